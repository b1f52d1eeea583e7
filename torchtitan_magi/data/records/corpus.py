"""The records of one or more sources under one numbering, with a weight per source."""

import functools
import hashlib
import itertools
import os
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_magi.data.records.formats import parse_document
from torchtitan_magi.data.records.record_file import Parse, RecordFile
from torchtitan_magi.data.records.record_list import RecordList
from torchtitan_magi.data.records.sources import parse_sources
from torchtitan_magi.wording import quoted, quoted_path, shown


@dataclass(frozen=True)
class Source:
    """Files with one weight. first, first_block: number of their first record and of their first block."""

    path: str
    weight: float
    files: list[RecordFile]
    first: int
    first_block: int

    @property
    def name(self) -> str:
        """The path, for messages."""
        return shown(self.path)

    def __len__(self) -> int:
        return sum(map(len, self.files))

    @property
    def num_blocks(self) -> int:
        """Number of blocks: `first_block` to `first_block + num_blocks` of the corpus."""
        return sum(file.num_blocks for file in self.files)


class Corpus:
    """The records of a data set.

    Args:
        paths: sources, separated by commas. A source is

            - a file: `.parquet`, or else JSONL, compressed if it ends in `.gz` or `.zst`;
            - a folder (its `*.jsonl`, `*.jsonl.gz`, `*.jsonl.zst` and `*.parquet` files, without subfolders) or a glob
              pattern (`**` includes subfolders; at the end of the pattern, their files of these names), sorted by name;
            - a folder that `save_to_disk` of `datasets` wrote, with `?split=train` (the default) if it has splits;
            - `hf://org/name?subset=x&split=train`, a data set on the hub, or `hf:///folder` of the same layout.

            `?messages=COLUMN` says that a column or key of another name holds "messages"; so for all keys. At the end
            `=2` or `=0.5` gives the source a weight: how many times an epoch passes over it. A comma, an equals sign or
            a question mark is part of the path if that file or folder exists; so is an equals sign with a slash
            somewhere after it.
        parse: the JSON value of a record -> the record; a function of `formats`.
        cache: folder that keeps the index of each file and the content of compressed ones, which need it; None: the
            files are read each time.

    Attributes:
        files: all files, in the order of the numbering.
        block_firsts: int64 [blocks + 1], number of the first record of each block, and the number of records.

    Raises ValueError for sources that cannot be read, hold no record or name a file a second time, and for weights
    that leave less than one record per epoch.
    """

    def __init__(
        self, paths: str | os.PathLike[str], parse: Parse = parse_document, cache: str | os.PathLike[str] | None = None
    ):
        if not isinstance(paths, (str, os.PathLike)):
            raise ValueError(f"the data set is {quoted(paths)}; name its sources in one string, separated by commas")
        self.paths = os.fspath(paths)
        folder = None if cache is None else Path(cache)
        named = [(name, name.openers(parse, folder)) for name in parse_sources(self.paths)]
        openers = [opener for _, openers in named for opener in openers]
        _check_distinct([identity for identity, _ in openers])
        self.sources: list[Source] = []
        self.files: list[RecordFile] = []
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            opened = pool.map(lambda opener: opener[1](), openers)
            for name, openers in named:
                source = Source(name.path, name.weight, [next(opened) for _ in openers], len(self), self.num_blocks)
                if len(source) == 0:
                    raise ValueError(f"source {quoted_path(name.path)} holds no record; write one JSON object per line")
                self.sources.append(source)
                self.files += source.files
        self._number()

    @classmethod
    def of_records(cls, name: str, values: Sequence[Any], parse: Parse = parse_document) -> "Corpus":
        """The JSON values of a list, at least one. name: of the list, for messages."""
        corpus = cls.__new__(cls)
        corpus.paths, corpus.files = name, [RecordList(name, values, parse)]
        corpus.sources = [Source(name, 1.0, corpus.files, 0, 0)]
        corpus._number()
        return corpus

    def _number(self) -> None:
        """Numbers records and blocks."""
        sizes = [source.weight * len(source) for source in self.sources]
        if sum(sizes) < 1 or not any(map(round, sizes)):  # each by itself may leave none, see `epoch_order`
            raise ValueError(
                f"the weights of {quoted_path(self.paths)} leave less than one record an epoch; give larger ones"
            )
        self._firsts = [0, *itertools.accumulate(map(len, self.files))]
        self._first_blocks = [0, *itertools.accumulate(file.num_blocks for file in self.files)]
        firsts = [file.block_firsts[:-1] + first for file, first in zip(self.files, self._firsts[:-1], strict=True)]
        self.block_firsts = np.concatenate([*firsts, self._firsts[-1:]])

    @property
    def name(self) -> str:
        """The sources, for messages."""
        return shown(self.paths)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitem__(self, index: int) -> dict[str, object]:
        file, place = self._locate(index)
        return file[place]

    def where(self, index: int) -> str:
        """`path:line` of a record, for messages."""
        file, place = self._locate(index)
        return file.where(place)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return sum(file.num_blocks for file in self.files)

    def read(self, block: int) -> list[dict[str, Any] | ValueError]:
        """The records of a block, numbers block_firsts[block] to block_firsts[block + 1]; a malformed one is its error
        (`what; remedy`). Raises ValueError, with the file's name, if the file has changed since it was opened."""
        file, number = self._locate_block(block)
        return file.read(number)

    def digest(self, block: int) -> str:
        """SHA-256, hexadecimal, of the block's content."""
        file, number = self._locate_block(block)
        return file.digest(number)

    @functools.cached_property
    def digest_of_all(self) -> bytes:
        """SHA-256 of the digests of all blocks."""
        return hashlib.sha256("".join(map(self.digest, range(self.num_blocks))).encode()).digest()

    def path(self, block: int) -> str:
        """Name of the block's file, for messages."""
        return self._locate_block(block)[0].path

    def unread_columns(self, block: int) -> tuple[str, ...]:
        """Names of the columns of the block's table that hold no key of a record; none where it is no table."""
        return self._locate_block(block)[0].unread_columns

    def check_unchanged(self, block: int) -> None:
        """Raises ValueError, with the file's name, if the block's file has changed since it was opened."""
        self._locate_block(block)[0].check_unchanged()

    @functools.cached_property
    def fingerprint(self) -> str:
        """Number of records, bytes and checksum, as text. Depends on the contents and order of the files and on the
        columns that their sources name, not on the names of the files."""
        crc32 = 0
        for file in self.files:
            columns = f"{sorted(file.columns.items())}" if file.columns else ""
            crc32 = zlib.crc32(f"{file.num_bytes} {file.crc32} {columns}".encode(), crc32)
        num_bytes = sum(file.num_bytes for file in self.files)
        return f"{len(self):,} records, {num_bytes:,} bytes, checksum {crc32:08x}"

    def _locate(self, index: int) -> tuple[RecordFile, int]:
        return self._file_with(index, self._firsts)

    def _locate_block(self, block: int) -> tuple[RecordFile, int]:
        return self._file_with(block, self._first_blocks)

    def _file_with(self, number: int, firsts: list[int]) -> tuple[RecordFile, int]:
        """The file that holds a record or block, and its number in the file. firsts: numbers of the files' first."""
        file = bisect_right(firsts, number) - 1
        return self.files[file], number - firsts[file]


def _check_distinct(identities: list[str]) -> None:
    seen: set[str] = set()
    for identity in identities:
        if identity in seen:
            raise ValueError(
                f"records file {quoted_path(identity)} is in the data set twice; give its source a weight instead"
            )
        seen.add(identity)
