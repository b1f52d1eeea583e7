"""Dense masks written down from their definitions, and hypothesis strategies for lists of slices, documents, trees."""

import numpy as np
from hypothesis import strategies as st

from torchtitan_magi.masks.builders import block_causal, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices


def dense_mask(table, num_q, num_k):
    """bool [num_q, num_k], pair by pair from the definition of the four mask types."""
    mask = np.zeros((num_q, num_k), bool)
    for q_start, q_end, k_start, k_end, mask_type in np.asarray(table).tolist():
        q, k = np.mgrid[q_start:q_end, k_start:k_end]
        allowed = np.ones(q.shape, bool)
        if mask_type in (1, 3):  # bottom-right aligned: the last row sees up to the last key
            allowed &= k - (k_end - 1) <= q - (q_end - 1)
        if mask_type in (2, 3):  # top-left aligned: the first row sees from the first key
            allowed &= k - k_start >= q - q_start
        mask[q_start:q_end, k_start:k_end] |= allowed
    return mask


def document_masks(lengths, size, padding=0):
    """Slices of each builder by name, and their mask bool [tokens, tokens] written down from the documents."""
    cu = np.cumsum([0, *lengths])
    document = np.repeat(np.arange(len(cu)), [*lengths, padding])  # padding as one more, which sees nothing
    q, k = np.mgrid[: len(document), : len(document)]
    same = (document[q] == document[k]) & (q < cu[-1])
    block = (np.arange(len(document)) - cu[document]) // size
    return {
        "causal": (varlen_causal(cu), same & (k <= q)),
        "full": (varlen_full(cu), same),
        "window": (sliding_window(cu, size), same & (k <= q) & (q - k < size)),
        "block": (block_causal(cu, size), same & (block[k] <= block[q])),
    }


def shared_prompt_mask(lengths):
    """bool [tokens, tokens] of pairs one after another, lengths [pairs, 3]: an answer sees itself and its prompt."""
    part = np.repeat(np.arange(np.size(lengths)), np.ravel(lengths))  # 3 * pair + (prompt, chosen, rejected)
    q, k = np.mgrid[: len(part), : len(part)]
    return (part[q] // 3 == part[k] // 3) & (k <= q) & ((part[q] == part[k]) | (part[k] % 3 == 0))


@st.composite
def slice_lists(draw, num_q, num_k, max_slices=8):
    rows = []
    for _ in range(draw(st.integers(0, max_slices))):
        q = sorted(draw(st.tuples(st.integers(0, num_q), st.integers(0, num_q))))
        k = sorted(draw(st.tuples(st.integers(0, num_k), st.integers(0, num_k))))
        rows.append([*q, *k, draw(st.integers(0, 3))])
    return AttnSlices(rows)


def square_slice_lists(least, most):
    """A number of tokens, and slices of them."""
    return st.integers(least, most).flatmap(lambda tokens: st.tuples(st.just(tokens), slice_lists(tokens, tokens)))


@st.composite
def document_lengths(draw, max_total=512):
    lengths = draw(st.lists(st.integers(1, max_total), min_size=1, max_size=12))
    ends = np.minimum(np.cumsum(lengths), max_total)
    return [length for length in np.diff(ends, prepend=0).tolist() if length]


@st.composite
def trees(draw):
    """lengths, parents, starts, window and the number of tokens; nodes lie in any order, perhaps with gaps."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(lengths))]
    order = draw(st.permutations(range(len(lengths)))) if draw(st.booleans()) else range(len(lengths))
    starts, end = [0] * len(lengths), 0
    for node in order:
        starts[node] = end + draw(st.integers(0, 1))
        end = starts[node] + lengths[node]
    return lengths, parents, starts, draw(st.none() | st.integers(1, 20)), end + 1
