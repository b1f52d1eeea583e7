"""Attention masks as lists of slices, and the geometry that the rest of the package needs of them.

An ``AttnSlice`` ``(q_start, q_end, k_start, k_end, mask_type)`` lets each query row ``q`` in ``[q_start, q_end)`` see
one interval of keys ``[lo(q), hi(q))``:

    lo(q) = k_start + [INV_CAUSAL or BI_CAUSAL] * (q - q_start)
    hi(q) = k_end   - [CAUSAL or BI_CAUSAL]     * (q_end - 1 - q)

so CAUSAL is aligned at the bottom right, INV_CAUSAL at the top left, and BI_CAUSAL is a diagonal band. ``mask_type`` is
a bit field: bit 0 makes the upper bound move with the row, bit 1 the lower bound. A mask is the union of its slices.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchtitan_magi.masks.geometry import (
    CAUSAL,
    FULL,
    Bools,
    Int32Array,
    Int64Array,
    IntArray,
    expand,
    first_true,
    frozen,
    groups,
    lower_bound,
    rows_of,
    slice_areas,
    slice_layers,
    trim,
    union,
    upper_bound,
)
from torchtitan_magi.wording import one_line, quoted

MAX_TOKENS = 2**31 - 1  # token numbers are int32 on the device
SHOWN = 100  # slices in a repr: a pack may have 500,000
FEW_PAIRS = 16  # pairs of slices with common rows, per slice, that are looked at one by one


class AttnSlices:
    """An immutable list of attention slices.

    Args:
        table: integers [n, 5]: q_start, q_end, k_start, k_end (tokens, half-open ranges), mask_type (0 FULL, 1 CAUSAL,
            2 INV_CAUSAL, 3 BI_CAUSAL). Ranges may overlap in any way and may be empty.

    Raises:
        ValueError: wrong shape, no integers, a reversed or negative range, an unknown mask type, a token number
            beyond 32 bits.
    """

    __slots__ = ("_canonical", "_hash", "_table")

    _table: Int32Array

    def __init__(self, table: Sequence[Sequence[int]] | IntArray) -> None:
        array = as_int64(table, "slices", "are of type")
        if array.size == 0:
            array = array.reshape(0, 5)
        if array.ndim != 2 or array.shape[1] != 5:
            raise ValueError(f"slices have shape {array.shape}; give [n, 5]: q_start, q_end, k_start, k_end, mask_type")
        q_start, q_end, k_start, k_end, mask_type = array.T
        if (i := first_true((q_start < 0) | (k_start < 0) | (q_end < q_start) | (k_end < k_start))) is not None:
            raise ValueError(f"slice {i} is {array[i].tolist()}; its ranges must satisfy 0 <= start <= end")
        if (i := first_true((mask_type < 0) | (mask_type > 3))) is not None:
            raise ValueError(
                f"slice {i} has mask_type {mask_type[i]}; use 0 FULL, 1 CAUSAL, 2 INV_CAUSAL or 3 BI_CAUSAL"
            )
        self._table = frozen(array.astype(np.int32))
        self._canonical: AttnSlices | None = None
        self._hash: int | None = None

    @classmethod
    def _trusted(cls, table: IntArray) -> "AttnSlices":
        """Wraps a table that is already canonical."""
        slices = cls.__new__(cls)
        slices._table = frozen(table.astype(np.int32))
        slices._canonical, slices._hash = slices, None
        return slices

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the table alone: hashes differ from process to process."""
        return AttnSlices._trusted if self._canonical is self else AttnSlices, (self.table,)

    @property
    def table(self) -> Int32Array:
        """The slices, int32 [n, 5], read-only."""
        return self._table

    def __len__(self) -> int:
        return len(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttnSlices) and np.array_equal(self.table, other.table)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(self.table.tobytes())
        return self._hash

    def __repr__(self) -> str:
        shown = str(self.table[:SHOWN].tolist())[:-1]
        return f"AttnSlices({shown}{f', ... {len(self):,} slices' * (len(self) > SHOWN)}])"

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

    def row_cost(self, num_rows: int) -> Int64Array:
        """Keys seen by each query row, int64 [num_rows].

        Raises:
            ValueError: the mask has more rows.
        """
        self._check_rows(num_rows)
        table = self.canonical().table.astype(np.int64)
        q_start, q_end, k_start, _, mask_type = table.T
        slope = (mask_type & 1) - (mask_type >> 1)
        keys_at_zero = upper_bound(table, q_start) - k_start - slope * q_start
        constant, linear = (np.zeros(num_rows + 1, np.int64) for _ in range(2))
        for values, steps in ((keys_at_zero, constant), (slope, linear)):
            np.add.at(steps, q_start, values)
            np.subtract.at(steps, q_end, values)
        return (constant.cumsum() + linear.cumsum() * np.arange(num_rows + 1))[:num_rows]

    def row_bands(self, num_rows: int) -> tuple[Int32Array, Int32Array]:
        """The mask as intervals of keys per row.

        Returns:
            lo, hi: int32 [num_layers, num_rows]; row q sees the keys in ``[lo[j, q], hi[j, q])`` for every j. The
            intervals of a row are disjoint; unused ones are 0, 0. num_layers is at least 1.

        Raises:
            ValueError: the mask has more rows.
        """
        self._check_rows(num_rows)
        table = self.canonical().table.astype(np.int64)
        layer = slice_layers(table)
        which, row = rows_of(table)
        lo, hi = np.zeros((2, layer.max(initial=0) + 1, num_rows), np.int32)
        lo[layer[which], row] = lower_bound(table[which], row)
        hi[layer[which], row] = upper_bound(table[which], row)
        return lo, hi

    def _check_rows(self, num_rows: int) -> None:
        last = int(self.canonical().table[:, 1].max(initial=0))
        if not is_integer(num_rows, last):
            raise ValueError(f"num_rows is {quoted(num_rows)}; give an integer of at least {last}, the mask's last row")


def stacked(masks: Sequence[AttnSlices]) -> AttnSlices:
    """What any of the masks lets through, as it is: a (query, key) pair may be in several slices, so only the rows and
    keys that the slices reach are right, not their area. It costs nothing, where merging costs a pass over all rows."""
    if len(masks) == 1:
        return masks[0]
    return AttnSlices._trusted(np.concatenate([mask.canonical().table for mask in masks]))


def check_slices(slices: AttnSlices) -> None:
    """Raises ValueError for a mask in another form, as a list."""
    if not isinstance(slices, AttnSlices):
        raise ValueError(f"slices are a {type(slices).__name__}; give AttnSlices, such as varlen_causal(cu_seqlens)")


def as_int64(values: object, name: str, is_of: str = "has dtype") -> Int64Array:
    """A copy of integers in sequences, arrays, or tensors on any device.

    Args:
        name, is_of: how an error about the type begins.

    Raises:
        ValueError: rows of different lengths, no integers, a value beyond 32 bits.
    """
    try:
        array = np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)
    except ValueError:
        raise ValueError(f"{name}: rows differ in length; give a rectangular array of integers") from None
    except (TypeError, RuntimeError) as error:  # of tensors that NumPy cannot hold, or that have no values
        raise ValueError(f"{name} cannot be read ({one_line(error, 80)}); give integers that fit in 32 bits") from None
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} {is_of} {array.dtype}; give integers that fit in 32 bits")
    if array.size and array.max() > MAX_TOKENS:
        raise ValueError(f"{name}: {array.max()} is too large; token numbers must fit in 32 bits")
    return array.astype(np.int64)


def is_integer(value: object, least: int) -> bool:
    """Whether a value is an integer of at least `least`, of Python or of NumPy; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


# ------------------------------------------------------------------------------------------------- the canonical form


def _sorted(table: IntArray) -> IntArray:
    if (table[1:, 0] > table[:-1, 0]).all():
        return table
    return table[np.lexsort((table[:, 2], table[:, 0]))]


def _overlapping_rectangles(table: IntArray) -> Bools:
    """Which slices of a table sorted by q_start share part of their q x k bounding rectangle with another one."""
    overlapping = np.zeros(len(table), bool)
    q_start, q_end, k_start, k_end = table[:, :4].T
    later = np.searchsorted(q_start, q_end)  # slices i < j overlap in q if j < later[i]
    count = later - np.arange(len(table)) - 1
    if count.sum() <= FEW_PAIRS * len(table):
        i = np.repeat(np.arange(len(table)), count)
        j = expand(later - count, later)
        hit = (k_start[i] < k_end[j]) & (k_start[j] < k_end[i])
        overlapping[i[hit]] = overlapping[j[hit]] = True
        return overlapping
    # Else count those that it misses: they end before it begins, or begin after it ends, in q, in k, or in both.
    before = [np.searchsorted(np.sort(end), start, side="right") for start, end in ((q_start, q_end), (k_start, k_end))]
    after = [len(table) - np.searchsorted(np.sort(start), end) for start, end in ((q_start, q_end), (k_start, k_end))]
    in_both = [
        _count_below(q, k, q_limit, k_limit)
        for q, q_limit in ((q_end, q_start), (-q_start, -q_end))
        for k, k_limit in ((k_end, k_start), (-k_start, -k_end))
    ]
    return np.sum([*before, *after], 0) - np.sum(in_both, 0) < len(table) - 1


def _count_below(x: IntArray, y: IntArray, x_limit: IntArray, y_limit: IntArray) -> Int64Array:
    """How many points (x, y) have x <= x_limit and y <= y_limit, for each limit, in O(n log n); int64 [n] each.

    A wavelet matrix: the ranks of y, in the order of x, are sorted bit by bit from the highest. At each bit the points
    within both limits so far are [low, high); those with a 0 are counted where the limit has a 1.
    """
    by_x = np.argsort(x, kind="stable")
    low, high = np.zeros(len(x), np.int64), np.searchsorted(x[by_x], x_limit, side="right")
    rank = np.argsort(np.argsort(y[by_x], kind="stable"))
    limit = np.searchsorted(np.sort(y), y_limit, side="right")
    count = np.zeros(len(x), np.int64)
    for bit in reversed(range(len(x).bit_length())):
        has_one, limit_has_one = rank >> bit & 1 == 1, limit >> bit & 1 == 1
        zeros = np.append(0, np.cumsum(~has_one))  # before each place
        count += np.where(limit_has_one, zeros[high] - zeros[low], 0)
        low, high = (np.where(limit_has_one, zeros[-1] + at - zeros[at], zeros[at]) for at in (low, high))
        rank = np.concatenate([rank[~has_one], rank[has_one]])
    return count


def _join_equal_rows(table: IntArray) -> IntArray:
    """Slices of the same rows and type as one where their keys overlap or touch in every row."""
    same, group = np.unique(table[:, [0, 1, 4]], axis=0, return_inverse=True)
    narrowest = np.where(table[:, 4] == CAUSAL, table[:, 0], table[:, 1] - 1)
    lo, hi = lower_bound(table, narrowest), upper_bound(table, narrowest)
    group, lo, hi = union(group.ravel(), lo, hi, int(hi.max())).T
    q_start, q_end, mask_type = same[group].T
    k_start = lo - (mask_type >> 1) * (q_end - 1 - q_start)
    k_end = hi + (mask_type == CAUSAL) * (q_end - 1 - q_start)
    return np.stack([q_start, q_end, k_start, k_end, mask_type], 1)


def _merge_rows(table: IntArray) -> IntArray:
    """A disjoint table for slices that overlap: merges the key intervals row by row, then joins rows into slices."""
    # Step 1: union of the intervals of each row.
    table = _join_equal_rows(table)
    which, row = rows_of(table)
    lo, hi = lower_bound(table[which], row), upper_bound(table[which], row)
    row, lo, hi = union(row, lo, hi, int(hi.max())).T

    # Step 2: the j-th intervals of consecutive rows form one slice as long as both bounds keep moving by 0 or by 1.
    new_row = np.concatenate([[True], row[1:] != row[:-1]])
    layer = np.arange(len(row)) - np.maximum.accumulate(np.where(new_row, np.arange(len(row)), 0))
    order = np.lexsort((row, layer))
    row, lo, hi, layer = row[order], lo[order], hi[order], layer[order]
    step_lo, step_hi = np.diff(lo), np.diff(hi)
    joined = (np.diff(layer) == 0) & (np.diff(row) == 1)
    joined &= (step_lo >= 0) & (step_lo <= 1) & (step_hi >= 0) & (step_hi <= 1)
    kind = np.where(joined, step_hi + 2 * step_lo, -1)
    turns = np.append(False, (kind[1:] != kind[:-1]) & (kind[:-1] >= 0))
    first, last = groups(joined & ~turns, len(row))
    mask_type = np.where(first < last, np.append(kind, -1)[np.minimum(first, len(kind))], FULL)
    return np.stack([row[first], row[last] + 1, lo[first], hi[last], mask_type], 1)
