"""Arithmetic of half-open integer ranges, vectorised. Ranges are pairs of int64 arrays: starts and ends."""

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.slices import IntArray

Int64Array = npt.NDArray[np.int64]


def expand(starts: IntArray, ends: IntArray) -> Int64Array:
    """All integers of the ranges, one range after the other."""
    lengths = ends - starts
    return np.arange(lengths.sum()) + np.repeat(starts - lengths.cumsum() + lengths, lengths)


def intersecting(lo: IntArray, hi: IntArray, starts: IntArray, ends: IntArray) -> tuple[Int64Array, Int64Array]:
    """All pairs (i, j) in which [lo[i], hi[i]) meets [starts[j], ends[j]); the latter are disjoint and ascending."""
    first = np.searchsorted(ends, lo, side="right")
    count = np.maximum(np.searchsorted(starts, hi, side="left") - first, 0)
    i = np.repeat(np.arange(len(lo)), count)
    return i, expand(first, first + count)


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
    first = np.flatnonzero(np.append(True, start[1:] > end[:-1] - (not join)))
    start, end = start[first], end[np.append(first[1:], len(end)) - 1]
    group = start // (limit + 1)
    return np.stack([group, start - group * (limit + 1), end - group * (limit + 1)], 1)


def joined(starts: IntArray, ends: IntArray) -> Int64Array:
    """Ascending disjoint ranges with adjacent ones joined, [n, 2]."""
    new = np.append(True, starts[1:] != ends[:-1])[: len(starts)]
    last = np.append(np.flatnonzero(new)[1:] - 1, len(ends) - 1)[: new.sum()]
    return np.stack([starts[new], ends[last]], 1)
