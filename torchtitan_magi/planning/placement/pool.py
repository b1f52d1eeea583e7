"""The pool of stretches that placement draws from."""

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, IntArray
from torchtitan_magi.planning.placement.profile import WorkProfile

Range = tuple[int, int]

# Columns of the pool's table. TAIL: the keys of the last row; BELOW: pairs of all rows before it; EDGE: of START.
START, END, TOKENS, WORK, TAIL, BELOW, EDGE = range(7)


class Pool:
    """The stretches that no rank owns yet, lightest (work per token) first."""

    def __init__(self, profile: WorkProfile, stretches: Int64Array) -> None:
        self.profile = profile
        start, end = stretches.T
        edge, below = profile.edge_of(start), profile.below_each(start)
        until, tail = profile.last_row(end, edge)
        work = profile.with_tiles(until - below, end - start)
        table = np.stack([start, end, end - start, work, tail, below, edge], 1)
        order = np.argsort(work / (end - start), kind="stable")
        self.table, self.density = table[order], (work / (end - start))[order]
        sums = np.zeros((2, len(table) + 1), np.int64)
        np.cumsum(self.table[:, TOKENS : WORK + 1].T, axis=1, out=sums[:, 1:])
        self.tokens, self.work = sums  # of the i lightest stretches

    def __len__(self) -> int:
        return len(self.table)

    def heaviest(self) -> int:
        """Index of the stretch whose last row sees the most keys."""
        return int(self.table[:, TAIL].argmax())

    def take(self, which: IntArray) -> list[Range]:
        """Removes these stretches of the table, ascending."""
        taken = self.table[which, :2].tolist()
        for run in np.split(which, np.flatnonzero(np.diff(which) != 1) + 1)[::-1] if len(which) else []:
            self._replace(int(run[0]), int(run[-1]) + 1, self.table[:0])
        return [(start, end) for start, end in taken]

    def put(self, start: int, end: int) -> None:
        """Adds a stretch."""
        if start < end:
            profile, tokens = self.profile, end - start
            below, until, work = profile.below(start), profile.below(end), profile.of(start, end)
            row = [start, end, tokens, work, until - profile.below(end - 1), below, profile.edge(start)]
            at = int(self.density.searchsorted(work / tokens))
            self._replace(at, at, np.array([row]))

    def _replace(self, first: int, end: int, rows: Int64Array) -> None:
        """Puts other rows in place of rows [first, end) of the table."""
        self.table = np.concatenate([self.table[:first], rows, self.table[end:]])
        new = rows[:, WORK] / rows[:, TOKENS]
        self.density = np.concatenate([self.density[:first], new, self.density[end:]])
        self.tokens = _with_sums(self.tokens, first, end, rows[:, TOKENS])
        self.work = _with_sums(self.work, first, end, rows[:, WORK])

    def lightest_work(self, tokens: int) -> int:
        """Work of the lightest stretches that hold `tokens` tokens, the last one cut."""
        i = int(self.tokens.searchsorted(tokens, side="right")) - 1
        work, rest = int(self.work[i]), tokens - int(self.tokens[i])
        if rest:
            work += int(self.table[i, WORK]) * rest // int(self.table[i, TOKENS])
        return work


def _with_sums(sums: Int64Array, first: int, end: int, new: Int64Array) -> Int64Array:
    """Sums of the first i numbers, where `new` ones take the place of those in [first, end)."""
    until = sums[: first + 1]
    here = until[-1] + new.cumsum()
    change = (here[-1] if len(new) else until[-1]) - sums[end]
    return np.concatenate([until, here, sums[end + 1 :] + change])
