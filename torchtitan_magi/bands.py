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


def tile_segments(table: Int32Array, num_q: int, tokens: int) -> Segments:
    """The keys that each tile of `tokens` consecutive rows sees.

    Keys that no row of the tile sees split a segment where there are at least KEYS of them in a row.

    Args:
        table: canonical slices, int32 [n, 5]; rows in [0, num_q).
    """
    if len(table) == 0:
        return Segments(*(np.zeros(0, np.int64) for _ in range(6)))
    # Step 1: cut the slices at the ends of tiles. The keys of a piece have no holes: bounds move by at most 1 per row.
    slices = table.astype(np.int64)
    first_tile, last_tile = slices[:, 0] // tokens, (slices[:, 1] - 1) // tokens
    pieces = last_tile - first_tile + 1
    which = np.repeat(np.arange(len(table)), pieces)
    tile = np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces - first_tile, pieces)
    layer = slice_layers(table)[which]
    q_start, q_end, k_start, k_end, mask_type = slices[which].T
    row, last_row = np.maximum(q_start, tile * tokens), np.minimum(q_end, (tile + 1) * tokens) - 1
    slope_lo, slope_hi = mask_type >> 1, mask_type & 1
    lo, last_lo = k_start + slope_lo * (row - q_start), k_start + slope_lo * (last_row - q_start)
    hi, last_hi = k_end - slope_hi * (q_end - 1 - row), k_end - slope_hi * (q_end - 1 - last_row)
    num_rows = last_row - row + 1

    # Step 2: bring the pieces of a tile together, by their first key.
    group = tile + layer * (num_q + 1)
    in_order = np.diff(group) > 0
    if not (in_order | ((np.diff(group) == 0) & (np.diff(lo) >= 0))).all():
        order = np.lexsort((lo, group))
        group, tile, layer = group[order], tile[order], layer[order]
        lo, last_lo, hi, last_hi, num_rows = (x[order] for x in (lo, last_lo, hi, last_hi, num_rows))

    # Step 3: join what lies close.
    new_tile = np.append(True, np.diff(group) != 0)
    lift = np.cumsum(new_tile) * (2 * FAR)  # makes the running maximum start again at each tile
    reach = np.maximum.accumulate(last_hi + lift) - lift
    starts = np.flatnonzero(new_tile | np.append(True, lo[1:] - reach[:-1] >= KEYS))
    tile, layer = tile[starts], layer[starts]
    all_rows = np.add.reduceat(num_rows, starts) == np.minimum(tokens, num_q - tile * tokens)
    segments = (
        tile,
        layer,
        np.minimum.reduceat(lo, starts),
        np.maximum.reduceat(last_hi, starts),
        np.where(all_rows, np.maximum.reduceat(last_lo, starts), FAR),
        np.where(all_rows, np.minimum.reduceat(hi, starts), 0),
    )
    if layer[-1] == 0:
        return Segments(*segments)
    order = np.lexsort((segments[2], layer, tile))
    return Segments(*(x[order] for x in segments))
