"""The plan of a window: which pieces of which records lie in which pack.

A window is packed as a whole, from lengths alone. The emptiest packs are dissolved and their pieces carried into the
next window, except in the last window of an epoch. A plan is a pure function of the data, the tokenizer and the
options. It is kept as a file beside the tokens, see `plan_cache`; each rank reads the rows of its own packs only.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from torchtitan_magi.data.packs.best_fit import PackingCounts, pack_best_fit
from torchtitan_magi.data.packs.dealing import Deal
from torchtitan_magi.data.packs.epoch_order import EpochOrder
from torchtitan_magi.data.packs.pack_options import PackOptions
from torchtitan_magi.data.packs.prefix_trees import Run, Trees, grow_trees
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.tokens.array_file import Damaged, Layout
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.wording import one_line, quoted

PACKING_VERSION = 4  # of the way from records to packs

_INDEX = {"bounds": np.int64, "checksums": np.uint32, "carried": np.int64, "pairs": np.int64}
_FILE = Layout(b"magiplan", _INDEX, "rows")
_COLUMNS = 5  # of rows
_FULL = 0.98  # a pack filled to this fraction is never carried over
_MAX_CARRIED = 1 / 8  # fraction of a window's packs; at least one pack
_MAX_MALFORMED = 10  # that a plan names


@dataclass(frozen=True)
class Pieces:
    """Pieces cut from the records of a block, which are packed: documents, cuts of long ones, or preference pairs.

    index: int64 [n], the record's index in its block; start: int64 [n], first position within its document, or behind
    the first token of its first one, or the number of its first pair; length: int64 [n], positions.
    """

    index: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, numbers: np.ndarray) -> "Pieces":
        """The pieces of these numbers, int [k], in their order."""
        return Pieces(self.index[numbers], self.start[numbers], self.length[numbers])

    @classmethod
    def concatenate(cls, pieces: Sequence["Pieces"]) -> "Pieces":
        """The pieces of several blocks, one after the other."""
        columns = [(p.index, p.start, p.length) for p in pieces] or [(np.zeros(0, np.int64),) * 3]
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))


# (tokens of a block, indices of good records in it) -> (pieces of at most seq_len tokens, each with a label; counts)
MakePieces = Callable[[TokenBlock, np.ndarray], tuple[Pieces, PackingCounts]]


@dataclass(frozen=True, eq=False)
class Cursor:
    """A position in the stream: some packs into a window of the epoch.

    carried: int64 [k, 2], (record, start) of each piece carried into this window; deals: how its packs were given out.
    """

    epoch: int = 0
    window: int = 0
    carried: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    deals: tuple[Deal, ...] = ()
    counts: PackingCounts = field(default_factory=PackingCounts)  # includes this window once given > 0

    @property
    def given(self) -> int:
        """Packs of the window that were given out."""
        return sum(deal.given for deal in self.deals)

    def state_dict(self) -> dict[str, Any]:
        """The position as plain Python values."""
        place = {"epoch": self.epoch, "window": self.window, "carried": self.carried.tolist()}
        return place | {"deals": [list(deal) for deal in self.deals], "counts": asdict(self.counts)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Cursor":
        """The position of `state_dict`. Raises ValueError, of one line, for what is none."""
        try:
            cursor = cls(
                state["epoch"], state["window"], _pairs(state["carried"]),
                tuple(Deal(*deal) for deal in state["deals"]), PackingCounts(**state["counts"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise unreadable_state(error) from None
        of_deals = chain.from_iterable(cursor.deals)
        for value in (cursor.epoch, cursor.window, *of_deals, *asdict(cursor.counts).values()):
            if type(value) is not int or not 0 <= value < 2**63:
                raise unreadable_state(ValueError(f"{quoted(value)} where a whole number of at least 0 should be"))
        return cursor


def _pairs(values: list[list[int]]) -> np.ndarray:
    """int64 [k, 2], none negative. Raises TypeError or ValueError."""
    pairs = np.array(values or np.zeros((0, 2), np.int64))
    if pairs.dtype != np.int64 or pairs.shape[1:] != (2,) or (pairs < 0).any():
        raise ValueError("carried is no list of pairs of whole numbers")
    return pairs


def unreadable_state(error: BaseException) -> ValueError:
    """The refusal of a loader's state that the error came from."""
    reason = one_line(f"{type(error).__name__}: {error}", 300)
    return ValueError(f"the loader's saved state cannot be read ({reason}); load another checkpoint")


@dataclass(frozen=True)
class WindowPlan:
    """A window of p packs.

    rows: int32 [n * 5], (block, index of the record in it, start, length, shared) of each piece, pack by pack, see
    `Pieces` and `prefix_trees`; bounds: int64 [p + 1], first row of each pack, and n; pairs: int64 [p], (query, key)
    pairs of each pack; checksums: uint32 [p], CRC-32 of each pack's rows; carried: int64 [k, 2], (record, start) of
    each piece that is carried into the next window; counts: of this window alone; malformed: the first records left out
    and what is wrong with them; notes: what the chat template left out of records -> (of how many of this window's,
    number of one of these).
    """

    rows: np.ndarray
    bounds: np.ndarray
    checksums: np.ndarray
    carried: np.ndarray
    pairs: np.ndarray
    counts: PackingCounts
    malformed: list[tuple[int, str]]
    notes: dict[str, tuple[int, int]]

    @property
    def num_packs(self) -> int:
        """Number of packs."""
        return len(self.checksums)

    def rows_of(self, number: int) -> np.ndarray:
        """int32 [n, 5]: the rows of a pack. Raises Damaged if they are not as they were written."""
        first, last = self.bounds[number : number + 2].tolist()
        rows = self.rows[_COLUMNS * first : _COLUMNS * last]
        if zlib.crc32(rows.data) != self.checksums[number]:
            raise Damaged
        return rows.reshape(-1, _COLUMNS)

    def write(self, path: str) -> None:
        """Writes a file, whole or not at all. Raises OSError."""
        head = {"counts": asdict(self.counts), "malformed": self.malformed, "notes": self.notes}
        _FILE.write(path, head, {name: getattr(self, name) for name in (*_INDEX, "rows")})

    @classmethod
    def open(cls, path: str) -> "WindowPlan":
        """Maps a file. Raises FileNotFoundError, OSError, and Damaged if it is not as it was written."""
        head, arrays = _FILE.open(path)
        counts = PackingCounts(**head["counts"])
        return cls(counts=counts, malformed=head["malformed"], notes=head["notes"], **arrays)


def plan_window(
    records: Corpus,
    order: EpochOrder,
    cursor: Cursor,
    make_pieces: MakePieces,
    options: PackOptions,
    open_block: Callable[[int], TokenBlock],
    open_sound: Callable[[int, np.ndarray], TokenBlock],
) -> WindowPlan:
    """Packs the window at the cursor.

    Args:
        make_pieces: a pure function.
        open_block: opens the tokens of a block.
        open_sound: the same, when those of these records have been compared with their checksums.
    """
    seq_len = options.seq_len
    found: list[tuple[int, Pieces]] = []
    counts, malformed, notes = PackingCounts(), [], dict[str, tuple[int, int]]()
    of_block, index = _places(records, cursor)
    for block in blocks_carried(records, cursor):
        here = of_block == block
        carried_here = list(zip(index[here].tolist(), cursor.carried[here, 1].tolist(), strict=True))
        found.append((block, _carried_pieces(records, open_block(block), block, carried_here, make_pieces)))
    for block, indices in order.records(cursor.window):
        tokens = open_block(block)
        is_bad = np.isin(indices, list(tokens.malformed))
        bad = indices[is_bad].tolist()
        malformed += [(int(records.block_firsts[block]) + index, tokens.malformed[index]) for index in bad]
        for note, those in tokens.notes_on(indices).items():
            number, one = notes.get(note, (0, int(records.block_firsts[block] + those.min())))
            notes[note] = number + len(those), one
        pieces, more = make_pieces(tokens, indices[~is_bad])
        found.append((block, pieces))
        counts += more + PackingCounts(documents=len(bad), skipped=len(bad))
    of_block = np.repeat(np.array([block for block, _ in found], np.int64), [len(pieces) for _, pieces in found])
    pieces = Pieces.concatenate([pieces for _, pieces in found])
    trees = Trees.of_single(len(pieces))
    if options.share_prefixes:
        runs = [_run(open_sound(block, those.index), those, options.share_labels) for block, those in found]
        trees = grow_trees(runs, seq_len)
    last = cursor.window + 1 == order.num_windows
    seed = None if order.seed is None else [order.seed, cursor.epoch, 1 + cursor.window]
    packs, carried = _pack(trees.lengths(pieces.length), seq_len, seed, last)
    picked, shared = trees.pieces_of(np.array([*chain(*packs)], np.int64))
    bounds = trees.bounds_of(packs)
    table = np.stack([of_block, pieces.index, pieces.start, pieces.length], axis=1)
    rows = np.column_stack([table[picked], shared]).astype(np.int32).reshape(-1)
    counts += PackingCounts(
        packs=len(packs),
        pieces=len(picked),
        tokens=int((pieces.length[picked] - shared).sum()),
        shared_tokens=int(shared.sum()),
        slots=len(packs) * seq_len,
    )
    left, _ = trees.pieces_of(np.array(carried, np.int64))
    of_packs = np.split(rows, _COLUMNS * bounds[1:-1])[: len(packs)]
    return WindowPlan(
        rows,
        bounds,
        np.array([zlib.crc32(pack.data) for pack in of_packs], np.uint32),
        np.stack([records.block_firsts[of_block[left]] + pieces.index[left], pieces.start[left]], axis=1),
        _pairs_of(pieces.length[picked], shared, bounds),
        counts,
        malformed[:_MAX_MALFORMED],
        notes,
    )


def _pairs_of(length: np.ndarray, shared: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """int64 [p]: the (query, key) pairs of each pack's pieces, which share so many positions with the ones before."""
    before = np.append(0, (length * (length + 1) // 2 - shared * (shared + 1) // 2).cumsum())
    return before[bounds[1:]] - before[bounds[:-1]]


def _run(tokens: TokenBlock, pieces: Pieces, share_labels: bool) -> Run:
    first = tokens.begins(pieces.index) + pieces.start
    unlabelled = pieces.length if share_labels else tokens.first_learned(first + 1) - first - 1
    return Run(tokens.tokens, first, pieces.length, np.minimum(pieces.length, unlabelled))


def blocks_carried(records: Corpus, cursor: Cursor) -> list[int]:
    """The blocks of the pieces carried into the cursor's window, in their order."""
    return list(dict.fromkeys(_places(records, cursor)[0].tolist()))


def _places(records: Corpus, cursor: Cursor) -> tuple[np.ndarray, np.ndarray]:
    """int64 [k]: the block of each piece carried into the cursor's window, and the record's index in it."""
    numbers = cursor.carried[:, 0]
    blocks = np.searchsorted(records.block_firsts, numbers, side="right") - 1
    return blocks, numbers - records.block_firsts[blocks]


def _carried_pieces(
    records: Corpus, tokens: TokenBlock, block: int, rows: list[tuple[int, int]], make_pieces: MakePieces
) -> Pieces:
    """The pieces of a block that are carried into a window, each as often as it is."""
    pieces, _ = make_pieces(tokens, np.array(sorted({index for index, _ in rows})))
    found = zip(pieces.index.tolist(), pieces.start.tolist(), strict=True)
    place = {row: number for number, row in enumerate(found)}
    for index, start in rows:
        if (index, start) not in place:
            raise ValueError(
                f"{records.where(int(records.block_firsts[block]) + index)} has no token {start} as it had when the"
                " loader's state was saved; resume with the same tokenizer and chat template"
            )
    return pieces[np.array([place[row] for row in rows])]


def _pack(lengths: np.ndarray, seq_len: int, seed: list[int] | None, last: bool) -> tuple[list[list[int]], list[int]]:
    """The packs of a window, and the trees that are carried into the next; trees are named by their number.

    seed: of the order of the packs; None: the order of the trees, as far as packing allows. last: of the epoch.
    """
    packs = pack_best_fit(lengths, seq_len)
    fill = np.array([lengths[pack].sum() for pack in packs], dtype=np.int64)
    keep = np.ones(len(packs), dtype=bool)
    if not last:
        emptiest = np.argsort(fill, kind="stable")[: max(1, int(_MAX_CARRIED * len(packs)))]
        keep[emptiest] = fill[emptiest] >= _FULL * seq_len
    chosen = np.flatnonzero(keep)
    if seed is not None:  # packing sorts by length
        chosen = np.random.default_rng(seed).permutation(chosen)
    else:
        packs = [sorted(pack) for pack in packs]
        chosen = chosen[np.argsort([packs[pack][0] for pack in chosen], kind="stable")]
    return [packs[pack] for pack in chosen], [tree for pack in np.flatnonzero(~keep) for tree in packs[pack]]
