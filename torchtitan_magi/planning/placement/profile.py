"""Work of any stretch of rows, and the documents of a mask."""

import bisect
from collections.abc import Sequence

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, groups, union, upper_bound
from torchtitan_magi.masks.slices import AttnSlices

Layers = Sequence[tuple[AttnSlices, int]]  # the masks of a model's layers, and how many layers have each


class WorkProfile:
    """What stretches of rows cost in all layers: their (query, key) pairs, exactly, and the tiles filled only in part.

    A stretch of n rows touches (n - 1) / tile_rows + 1 tiles on average over its offsets, so its pairs count
    (n + tile_rows - 1) / n times. Costs that are equal for all rows are left out: ranks have equally many rows.

    Args:
        tile_rows: query tokens per tile of the kernel; 1 counts pairs alone.
    """

    def __init__(self, layers: Layers, num_tokens: int, tile_rows: int) -> None:
        tables = [slices.canonical().table.astype(np.int64) for slices, _ in layers]
        table = np.concatenate(tables)
        count = np.repeat([count for _, count in layers], [len(table) for table in tables])
        q_start, q_end, k_start, _, mask_type = table.T
        slope = ((mask_type & 1) - (mask_type >> 1)) * count
        keys = (upper_bound(table, q_start) - k_start) * count - slope * q_start  # of row 0 if the slice reached it
        edges = np.unique(np.concatenate([q_start, q_end, [0, num_tokens]]))
        constant, linear = np.zeros((2, len(edges)), np.int64)
        for rows, sign in ((q_start, 1), (q_end, -1)):
            at = np.searchsorted(edges, rows)
            np.add.at(constant, at, sign * keys)
            np.add.at(linear, at, sign * slope)
        self.slope = linear.cumsum()
        self.keys = constant.cumsum() + self.slope * edges  # of the first row of each stretch
        rows = np.diff(edges)
        work = rows * self.keys[:-1] + self.slope[:-1] * (rows * (rows - 1) // 2)
        self.edges = edges
        self.work = np.append(0, work.cumsum())
        self.rows_wasted = tile_rows - 1
        self._lists = [array.tolist() for array in (self.edges, self.work, self.keys, self.slope)]

    def below(self, row: int) -> int:
        """Pairs of the rows [0, row)."""
        edges, work, keys, slope = self._lists
        i = self.edge(row)
        rows = row - edges[i]
        return work[i] + rows * keys[i] + slope[i] * (rows * (rows - 1) // 2)

    def below_each(self, row: Int64Array | int) -> Int64Array:
        """``below`` for an array of rows."""
        i = self.edge_of(row)
        rows = row - self.edges[i]
        return self.work[i] + rows * self.keys[i] + self.slope[i] * (rows * (rows - 1) // 2)

    def edge(self, row: int) -> int:
        """The stretch of alike rows that a row lies in."""
        return bisect.bisect_right(self._lists[0], row) - 1

    def edge_of(self, row: Int64Array | int) -> Int64Array:
        """``edge`` for an array of rows."""
        return self.edges.searchsorted(row, side="right") - 1

    def last_row(self, end: Int64Array, edge: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Pairs of the rows [0, end) and those of the last of them, for an array of ends.

        Args:
            edge: ``edge_of`` a row before each end; most often that of the last row as well.
        """
        last = end - 1
        beyond = np.flatnonzero(last >= self.edges[np.minimum(edge + 1, len(self.edges) - 1)])
        edge = edge.copy()
        edge[beyond] = self.edge_of(last[beyond])
        rows, keys, slope = last - self.edges[edge], self.keys[edge], self.slope[edge]
        of_last = keys + slope * rows
        return self.work[edge] + rows * keys + slope * (rows * (rows - 1) // 2) + of_last, of_last

    def of(self, start: int, end: int) -> int:
        """Work of the stretch [start, end)."""
        if start >= end:
            return 0
        pairs = self.below(end) - self.below(start)
        return pairs + pairs * self.rows_wasted // (end - start)

    def of_each(self, start: Int64Array, end: Int64Array | int) -> Int64Array:
        """``of`` for arrays of stretches; those that are empty cost nothing."""
        return self.with_tiles(self.below_each(end) - self.below_each(start), end - start)

    def with_tiles(self, pairs: Int64Array, rows: Int64Array | int) -> Int64Array:
        """What so many pairs in so many rows cost."""
        return pairs + pairs * self.rows_wasted // np.maximum(rows, 1)


def documents(slices: AttnSlices, num_tokens: int, longest_gap: int, keep_links: bool = True) -> Int64Array:
    """Cuts the pack into stretches that attend to nothing outside themselves, int64 [n, 2], ascending.

    Args:
        longest_gap: most tokens per stretch of tokens that take part in nothing (padding).
        keep_links: whether a slice whose keys lie wholly outside its rows joins both into one document. If not, keys
            that many rows see (a common prefix) do not make one document of everything.
    """
    table = slices.canonical().table.astype(np.int64)
    if not keep_links:
        table = table[(table[:, 0] < table[:, 3]) & (table[:, 2] < table[:, 1])]
    start, end = np.minimum(table[:, 0], table[:, 2]), np.maximum(table[:, 1], table[:, 3])
    start, end = union(np.zeros(len(table), np.int64), start, end, num_tokens, join=False)[:, 1:].T
    gap_start, gap_end = np.append(0, end), np.append(start, num_tokens)
    steps = -(-(gap_end - gap_start) // longest_gap)
    which = np.repeat(np.arange(len(steps)), steps)
    begin = gap_start[which] + longest_gap * (np.arange(len(which)) - np.repeat(steps.cumsum() - steps, steps))
    gaps = np.stack([begin, np.minimum(begin + longest_gap, gap_end[which])], 1)
    stretches = np.concatenate([np.stack([start, end], 1), gaps])
    return stretches[np.argsort(stretches[:, 0], kind="stable")]


def bundle(stretches: Int64Array, tokens: int) -> Int64Array:
    """Joins neighbours of at most `tokens` tokens into stretches of about as many: fewer and longer ranges."""
    start, end = stretches.T
    is_short = end - start <= tokens
    cell = np.where(is_short, start // tokens, -1)
    first, last = groups(is_short[1:] & (cell[1:] == cell[:-1]), len(start))
    return np.stack([start[first], end[last]], 1)
