"""Dense masks written down from their definitions, and hypothesis strategies for slice lists."""

import numpy as np
from hypothesis import strategies as st

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


@st.composite
def slice_lists(draw, num_q, num_k, max_slices=8):
    rows = []
    for _ in range(draw(st.integers(0, max_slices))):
        q = sorted(draw(st.tuples(st.integers(0, num_q), st.integers(0, num_q))))
        k = sorted(draw(st.tuples(st.integers(0, num_k), st.integers(0, num_k))))
        rows.append([*q, *k, draw(st.integers(0, 3))])
    return AttnSlices(rows)


@st.composite
def document_lengths(draw, max_total=512):
    lengths = draw(st.lists(st.integers(1, max_total), min_size=1, max_size=12))
    kept, total = [], 0
    for length in lengths:
        length = min(length, max_total - total)
        if length == 0:
            break
        kept.append(length)
        total += length
    return kept
