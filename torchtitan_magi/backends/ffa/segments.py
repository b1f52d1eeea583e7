"""What the rows of a mask see, tile by tile.

A segment is a run of keys that a tile of consecutive rows sees on one mask layer. Inside a slice it moves evenly from
tile to tile, so segments are made as runs, few per slice, and only what the kernel reads of them is written out. (Where
rows of a table are gathered, `take` and `compress` are several times as fast as an index; methods of arrays are faster
than NumPy's functions of the same name.)
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchtitan_magi.masks.geometry import Bools, Int64Array
from torchtitan_magi.tiles import KEYS

FAR = 1 << 30  # beyond every key and every row


@dataclass(frozen=True)
class SegmentRuns:
    """Runs of keys that tiles of consecutive query rows see: `count` tiles from `tile` on, one segment each.

    Parallel int64 arrays, one entry per run. Written out run after run, the segments are sorted by tile, layer, first.
    The four bounds are those of the run's first tile.
    """

    tile: Int64Array
    count: Int64Array  # at least 1
    layer: Int64Array
    first: Int64Array
    end: Int64Array
    full_first: Int64Array  # keys in [full_first, full_end) are seen by every row of the tile; may be an empty range
    full_end: Int64Array
    step_lo: Int64Array  # by which first and full_first grow from tile to tile
    step_hi: Int64Array  # by which end and full_end grow

    def __len__(self) -> int:
        return len(self.tile)

    def tiles(self) -> Int64Array:
        """The tile of each segment."""
        return np.arange(self.count.sum()) + (self.tile - starts_of(self.count)).repeat(self.count)

    def write_ramps(self, lo: Int64Array, hi: Int64Array, out: Int64Array) -> None:
        """Pairs of int32 that grow evenly, run after run: (lo + i * step_lo, hi + i * step_hi) for i < count.

        The two halves of an int64 grow together (the machine is little-endian): one running sum writes both.

        Args:
            lo, hi: int64 [runs]; no value of a pair is negative.
            out: int64 [segments], each a pair; overwritten.
        """
        if len(self) == 0:
            return
        value, step = lo + (hi << 32), self.step_lo + (self.step_hi << 32)
        if (step == step[0]).all():  # as in a pack of causal documents: then no memory is needed
            steps = out
            steps[:] = step[0]
        else:
            steps = step.repeat(self.count)
        value[1:] -= (value + (self.count - 1) * step)[:-1]
        steps[starts_of(self.count)] = value
        # NumPy's running sums take six times as long on some CPUs, as each is read back from memory.
        torch.cumsum(torch.from_numpy(steps), 0, out=torch.from_numpy(out))

    def stacked(self) -> Int64Array:
        """All fields, int64 [9, n]."""
        return np.array([*vars(self).values()])


def starts_of(count: Int64Array) -> Int64Array:
    """Where each of the groups of `count` things begins, one after another."""
    return count.cumsum() - count


def is_new(values: Int64Array) -> Bools:
    """Which of `values` [n] differ from the one before; the first does."""
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return new


def tile_segments(
    table: Int64Array, layer: Int64Array, num_q: int, sizes: Sequence[int], apart: int = FAR
) -> list[SegmentRuns]:
    """The keys that each tile of `size` consecutive rows sees, for each of `sizes`.

    KEYS or more consecutive keys that no row of the tile sees end a segment.

    Args:
        table: canonical slices, int64 [n, 5]; rows in [0, num_q).
        layer: mask layer of each slice, int64 [n], from `slice_layers`.
        apart: keys before it and from it on share no segment; nor do they share a slice.
    """
    # All sizes at once, as the time goes into calls: the slices once for each size, on layers of its own.
    num_layers = int(layer.max(initial=0)) + 1
    tokens = np.array(sizes).repeat(len(table))
    layer = np.concatenate([layer + i * num_layers for i in range(len(sizes))])
    table = np.concatenate([table] * len(sizes))
    q_start, q_end, k_start, k_end, mask_type = table.T
    slope_lo, slope_hi = mask_type >> 1, mask_type & 1
    first_tile, end_tile = -(-q_start // tokens), q_end // tokens  # tiles in between lie in the slice whole
    # The rows of a slice before and after its whole tiles: two stretches, each inside one tile.
    tail = end_tile * tokens
    start = np.array([q_start, np.where(tail < q_start, q_end, tail)]).T.ravel()
    end = np.array([np.minimum(first_tile * tokens, q_end), q_end]).T.ravel()
    some = (start < end).nonzero()[0]
    which = some // 2
    joined = _join_stretches(table.take(which, 0), layer[which], start[some], end[some], num_q, tokens[which], apart)

    some = (first_tile < end_tile).nonzero()[0]
    tile, slope_lo, slope_hi, tokens = first_tile[some], slope_lo[some], slope_hi[some], tokens[some]
    row = tile * tokens
    lo = k_start[some] + slope_lo * (row - q_start[some])
    hi = k_end[some] - slope_hi * (q_end[some] - 1 - row)
    step_lo, step_hi = slope_lo * tokens, slope_hi * tokens
    end, full_first = hi + step_hi - slope_hi, lo + step_lo - slope_lo
    whole = SegmentRuns(tile, end_tile[some] - tile, layer[some], lo, end, full_first, hi, step_lo, step_hi)
    fields = np.concatenate([joined.stacked(), whole.stacked()], 1)
    if num_layers > 1:  # layers share tiles, so their runs would interleave: write them out
        fields = _written_out(SegmentRuns(*fields)).stacked()
    runs = SegmentRuns(*fields)  # views
    size, runs.layer[:] = np.divmod(runs.layer, num_layers)
    by_tile = ((size * (num_q + 1) + runs.tile) * num_layers + runs.layer).argsort(kind="stable")
    fields = fields.take(by_tile, 1)
    edges = [0, *np.bincount(size, minlength=len(sizes)).cumsum()]
    return [SegmentRuns(*fields[:, begin:end]) for begin, end in itertools.pairwise(edges)]


def _join_stretches(
    table: Int64Array, layer: Int64Array, row: Int64Array, end: Int64Array, num_q: int, tokens: Int64Array, apart: int
) -> SegmentRuns:
    """Segments of tiles that no slice covers alone, as runs of one tile, sorted by layer, tile and first key.

    Args:
        table, layer: slice of each stretch of rows, int64 [n, 5], and its mask layer, [n].
        row, end: the stretches, int64 [n], each inside one tile. Bounds move by at most 1 per row, so that the keys
            of a stretch have no holes.
        tokens: rows of the tile, int64 [n].
        apart: see tile_segments.
    """
    if len(row) == 0:
        return SegmentRuns(*np.zeros((9, 0), np.int64))
    # Step 1: bring the stretches of a tile together, by their first key.
    q_start, q_end, k_start, k_end, mask_type = table.T
    slope_lo, slope_hi = mask_type >> 1, mask_type & 1
    num_rows, tile = end - row, row // tokens
    lo, hi = k_start + slope_lo * (row - q_start), k_end - slope_hi * (q_end - 1 - row)
    group = tile + layer * (num_q + 1)
    step = group[1:] - group[:-1]
    if not ((step > 0) | ((step == 0) & (lo[1:] >= lo[:-1]))).all():
        order = np.lexsort((lo, group))
        group, tile, layer, slope_lo, slope_hi = (x[order] for x in (group, tile, layer, slope_lo, slope_hi))
        lo, hi, num_rows, tokens = lo[order], hi[order], num_rows[order], tokens[order]
    last_lo, last_hi = lo + slope_lo * (num_rows - 1), hi + slope_hi * (num_rows - 1)

    # Step 2: join what lies close.
    new_tile = is_new(group)
    lift = new_tile.cumsum() * (2 * FAR)  # makes the running maximum start again at each tile
    reach = np.maximum.accumulate(last_hi + lift) - lift
    is_first = new_tile.copy()
    is_first[1:] |= (lo[1:] - reach[:-1] >= KEYS) | (lo[1:] >= apart) & (reach[:-1] <= apart)
    starts = is_first.nonzero()[0]
    tile, tokens = tile[starts], tokens[starts]
    all_rows = np.add.reduceat(num_rows, starts) == np.minimum(tokens, num_q - tile * tokens)
    first, end = np.minimum.reduceat(lo, starts), np.maximum.reduceat(last_hi, starts)
    full_first = np.where(all_rows, np.maximum.reduceat(last_lo, starts), FAR)
    full_end = np.where(all_rows, np.minimum.reduceat(hi, starts), 0)
    zero = np.zeros_like(tile)
    return SegmentRuns(tile, zero + 1, layer[starts], first, end, full_first, full_end, zero, zero)


def _written_out(runs: SegmentRuns) -> SegmentRuns:
    """Runs of one tile each in place of longer ones."""
    i = np.arange(runs.count.sum()) - starts_of(runs.count).repeat(runs.count)
    tile, _, layer, first, end, full_first, full_end, step_lo, step_hi = runs.stacked().repeat(runs.count, 1)
    lo, hi = step_lo * i, step_hi * i
    bounds = first + lo, end + hi, full_first + lo, full_end + hi
    return SegmentRuns(tile + i, np.ones_like(i), layer, *bounds, step_lo, step_hi)
