"""The global stream of packs: one sequence, the same on every rank, that can be resumed at any pack.

An epoch is read in windows of records, see `epoch_order`. A window is packed as a whole, from lengths alone; a rank
reads the tokens of its own packs only. The emptiest packs are dissolved and their pieces carried into the next window,
except in the last window of an epoch. While the packs of one window are given out, a thread makes the next, across the
ends of epochs too. A position in the stream is a few numbers.
"""

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from torchtitan_magi.data.corpus import Corpus
from torchtitan_magi.data.documents import Pieces
from torchtitan_magi.data.epoch_order import EpochOrder
from torchtitan_magi.data.packing import PackingCounts, pack_best_fit
from torchtitan_magi.data.token_block import TokenBlock

logger = logging.getLogger(__name__)

PACKING_VERSION = 2  # of the way from records to packs

# (tokens of a block, indices of records in it) -> (pieces of at most seq_len tokens, each with a label; counts)
MakePieces = Callable[[TokenBlock, np.ndarray], tuple[Pieces, PackingCounts]]

_FULL = 0.98  # a pack filled to this fraction is never carried over
_MAX_NOTES_LOGGED = 20  # per run
_MAX_SKIPS_LOGGED = 10  # per run
_MAX_CARRIED = 1 / 8  # fraction of a window's packs; at least one pack

T = TypeVar("T")


class Tokens(Protocol):
    """Where the stream takes tokens from, see `token_cache`."""

    def order(self, blocks: list[int]) -> None:
        """Says in which order blocks will be opened."""

    def open(self, block: int, cancelled: threading.Event) -> TokenBlock:
        """Waits for the tokens of a block, or until the event is set: then raises Cancelled."""

    def malformed(self, block: int) -> dict[int, str] | None:
        """What is wrong with records of a block, by index in it; None if its tokens are not there yet."""

    def remake(self, block: int) -> TokenBlock:
        """The tokens of a block that are damaged, made again."""


@dataclass(frozen=True)
class Cursor:
    """A position in the stream: `given` packs into a window of the epoch."""

    epoch: int = 0
    window: int = 0
    carried: tuple[tuple[int, int], ...] = ()  # (record, start) of each piece carried into this window
    given: int = 0
    counts: PackingCounts = field(default_factory=PackingCounts)  # includes this window once given > 0

    def state_dict(self) -> dict[str, Any]:
        return asdict(self) | {"carried": [list(piece) for piece in self.carried]}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Cursor":
        carried = tuple((record, start) for record, start in state["carried"])
        return cls(state["epoch"], state["window"], carried, state["given"], PackingCounts(**state["counts"]))


@dataclass(frozen=True)
class Piece:
    """One row of `Pieces` with its tokens. record: number of the record in the corpus."""

    record: int
    index: int
    start: int
    length: int
    block: TokenBlock


@dataclass(frozen=True)
class _Window:
    """A packed window, which begins at the cursor `begin`; `end` is the cursor of the next.

    blocks: number of a block -> its tokens; of_block: int64 [n], block of each piece; firsts: int64 [n], number of each
    block's first record in the corpus; packs: rows of `pieces`; last: whether it is the epoch's last.
    """

    begin: Cursor
    blocks: dict[int, TokenBlock]
    of_block: np.ndarray
    firsts: np.ndarray
    pieces: Pieces
    packs: list[list[int]]
    last: bool
    end: Cursor

    def pack(self, number: int) -> list[Piece]:
        rows, pieces = self.packs[number], self.pieces
        columns = (self.of_block[rows], self.firsts[rows], pieces.index[rows], pieces.start[rows], pieces.length[rows])
        return [
            Piece(first + index, index, start, length, self.blocks[block])
            for block, first, index, start, length in zip(*(column.tolist() for column in columns), strict=True)
        ]


@dataclass(frozen=True)
class Pack:
    """One pack of a window, and the cursor of the next pack."""

    window: _Window
    number: int
    next_cursor: Cursor

    def pieces(self, tokens: Tokens) -> list[Piece]:
        """At most seq_len tokens in total, checked for damage."""
        pieces = self.window.pack(self.number)
        for row, piece in zip(self.window.packs[self.number], pieces, strict=True):
            if not piece.block.is_sound(piece.index):
                block = int(self.window.of_block[row])
                self.window.blocks[block] = tokens.remake(block)
                return self.pieces(tokens)
        return pieces


@dataclass(frozen=True)
class PackStream:
    """Packs of `seq_len` tokens from `records`; see `PackedDataset` for the options.

    make_pieces: a pure function. skip_bad: whether a record that is malformed or refused by the tokenizer is left out
    and counted; otherwise it raises ValueError.
    """

    records: Corpus
    tokens: Tokens
    make_pieces: MakePieces
    seq_len: int
    seed: int
    shuffle: bool
    epochs: int
    window_blocks: int
    skip_bad: bool
    weighted: bool
    said: set[str] = field(default_factory=set)  # notes that were logged

    def packs(self, cursor: Cursor) -> Iterator[Pack]:
        """The packs from `cursor` to the end of the last epoch.

        Raises ValueError if a whole epoch has no label, and for a bad record (file and line) before the first pack of
        its window.
        """
        cancelled = threading.Event()
        for window in made_ahead(self._windows(cursor, cancelled), cancelled):
            inside = replace(window.begin, counts=window.end.counts)
            for number in range(window.begin.given, len(window.packs)):
                after = window.end if number + 1 == len(window.packs) else replace(inside, given=number + 1)
                yield Pack(window, number, after)
            self._report(window)

    def order_of(self, epoch: int) -> EpochOrder:
        return EpochOrder.of(self.records, self.weights, epoch, self.seed if self.shuffle else None, self.window_blocks)

    @property
    def weights(self) -> list[float]:
        return [source.weight if self.weighted else 1.0 for source in self.records.sources]

    def _windows(self, cursor: Cursor, cancelled: threading.Event) -> Iterator[_Window]:
        before: _Window | None = None  # holds the blocks of pieces carried from it
        while self.epochs == -1 or cursor.epoch < self.epochs:
            order = self.order_of(cursor.epoch)
            self.tokens.order(self._blocks_from(cursor, order))
            while cursor.window < order.num_windows:
                before = self._window(cursor, order, cancelled)
                cursor = before.end
                yield before
            if cursor.counts.packs == 0:
                raise ValueError(
                    f"no record of {self.records.paths!r} has a token to train on ({cursor.counts});"
                    " add records with an assistant's answer, or raise the sequence length"
                )
            cursor = Cursor(cursor.epoch + 1, counts=cursor.counts)

    def _blocks_from(self, cursor: Cursor, order: EpochOrder) -> list[int]:
        """The blocks of this epoch from the cursor on and of the next epoch, in the order of their need."""
        following: list[int] = []
        if self.epochs == -1 or cursor.epoch + 1 < self.epochs:
            following = self.order_of(cursor.epoch + 1).blocks_from(0)
        return list(dict.fromkeys([*self._by_block(cursor), *order.blocks_from(cursor.window), *following]))

    def _window(self, cursor: Cursor, order: EpochOrder, cancelled: threading.Event) -> _Window:
        """Reads and packs the window at the cursor."""
        blocks: dict[int, TokenBlock] = {}

        def opened(block: int) -> TokenBlock:
            if block not in blocks:
                blocks[block] = self.tokens.open(block, cancelled)
                self._say_notes(blocks[block], block)
            return blocks[block]

        found = [(block, self._carried(opened(block), block, rows)) for block, rows in self._by_block(cursor).items()]
        counts = PackingCounts()
        for block, indices in order.records(cursor.window):
            counts += self._left_out(opened(block), block, indices, cursor.counts.skipped + counts.skipped)
            pieces, more = self.make_pieces(blocks[block], indices)
            found.append((block, pieces))
            counts += more
        pieces = Pieces.concatenate([pieces for _, pieces in found])
        of_block = np.repeat([block for block, _ in found], [len(pieces) for _, pieces in found])
        return self._packed(cursor, order, blocks, of_block.astype(np.int64), pieces, counts)

    def _packed(
        self,
        cursor: Cursor,
        order: EpochOrder,
        blocks: dict[int, TokenBlock],
        of_block: np.ndarray,
        pieces: Pieces,
        counts: PackingCounts,
    ) -> _Window:
        packs = pack_best_fit(pieces.length, self.seq_len)
        fill = np.array([pieces.length[pack].sum() for pack in packs], dtype=np.int64)
        keep = np.ones(len(packs), dtype=bool)
        last = cursor.window + 1 == order.num_windows
        if not last:
            emptiest = np.argsort(fill, kind="stable")[: max(1, int(_MAX_CARRIED * len(packs)))]
            keep[emptiest] = fill[emptiest] >= _FULL * self.seq_len
        chosen = np.flatnonzero(keep)
        if self.shuffle:  # packing sorts by length
            chosen = np.random.default_rng([self.seed, cursor.epoch, 1 + cursor.window]).permutation(chosen)
        else:
            packs = [sorted(pack) for pack in packs]
            chosen = chosen[np.argsort([packs[pack][0] for pack in chosen], kind="stable")]
        total = cursor.counts
        if cursor.given == 0:
            total += counts + PackingCounts(
                packs=len(chosen),
                pieces=sum(len(packs[pack]) for pack in chosen),
                tokens=int(fill[chosen].sum()),
                slots=len(chosen) * self.seq_len,
            )
        firsts = self.records.block_firsts[of_block]
        carried = [row for pack in np.flatnonzero(~keep) for row in packs[pack]]
        numbers = firsts[carried] + pieces.index[carried]
        origins = tuple(zip(numbers.tolist(), pieces.start[carried].tolist(), strict=True))
        end = Cursor(cursor.epoch, cursor.window + 1, origins, counts=total)
        return _Window(cursor, blocks, of_block, firsts, pieces, [packs[pack] for pack in chosen], last, end)

    def _locate(self, record: int) -> tuple[int, int]:
        """The block of a record, and the record's index there."""
        block = int(np.searchsorted(self.records.block_firsts, record, side="right")) - 1
        return block, record - int(self.records.block_firsts[block])

    def _where(self, block: int, index: int) -> str:
        return self.records.where(int(self.records.block_firsts[block]) + index)

    def _left_out(self, tokens: TokenBlock, block: int, indices: np.ndarray, num_skipped: int) -> PackingCounts:
        """Counts the malformed records among these, or raises ValueError for the first."""
        bad = [index for index in indices.tolist() if index in tokens.malformed] if tokens.malformed else []
        for number, index in enumerate(bad, start=num_skipped):
            text = f"{self._where(block, index)}: {tokens.malformed[index]}"
            if not self.skip_bad:
                raise ValueError(text)
            if number < _MAX_SKIPS_LOGGED:
                logger.warning("record left out: %s", text)
            else:
                break
        return PackingCounts(documents=len(bad), skipped=len(bad))

    def _say_notes(self, tokens: TokenBlock, block: int) -> None:
        """Logs what the chat template left out of records, each thing once."""
        for note, number in tokens.notes.items():
            if note not in self.said and len(self.said) < _MAX_NOTES_LOGGED:
                self.said.add(note)
                where = self._where(block, 0)
                logger.warning("%s, in %d of the %d records from %s on", note, number, len(tokens), where)

    def _by_block(self, cursor: Cursor) -> dict[int, list[tuple[int, int]]]:
        """block -> (index of the record in it, start) of each piece carried into the cursor's window."""
        found: dict[int, list[tuple[int, int]]] = {}
        for record, start in cursor.carried:
            block, index = self._locate(record)
            found.setdefault(block, []).append((index, start))
        return found

    def _carried(self, tokens: TokenBlock, block: int, rows: list[tuple[int, int]]) -> Pieces:
        """The pieces of a block that are carried into a window, each as often as it is."""
        pieces, _ = self.make_pieces(tokens, np.array(sorted({index for index, _ in rows})))
        found = zip(pieces.index.tolist(), pieces.start.tolist(), strict=True)
        place = {row: number for number, row in enumerate(found)}
        for index, start in rows:
            if (index, start) not in place:
                raise ValueError(
                    f"{self._where(block, index)} has no token {start} as it had when the loader's state was saved;"
                    " resume with the same tokenizer and chat template"
                )
        return pieces.rows(np.array([place[row] for row in rows]))

    def _report(self, window: _Window) -> None:
        """Logs the counts at the end of each epoch, and in the first also each time the packs have doubled."""
        before, after = window.begin.counts, window.end.counts
        if window.last:
            logger.info("%s: end of epoch %d: %s", self.records.paths, window.begin.epoch + 1, after)
        elif window.begin.epoch == 0 and before.packs.bit_length() < after.packs.bit_length():
            logger.info("%s: %s", self.records.paths, after)


class Cancelled(Exception):
    """Nobody wants the result any more."""


def made_ahead(items: Iterator[T], cancelled: threading.Event) -> Iterator[T]:
    """The items, of which a thread makes the next while one is used. Sets the event when it is closed."""
    made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()
    wanted = threading.Semaphore(1)

    def make() -> None:
        try:
            for item in items:
                made.put((item, None))
                wanted.acquire()
                if cancelled.is_set():
                    return
            made.put((None, None))
        except Cancelled:
            pass
        except BaseException as error:
            made.put((None, error))

    threading.Thread(target=make, name="packs", daemon=True).start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
            wanted.release()
    finally:
        cancelled.set()
        wanted.release()
