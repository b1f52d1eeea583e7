"""Packed SFT batches: the data-parallel shard of the global pack stream, as tensors."""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, get_args

import numpy as np
import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info

from torchtitan_magi.data.documents import IGNORE_INDEX, LongDocuments, Piece
from torchtitan_magi.data.packing import PackingCounts
from torchtitan_magi.data.records import RecordFile
from torchtitan_magi.data.stream import Cursor, PackStream, Tokenize

Sample = tuple[dict[str, Any], torch.Tensor]


class PackedSFTDataset(IterableDataset, Stateful):
    """Packs of documents for supervised fine-tuning, sharded over data-parallel ranks.

    Packs form one global stream; rank r of R takes packs r, r + R, r + 2R, ... of it. An item is `(inputs, labels)`:

    - `inputs["input"]`: int64 [seq_len] token ids, 0 on the padding at the end;
    - `inputs["positions"]`: int32 [seq_len], restarting at 0 with every document, 0 on padding;
    - `inputs["documents"]`: NumPy int32 [n, 2], half-open token ranges of the documents, in order and without gaps;
      padding belongs to none;
    - `labels`: int64 [seq_len], already shifted: the token after each input, or IGNORE_INDEX where it is not to be
      predicted (and on padding). At least one is not IGNORE_INDEX.

    The state is taken between rounds of R packs, is the same on all ranks, and can be loaded with another R. Without a
    loaded state, `iter()` starts at the beginning. With `infinite=False` there is one epoch, and all ranks get the same
    number of items: in the last round, ranks left without a pack get one of padding only (no documents, no labels).

    Args:
        path: JSONL file of records (see `records`).
        tokenize: record -> TokenizedDocument, such as a `ChatTokenizer`; a pure function, picklable for workers.
        seq_len: tokens per pack.
        dp_rank, dp_world_size: this shard, and the number of shards.
        seed: of the order of records and packs, >= 0.
        long_documents: "truncate" or "split" documents that do not fit a pack.
        shuffle: new order in every epoch; otherwise the file's order, as far as packing allows.
        infinite: start over after each epoch.
        window_packs: records are packed together until they fill so many packs; more packs tighter and takes more
            memory and time before the first item.

    Raises ValueError for arguments out of range and for a records file that is missing, empty or malformed; while
    iterating, when no record holds a label or a chat template refuses one. Works with 0 or 1 loader workers.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        tokenize: Tokenize,
        seq_len: int,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        seed: int = 0,
        long_documents: LongDocuments = "truncate",
        shuffle: bool = True,
        infinite: bool = True,
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
        if long_documents not in get_args(LongDocuments):
            raise ValueError(f"long_documents is {long_documents!r}; use one of {', '.join(get_args(LongDocuments))}")
        self.dp_rank, self.dp_world_size = dp_rank, dp_world_size
        self._stream = PackStream(
            RecordFile(path), tokenize, seq_len, seed, long_documents, shuffle, infinite, window_packs
        )
        self._cursor, self._resuming = Cursor(), False

    @property
    def counts(self) -> PackingCounts:
        """What became of the records so far, over all ranks; up to date where the dataset is iterated."""
        return self._cursor.counts

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
            mine = round_of_packs[self.dp_rank].pieces if self.dp_rank < len(round_of_packs) else []
            yield lay_out(mine, self._stream.seq_len)

    def state_dict(self) -> dict[str, Any]:
        """The position in the global stream, plain Python values, with what the stream depends on."""
        return {"cursor": self._cursor.state_dict(), "stream": self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next `iter()` continues there. Raises ValueError if the state is of another stream of packs."""
        for name, now in self._identity().items():
            saved = state_dict["stream"].get(name)
            if saved != now:
                raise ValueError(
                    f"the loader's saved state has {name} = {saved!r}, this run has {now!r};"
                    " resume with the same value, or without the loader's state"
                )
        self._cursor, self._resuming = Cursor.from_state_dict(state_dict["cursor"]), True

    def _identity(self) -> dict[str, Any]:
        stream = self._stream
        return {
            "num_records": len(stream.records),
            "num_bytes": stream.records.num_bytes,
            "seq_len": stream.seq_len,
            "seed": stream.seed,
            "long_documents": stream.long_documents,
            "shuffle": stream.shuffle,
            "window_packs": stream.window_packs,
        }


def lay_out(pieces: Sequence[Piece], seq_len: int) -> Sample:
    """Pieces of at most seq_len tokens together -> one item of `PackedSFTDataset`."""
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    tokens = np.zeros(seq_len, dtype=np.int64)
    positions = np.zeros(seq_len, dtype=np.int32)
    labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
    for piece, end in zip(pieces, ends.tolist(), strict=True):
        where = slice(end - len(piece), end)
        tokens[where], labels[where] = piece.inputs, piece.labels
        positions[where] = np.arange(len(piece), dtype=np.int32)
    documents = np.stack([ends - lengths, ends], axis=1)
    inputs = {"input": torch.from_numpy(tokens), "positions": torch.from_numpy(positions), "documents": documents}
    return inputs, torch.from_numpy(labels)


def collate_packs(samples: Sequence[Sample]) -> Sample:
    """b items -> tensors [b, seq_len]; `documents` become one NumPy int32 [n, 2] over the b * seq_len tokens."""
    seq_len = len(samples[0][1])
    shifted = [inputs["documents"] + np.int32(row * seq_len) for row, (inputs, _) in enumerate(samples)]
    inputs = {name: torch.stack([inputs[name] for inputs, _ in samples]) for name in ("input", "positions")}
    return inputs | {"documents": np.concatenate(shifted)}, torch.stack([labels for _, labels in samples])
