"""The global stream of packs: one sequence, the same on every rank, that can be resumed at any pack.

Each epoch has a seeded order of records. A window of records that fills `window_packs` packs is tokenized and packed
together. The emptiest packs are dissolved and their pieces carried into the next window, except in the last window of
an epoch. While the packs of one window are given out, the next window is read step by step, so only the first pack of a
run waits for a whole window. Two windows are in memory. A position in the stream is a few numbers.

Every rank tokenizes every record. This makes the packs independent of the number of ranks.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from torchtitan_magi.data.corpus import Corpus
from torchtitan_magi.data.documents import Piece
from torchtitan_magi.data.packing import PackingCounts, pack_best_fit

logger = logging.getLogger(__name__)

# (number of a record, its content) -> (pieces of at most seq_len tokens, each with a label; counts)
MakePieces = Callable[[int, dict[str, Any]], tuple[list[Piece], PackingCounts]]

_FULL = 0.98  # a pack filled to this fraction is never carried over
_MAX_SKIPS_LOGGED = 10  # per run
_MAX_CARRIED = 1 / 8  # fraction of a window's packs; at least one pack


@dataclass(frozen=True)
class Cursor:
    """A position in the stream: `given` packs into the window that starts at record `position` of the epoch's order."""

    epoch: int = 0
    position: int = 0
    carried: tuple[tuple[int, int], ...] = ()  # (record, start) of each piece carried into this window
    given: int = 0
    counts: PackingCounts = field(default_factory=PackingCounts)  # includes this window once given > 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self) | {"carried": [list(piece) for piece in self.carried]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Cursor":
        carried = tuple((record, start) for record, start in state["carried"])
        return cls(state["epoch"], state["position"], carried, state["given"], PackingCounts(**state["counts"]))


@dataclass(frozen=True)
class Pack:
    """The pieces of one pack, at most seq_len tokens in total, and the cursor of the next pack."""

    pieces: list[Piece]
    next_cursor: Cursor


class _Window:
    """Pieces to be packed together: those carried into the window and those of the records read so far."""

    def __init__(self, position: int, carried: list[Piece]) -> None:
        self.position, self.pieces = position, list(carried)  # position: next record in the epoch's order
        self.num_tokens = sum(map(len, carried))
        self.counts = PackingCounts()  # over the records read


@dataclass(frozen=True)
class PackStream:
    """Packs of `seq_len` tokens from `records`; see `PackedDataset` for the options.

    make_pieces: a pure function. skip_bad: whether a record that is malformed, or that `make_pieces` refuses, is left
    out and counted; otherwise it raises ValueError.
    """

    records: Corpus
    make_pieces: MakePieces
    seq_len: int
    seed: int
    shuffle: bool
    epochs: int
    window_packs: int
    skip_bad: bool
    weighted: bool

    def packs(self, cursor: Cursor) -> Iterator[Pack]:
        """The packs from `cursor` to the end of the last epoch.

        Raises ValueError if a whole epoch has no label, and for a bad record (file and line).
        """
        carried = [self._reload(record, start) for record, start in cursor.carried]
        while self.epochs == -1 or cursor.epoch < self.epochs:
            order = self.records.epoch_order(self.seed, cursor.epoch, self.shuffle, self.weighted)
            window = _Window(cursor.position, carried)
            while cursor.position < len(order):
                self._read(window, order, cursor.counts.skipped)
                packs, carried, after = self._pack(window, cursor, is_last=window.position == len(order))
                self._report(cursor.counts, after.counts)
                inside = replace(cursor, counts=after.counts)
                window = _Window(after.position, carried)
                for number, pieces in enumerate(packs[cursor.given :], start=cursor.given + 1):
                    yield Pack(pieces, after if number == len(packs) else replace(inside, given=number))
                    self._read(window, order, after.counts.skipped, number / len(packs))
                cursor = after
            if cursor.counts.packs == 0:
                raise ValueError(
                    f"no record of {self.records.paths!r} has a token to train on ({cursor.counts});"
                    " add records with an assistant's answer, or raise the sequence length"
                )
            logger.info("%s: end of epoch %d: %s", self.records.paths, cursor.epoch + 1, cursor.counts)
            cursor = Cursor(cursor.epoch + 1, counts=cursor.counts)

    def _read(self, window: "_Window", order: np.ndarray, num_skipped: int, fraction: float = 1.0) -> None:
        """Adds records to the window, at least one, until this fraction of it is filled."""
        while window.position < len(order) and (
            window.num_tokens < fraction * self.window_packs * self.seq_len or window.counts.documents == 0
        ):
            made, found = self._make(int(order[window.position]), num_skipped + window.counts.skipped)
            window.pieces += made
            window.num_tokens += sum(map(len, made))
            window.counts += found
            window.position += 1

    def _pack(self, window: "_Window", cursor: Cursor, is_last: bool) -> tuple[list[list[Piece]], list[Piece], Cursor]:
        """Packs a window read at `cursor`: its packs, the pieces it carries over, and the cursor of the next window."""
        pieces = window.pieces
        packs = pack_best_fit(np.array([len(piece) for piece in pieces], dtype=np.int64), self.seq_len)
        fill = np.array([sum(len(pieces[i]) for i in pack) for pack in packs], dtype=np.int64)
        keep = np.ones(len(packs), dtype=bool)
        if not is_last:
            emptiest = np.argsort(fill, kind="stable")[: max(1, int(_MAX_CARRIED * len(packs)))]
            keep[emptiest] = fill[emptiest] >= _FULL * self.seq_len
        chosen = np.flatnonzero(keep)
        if self.shuffle:  # packing sorts by length
            chosen = np.random.default_rng([self.seed, cursor.epoch, 1 + cursor.position]).permutation(chosen)
        counts = cursor.counts
        if cursor.given == 0:
            packed = PackingCounts(
                packs=len(chosen),
                pieces=sum(len(packs[pack]) for pack in chosen),
                tokens=int(fill[chosen].sum()),
                slots=len(chosen) * self.seq_len,
            )
            counts = counts + window.counts + packed
        carry = [pieces[i] for pack in np.flatnonzero(~keep) for i in packs[pack]]
        origins = tuple((piece.record, piece.start) for piece in carry)
        after = Cursor(cursor.epoch, window.position, origins, counts=counts)
        return [[pieces[i] for i in packs[pack]] for pack in chosen], carry, after

    def _make(self, record: int, num_skipped: int = 0) -> tuple[list[Piece], PackingCounts]:
        try:
            return self.make_pieces(record, self.records[record])
        except ValueError as error:
            if not self.skip_bad:
                raise ValueError(f"{self.records.where(record)}: {error}") from error
            if num_skipped < _MAX_SKIPS_LOGGED:
                logger.warning("record left out: %s: %s", self.records.where(record), error)
            return [], PackingCounts(documents=1, skipped=1)

    def _report(self, before: PackingCounts, after: PackingCounts) -> None:
        """Logs the counts each time the number of packs has doubled, unless there is one epoch only.

        A single epoch, such as validation's, is logged at its end.
        """
        if self.epochs != 1 and before.packs.bit_length() < after.packs.bit_length():
            logger.info("%s: %s", self.records.paths, after)

    def _reload(self, record: int, start: int) -> Piece:
        for piece in self._make(record)[0]:
            if piece.start == start:
                return piece
        raise ValueError(
            f"{self.records.where(record)} has no token {start} as it had when the loader's state was saved;"
            " resume with the same tokenizer and chat template"
        )
