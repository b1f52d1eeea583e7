"""Attention masks as lists of slices, and the geometry that the rest of the package needs of them.

An ``AttnSlice`` ``(q_start, q_end, k_start, k_end, mask_type)`` lets each query row ``q`` in ``[q_start, q_end)`` see
one interval of keys ``[lo(q), hi(q))``:

    lo(q) = k_start + [INV_CAUSAL or BI_CAUSAL] * (q - q_start)
    hi(q) = k_end   - [CAUSAL or BI_CAUSAL]     * (q_end - 1 - q)

so CAUSAL is aligned at the bottom right, INV_CAUSAL at the top left, and BI_CAUSAL is a diagonal band. ``mask_type`` is
a bit field: bit 0 makes the upper bound move with the row, bit 1 the lower bound. A mask is the union of its slices.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import (
    FULL,
    IntArray,
    lower_bound,
    slice_areas,
    slice_layers,
    trim,
    upper_bound,
)


class AttnSlices:
    """An immutable list of attention slices.

    Args:
        table: integers [n, 5]: q_start, q_end, k_start, k_end (tokens, half-open ranges), mask_type (0 FULL, 1 CAUSAL,
            2 INV_CAUSAL, 3 BI_CAUSAL). Ranges may overlap in any way and may be empty.

    Raises:
        ValueError: wrong shape, no integers, a reversed or negative range, an unknown mask type.
    """

    __slots__ = ("_canonical", "_hash", "table")

    table: npt.NDArray[np.int32]

    def __init__(self, table: Sequence[Sequence[int]] | IntArray) -> None:
        array = np.array(table)
        if array.size == 0:
            array = array.reshape(0, 5)
        if array.size and array.dtype.kind not in "iu":
            raise ValueError(f"slices are of type {array.dtype}; give integers: tokens and mask types")
        array = array.astype(np.int64)
        if array.ndim != 2 or array.shape[1] != 5:
            raise ValueError(f"slices have shape {array.shape}; give [n, 5]: q_start, q_end, k_start, k_end, mask_type")
        q_start, q_end, k_start, k_end, mask_type = array.T
        bad = (q_start < 0) | (k_start < 0) | (q_end < q_start) | (k_end < k_start)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(f"slice {i} is {array[i].tolist()}; its ranges must satisfy 0 <= start <= end")
        bad = (mask_type < 0) | (mask_type > 3)
        if bad.any():
            i = int(bad.argmax())
            raise ValueError(
                f"slice {i} has mask_type {mask_type[i]}; use 0 FULL, 1 CAUSAL, 2 INV_CAUSAL or 3 BI_CAUSAL"
            )
        self.table = _frozen(array)
        self._canonical: AttnSlices | None = None
        self._hash: int | None = None

    @classmethod
    def _trusted(cls, table: IntArray) -> "AttnSlices":
        """Wraps a table that is already canonical."""
        slices = cls.__new__(cls)
        slices.table = _frozen(table)
        slices._canonical, slices._hash = slices, None
        return slices

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnSlices) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.table.tobytes())
        return self._hash

    def __repr__(self) -> str:
        return f"AttnSlices({self.table.tolist()})"

    def canonical(self) -> "AttnSlices":
        """The same mask as slices that are pairwise disjoint sets of (query, key) pairs.

        Every row of every slice has at least one key, so that the keys a slice needs are exactly ``[k_start, k_end)``.
        Sorted by q_start, then k_start.
        """
        if self._canonical is None:
            table = _sorted(trim(self.table.astype(np.int64)))
            overlapping = _overlapping_rectangles(table)
            if overlapping.any():
                table = _sorted(np.concatenate([table[~overlapping], _merge_rows(table[overlapping])]))
            self._canonical = AttnSlices._trusted(table)
        return self._canonical

    @property
    def area(self) -> int:
        """The number of (query, key) pairs that the mask lets through, each counted once."""
        return int(slice_areas(self.canonical().table.astype(np.int64)).sum())

    def row_cost(self, num_rows: int) -> npt.NDArray[np.int64]:
        """Keys seen by each query row, int64 [num_rows]."""
        table = self.canonical().table.astype(np.int64)
        q_start, q_end, k_start, _, mask_type = table.T
        slope = (mask_type & 1) - (mask_type >> 1)
        keys_at_zero = upper_bound(table, q_start) - k_start - slope * q_start
        constant, linear = (np.zeros(num_rows + 1, np.int64) for _ in range(2))
        for values, steps in ((keys_at_zero, constant), (slope, linear)):
            np.add.at(steps, q_start, values)
            np.subtract.at(steps, q_end, values)
        return (constant.cumsum() + linear.cumsum() * np.arange(num_rows + 1))[:num_rows]

    def row_bands(self, num_rows: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The mask as intervals of keys per row.

        Returns:
            lo, hi: int32 [num_layers, num_rows]; row q sees the keys in ``[lo[j, q], hi[j, q])`` for every j. The
            intervals of a row are disjoint; unused ones are 0, 0. num_layers is at least 1.
        """
        table = self.canonical().table.astype(np.int64)
        layer = slice_layers(table)
        lengths = table[:, 1] - table[:, 0]
        which = np.repeat(np.arange(len(table)), lengths)
        row = np.arange(len(which)) - np.repeat(lengths.cumsum() - lengths - table[:, 0], lengths)
        lo, hi = np.zeros((2, layer.max(initial=0) + 1, num_rows), np.int32)
        lo[layer[which], row] = lower_bound(table[which], row)
        hi[layer[which], row] = upper_bound(table[which], row)
        return lo, hi


def check_slices(slices: AttnSlices) -> None:
    """Raises ValueError for a mask in another form, as a list."""
    if not isinstance(slices, AttnSlices):
        raise ValueError(f"slices are a {type(slices).__name__}; give AttnSlices, such as varlen_causal(cu_seqlens)")


def _frozen(table: IntArray) -> npt.NDArray[np.int32]:
    if table.size and table.max() > np.iinfo(np.int32).max:
        raise ValueError(f"a slice reaches token {table.max()}; token numbers must fit in 32 bits")
    frozen = np.ascontiguousarray(table, dtype=np.int32)
    frozen.setflags(write=False)
    return frozen


def _sorted(table: IntArray) -> IntArray:
    if (table[1:, 0] > table[:-1, 0]).all():
        return table
    return table[np.lexsort((table[:, 2], table[:, 0]))]


def _overlapping_rectangles(table: IntArray) -> npt.NDArray[np.bool_]:
    """Which slices of a table sorted by q_start share part of their q x k bounding rectangle with another one."""
    overlapping = np.zeros(len(table), bool)
    if (table[1:, 0] >= table[:-1, 1]).all():
        return overlapping
    # Slices i < j overlap in q if q_start[j] < q_end[i]: for each i the candidates j are consecutive.
    last = np.searchsorted(table[:, 0], table[:, 1], side="left")
    count = last - np.arange(len(table)) - 1
    i = np.repeat(np.arange(len(table)), count)
    j = i + 1 + np.arange(len(i)) - np.repeat(count.cumsum() - count, count)
    hit = (table[i, 2] < table[j, 3]) & (table[j, 2] < table[i, 3])
    overlapping[i[hit]] = overlapping[j[hit]] = True
    return overlapping


def _merge_rows(table: IntArray) -> IntArray:
    """A disjoint table for slices that overlap: merges the key intervals row by row, then joins rows into slices."""
    lengths = table[:, 1] - table[:, 0]
    which = np.repeat(np.arange(len(table)), lengths)
    row = np.arange(len(which)) - np.repeat(lengths.cumsum() - lengths - table[:, 0], lengths)
    lo, hi = lower_bound(table[which], row), upper_bound(table[which], row)

    # Step 1: union of the intervals of each row. A row offset keeps the running maximum from crossing rows.
    order = np.lexsort((lo, row))
    row, lo, hi = row[order], lo[order], hi[order]
    offset = row * (hi.max() + 2)
    reach = np.maximum.accumulate(hi + offset)
    is_new = np.concatenate([[True], (lo + offset)[1:] > reach[:-1]])
    first = np.flatnonzero(is_new)
    hi = np.maximum.reduceat(hi, first)
    row, lo = row[first], lo[first]

    # Step 2: the j-th intervals of consecutive rows form one slice as long as both bounds keep moving by 0 or by 1.
    new_row = np.concatenate([[True], row[1:] != row[:-1]])
    layer = np.arange(len(row)) - np.maximum.accumulate(np.where(new_row, np.arange(len(row)), 0))
    order = np.lexsort((row, layer))
    row, lo, hi, layer = row[order], lo[order], hi[order], layer[order]
    step_lo, step_hi = np.diff(lo), np.diff(hi)
    joined = (np.diff(layer) == 0) & (np.diff(row) == 1)
    joined &= (step_lo >= 0) & (step_lo <= 1) & (step_hi >= 0) & (step_hi <= 1)
    kind = np.where(joined, step_hi + 2 * step_lo, -1)
    starts = np.concatenate([[True], ~joined | np.concatenate([[False], (kind[1:] != kind[:-1]) & (kind[:-1] >= 0)])])
    first = np.flatnonzero(starts)
    last = np.append(first[1:], len(row)) - 1
    mask_type = np.where(first < last, np.append(kind, -1)[np.minimum(first, len(kind))], FULL)
    return np.stack([row[first], row[last] + 1, lo[first], hi[last], mask_type], 1)
