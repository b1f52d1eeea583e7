"""Arithmetic of half-open integer ranges and of slice tables, vectorised.

Ranges are pairs of int64 arrays: starts and ends. Slice tables are int64 [n, 5], see ``AttnSlices``.
"""

import heapq
import itertools
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = 0, 1, 2, 3

IntArray = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
_Array = TypeVar("_Array", bound=npt.NDArray[Any])


def frozen(array: _Array) -> _Array:
    """The array itself, read-only from now on."""
    array.setflags(write=False)
    return array


def first_true(which: Bools) -> int | None:
    """Index of the first that is True; None if none is."""
    return int(which.argmax()) if which.any() else None


def expand(starts: IntArray, ends: IntArray) -> Int64Array:
    """All integers of the ranges, one range after the other."""
    lengths = ends - starts
    return np.arange(lengths.sum()) + np.repeat(starts - lengths.cumsum() + lengths, lengths)


def rows_of(table: IntArray) -> tuple[Int64Array, Int64Array]:
    """Each row of each slice of a table: the index of the slice, and the row."""
    start, end = table[:, :2].T
    return np.repeat(np.arange(len(table)), end - start), expand(start, end)


def intersecting(lo: IntArray, hi: IntArray, starts: IntArray, ends: IntArray) -> tuple[Int64Array, Int64Array]:
    """All pairs (i, j) where [lo[i], hi[i]) meets [starts[j], ends[j]); the latter are disjoint and ascending."""
    first = np.searchsorted(ends, lo, side="right")
    count = np.maximum(np.searchsorted(starts, hi, side="left") - first, 0)
    i = np.repeat(np.arange(len(lo)), count)
    return i, expand(first, first + count)


def groups(goes_on: Bools, count: int) -> tuple[Int64Array, Int64Array]:
    """First and last index of each group of neighbours among `count`, of which `goes_on[i]` puts i + 1 to i."""
    first = np.flatnonzero(np.append(True, ~goes_on)[:count])
    return first, np.append(first[1:], count)[: len(first)] - 1


def union(group: IntArray, start: IntArray, end: IntArray, limit: int, join: bool = True) -> Int64Array:
    """Union of ranges within each group: [n, 3] of group, start, end; disjoint and sorted.

    Args:
        limit: no range reaches beyond it.
        join: whether ranges that only touch become one.
    """
    if len(group) == 0:
        return np.zeros((0, 3), np.int64)
    shift = group * (limit + 1)  # keeps the groups apart on one axis
    order = np.argsort(start + shift, kind="stable")
    start, end = (start + shift)[order], np.maximum.accumulate((end + shift)[order])
    first, last = groups(start[1:] <= end[:-1] - (not join), len(start))
    start, end = start[first], end[last]
    group = start // (limit + 1)
    return np.stack([group, start - group * (limit + 1), end - group * (limit + 1)], 1)


def joined(starts: IntArray, ends: IntArray) -> Int64Array:
    """Ascending disjoint ranges with adjacent ones joined, [n, 2]."""
    first, last = groups(starts[1:] == ends[:-1], len(starts))
    return np.stack([starts[first], ends[last]], 1)


def lower_bound(table: IntArray, q: IntArray) -> IntArray:
    """lo(q) of each slice at its row q."""
    return table[:, 2] + (table[:, 4] >> 1) * (q - table[:, 0])


def upper_bound(table: IntArray, q: IntArray) -> IntArray:
    """hi(q) of each slice at its row q."""
    return table[:, 3] - (table[:, 4] & 1) * (table[:, 1] - 1 - q)


def slice_areas(table: IntArray) -> IntArray:
    """(query, key) pairs of each slice of a trimmed table."""
    rows, keys = table[:, 1] - table[:, 0], table[:, 3] - table[:, 2]
    moving_bounds = (table[:, 4] & 1) + (table[:, 4] >> 1)
    return rows * keys - moving_bounds * (rows * (rows - 1) // 2)


def trim(table: IntArray) -> IntArray:
    """Removes the rows, and then the slices, that see no key. Columns after the fifth are kept as they are."""
    table = table[(table[:, 0] < table[:, 1]) & (table[:, 2] < table[:, 3])]
    q_start, q_end, k_start, k_end, mask_type = table[:, :5].T
    keys = k_end - k_start
    q_start = np.where(mask_type == CAUSAL, np.maximum(q_start, q_end - keys), q_start)
    q_end = np.where(mask_type == INV_CAUSAL, np.minimum(q_end, q_start + keys), q_end)
    keep = (mask_type != BI_CAUSAL) | (keys >= q_end - q_start)
    return np.column_stack([q_start, q_end, k_start, k_end, mask_type, table[:, 5:]])[keep]


def clip_rows(table: IntArray, start: IntArray, end: IntArray) -> IntArray:
    """Each slice restricted to the query rows [start, end), which must not be empty."""
    q_start, q_end = np.maximum(table[:, 0], start), np.minimum(table[:, 1], end)
    return np.stack([q_start, q_end, lower_bound(table, q_start), upper_bound(table, q_end - 1), table[:, 4]], 1)


def clip_keys(table: IntArray, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray]:
    """Each slice restricted to the keys [start, end).

    A bound that is cut stops moving with the row, so a slice falls into up to three.

    Returns:
        the trimmed pieces, and for each the index of the slice it comes from.
    """
    q_start, q_end, k_start, _, mask_type = table.T
    far = np.iinfo(np.int64).max // 4
    # The bounds never decrease with the row: first row with lo >= start, first row with hi > end.
    lo_free = np.where(k_start >= start, q_start, np.where(mask_type >> 1 == 1, q_start + start - k_start, far))
    first_hi = upper_bound(table, q_start)
    hi_cut = np.where(first_hi > end, q_start, np.where(mask_type & 1 == 1, q_start + end + 1 - first_hi, far))
    lo_free, hi_cut = np.clip(lo_free, q_start, q_end), np.clip(hi_cut, q_start, q_end)
    edges = np.stack([q_start, np.minimum(lo_free, hi_cut), np.maximum(lo_free, hi_cut), q_end])
    pieces = []
    for first, last in itertools.pairwise(edges):
        some = np.flatnonzero(first < last)
        a, b, whole = first[some], last[some], table[some]
        is_lo_free, is_hi_free = a >= lo_free[some], a < hi_cut[some]
        lo = np.maximum(lower_bound(whole, a), start[some])
        hi = np.minimum(upper_bound(whole, b - 1), end[some])
        kind = (whole[:, 4] & 1) * is_hi_free + (whole[:, 4] & 2) * is_lo_free
        pieces.append(np.stack([a, b, lo, hi, kind, some], 1))
    table = trim(np.concatenate(pieces))
    return table[:, :5], table[:, 5]


def slice_layers(table: IntArray) -> Int64Array:
    """Numbers the slices of a canonical table so that those of one number have no row in common, few numbers first."""
    layer = np.zeros(len(table), np.int64)
    if (table[1:, 0] >= table[:-1, 1]).all():
        return layer
    taken: list[tuple[int, int]] = []  # heap of the numbers in use: until which row, number
    free: list[int] = []  # heap of numbers that were in use
    for i, (start, end) in enumerate(table[:, :2].tolist()):
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        layer[i] = heapq.heappop(free) if free else len(taken)
        heapq.heappush(taken, (end, int(layer[i])))
    return layer
