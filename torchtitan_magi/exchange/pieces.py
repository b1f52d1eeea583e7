"""How an exchange through peer memory is cut into pieces that fit: who sends what in each, and where it arrives."""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from torchtitan_magi.planning.stage import Exchange


class Parcel(NamedTuple):
    """The rows that one rank sends to another one."""

    other: int  # the rank at the other end
    first: int  # row in what is sent
    rows: int
    place: int  # row in what is received


@dataclass(frozen=True, eq=False)
class Flow:
    """What all ranks send each other in an exchange, one way: K/V rows there, or their gradients back.

    Attributes:
        between: rows by receiver and source, int64 [ranks, ranks].
        rank: this rank.
    """

    between: npt.NDArray[np.int64]
    rank: int

    @classmethod
    def of(cls, exchange: Exchange, back: bool) -> "Flow":
        """One way of an exchange, which has no relays."""
        return cls(exchange.between.T if back else exchange.between, exchange.rank)

    @property
    def most_sent(self) -> int:
        """Rows that the rank sends that sends most."""
        return int(self.between.sum(0).max())

    @property
    def most_received(self) -> int:
        """Rows that the rank gets that gets most."""
        return int(self.between.sum(1).max())

    @property
    def deliveries(self) -> tuple[Parcel, ...]:
        """What this rank sends, in the order of the rows."""
        rows = self.between[:, self.rank]
        first, place = rows.cumsum() - rows, self.between[:, : self.rank].sum(1)
        return tuple(Parcel(i, int(first[i]), int(rows[i]), int(place[i])) for i in range(len(rows)) if rows[i])

    def num_pieces(self, rows: int) -> int:
        """How many pieces let no rank send more than `rows` rows in one; the same on all ranks.

        A piece takes its share of what each rank sends to each other one: all links are in use all the time.

        Args:
            rows: at least as many as there are ranks.
        """
        assert rows >= len(self.between)
        count = max(1, -(-self.most_sent // rows))
        while (-(-self.between // count)).sum(0).max() > rows:
            count += 1
        return count

    def fetches(self, piece: int = 0, num_pieces: int = 1) -> tuple[Parcel, ...]:
        """What this rank receives in a piece, from the next rank on, so that not all begin with the same one.

        A parcel's first row counts in what the other rank sends in that piece, its place in all that is received.
        """
        before = _rows_before(self.between, piece, num_pieces)
        rows = _rows_before(self.between, piece + 1, num_pieces) - before
        first, mine = rows[: self.rank].sum(0), self.between[self.rank]  # a source has them ready by receiver
        place = mine.cumsum() - mine + before[self.rank]
        sources = [source % len(mine) for source in range(self.rank + 1, self.rank + len(mine))]
        return tuple(
            Parcel(i, int(first[i]), int(rows[self.rank, i]), int(place[i])) for i in sources if rows[self.rank, i]
        )

    def parts(self, piece: int, num_pieces: int) -> tuple[slice, ...]:
        """The rows that this rank sends in a piece: some of those for each receiver."""
        return tuple(
            slice(first + _rows_before(rows, piece, num_pieces), first + _rows_before(rows, piece + 1, num_pieces))
            for _, first, rows, _ in self.deliveries
        )


_Count = TypeVar("_Count", int, npt.NDArray[np.int64])


def _rows_before(rows: _Count, piece: int, num_pieces: int) -> _Count:
    """How many of the rows that travel in several pieces do so before a piece."""
    return rows * piece // num_pieces
