"""Masks of packed documents: causal, full, windows, blocks, preference pairs."""

import numpy as np

from torchtitan_magi.masks.geometry import BI_CAUSAL, CAUSAL, FULL, INV_CAUSAL, Int64Array, first_true
from torchtitan_magi.masks.slices import AttnSlices, as_int64, is_integer
from torchtitan_magi.wording import quoted

MAX_BLOCKS = 2**22  # of block_causal, each a slice


def varlen_causal(cu_seqlens: object, total_tokens: int | None = None) -> AttnSlices:
    """Causal attention inside each document.

    Args:
        cu_seqlens: integers [num_documents + 1], cumulative document lengths in tokens: starts at 0, never decreases.
        total_tokens: when given, cu_seqlens must end there.

    Raises:
        ValueError: cu_seqlens does not start at 0, decreases, or does not end at total_tokens.
    """
    return _per_document(_checked(cu_seqlens, total_tokens), CAUSAL)


def varlen_full(cu_seqlens: object, total_tokens: int | None = None) -> AttnSlices:
    """Bidirectional attention inside each document. Arguments and errors as in ``varlen_causal``."""
    return _per_document(_checked(cu_seqlens, total_tokens), FULL)


def sliding_window(cu_seqlens: object, window: int, total_tokens: int | None = None) -> AttnSlices:
    """Causal attention inside each document to the last ``window`` tokens, the token itself among them.

    Raises:
        ValueError: window is no integer of at least 1, or cu_seqlens as in ``varlen_causal``.
    """
    _check_window(window)
    cu = _checked(cu_seqlens, total_tokens)
    return AttnSlices(causal_ranges(cu[:-1], cu[1:], window))


def block_causal(cu_seqlens: object, block_size: int, total_tokens: int | None = None) -> AttnSlices:
    """Inside each document, full attention to the row's own block of ``block_size`` tokens and to all earlier ones.

    Raises:
        ValueError: block_size is no integer of at least 1 or makes more than 2**22 blocks;
            cu_seqlens as in ``varlen_causal``.
    """
    if not is_integer(block_size, 1):
        raise ValueError(f"block_size is {quoted(block_size)}; it counts the tokens of a block: use at least 1")
    cu = _checked(cu_seqlens, total_tokens)
    block_size = min(block_size, max(1, int(cu[-1])))
    num_blocks = -(-np.diff(cu) // block_size)
    if num_blocks.sum() > MAX_BLOCKS:
        raise ValueError(
            f"block_size is {block_size}, which cuts {cu[-1]:,} tokens into {num_blocks.sum():,} blocks; use a larger "
            f"one, for at most {MAX_BLOCKS:,} blocks"
        )
    document = np.repeat(np.arange(len(num_blocks)), num_blocks)
    block = np.arange(len(document)) - np.repeat(num_blocks.cumsum() - num_blocks, num_blocks)
    q_start = cu[document] + block * block_size
    q_end = np.minimum(q_start + block_size, cu[document + 1])
    return AttnSlices(np.stack([q_start, q_end, cu[document], q_end, np.full_like(q_start, FULL)], 1))


def shared_prompt(lengths: object, starts: object = None, window: int | None = None) -> AttnSlices:
    """Preference pairs that share their prompt, each laid out as prompt, chosen, rejected.

    Chosen and rejected each see the prompt and their own earlier tokens, not each other.

    Args:
        lengths: integers [num_pairs, 3]: tokens of prompt, chosen and rejected.
        starts: integers [num_pairs]: first token of each pair; by default pair follows pair.
        window: how many tokens a row sees at most, as in ``sliding_window``, where rejected follows the prompt at
            once; None: all.

    Raises:
        ValueError: wrong shape or a negative value; pairs that overlap; window is no integer of at least 1.
    """
    if window is not None:
        _check_window(window)
    array = as_int64(lengths, "lengths")
    if array.ndim != 2 or array.shape[1] != 3 or (array < 0).any():
        raise ValueError(f"lengths has {_wrong(array)}; give non-negative [num_pairs, 3]: prompt, chosen, rejected")
    total = array.sum(1)
    start = total.cumsum() - total if starts is None else as_int64(starts, "starts")
    if start.shape != total.shape:
        raise ValueError(f"starts has shape {start.shape} for {len(total)} pairs; give the first token of each pair")
    prompt = 3 * np.arange(len(total))
    parents = np.stack([np.full_like(prompt, -1), prompt, prompt], 1).ravel()
    return _of_trees(array.ravel(), parents, (start[:, None] + array.cumsum(1) - array).ravel(), window)


def tree_causal(lengths: object, parents: object, starts: object = None, window: int | None = None) -> AttnSlices:
    """Documents that share their beginnings, each a tree of nodes: runs of tokens.

    A token sees those of its own node that are not behind it, and all tokens of its node's ancestors. A chain of nodes
    is a document; a prompt with several answers is a root with as many children.

    Args:
        lengths: integers [num_nodes], tokens of each node.
        parents: integers [num_nodes], the number of each node's parent, which comes before it; -1: it has none.
        starts: integers [num_nodes], first token of each node; by default node follows node.
        window: how many tokens a row sees at most, as in ``sliding_window``, along the way from its root; None: all.

    Raises:
        ValueError: shapes that differ, a negative length, a parent that does not come before its child, nodes that
            overlap; window is no integer of at least 1.
    """
    if window is not None:
        _check_window(window)
    sizes, above = as_int64(lengths, "lengths"), as_int64(parents, "parents")
    if sizes.ndim != 1 or (sizes < 0).any():
        raise ValueError(f"lengths has {_wrong(sizes)}; give non-negative [num_nodes], the tokens of each node")
    if above.shape != sizes.shape:
        raise ValueError(f"parents has shape {above.shape} for {len(sizes)} nodes; give the parent of each node, or -1")
    if (i := first_true((above < -1) | (above >= np.arange(len(above))))) is not None:
        raise ValueError(
            f"parents has {above[i]} at index {i}; a parent comes before its child: give a lower number, or -1"
        )
    first = sizes.cumsum() - sizes if starts is None else as_int64(starts, "starts")
    if first.shape != sizes.shape:
        raise ValueError(f"starts has shape {first.shape} for {len(sizes)} nodes; give the first token of each node")
    return _of_trees(sizes, above, first, window)


def _of_trees(sizes: Int64Array, parents: Int64Array, start: Int64Array, window: int | None) -> AttnSlices:
    """The mask of ``tree_causal``. Nodes that follow their parents at once are one run with these."""
    end, numbers = start + sizes, np.arange(len(sizes))
    some = numbers[sizes > 0]
    some = some[np.argsort(start[some], kind="stable")]
    if (i := first_true(start[some[1:]] < end[some[:-1]])) is not None:
        raise ValueError(f"starts put token {start[some[i + 1]]} into two runs; give starts at which none overlap")
    follows = (parents >= 0) & (start == end[parents])
    head = np.where(follows, parents, numbers)
    while (head[head] != head).any():
        head = head[head]
    run_end = start.copy()
    np.maximum.at(run_end, head, end)
    runs = numbers[(head == numbers) & (start < run_end)]
    tables = [causal_ranges(start[runs], run_end[runs], window)]
    runs = runs[parents[runs] >= 0]
    seen, between = parents[runs], np.zeros_like(runs)  # a node of an ancestor's run; tokens from its end to the run
    while len(runs):
        keys = start[head[seen]], end[seen]
        tables += _ancestors(start[runs], run_end[runs], *keys, between, window)
        between = between + keys[1] - keys[0]
        above = parents[head[seen]]
        runs, seen, between = runs[above >= 0], above[above >= 0], between[above >= 0]
    return AttnSlices(np.concatenate(tables))


def _ancestors(
    start: Int64Array, end: Int64Array, first: Int64Array, last: Int64Array, between: Int64Array, window: int | None
) -> list[Int64Array]:
    """What rows [start, end) see of keys [first, last), which lie ``between`` tokens before them: all of these, and of
    the last ones of a window, fewer with each row."""
    some = first < last
    start, end, first, last, between = (x[some] for x in (start, end, first, last, between))
    longest = int((end - start + last - first + between).max(initial=0))
    left = (longest + 1 if window is None else min(window, longest + 1)) - between  # of the window, in front of them
    whole = np.clip(start + left - (last - first), start, end)  # up to here rows see all of the keys
    reach = np.clip(start + left - 1, whole, end)  # and up to here some
    begin = last - (left - 1 - (whole - start))
    full = np.stack([start, whole, first, last, np.full_like(start, FULL)], 1)
    part = np.stack([whole, reach, begin, last, np.full_like(start, INV_CAUSAL)], 1)
    return [full[start < whole], part[whole < reach]]


def causal_ranges(start: Int64Array, end: Int64Array, window: int | None = None) -> Int64Array:
    """Causal attention inside each token range, to the last ``window`` tokens if given: a table for ``AttnSlices``."""
    if window is None:
        return np.stack([start, end, start, end, np.full_like(start, CAUSAL)], 1)
    window = min(window, max(1, int((end - start).max(initial=0))))
    knee = np.minimum(start + window, end)
    head = np.stack([start, knee, start, knee, np.full_like(start, CAUSAL)], 1)
    tail = np.stack([knee, end, knee - window + 1, end, np.full_like(start, BI_CAUSAL)], 1)
    return np.concatenate([head, tail[knee < end]])


def _wrong(lengths: Int64Array) -> str:
    """What lengths should not have: a negative one, or their shape."""
    return str(lengths.min()) if (lengths < 0).any() else f"shape {lengths.shape}"


def _check_window(window: int) -> None:
    if not is_integer(window, 1):
        raise ValueError(
            f"window is {quoted(window)}; it counts the tokens a row sees, itself included: use at least 1"
        )


def _checked(cu_seqlens: object, total_tokens: int | None) -> Int64Array:
    cu = as_int64(cu_seqlens, "cu_seqlens")
    if cu.ndim != 1 or len(cu) == 0 or cu[0] != 0:
        first = cu.ravel()[:1].tolist()
        raise ValueError(f"cu_seqlens starts with {first}; give a 1-D list of cumulative lengths that starts at 0")
    if (i := first_true(np.diff(cu) < 0)) is not None:
        raise ValueError(f"cu_seqlens decreases from {cu[i]} to {cu[i + 1]} at index {i + 1}; give cumulative lengths")
    if total_tokens is not None and cu[-1] != total_tokens:
        raise ValueError(f"cu_seqlens ends at {cu[-1]} but there are {total_tokens} tokens; it must end at that count")
    return cu


def _per_document(cu: Int64Array, mask_type: int) -> AttnSlices:
    start, end = cu[:-1], cu[1:]
    return AttnSlices(np.stack([start, end, start, end, np.full_like(start, mask_type)], 1)[start < end])
