"""The global stream of packs: one sequence, the same on every rank, that can be resumed at any pack.

An epoch is read in windows of records, see `epoch_order`. A window is packed as a whole, see `window_plan`; a rank
reads the plan and the tokens of its own packs only. While the packs of one window are given out, a thread makes or
opens the plan of the next, across the ends of epochs too. A position in the stream is a few numbers.
"""

import functools
import hashlib
import json
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.dealing import Deal, order_of
from torchtitan_magi.data.packs.epoch_order import EpochOrder
from torchtitan_magi.data.packs.pack_options import PackOptions
from torchtitan_magi.data.packs.plan_cache import PlanCache
from torchtitan_magi.data.packs.window_plan import Cursor, MakePieces, WindowPlan, blocks_carried, plan_window
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.tokens.array_file import Damaged
from torchtitan_magi.data.tokens.token_block import VERSION, TokenBlock
from torchtitan_magi.data.tokens.token_cache import Cancelled, Tokens
from torchtitan_magi.wording import quoted_path

logger = logging.getLogger(__name__)

_MAX_NOTES_LOGGED = 20  # per run
_MAX_NOTES_COUNTED = 5  # at the end of an epoch
_MAX_SKIPS_LOGGED = 10  # per run
_FEWEST_KEPT = 1000  # records of a window whose plan is kept; fewer are packed in a few milliseconds

T = TypeVar("T")


@dataclass(frozen=True)
class Pack:
    """The n pieces of a pack, in its order, with their tokens.

    block, index, start, length: int64 [n], see `Pieces`; shared: int64 [n], see `Trees`; record: int64 [n], numbers of
    the records in the corpus; tokens: block -> its tokens.
    """

    block: np.ndarray
    index: np.ndarray
    start: np.ndarray
    length: np.ndarray
    shared: np.ndarray
    record: np.ndarray
    tokens: dict[int, TokenBlock]


def pack_of_padding() -> Pack:
    """A pack without a piece."""
    nothing = np.zeros(0, np.int64)
    return Pack(nothing, nothing, nothing, nothing, nothing, nothing, {})


class Blocks:
    """Tokens of blocks, opened when they are first needed, and held."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self._opened: dict[int, TokenBlock] = {}

    def open(self, block: int, cancelled: threading.Event | None = None) -> TokenBlock:
        """The tokens of a block. Raises Cancelled if the event is set while it waits for them."""
        if block not in self._opened:
            self._opened[block] = self.tokens.open(block, cancelled or threading.Event())
        return self._opened[block]

    def open_sound(self, block: int, indices: np.ndarray) -> TokenBlock:
        """The tokens of a block, made again if those of these records are damaged."""
        while not self.open(block).are_sound(indices):
            self._opened[block] = self.tokens.remake(block)
        return self.open(block)


@dataclass(frozen=True)
class SoFar:
    """What was read in this run, that is, since a state was loaded.

    num_records: number of records; notes: what the chat template left out of them -> of how many; malformed: the first
    of them that is, and what is wrong with it.
    """

    num_records: int = 0
    notes: Counter[str] = field(default_factory=Counter)
    malformed: tuple[int, str] | None = None

    def after(self, plan: WindowPlan) -> "SoFar":
        """What was read once the window of the plan was read as well."""
        notes = self.notes + Counter({note: number for note, (number, _) in plan.notes.items()})
        malformed = self.malformed or next(iter(plan.malformed), None)
        return SoFar(self.num_records + plan.counts.documents, notes, malformed)


@dataclass
class Window:
    """A window of packs, which begins at the cursor `begin`; `end` is the cursor of the next.

    last: whether it is the epoch's last; replan: makes the plan again, which is damaged; so_far: what was read in this
    run up to its end.
    """

    records: Corpus
    begin: Cursor
    end: Cursor
    last: bool
    blocks: Blocks
    plan: WindowPlan
    replan: Callable[[], WindowPlan]
    so_far: SoFar

    def after(self, deals: list[Deal], given: int) -> Cursor:
        """The cursor behind the first `given` packs of the window, the last ones by the last of these deals."""
        if given == self.plan.num_packs:
            return self.end
        *before, now = deals
        now = now._replace(given=given - sum(deal.given for deal in before))
        return replace(self.begin, deals=(*before, now), counts=self.end.counts)

    def deals(self, per_step: int, taken: int) -> list[Deal]:
        """How its packs are given out from its beginning on.

        Args:
            per_step: packs of a step.
            taken: packs of the step that it begins in.
        """
        before = list(self.begin.deals)
        return before if before and before[-1].per_step == per_step else [*before, Deal(per_step, taken, 0)]

    def pack(self, number: int) -> Pack:
        """One of its packs, counted from 0. Plan and tokens are checked for damage, and made again."""
        try:
            rows = self.plan.rows_of(number)
        except Damaged:
            self.plan = self.replan()
            rows = self.plan.rows_of(number)
        block, index, start, length, shared = rows.T.astype(np.int64)
        tokens = {each: self._tokens(each, index[block == each]) for each in dict.fromkeys(block.tolist())}
        return Pack(block, index, start, length, shared, self.records.block_firsts[block] + index, tokens)

    def _tokens(self, block: int, indices: np.ndarray) -> TokenBlock:
        """The tokens of a block, of which those of these records are needed."""
        tokens = self.blocks.open_sound(block, indices)
        for index in tokens.malformed.keys() & indices.tolist():  # it was not when it was packed
            where = self.records.where(int(self.records.block_firsts[block]) + index)
            raise ValueError(f"{where}: {tokens.malformed[index]}")
        return tokens


class WindowCount(NamedTuple):
    """What is to come of a window: packs, and the counts of the records read for them; these are 0 if some of its packs
    are given out.

    last: whether it is the epoch's last.
    """

    epoch: int
    packs: int
    counts: PackingCounts
    last: bool


@dataclass(frozen=True)
class PackStream:
    """Packs of `records`, whose tokens are in `tokens`.

    plans: keeps the plans of windows; None: they are not kept. make_pieces: a pure function. identity: all that the
    packs depend on, as plain Python values. reports: whether the counts of what was read are logged.
    """

    records: Corpus
    tokens: Tokens
    plans: PlanCache | None
    make_pieces: MakePieces
    options: PackOptions
    identity: Callable[[], dict[str, Any]]
    reports: bool = True
    said: set[str] = field(default_factory=set)  # notes that were logged
    named: set[str] = field(default_factory=set)  # records left out that were logged
    reported: set[str] = field(default_factory=set)  # counts that were logged

    def rounds(self, cursor: Cursor, rank: int, num_ranks: int) -> Iterator[tuple[Callable[[], Pack], Cursor]]:
        """Rounds of `num_ranks` packs, from `cursor` to the end of the last epoch: what reads the pack of this rank,
        which is one of padding if the last round has no other, and the cursor behind the round.

        Raises ValueError if a whole epoch has no label, and for a bad record (file and line) before the first pack of
        its window.
        """
        cancelled, per_step = threading.Event(), self.options.packs_per_step
        mine, taken, of_step = pack_of_padding, 0, 0  # packs of this round, and of this step
        for window in made_ahead(self._windows(cursor, cancelled), cancelled):
            given, deals = window.begin.given, window.deals(per_step, of_step)
            order, dealt_before = self._order(window, deals), sum(deal.given for deal in deals[:-1])
            of_step = (deals[-1].taken + window.plan.num_packs - dealt_before) % per_step
            while given < window.plan.num_packs:
                more = min(num_ranks - taken, window.plan.num_packs - given)
                if taken <= rank < taken + more:
                    mine = functools.partial(window.pack, int(order[given + rank - taken]))
                given, taken = given + more, taken + more
                cursor = window.after(deals, given)
                if taken == num_ranks:
                    yield mine, cursor
                    mine, taken = pack_of_padding, 0
            if self.reports:
                self._report(window)
        if taken:
            yield mine, cursor

    def _order(self, window: Window, deals: list[Deal]) -> np.ndarray:
        """The numbers of a window's packs in the order in which they are given out."""
        seed = self.options.order_seed
        if seed is None:
            return np.arange(window.plan.num_packs)
        return order_of(window.plan.pairs, deals, [seed, window.begin.epoch, 1 + window.begin.window, 1])

    def counts(self, cursor: Cursor) -> Iterator[WindowCount]:
        """The number of packs of each window from `cursor` to the end of the last epoch. Makes the plans that `rounds`
        will use, and waits for their tokens.

        Raises ValueError as `rounds`.
        """
        for window in self._windows(cursor, threading.Event()):
            given = window.begin.given
            counts = PackingCounts() if given else window.plan.counts
            yield WindowCount(window.begin.epoch, window.plan.num_packs - given, counts, window.last)

    def first_packs(self) -> Iterator[Pack]:
        """The packs from the first one on, in the order in which steps of one pack take them."""
        for window in self._windows(Cursor(), threading.Event()):
            yield from map(window.pack, range(window.plan.num_packs))

    def order_of(self, epoch: int) -> EpochOrder:
        """The order in which an epoch reads the records."""
        options = self.options
        return EpochOrder.of(self.records, self.weights, epoch, options.order_seed, options.window_blocks)

    @property
    def weights(self) -> list[float]:
        """How many times an epoch passes over each source."""
        return [source.weight if self.options.weighted else 1.0 for source in self.records.sources]

    def _windows(self, cursor: Cursor, cancelled: threading.Event) -> Iterator[Window]:
        before: Window | None = None  # holds the blocks of pieces carried from it
        following, so_far = self.order_of(cursor.epoch), SoFar()
        while self.options.has_epoch(cursor.epoch):
            order, following = following, self.order_of(cursor.epoch + 1)
            self.tokens.order(self._blocks_from(cursor, order, following))
            while cursor.window < order.num_windows:
                before = self._window(cursor, order, cancelled, so_far)
                cursor, so_far = before.end, before.so_far
                yield before
            if cursor.counts.packs == 0:
                remedy = "add records with an assistant's answer, or raise the sequence length"
                if so_far.malformed:
                    record, what = so_far.malformed
                    remedy = f"the first malformed one read is {self.records.where(record)}: {what}"
                sources = quoted_path(self.records.paths)
                raise ValueError(f"no record of {sources} has a token to train on ({cursor.counts}); {remedy}")
            cursor = Cursor(cursor.epoch + 1, counts=cursor.counts)

    def _blocks_from(self, cursor: Cursor, order: EpochOrder, following: EpochOrder) -> list[int]:
        """The blocks of this epoch from the cursor on and of the next epoch, in the order of their need."""
        blocks = [*blocks_carried(self.records, cursor), *order.blocks_from(cursor.window)]
        if self.options.has_epoch(cursor.epoch + 1):
            blocks += following.blocks_from(0)
        return list(dict.fromkeys(blocks))

    def _window(self, cursor: Cursor, order: EpochOrder, cancelled: threading.Event, before: SoFar) -> Window:
        """The window at the cursor, whose tokens are opened only if it has to be packed."""
        blocks = Blocks(self.tokens)

        def make(cancelled: threading.Event) -> WindowPlan:
            open_block = functools.partial(blocks.open, cancelled=cancelled)
            return plan_window(
                self.records, order, cursor, self.make_pieces, self.options, open_block, blocks.open_sound
            )

        if self.plans is None or order.num_records(cursor.window) < _FEWEST_KEPT:
            plan, replan = make(cancelled), functools.partial(make, threading.Event())
        else:
            name = self._name(cursor)
            plan = self.plans.open(name, make, cancelled)
            replan = functools.partial(self.plans.remake, name, make)
        so_far = before.after(plan)
        self._say(plan, cursor, so_far)
        counts = cursor.counts if cursor.given else cursor.counts + plan.counts
        end = Cursor(cursor.epoch, cursor.window + 1, plan.carried, counts=counts)
        return Window(self.records, cursor, end, end.window == order.num_windows, blocks, plan, replan, so_far)

    def _name(self, cursor: Cursor) -> str:
        """Names the plan of the window at the cursor: a hash of all that it depends on."""
        depends_on = json.dumps((VERSION, self.identity(), cursor.epoch, cursor.window)).encode()
        return hashlib.sha256(depends_on + self.records.digest_of_all + cursor.carried.tobytes()).hexdigest()[:40]

    def _say(self, plan: WindowPlan, cursor: Cursor, so_far: SoFar) -> None:
        """Logs what the chat template left out of records, each thing once, and the first records left out; or raises
        ValueError for the first of these."""
        for note, (number, record) in plan.notes.items():
            if note in self.said or len(self.said) > _MAX_NOTES_LOGGED:
                continue
            self.said.add(note)
            if len(self.said) > _MAX_NOTES_LOGGED:
                logger.warning("the chat template leaves out more things; torchtitan-magi data shows them")
                continue
            text = "%s, in %s of the %s records read so far, such as %s"
            logger.warning(text, note, f"{number:,}", f"{so_far.num_records:,}", self.records.where(record))
        for number, (record, what) in enumerate(plan.malformed, start=cursor.counts.skipped):
            text = f"{self.records.where(record)}: {what}"
            if not self.options.skips_bad:
                raise ValueError(text)
            if number < _MAX_SKIPS_LOGGED and text not in self.named:
                self.named.add(text)
                logger.warning("record left out: %s", text)

    def _report(self, window: Window) -> None:
        """Logs the counts at the end of each epoch, and in the first also each time the packs have doubled; once, as
        each validation passes over the same data.
        """
        before, after = window.begin.counts, window.end.counts
        if window.last:
            notes = [f"; {note}: {number:,}" for note, number in window.so_far.notes.most_common(_MAX_NOTES_COUNTED)]
            counted = f"; of {window.so_far.num_records:,} records read" + "".join(notes) if notes else ""
            text = f"end of epoch {window.begin.epoch + 1}: {after}{counted}"
        elif window.begin.epoch == 0 and before.packs.bit_length() < after.packs.bit_length():
            text = str(after)
        else:
            return
        if text not in self.reported:
            self.reported.add(text)
            logger.info("%s: %s", self.records.name, text)


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
