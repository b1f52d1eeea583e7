"""What a mask's rows see, as bands per row and as segments per tile of rows. NumPy only.

A band is a query row's interval of keys on one mask layer; the intervals of a row are disjoint. A segment is a run of
keys that a tile of consecutive rows sees on one layer.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KEYS = 128  # of a block or tile of the kernel
FAR = 1 << 30  # beyond every key

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Segments:
    """Runs of keys that tiles of consecutive query rows see; parallel int64 arrays, sorted by tile, layer, first."""

    tile: Int64Array
    layer: Int64Array
    first: Int64Array
    end: Int64Array
    full_first: Int64Array  # keys in [full_first, full_end) are seen by every row of the tile; may be an empty range
    full_end: Int64Array

    def __len__(self) -> int:
        return len(self.tile)


def row_bands(table: Int32Array, num_q: int) -> tuple[Int32Array, Int32Array]:
    """What AttnSlices.row_bands gives, for a canonical table: on a layer, runs of slices and of nothing alternate."""
    layer = slice_layers(table)
    lo, hi = np.zeros((2, layer.max(initial=0) + 1, num_q), np.int32)
    rows = np.arange(num_q, dtype=np.int32)
    for j in range(len(lo)):
        q_start, q_end, k_start, k_end, mask_type = table[layer == j].astype(np.int32).T
        edges = np.zeros(2 * len(q_start) + 2, np.int32)
        edges[1:-1:2], edges[2:-1:2], edges[-1] = q_start, q_end, num_q
        lengths = np.diff(edges)
        slope_lo, slope_hi = mask_type >> 1, mask_type & 1
        bounds = ((lo[j], k_start, slope_lo, q_start), (hi[j], k_end, slope_hi, q_end - 1))
        for out, constant, slope, anchor in bounds:
            run = np.zeros(len(lengths), np.int32)  # 0 between slices
            run[1::2] = constant - slope * anchor
            out[:] = np.repeat(run, lengths)
            if slope.any():
                run[1::2] = slope
                out += np.repeat(run, lengths) * rows
    return lo, hi


def slice_layers(table: Int32Array) -> Int64Array:
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


@dataclass(frozen=True)
class Bounds:
    """Of tiles of `tokens` rows, int32 [num_layers, num_tiles]: keys some row sees, keys all see, the longest band."""

    tokens: int
    first: Int32Array  # FAR where no row sees any
    end: Int32Array
    full_first: Int32Array
    full_end: Int32Array
    longest: Int32Array


def row_segments(lo: Int32Array, hi: Int32Array, tokens: int, finer: Bounds | None = None) -> tuple[Segments, Bounds]:
    """The keys that each tile of `tokens` consecutive rows sees.

    Keys that no row of the tile sees split a segment where there are at least KEYS of them in a row.

    Args:
        lo, hi: int32 [num_layers, num_rows], the rows' bands; empty where hi <= lo.
        finer: bounds of tiles of which one of these holds several; saves time.

    Returns:
        the segments, and the bounds of the tiles.
    """
    num_layers, num_rows = lo.shape
    if num_rows == 0:
        empty = np.zeros((num_layers, 0), np.int32)
        return Segments(*(np.zeros(0, np.int64) for _ in range(6))), Bounds(tokens, *[empty] * 5)
    bounds = tile_bounds(lo, hi, tokens) if finer is None else merge_bounds(finer, tokens)
    used = bounds.end > bounds.first
    holes = used & (bounds.end - bounds.first - bounds.longest >= KEYS)
    layer, tile = np.nonzero(used & ~holes)
    limits = (bounds.first, bounds.end, bounds.full_first, bounds.full_end)
    parts = [np.stack([tile, layer, *(x[layer, tile] for x in limits)])]
    if holes.any():
        low = np.where(hi > lo, lo, np.int32(FAR))
        parts.append(_split_at_holes(low, hi, tokens, *np.nonzero(holes)))
    columns = np.concatenate(parts, 1).astype(np.int64) if len(parts) > 1 else parts[0]
    if num_layers > 1 or len(parts) > 1:
        columns = columns[:, np.lexsort(columns[2::-1])]
    return Segments(*columns), bounds


def tile_bounds(lo: Int32Array, hi: Int32Array, tokens: int) -> Bounds:
    starts = np.arange(0, lo.shape[1], tokens)
    low = np.where(hi > lo, lo, np.int32(FAR))
    largest, smallest = np.maximum.reduceat, np.minimum.reduceat
    return Bounds(
        tokens,
        smallest(low, starts, 1),
        largest(hi, starts, 1),
        largest(low, starts, 1),
        smallest(hi, starts, 1),
        largest(hi - lo, starts, 1),
    )


def merge_bounds(finer: Bounds, tokens: int) -> Bounds:
    starts = np.arange(0, finer.first.shape[1], tokens // finer.tokens)
    largest, smallest = np.maximum.reduceat, np.minimum.reduceat
    return Bounds(
        tokens,
        smallest(finer.first, starts, 1),
        largest(finer.end, starts, 1),
        largest(finer.full_first, starts, 1),
        smallest(finer.full_end, starts, 1),
        largest(finer.longest, starts, 1),
    )


def _split_at_holes(low: Int32Array, hi: Int32Array, tokens: int, layer: Int64Array, tile: Int64Array) -> Int64Array:
    """Segments (columns as in Segments) of tiles whose keys may lie apart. low: FAR where a row sees nothing."""
    rows = np.minimum(tile[:, None] * tokens + np.arange(tokens), low.shape[1] - 1)
    first, end = low[layer[:, None], rows], hi[layer[:, None], rows]
    order = np.argsort(first, 1)
    first, end = np.take_along_axis(first, order, 1), np.take_along_axis(end, order, 1)
    seen = first < FAR
    reach = np.maximum.accumulate(np.where(seen, end, 0), 1)
    starts_new = seen.copy()
    starts_new[:, 1:] &= first[:, 1:] - reach[:, :-1] >= KEYS
    starts_new[:, 0] = True  # tiles come here with at least one row that sees keys
    begin = np.flatnonzero(starts_new)
    part = begin // tokens
    part_end = np.maximum.reduceat(np.where(seen, end, 0).ravel(), begin)
    full_first = np.maximum.reduceat(first.ravel(), begin)
    full_end = np.minimum.reduceat(np.where(seen, end, 0).ravel(), begin)
    alone = np.bincount(part, minlength=len(tile))[part] == 1
    return np.stack(
        [
            tile[part],
            layer[part],
            first.ravel()[begin],
            part_end,
            np.where(alone, full_first, FAR),
            np.where(alone, full_end, 0),
        ]
    )
