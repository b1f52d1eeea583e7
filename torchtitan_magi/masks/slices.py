"""Attention masks as lists of slices, and the geometry that the rest of the package needs of them.

An ``AttnSlice`` ``(q_start, q_end, k_start, k_end, mask_type)`` lets each query row ``q`` in ``[q_start, q_end)`` see
one interval of keys ``[lo(q), hi(q))``:

    lo(q) = k_start + [INV_CAUSAL or BI_CAUSAL] * (q - q_start)
    hi(q) = k_end   - [CAUSAL or BI_CAUSAL]     * (q_end - 1 - q)

so CAUSAL is aligned at the bottom right, INV_CAUSAL at the top left, and BI_CAUSAL is a diagonal band. ``mask_type`` is
a bit field: bit 0 makes the upper bound move with the row, bit 1 the lower bound. A mask is the union of its slices.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FULL, CAUSAL, INV_CAUSAL, BI_CAUSAL = 0, 1, 2, 3

IntArray = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


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


# ---------------------------------------------------------------------------------------------------------- builders


def varlen_causal(cu_seqlens: object, total_tokens: int | None = None) -> AttnSlices:
    """Causal attention inside each document.

    Args:
        cu_seqlens: integers [num_documents + 1], cumulative document lengths in tokens: starts at 0, never decreases.
        total_tokens: when given, cu_seqlens must end there.

    Raises:
        ValueError: cu_seqlens does not start at 0, decreases, or does not end at total_tokens.
    """
    return _per_document(_check_cu_seqlens(cu_seqlens, total_tokens), CAUSAL)


def varlen_full(cu_seqlens: object, total_tokens: int | None = None) -> AttnSlices:
    """Bidirectional attention inside each document. Arguments and errors as in ``varlen_causal``."""
    return _per_document(_check_cu_seqlens(cu_seqlens, total_tokens), FULL)


def sliding_window(cu_seqlens: object, window: int, total_tokens: int | None = None) -> AttnSlices:
    """Causal attention inside each document to the last ``window`` tokens, the token itself among them.

    Raises:
        ValueError: window < 1, or cu_seqlens as in ``varlen_causal``.
    """
    if window < 1:
        raise ValueError(f"window is {window}; it counts the tokens a row sees, itself included: use at least 1")
    cu = _check_cu_seqlens(cu_seqlens, total_tokens)
    window = min(window, max(1, int(cu[-1])))
    start, end = cu[:-1], cu[1:]
    knee = np.minimum(start + window, end)
    head = np.stack([start, knee, start, knee, np.full_like(start, CAUSAL)], 1)
    tail = np.stack([knee, end, knee - window + 1, end, np.full_like(start, BI_CAUSAL)], 1)
    return AttnSlices(np.concatenate([head, tail[knee < end]]))


def block_causal(cu_seqlens: object, block_size: int, total_tokens: int | None = None) -> AttnSlices:
    """Inside each document, full attention to the row's own block of ``block_size`` tokens and to all earlier ones.

    Raises:
        ValueError: block_size < 1, or cu_seqlens as in ``varlen_causal``.
    """
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it counts the tokens of a block: use at least 1")
    cu = _check_cu_seqlens(cu_seqlens, total_tokens)
    block_size = min(block_size, max(1, int(cu[-1])))
    num_blocks = -(-np.diff(cu) // block_size)
    document = np.repeat(np.arange(len(num_blocks)), num_blocks)
    block = np.arange(len(document)) - np.repeat(num_blocks.cumsum() - num_blocks, num_blocks)
    q_start = cu[document] + block * block_size
    q_end = np.minimum(q_start + block_size, cu[document + 1])
    return AttnSlices(np.stack([q_start, q_end, cu[document], q_end, np.full_like(q_start, FULL)], 1))


def shared_prompt(lengths: object, starts: object = None) -> AttnSlices:
    """Preference pairs that share their prompt, each laid out as prompt, chosen, rejected.

    Chosen and rejected each see the prompt and their own earlier tokens, not each other.

    Args:
        lengths: integers [num_pairs, 3]: tokens of prompt, chosen and rejected.
        starts: integers [num_pairs]: first token of each pair; by default pair follows pair.

    Raises:
        ValueError: wrong shape or a negative value.
    """
    array = _as_int64(lengths, "lengths")
    if array.ndim != 2 or array.shape[1] != 3 or (array < 0).any():
        raise ValueError(f"lengths has shape {array.shape}; give non-negative [num_pairs, 3]: prompt, chosen, rejected")
    total = array.sum(1)
    start = total.cumsum() - total if starts is None else _as_int64(starts, "starts")
    if start.shape != total.shape:
        raise ValueError(f"starts has shape {start.shape} for {len(total)} pairs; give the first token of each pair")
    prompt_end, chosen_end, rejected_end = start + array.cumsum(1).T
    causal, full = np.full_like(start, CAUSAL), np.full_like(start, FULL)
    return AttnSlices(
        np.concatenate(
            [
                np.stack([start, chosen_end, start, chosen_end, causal], 1),
                np.stack([chosen_end, rejected_end, start, prompt_end, full], 1),
                np.stack([chosen_end, rejected_end, chosen_end, rejected_end, causal], 1),
            ]
        )
    )


# ---------------------------------------------------------------------------------------- geometry of slice tables
# Tables below are int64 [n, 5]; every function is vectorised over the slices.


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


# ----------------------------------------------------------------------------------------------------------- private


def _frozen(table: IntArray) -> npt.NDArray[np.int32]:
    if table.size and table.max() > np.iinfo(np.int32).max:
        raise ValueError(f"a slice reaches token {table.max()}; token numbers must fit in 32 bits")
    frozen = np.ascontiguousarray(table, dtype=np.int32)
    frozen.setflags(write=False)
    return frozen


def _as_int64(values: object, name: str) -> npt.NDArray[np.int64]:
    """Sequences, arrays and tensors on any device."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    array = np.asarray(values)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} has dtype {array.dtype}; give integers")
    return array.astype(np.int64)


def _check_cu_seqlens(cu_seqlens: object, total_tokens: int | None) -> npt.NDArray[np.int64]:
    cu = _as_int64(cu_seqlens, "cu_seqlens")
    if cu.ndim != 1 or len(cu) == 0 or cu[0] != 0:
        first = cu.ravel()[:1].tolist()
        raise ValueError(f"cu_seqlens starts with {first}; give a 1-D list of cumulative lengths that starts at 0")
    step = np.diff(cu)
    if (step < 0).any():
        i = int((step < 0).argmax())
        raise ValueError(f"cu_seqlens decreases from {cu[i]} to {cu[i + 1]} at index {i + 1}; give cumulative lengths")
    if total_tokens is not None and cu[-1] != total_tokens:
        raise ValueError(f"cu_seqlens ends at {cu[-1]} but there are {total_tokens} tokens; it must end at that count")
    return cu


def _per_document(cu: npt.NDArray[np.int64], mask_type: int) -> AttnSlices:
    start, end = cu[:-1], cu[1:]
    return AttnSlices(np.stack([start, end, start, end, np.full_like(start, mask_type)], 1)[start < end])


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


def slice_layers(table: IntArray) -> npt.NDArray[np.int64]:
    """Numbers the slices of a canonical table so that those of one number have no row in common, few numbers first."""
    layer = np.zeros(len(table), np.int64)
    if (table[1:, 0] >= table[:-1, 1]).all():
        return layer
    free_from: list[int] = []
    for i, (start, end) in enumerate(table[:, :2].tolist()):
        j = next((j for j, free in enumerate(free_from) if free <= start), len(free_from))
        free_from[j : j + 1] = [end]
        layer[i] = j
    return layer
