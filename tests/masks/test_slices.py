import copy
import itertools
import pickle
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import one_line
from support.masks import dense_mask, document_lengths, document_masks, shared_prompt_mask, slice_lists, trees

from torchtitan_magi.masks.builders import (
    block_causal,
    shared_prompt,
    sliding_window,
    tree_causal,
    varlen_causal,
    varlen_full,
)
from torchtitan_magi.masks.geometry import clip_keys, clip_rows, trim
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


def canonical_by_definition(table):
    """Slices whose rectangles overlap are merged row by row; the j-th intervals of the rows are then joined again."""
    table = trim(table.astype(np.int64)).tolist()
    merged = set()
    for (i, (a, b, c, d, _)), (j, (e, f, g, h, _)) in itertools.combinations(enumerate(table), 2):
        merged |= {i, j} if a < f and e < b and c < h and g < d else set()
    mask = dense_mask([table[i] for i in merged], N, 3 * N)
    ends = {}  # (j, row) -> the row's j-th interval
    for q in range(N):
        ends |= {
            (j, q): at for j, at in enumerate(np.flatnonzero(np.diff(mask[q], prepend=0, append=0)).reshape(-1, 2))
        }

    def step(j, q):  # mask type of rows q and q + 1 as one slice
        steps = ends[j, q + 1] - ends[j, q] if {(j, q), (j, q + 1)} <= ends.keys() else [-1]
        return int(2 * steps[0] + steps[1]) if set(steps) <= {0, 1} else None

    slices = [row for i, row in enumerate(table) if i not in merged]
    for j, q in sorted(ends):
        if step(j, q - 1) is not None and step(j, q - 2) in (None, step(j, q - 1)):
            slices[-1][1::2] = q + 1, int(ends[j, q][1])
            slices[-1][4] = step(j, q - 1)
        else:
            slices.append([q, q + 1, *ends[j, q].tolist(), 0])
    return sorted(slices, key=lambda row: (row[0], row[2]))


@given(slice_lists(N, N) | slice_lists(3, 3 * N, max_slices=40))
@settings(max_examples=200)
def test_canonical_merges_what_overlaps_row_by_row(slices):
    assert slices.canonical().table.tolist() == canonical_by_definition(slices.table)


@pytest.mark.parametrize("width", [8, 24])  # apart, overlapping
def test_many_slices_of_the_same_rows_take_little_memory(width):
    first = 16 * np.arange(16384)
    none = np.zeros_like(first)
    slices = AttnSlices(np.stack([none, none + 16, first, first + width, none], 1))
    tracemalloc.start()
    table = slices.canonical().table
    lo, _ = slices.row_bands(16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(table) == len(lo) == (16384 if width == 8 else 1)
    assert slices.area == (16384 * 8 * 16 if width == 8 else (16 * 16383 + 24) * 16)
    assert peak < 2**26


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
    for slices, want in document_masks(lengths, size).values():
        assert (dense_mask(slices.table, *want.shape) == want).all()
        assert slices.area == want.sum()


def tree_mask(lengths, parents, starts, window, total):
    """By its definition: the last ``window`` tokens on the way from the root."""
    mask = np.zeros((total, total), dtype=bool)
    for node, length in enumerate(lengths):
        way, above = [], node
        while above >= 0:
            way, above = [*range(starts[above], starts[above] + lengths[above]), *way], parents[above]
        for row in range(length):
            seen = way[: len(way) - length + row + 1]
            mask[starts[node] + row, seen[-window:] if window else seen] = True
    return mask


@given(trees())
def test_a_tree_sees_the_way_from_its_root(tree):
    lengths, parents, starts, window, total = tree
    slices, want = tree_causal(lengths, parents, starts, window), tree_mask(*tree)
    assert (dense_mask(slices.table, total, total) == want).all()
    assert slices.area == want.sum()  # no pair twice


def test_nodes_that_follow_their_parents_are_one_causal_document():
    assert tree_causal([3, 4, 2], [-1, 0, 1]).table.tolist() == varlen_causal([0, 9]).table.tolist()
    answers = tree_causal([8, 2, 2, 2], [-1, 0, 0, 0])
    assert (
        len(answers.table) == 1 + 2 * 2
    )  # prompt with its first answer; each other one, and what it sees of the prompt
    assert answers.area == 8 * 9 // 2 + 3 * (2 * 8 + 3)


def test_shared_prompt_lets_both_answers_see_the_prompt_and_not_each_other():
    lengths = [[3, 2, 4], [1, 0, 2], [0, 2, 1]]
    assert (dense_mask(shared_prompt(lengths).table, 15, 15) == shared_prompt_mask(lengths)).all()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 6, 7, 8, 50])
def test_a_window_over_pairs_counts_the_prompt_as_just_before_each_answer(window):
    lengths = [[3, 2, 4], [1, 0, 2], [0, 2, 1], [6, 1, 5], [2, 3, 0], [1, 1, 9]]
    place = np.concatenate([[*range(p + c), *range(p, p + r)] for p, c, r in lengths])  # of a token in its document
    want = shared_prompt_mask(lengths) & (place[:, None] - place < window)
    slices = shared_prompt(lengths, window=window)
    assert (dense_mask(slices.table, *want.shape) == want).all()
    assert slices.area == want.sum()


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
        *((lambda size=size: sliding_window([0, 5], size), f"window is {size!r}") for size in (0, None, -1, 2.0, True)),
        *((lambda size=size: block_causal([0, 5], size), f"block_size is {size!r}") for size in (0, None, 1.5, "4")),
        (lambda: sliding_window([0, 5], "a" * 5000), r"window is 'a{76}\.\.\.; it counts"),
        (lambda: block_causal([0, 5], [1] * 5000), r"block_size is \[1, 1, 1.*\.\.\.; it counts"),
        (
            lambda: block_causal([0, 2**31 - 1], 1),
            "block_size is 1, which cuts 2,147,483,647 tokens into 2,147,483,647 blocks; use a larger one, for at most",
        ),
        (lambda: varlen_causal([[0, 5], [0]]), "cu_seqlens: rows differ in length"),
        (lambda: AttnSlices([[0, 1, 0, 1, 0], [0, 1]]), "slices: rows differ in length"),
        (lambda: varlen_causal([0, 10**20]), "cu_seqlens has dtype object; give integers that fit in 32 bits"),
        (lambda: varlen_causal([0, 2**40]), "cu_seqlens: 1099511627776 is too large"),
        (lambda: AttnSlices([[0, 2**31, 0, 1, 0]]), "2147483648 is too large; token numbers must fit in 32 bits"),
        (lambda: shared_prompt([[1, 2]]), "num_pairs, 3"),
        (lambda: tree_causal([1, -2], [-1, 0]), r"lengths has -2; give non-negative \[num_nodes\]"),
        (lambda: shared_prompt([[3, -2, 2]]), r"lengths has -2; give non-negative \[num_pairs, 3\]"),
        (lambda: tree_causal([1, 2], [-1]), r"parents has shape \(1,\) for 2 nodes"),
        (lambda: tree_causal([1, 2], [-1, 1]), "parents has 1 at index 1; a parent comes before its child"),
        (lambda: tree_causal([1, 2], [-2, 0]), "parents has -2 at index 0"),
        (lambda: tree_causal([1, 2], [-1, 0], [0]), r"starts has shape \(1,\) for 2 nodes"),
        (lambda: tree_causal([1, 2], [-1, 0], window=0), "window is 0; it counts"),
        (lambda: shared_prompt([[1, 2, 3]], window=0), "window is 0; it counts"),
        (lambda: shared_prompt([[1, 2, 3]], [0, 6]), r"starts has shape \(2,\) for 1 pairs"),
        (lambda: tree_causal([3, 0, 3], [-1, 0, 0], [0, 1, 2]), "starts put token 2 into two runs; give starts at"),
        (lambda: shared_prompt([[2, 3, 3], [2, 3, 3]], [4, 0]), "starts put token 4 into two runs; give starts at"),
        (lambda: AttnSlices([[0, 1, 0, 1]]), r"give \[n, 5\]"),
        (lambda: AttnSlices([[0, 1, 0, 1, 4]]), "mask_type 4"),
        (lambda: AttnSlices([[0, 1.5, 0, 1, 0]]), "slices are of type float64; give integers"),
        (lambda: AttnSlices([[0, 1, 0, 1, 0], [3, 1, 0, 1, 0]]), r"slice 1 is \[3, 1, 0, 1, 0\]"),
        (lambda: AttnSlices([[0, 1, -1, 1, 0]]), "0 <= start <= end"),
        (lambda: varlen_causal(torch.tensor([0, 5]).bfloat16()), "cu_seqlens cannot be read .*BFloat16.*; give"),
        (lambda: varlen_causal(torch.zeros(2, device="meta")), "cu_seqlens cannot be read .*; give integers"),
        (lambda: AttnSlices(torch.zeros(1, 5, device="meta")), "slices cannot be read .*; give integers"),
        *((lambda n=n: varlen_causal([0, 5]).row_cost(n), f"num_rows is {n!r}; .* least 5,") for n in (-1, 4, "5")),
        *((lambda n=n: varlen_causal([0, 5]).row_bands(n), f"num_rows is {n!r}; .* least 5,") for n in (2, 5.0)),
    ],
)
def test_a_bad_mask_is_one_line_that_names_the_value(build, message):
    with one_line(message) as error:
        build()
    assert len(str(error.value)) < 1000


def test_sizes_may_be_integers_of_numpy():
    assert sliding_window([0, 9], np.int64(4)) == sliding_window([0, 9], 4)
    assert block_causal([0, 9], np.uint8(4)) == block_causal([0, 9], 4)


def test_slices_are_immutable_and_hashable():
    slices = varlen_causal([0, 4])
    with pytest.raises(ValueError, match="read-only"):
        slices.table[0, 0] = 1
    assert hash(slices) == hash(varlen_causal([0, 4]))
    with pytest.raises(AttributeError):
        slices.table = slices.table[:0]


@pytest.mark.parametrize("slices", [AttnSlices([[0, 4, 0, 4, 1], [0, 2, 0, 2, 0]]), varlen_causal([0, 4]).canonical()])
def test_slices_are_the_same_in_other_processes(slices):
    in_dict = "import pickle, sys; slices, other = pickle.load(sys.stdin.buffer); print({slices: 1}.get(other))"
    hash(slices)
    given = pickle.dumps((slices, AttnSlices(slices.table)))
    found = subprocess.run([sys.executable, "-c", in_dict], input=given, capture_output=True, check=True, timeout=60)
    assert found.stdout.split() == [b"1"]
    again = copy.deepcopy(slices)
    assert again == slices
    assert not again.table.flags.writeable


def test_a_long_mask_is_shown_by_its_beginning():
    short, long = AttnSlices([[0, 1, 0, 1, 0]] * 100), AttnSlices([[0, 1, 0, 1, 0]] * 2000)
    assert repr(AttnSlices([])) == "AttnSlices([])"
    assert repr(short) == f"AttnSlices({short.table.tolist()})"
    assert repr(long) == repr(short)[:-2] + ", ... 2,000 slices])"
