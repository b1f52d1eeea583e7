"""Packed batches: the data-parallel shard of the global pack stream, as tensors."""

import functools
import itertools
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.pack_options import PackOptions, is_integer
from torchtitan_magi.data.packs.plan_cache import PlanCache
from torchtitan_magi.data.packs.stream import Pack, PackStream, WindowCount
from torchtitan_magi.data.packs.window_plan import PACKING_VERSION, Cursor, Pieces, unreadable_state
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.records.record_file import attempt
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.data.tokens.token_cache import TokenCache, TokenizedHere, Tokens
from torchtitan_magi.wording import quoted

Sample = tuple[dict[str, Any], torch.Tensor]

IGNORE_INDEX = -100
"""Label of a position that does not count in the loss."""
_BEFORE = {"share_prefixes": False}  # what states have that do not name it
CHECKED_BYTES = 2**30  # so much is parsed before the first step to find malformed records


class PackedDataset(IterableDataset, Stateful):
    """Packs made of records, sharded over data-parallel ranks.

    Packs form one global stream; rank r of R takes packs r, r + R, r + 2R, ... of it. An item is `(inputs, labels)`:

    - `inputs["input"]`: int64 [seq_len] token ids, 0 on the padding at the end;
    - `inputs["positions"]`: int32 [seq_len], rotary positions, 0 on padding;
    - `inputs["documents"]`: NumPy int32 [n, 2] or [n, 3], the boundaries; see the subclass. They leave out the padding;
    - `labels`: int64 [seq_len], already shifted: the token to predict after each input, or IGNORE_INDEX where there is
      none (and on padding). At least one is not IGNORE_INDEX.

    The state is taken between rounds of R packs, is the same on all ranks, and can be loaded with another R. Without a
    loaded state, `iter()` starts at the beginning. All ranks get the same number of items: in the last round, ranks
    without a pack get one of padding only (no boundaries, no labels).

    Args:
        paths: sources of records, see `Corpus`; or a corpus whose records are parsed by `parse`.
        tokenize: a `ChatTokenizer` or one of its methods; or a function record -> tokens, which raises ValueError for a
            record that it refuses. Pure, and picklable for workers. A state is loaded only if the tokenizer's
            `fingerprint` is equal.
        seq_len: tokens per pack.
        dp_rank: this shard.
        dp_world_size: the number of shards.
        check: whether the constructor calls `check` if bad_records is "error".
        token_cache: folder that keeps tokens, made by processes on all cores, for a `ChatTokenizer`; all ranks and
            later runs read them there. None: tokens are made in this process, where templates have no limits, and not
            kept.
        reports: whether the counts of the records read are logged, at the end of each epoch.
        options: the other fields of `PackOptions`, by keyword:

            - `seed` (0): seeds the order of records and packs, >= 0;
            - `shuffle` (True): new order in every epoch; otherwise the file's order, as far as packing allows;
            - `epochs` (-1): passes over the records; -1 for passes without end;
            - `bad_records` ("error"): what happens to malformed records and to those that the chat template refuses.
              "error": they raise, see `check`. "skip": they are left out when read, counted, and the first few logged;
            - `weighted` (True): whether the weights of the sources count; otherwise an epoch has each record once;
            - `packs_per_step` (1): steps of so many packs, of all ranks, have packs of nearly equal work, as far as a
              window has such; not without `shuffle`;
            - `window_blocks` (32): size of the windows whose records are packed together, in blocks of 4 MiB of text; a
              larger window packs tighter and takes more memory and time before the first item;
            - `share_prefixes` (False): whether records of a window that begin with the same tokens are packed as a
              tree; for documents;
            - `share_labels` (True): whether trees may have labels in what they share.

    Raises ValueError for arguments out of range, for records files that are missing or empty and for malformed records;
    while iterating, when no record holds a label or a chat template refuses one, and when tokens cannot be kept. Works
    with 0 or 1 loader workers; with more through `training.pack_loader`.
    """

    kind: ClassVar[str]  # of records: "documents", "rollouts" or "pairs"
    made: ClassVar[tuple[type, ...]]  # one of which `tokenize` returns

    @staticmethod
    @abstractmethod
    def parse(record: Any) -> dict[str, Any]:
        """The JSON value of a line -> what `tokenize` takes. Raises ValueError (`what; remedy`)."""

    def __init__(
        self,
        paths: str | os.PathLike[str] | Corpus,
        tokenize: Callable[..., Any],
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        *,
        check: bool = True,
        token_cache: str | os.PathLike[str] | None = None,
        reports: bool = True,
        **options: Any,
    ):
        if not (is_integer(dp_rank, 0) and is_integer(dp_world_size, 1) and dp_rank < dp_world_size):
            raise ValueError(
                f"dp_rank is {quoted(dp_rank)} of {quoted(dp_world_size)}; give a rank from 0 to dp_world_size - 1"
            )
        self.options, self.seq_len = PackOptions(seq_len, **options), seq_len
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self.tokenizer = getattr(tokenize, "__self__", tokenize)  # the object of a bound method
        self.records = paths if isinstance(paths, Corpus) else Corpus(paths, self.parse, token_cache)
        self.tokens = self._tokens(tokenize, token_cache)
        plans = None if token_cache is None else PlanCache(Path(token_cache))
        of_packs = self.make_pieces, self.options, self.identity
        self._stream = PackStream(self.records, self.tokens, plans, *of_packs, reports)
        self._cursor, self._resuming = Cursor(), False
        if check and not self.options.skips_bad:
            self.check()

    def _tokens(self, tokenize: Any, folder: str | os.PathLike[str] | None) -> Tokens:
        if folder is not None:
            options = self.options
            name = f"{self.records.fingerprint} {options.seed} {options.shuffle} {options.weighted}"
            return TokenCache(Path(folder), self.records, self.tokenizer, self.kind, name)
        batch = getattr(self.tokenizer, self.kind, None) or functools.partial(_attempt_each, tokenize, self.made)
        return TokenizedHere(self.records, batch)

    @abstractmethod
    def make_pieces(self, block: TokenBlock, indices: np.ndarray) -> tuple[Pieces, PackingCounts]:
        """Pieces of these records of a block, each of at most seq_len tokens and with a label; and the counts.

        indices: int64 [n], of records in the block that are not malformed.
        """

    def check(self, rank: int = 0, num_ranks: int = 1) -> None:
        """Checks this rank's share of the records for malformed ones; spans ascend by rank.

        Where tokens are kept, they know. Other blocks are parsed, unless the data has more than CHECKED_BYTES: then
        they are checked as they are tokenized, which is ahead of training.

        Raises:
            ValueError: `path:line: what; remedy` of the span's first error.
        """
        all_parsed = sum(file.num_bytes for file in self.records.files) <= CHECKED_BYTES
        begin, end = (self.records.num_blocks * number // num_ranks for number in (rank, rank + 1))
        for block in range(begin, end):
            malformed = self.tokens.malformed(block)
            if malformed is None and all_parsed:
                records = enumerate(self.records.read(block))
                malformed = {index: str(record) for index, record in records if isinstance(record, ValueError)}
            if malformed:
                first = min(malformed)
                where = self.records.where(int(self.records.block_firsts[block]) + first)
                raise ValueError(f"{where}: {malformed[first]}")

    @property
    def counts(self) -> PackingCounts:
        """Counts of the records so far, over all ranks; current only in the process that iterates the dataset."""
        return self._cursor.counts

    @property
    def num_records(self) -> int:
        """Records in the data set; the numbers in `pair_ids` are below it."""
        return len(self.records)

    @property
    def records_per_epoch(self) -> int:
        """Records that the first epoch reads; those of later ones differ by rounding, where sources have weights."""
        parts = self._stream.order_of(0).parts
        return int((parts[:, 3] - parts[:, 2]).sum())

    def packs_per_epoch(self, counts: PackingCounts) -> float:
        """An estimate from the counts of what was read so far, by its tokens: some of it may not be packed yet."""
        tokens = counts.tokens_read - counts.truncated_tokens - counts.tokens_left_out - counts.shared_tokens
        packs = tokens / (self.seq_len * counts.fill)
        return max(1.0, packs / counts.documents * self.records_per_epoch)

    @property
    def has_tokens(self) -> bool:
        """Whether no token that the first epoch needs has to be made."""
        return self.tokens.are_there(self._stream.order_of(0).blocks_from(0))

    def count_packs(self, state_dict: dict[str, Any] | None = None) -> Iterator[WindowCount]:
        """The packs to come over all ranks, window by window of records that are packed together, up to the end of the
        last epoch.

        It makes the plans of packs that `iter()` will find, and waits for their tokens.

        Args:
            state_dict: where to begin; None: at the first pack.

        Raises ValueError as `iter()`.
        """
        return self._stream.counts(self._cursor_of(state_dict))

    def packs_before(self, state_dict: dict[str, Any] | None = None) -> int:
        """How many packs, over all ranks, were given out up to a state; None: that before the first pack."""
        cursor = self._cursor_of(state_dict)
        to_come = next(self._stream.counts(cursor)).packs if cursor.given else 0  # of a window that is counted whole
        return cursor.counts.packs - to_come

    @staticmethod
    def _cursor_of(state_dict: dict[str, Any] | None) -> Cursor:
        return Cursor() if state_dict is None else Cursor.from_state_dict(state_dict["cursor"])

    def first_items(self, most: int) -> list[Sample]:
        """Items of the first packs of all ranks, in the order in which steps of one pack take them. No position
        changes.

        Raises ValueError as `iter()`.
        """
        return list(map(self.lay_out, itertools.islice(self._stream.first_packs(), most)))

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"num_workers is {worker.num_workers}; use 0 or 1, or a PackLoader")
        yield from self.shard()

    def shard(self, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[Sample]:
        """This shard's items, counted from 0 where it begins; those that are not wanted are left out."""
        if not self._resuming:
            self._cursor = Cursor()
        self._resuming = False
        rounds = self._stream.rounds(self._cursor, self.dp_rank, self.dp_world_size)
        for number, (read_pack, self._cursor) in enumerate(rounds):
            if wanted(number):
                yield self.lay_out(read_pack())

    @abstractmethod
    def lay_out(self, pack: Pack) -> Sample:
        """The item of a pack."""

    def item(self, columns: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], bounds: np.ndarray) -> Sample:
        """An item of consecutive ranges of positions, of each its input tokens, rotary positions and labels, and of the
        boundaries of documents. They are int arrays; padding comes behind them."""
        tokens, positions, labels = zip(*columns, strict=True) if columns else ((), (), ())
        inputs = {
            "input": self._padded(tokens, 0, np.int64),
            "positions": self._padded(positions, 0, np.int32),
            "documents": bounds.astype(np.int32),
        }
        return inputs, self._padded(labels, IGNORE_INDEX, np.int64)

    def _padded(self, parts: Sequence[np.ndarray], padding: int, dtype: type) -> torch.Tensor:
        """Arrays one behind the other, and padding: [seq_len]."""
        row: np.ndarray = np.full(self.seq_len, padding, dtype)
        whole = np.concatenate([row[:0], *parts])
        row[: len(whole)] = whole
        return torch.from_numpy(row)

    def state_dict(self) -> dict[str, Any]:
        """The position in the global stream and what the stream depends on, as plain Python values."""
        return {"cursor": self._cursor.state_dict(), "stream": self.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next `iter()` continues from this state. Raises ValueError if it belongs to another stream of packs."""
        self.check_state(state_dict)
        self._cursor, self._resuming = Cursor.from_state_dict(state_dict["cursor"]), True

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if the state belongs to another stream of packs, or is none."""
        if not isinstance(state_dict, dict) or not isinstance(state_dict.get("stream"), dict):
            raise unreadable_state(ValueError("it names no stream of packs"))
        version = state_dict["stream"].get("packing", 1)
        if version != PACKING_VERSION:
            raise ValueError(
                f"the loader's saved state has packing version {quoted(version)}, this program has {PACKING_VERSION};"
                " resume with the program that saved it, or begin anew in another folder"
            )
        for name, now in self.identity().items():
            saved = state_dict["stream"].get(name, _BEFORE.get(name))
            if saved != now:
                same = "the same files in the same order" if name == "records" else "the same value"
                raise ValueError(
                    f"the loader's saved state has {name} = {quoted(saved)}, this run has {quoted(now)};"
                    f" resume with {same}, or begin anew in another folder (job.dump_folder)"
                )
        cursor = Cursor.from_state_dict(state_dict.get("cursor", {}))
        if cursor.window > self._stream.order_of(cursor.epoch).num_windows or (
            cursor.carried[:, 0].max(initial=0) >= len(self.records)
        ):
            raise unreadable_state(ValueError("its position lies beyond the data"))

    def identity(self) -> dict[str, Any]:
        """All that the stream of packs depends on, as plain Python values."""
        options, sources = self.options, self.records.sources
        return {
            "packing": PACKING_VERSION,
            "kind": self.kind,
            "records": self.records.fingerprint,
            "weights": self._stream.weights,
            "records of the sources": [len(source) for source in sources] if options.weighted else [],
            "tokenizer": getattr(self.tokenizer, "fingerprint", None),
            "seq_len": options.seq_len,
            "seed": options.seed,
            "shuffle": options.shuffle,
            "window_blocks": options.window_blocks,
        }


def _attempt_each(tokenize: Callable[[Any], Any], made: tuple[type, ...], records: list[Any]) -> list[Any]:
    def checked(record: Any) -> Any:
        if not isinstance(found := tokenize(record), made):
            names = " or ".join(each.__name__ for each in made)
            raise ValueError(f"tokenize returned {quoted(type(found).__name__)}; return {names}")
        return found

    return [attempt(checked, record) for record in records]


def collate_packs(samples: Sequence[Sample], num_rows: int | None = None) -> Sample:
    """Items -> tensors [b, seq_len]. The boundaries become one NumPy int32 [n, 2 or 3] over the b * seq_len tokens,
    `pairs` one int32 [k, 2] with the numbers of these n documents, `records`, `pair_ids` and `pair_numbers` one int64
    array each. num_rows: b, reached by adding padding; None: the number of items."""
    samples = [*samples, *[padding_like(samples[0])] * ((num_rows or 0) - len(samples))]
    seq_len = len(samples[0][1])
    documents_before = np.cumsum([0, *(len(inputs["documents"]) for inputs, _ in samples)], dtype=np.int32)
    inputs: dict[str, Any] = {}
    for name, first in samples[0][0].items():
        values = [inputs[name] for inputs, _ in samples]
        if isinstance(first, torch.Tensor):
            inputs[name] = torch.stack(values)
        elif name == "documents":
            shift = np.full(first.shape[1], seq_len, np.int32)
            shift[2:] = 0  # counts tokens
            inputs[name] = np.concatenate([value + row * shift for row, value in enumerate(values)])
        elif name == "pairs":
            inputs[name] = np.concatenate([value + documents_before[row] for row, value in enumerate(values)])
        else:
            inputs[name] = np.concatenate(values)
    return inputs, torch.stack([labels for _, labels in samples])


def padding_like(sample: Sample) -> Sample:
    """An item or batch of padding only, of the same shape."""
    inputs, labels = sample
    empty = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x[:0] for name, x in inputs.items()}
    return empty, torch.full_like(labels, IGNORE_INDEX)
