import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import dense_mask, document_lengths, slice_lists

from torchtitan_magi.masks.builders import block_causal, shared_prompt, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.geometry import clip_keys, clip_rows
from torchtitan_magi.masks.slices import AttnSlices

N = 40


@given(slice_lists(N, N + 9))
@settings(max_examples=300)
def test_canonical_is_the_same_mask_with_every_pair_once(slices):
    canonical = slices.canonical()
    want = dense_mask(slices.table, N, N + 9)
    count = sum((dense_mask(row[None], N, N + 9).astype(int) for row in canonical.table), np.zeros_like(want, int))
    assert (count == want).all()
    assert slices.area == want.sum()
    for row in canonical.table:  # no empty row, so the keys needed are exactly [k_start, k_end)
        one = dense_mask(row[None], N, N + 9)
        assert one[row[0] : row[1]].any(1).all()
        assert one.any(0)[row[2] : row[3]].all()


@given(slice_lists(N, N))
def test_row_bands_and_row_cost_describe_the_mask(slices):
    lo, hi = slices.row_bands(N)
    keys = np.arange(N)
    inside = (lo[:, :, None] <= keys) & (keys < hi[:, :, None])
    assert inside.sum(0).max(initial=0) <= 1
    want = dense_mask(slices.table, N, N)
    assert (inside.any(0) == want).all()
    assert (slices.row_cost(N) == want.sum(1)).all()


@given(
    slice_lists(N, N), st.tuples(st.integers(0, N), st.integers(0, N)), st.tuples(st.integers(0, N), st.integers(0, N))
)
def test_clipping_is_the_mask_inside_the_window(slices, rows, keys):
    (a, b), (c, d) = sorted(rows), sorted(keys)
    table = slices.canonical().table.astype(np.int64)
    table = table[(np.maximum(table[:, 0], a) < np.minimum(table[:, 1], b))]
    n = np.ones(len(table), np.int64)
    pieces, index = clip_keys(clip_rows(table, a * n, b * n), c * n, d * n)
    window = np.zeros((N, N), bool)
    window[a:b, c:d] = True
    assert (dense_mask(pieces, N, N) == dense_mask(slices.table, N, N) & window).all()
    for i in range(len(table)):
        assert (dense_mask(pieces[index == i], N, N) == dense_mask(table[i][None], N, N) & window).all()


@given(document_lengths(60), st.integers(1, 70))
def test_builders_follow_their_definitions(lengths, size):
    cu = np.cumsum([0, *lengths])
    document = np.repeat(np.arange(len(lengths)), lengths)
    q, k = np.mgrid[: cu[-1], : cu[-1]]
    same = document[:, None] == document[None]
    block = (np.arange(cu[-1]) - cu[document]) // size
    for slices, want in (
        (varlen_causal(cu), same & (k <= q)),
        (varlen_full(cu), same),
        (sliding_window(cu, size), same & (k <= q) & (q - k < size)),
        (block_causal(cu, size), same & (block[None] <= block[:, None])),
    ):
        assert (dense_mask(slices.table, cu[-1], cu[-1]) == want).all()
        assert slices.area == want.sum()


def test_shared_prompt_lets_both_answers_see_the_prompt_and_not_each_other():
    slices = shared_prompt([[3, 2, 4], [1, 0, 2], [0, 2, 1]])
    part = np.array([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 5, 5, 7, 7, 8])  # 3 * pair + (prompt, chosen, rejected)
    q, k = np.mgrid[:15, :15]
    same_pair = part[q] // 3 == part[k] // 3
    want = same_pair & (k <= q) & ((part[q] == part[k]) | (part[k] % 3 == 0))
    assert (dense_mask(slices.table, 15, 15) == want).all()


def test_pairs_may_stand_anywhere():
    lengths = [[3, 2, 4], [0, 2, 1]]
    mask = dense_mask(shared_prompt(lengths, [2, 13]).table, 20, 20)
    assert (mask[2:11, 2:11] == dense_mask(shared_prompt(lengths[:1]).table, 9, 9)).all()
    assert (mask[13:16, 13:16] == dense_mask(shared_prompt(lengths[1:]).table, 3, 3)).all()
    assert mask.sum() == shared_prompt(lengths).area


def test_cu_seqlens_may_be_a_list_an_array_or_a_tensor():
    assert varlen_causal([0, 3, 3, 7]) == varlen_causal(torch.tensor([0, 3, 3, 7], dtype=torch.int32))
    assert varlen_causal([0, 3, 3, 7]) == AttnSlices([[0, 3, 0, 3, 1], [3, 7, 3, 7, 1]])
    assert len(varlen_causal([0])) == 0


def test_a_window_and_blocks_as_large_as_can_be_are_no_limit():
    mask = dense_mask(varlen_causal([0, 3, 9]).table, 9, 9)
    for size in (9, sys.maxsize, 2**70):
        assert (dense_mask(sliding_window([0, 3, 9], size).table, 9, 9) == mask).all()
    full = dense_mask(varlen_full([0, 3, 9]).table, 9, 9)
    assert (dense_mask(block_causal([0, 3, 9], sys.maxsize).table, 9, 9) == full).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: varlen_causal([1, 3]), r"starts with \[1\]"),
        (lambda: varlen_causal([]), "starts with"),
        (lambda: varlen_causal([0, 5, 3]), "decreases from 5 to 3 at index 2"),
        (lambda: varlen_causal([0, 5], total_tokens=8), "ends at 5 but there are 8 tokens"),
        (lambda: varlen_causal([0.0, 5.0]), "float64; give integers"),
        (lambda: sliding_window([0, 5], 0), "window is 0"),
        (lambda: block_causal([0, 5], 0), "block_size is 0"),
        (lambda: shared_prompt([[1, 2]]), "num_pairs, 3"),
        (lambda: shared_prompt([[1, 2, 3]], [0, 6]), r"starts has shape \(2,\) for 1 pairs"),
        (lambda: AttnSlices([[0, 1, 0, 1]]), r"give \[n, 5\]"),
        (lambda: AttnSlices([[0, 1, 0, 1, 4]]), "mask_type 4"),
        (lambda: AttnSlices([[0, 1.5, 0, 1, 0]]), "slices are of type float64; give integers"),
        (lambda: AttnSlices([[0, 1, 0, 1, 0], [3, 1, 0, 1, 0]]), r"slice 1 is \[3, 1, 0, 1, 0\]"),
        (lambda: AttnSlices([[0, 1, -1, 1, 0]]), "0 <= start <= end"),
    ],
)
def test_a_bad_mask_is_one_line_that_names_the_value(build, message):
    with pytest.raises(ValueError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


def test_slices_are_immutable_and_hashable():
    slices = varlen_causal([0, 4])
    with pytest.raises(ValueError, match="read-only"):
        slices.table[0, 0] = 1
    assert hash(slices) == hash(varlen_causal([0, 4]))
