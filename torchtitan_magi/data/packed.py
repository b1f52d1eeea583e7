"""Packed batches: the data-parallel shard of the global pack stream, as tensors."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_magi.data.corpus import Corpus
from torchtitan_magi.data.documents import IGNORE_INDEX, Piece
from torchtitan_magi.data.packing import PackingCounts
from torchtitan_magi.data.stream import Cursor, PackStream

BadRecords = Literal["error", "skip"]
Sample = tuple[dict[str, Any], torch.Tensor]


class PackedDataset(IterableDataset, Stateful):
    """Packs made of records, sharded over data-parallel ranks.

    Packs form one global stream; rank r of R takes packs r, r + R, r + 2R, ... of it. An item is `(inputs, labels)`:

    - `inputs["input"]`: int64 [seq_len] token ids, 0 on the padding at the end;
    - `inputs["positions"]`: int32 [seq_len], rotary positions, 0 on padding;
    - `inputs["documents"]` or `inputs["pairs"]`: NumPy int32 [n, k], the boundaries; see the subclass. They leave out
      the padding;
    - `labels`: int64 [seq_len], already shifted: the token to predict after each input, or IGNORE_INDEX where there is
      none (and on padding). At least one is not IGNORE_INDEX.

    The state is taken between rounds of R packs, is the same on all ranks, and can be loaded with another R. Without a
    loaded state, `iter()` starts at the beginning. All ranks get the same number of items: in the last round, ranks
    without a pack get one of padding only (no boundaries, no labels).

    Args:
        paths: JSONL files of records, see `Corpus`.
        tokenize: record -> tokens, a `ChatTokenizer` or one of its methods; a pure function, picklable for workers. If
            it has a `fingerprint`, a state is loaded only if its fingerprint is equal.
        seq_len: tokens per pack.
        dp_rank, dp_world_size: this shard, and the number of shards.
        seed: seeds the order of records and packs, >= 0.
        shuffle: new order in every epoch; otherwise the file's order, as far as packing allows.
        epochs: passes over the records; -1 for passes without end.
        bad_records: what happens to malformed records. "error": the constructor checks all records, and a record that
            the chat template refuses raises when it is read. "skip": they are left out when read, counted, and the
            first few logged.
        weighted: whether the weights of the sources count; otherwise an epoch has each record once.
        check: whether the constructor checks the records if bad_records is "error"; if not, call `records.check`.
        window_packs: packs whose records are packed together; a larger window packs tighter and takes more memory and
            time before the first item.

    Raises ValueError for arguments out of range, for records files that are missing or empty and for malformed records;
    while iterating, when no record holds a label or a chat template refuses one. Works with 0 or 1 loader workers.
    """

    bounds_name: ClassVar[str]  # "documents" or "pairs"

    @staticmethod
    @abstractmethod
    def parse(record: Any) -> dict[str, Any]:
        """The JSON value of a line -> what `tokenize` takes. Raises ValueError (`what; remedy`)."""

    def __init__(
        self,
        paths: str | os.PathLike[str],
        tokenize: Callable[[dict[str, Any]], Any],
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int = -1,
        bad_records: BadRecords = "error",
        check: bool = True,
        weighted: bool = True,
        window_packs: int = 32,
    ):
        if seq_len < 1:
            raise ValueError(f"seq_len is {seq_len}; give at least 1 token")
        if window_packs < 2:
            raise ValueError(f"window_packs is {window_packs}; give at least 2 packs")
        if not 0 <= dp_rank < dp_world_size:
            raise ValueError(f"dp_rank is {dp_rank} of {dp_world_size}; give a rank from 0 to dp_world_size - 1")
        if seed < 0:
            raise ValueError(f"seed is {seed}; give an integer >= 0")
        if epochs < 1 and epochs != -1:
            raise ValueError(f"epochs is {epochs}; give at least 1, or -1 for epochs without end")
        if bad_records not in get_args(BadRecords):
            raise ValueError(f"bad_records is {bad_records!r}; use one of {', '.join(get_args(BadRecords))}")
        self.tokenize, self.seq_len, self.dp_rank, self.dp_world_size = tokenize, seq_len, dp_rank, dp_world_size
        self.records, skip_bad = Corpus(paths, self.parse), bad_records == "skip"
        if check and not skip_bad:
            self.records.check()
        self._stream = PackStream(
            self.records, self.make_pieces, seq_len, seed, shuffle, epochs, window_packs, skip_bad, weighted
        )
        self._cursor, self._resuming = Cursor(), False

    @abstractmethod
    def make_pieces(self, record: int, content: dict[str, Any]) -> tuple[list[Piece], PackingCounts]:
        """The pieces of record number `record`, each of at most seq_len tokens and with a label; and its counts."""

    @property
    def counts(self) -> PackingCounts:
        """Counts of the records so far, over all ranks; current only in the process that iterates the dataset."""
        return self._cursor.counts

    @property
    def num_records(self) -> int:
        """Records in the data set; the numbers in `pair_ids` are below it."""
        return len(self.records)

    def __iter__(self) -> Iterator[Sample]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 1:
            raise ValueError(f"num_workers is {worker.num_workers}; use 0 or 1, packs are made in one sequence")
        if not self._resuming:
            self._cursor = Cursor()
        self._resuming = False
        packs = self._stream.packs(self._cursor)
        while round_of_packs := list(islice(packs, self.dp_world_size)):
            self._cursor = round_of_packs[-1].next_cursor
            yield self.lay_out(round_of_packs[self.dp_rank].pieces if self.dp_rank < len(round_of_packs) else [])

    def lay_out(self, pieces: Sequence[Piece]) -> Sample:
        """Pieces with at most seq_len tokens in total -> one item."""
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        positions = np.zeros(self.seq_len, dtype=np.int32)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        bounds, start = [], 0
        for piece in pieces:
            where = slice(start, start + len(piece))
            tokens[where], labels[where], positions[where] = piece.inputs, piece.labels, piece.positions
            bounds.append([start + bound for bound in piece.bounds])
            start += len(piece)
        columns = {"documents": 2, "pairs": 4}[self.bounds_name]
        inputs = {
            "input": torch.from_numpy(tokens),
            "positions": torch.from_numpy(positions),
            self.bounds_name: np.array(bounds, dtype=np.int32).reshape(-1, columns),
        }
        return inputs, torch.from_numpy(labels)

    def state_dict(self) -> dict[str, Any]:
        """The position in the global stream and what the stream depends on, as plain Python values."""
        return {"cursor": self._cursor.state_dict(), "stream": self.identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next `iter()` continues from this state. Raises ValueError if it belongs to another stream of packs."""
        self.check_state(state_dict)
        self._cursor, self._resuming = Cursor.from_state_dict(state_dict["cursor"]), True

    def check_state(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if the state belongs to another stream of packs."""
        for name, now in self.identity().items():
            saved = state_dict["stream"].get(name)
            if saved != now:
                raise ValueError(
                    f"the loader's saved state has {name} = {saved!r}, this run has {now!r};"
                    " resume with the same value, or without the loader's state"
                )

    def identity(self) -> dict[str, Any]:
        """All that the stream of packs depends on, as plain Python values."""
        stream = self._stream
        tokenizer = getattr(self.tokenize, "__self__", self.tokenize)  # the object of a bound method
        return {
            "kind": self.bounds_name,
            "records": self.records.fingerprint,
            "weights": [source.weight if stream.weighted else 1.0 for source in self.records.sources],
            "records of the sources": [len(source) for source in self.records.sources] if stream.weighted else [],
            "tokenizer": getattr(tokenizer, "fingerprint", None),
            "seq_len": stream.seq_len,
            "seed": stream.seed,
            "shuffle": stream.shuffle,
            "window_packs": stream.window_packs,
        }


def collate_packs(samples: Sequence[Sample], num_rows: int | None = None) -> Sample:
    """Items -> tensors [b, seq_len]. The boundaries become one NumPy int32 [n, k] over the b * seq_len tokens, and
    `pair_ids` one int64 [n]. num_rows: b, reached by adding padding; None: the number of items."""
    samples = [*samples, *[padding_like(samples[0])] * ((num_rows or 0) - len(samples))]
    seq_len = len(samples[0][1])
    inputs: dict[str, Any] = {}
    for name, first in samples[0][0].items():
        values = [inputs[name] for inputs, _ in samples]
        if isinstance(first, torch.Tensor):
            inputs[name] = torch.stack(values)
        elif name in ("documents", "pairs"):
            inputs[name] = np.concatenate([value + np.int32(row * seq_len) for row, value in enumerate(values)])
        else:
            inputs[name] = np.concatenate(values)
    return inputs, torch.stack([labels for _, labels in samples])


def padding_like(sample: Sample) -> Sample:
    """An item or batch of padding only, of the same shape."""
    inputs, labels = sample
    empty = {name: torch.zeros_like(x) if isinstance(x, torch.Tensor) else x[:0] for name, x in inputs.items()}
    return empty, torch.full_like(labels, IGNORE_INDEX)
