"""The pool of pieces that placement draws from."""

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, IntArray
from torchtitan_magi.planning.placement.profile import WorkProfile

Range = tuple[int, int]

START, END, TOKENS, WORK, TAIL = range(5)  # columns of the pool's table: TAIL is the keys of the last row


class Pool:
    """The pieces that no rank owns yet, lightest (work per token) first."""

    def __init__(self, profile: WorkProfile, stretches: Int64Array) -> None:
        self.profile = profile
        start, end = stretches.T
        work, tail = profile.of_each(start, end), profile.below_each(end) - profile.below_each(end - 1)
        table = np.stack([start, end, end - start, work, tail], 1)
        self._set(table[np.argsort(work / (end - start), kind="stable")])

    def _set(self, table: Int64Array) -> None:
        self.table = table
        sums = np.zeros((2, len(table) + 1), np.int64)
        np.cumsum(table[:, TOKENS : WORK + 1].T, axis=1, out=sums[:, 1:])
        self.tokens, self.work = sums  # of the i lightest pieces

    def __len__(self) -> int:
        return len(self.table)

    def heaviest(self) -> int:
        """Index of the piece whose last row sees the most keys."""
        return int(self.table[:, TAIL].argmax())

    def take(self, which: IntArray) -> list[Range]:
        """Removes these pieces of the table."""
        taken = self.table[which, :2].tolist()
        stays = np.ones(len(self.table), bool)
        stays[which] = False
        self._set(self.table[stays])
        return [(start, end) for start, end in taken]

    def put(self, start: int, end: int) -> None:
        """Adds a piece."""
        if start < end:
            tokens, work = end - start, self.profile.of(start, end)
            tail = self.profile.below(end) - self.profile.below(end - 1)
            at = int(np.searchsorted(self.table[:, WORK] / self.table[:, TOKENS], work / tokens))
            row = np.array([[start, end, tokens, work, tail]])
            self._set(np.concatenate([self.table[:at], row, self.table[at:]]))

    def lightest_work(self, tokens: int) -> int:
        """Work of the lightest pieces that hold `tokens` tokens, the last one cut."""
        i = int(self.tokens.searchsorted(tokens, side="right")) - 1
        work, rest = int(self.work[i]), tokens - int(self.tokens[i])
        if rest:
            work += int(self.table[i, WORK]) * rest // int(self.table[i, TOKENS])
        return work
