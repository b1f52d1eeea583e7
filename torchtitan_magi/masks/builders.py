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
        ValueError: wrong shape or a negative value; window is no integer of at least 1.
    """
    if window is not None:
        _check_window(window)
    array = as_int64(lengths, "lengths")
    if array.ndim != 2 or array.shape[1] != 3 or (array < 0).any():
        raise ValueError(f"lengths has shape {array.shape}; give non-negative [num_pairs, 3]: prompt, chosen, rejected")
    total = array.sum(1)
    start = total.cumsum() - total if starts is None else as_int64(starts, "starts")
    if start.shape != total.shape:
        raise ValueError(f"starts has shape {start.shape} for {len(total)} pairs; give the first token of each pair")
    prompt_end, chosen_end, rejected_end = start + array.cumsum(1).T
    own = causal_ranges(start, chosen_end, window), causal_ranges(chosen_end, rejected_end, window)
    longest = int(total.max(initial=0)) + 1
    window = longest if window is None else min(window, longest)
    reach = np.minimum(chosen_end + window - 1, rejected_end)  # up to here rejected sees some of the prompt
    whole = np.clip(chosen_end + window - 1 - (prompt_end - start), chosen_end, reach)  # and up to here all of it
    first = np.maximum(start, prompt_end - window + 1)
    all_of_prompt = np.stack([chosen_end, whole, start, prompt_end, np.full_like(start, FULL)], 1)
    end_of_prompt = np.stack([whole, reach, first, prompt_end, np.full_like(start, INV_CAUSAL)], 1)
    return AttnSlices(np.concatenate([*own, all_of_prompt, end_of_prompt[whole < reach]]))


def causal_ranges(start: Int64Array, end: Int64Array, window: int | None = None) -> Int64Array:
    """Causal attention inside each token range, to the last ``window`` tokens if given: a table for ``AttnSlices``."""
    if window is None:
        return np.stack([start, end, start, end, np.full_like(start, CAUSAL)], 1)
    window = min(window, max(1, int((end - start).max(initial=0))))
    knee = np.minimum(start + window, end)
    head = np.stack([start, knee, start, knee, np.full_like(start, CAUSAL)], 1)
    tail = np.stack([knee, end, knee - window + 1, end, np.full_like(start, BI_CAUSAL)], 1)
    return np.concatenate([head, tail[knee < end]])


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
