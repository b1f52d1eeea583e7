"""Records in columns: Parquet files, and data sets that the `datasets` library reads.

A row becomes the object that it would be on a line of JSONL. Arrow gives an object all keys of its column, with null
for those that it lacks, so keys without a value are left out. Of columns with images and the like a row has only
whether there is a value: such a record is refused.
"""

import functools
import os
import resource
import threading
import zlib
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchtitan_magi.data import guard
from torchtitan_magi.data.records.formats import SEEN, parse_document
from torchtitan_magi.data.records.jsonl import json_value
from torchtitan_magi.data.records.kept_files import digest_of_file
from torchtitan_magi.data.records.record_file import (
    BLOCK_BYTES,
    MAX_RECORD_BYTES,
    Parse,
    RecordFile,
    named_errors,
    sha256,
)
from torchtitan_magi.files import regular_file
from torchtitan_magi.wording import one_line, quoted, quoted_path, shown

if TYPE_CHECKING:
    import subprocess

    from datasets import Dataset

_MAX_ROWS = 4096  # of a block: its size is an average, and Parquet stores a repeated value once
_MAX_ROWS_OF_FILE = 2**36  # more is damage
# what Arrow raises for values and types
_UNREADABLE = (ValueError, KeyError, NotImplementedError, OverflowError, RecursionError)
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)


class TableFile(RecordFile):
    """Rows of a table. A block has as many rows as have BLOCK_BYTES on average, at most _MAX_ROWS."""

    def where(self, index: int) -> str:
        """`path:row` of a record, for messages."""
        return f"{shown(self.path)}:{index + 1}"

    def _used_columns(self, names: list[str]) -> list[str]:
        """The columns that hold keys of records; of others nothing is read, but for `_seen`. Raises ValueError if there
        are none."""
        for key, column in self.columns.items():
            if column not in names:
                raise ValueError(
                    f"{quoted_path(self.path)} has no column {quoted(column)} for {key}, only {quoted(names)}; name "
                    "one of them"
                )
        used = [name for name in names if name in self._column_of.values()]
        if not used:
            raise ValueError(
                f'{quoted_path(self.path)} has only the columns {quoted(names)}, none of them "messages", "text" or '
                "the like; say which one holds them, as in ?messages=COLUMN after the source"
            )
        self._seen = [name for name in names if name in SEEN and name not in used]
        read = [*used, *self._seen]
        if len(read) > len({*read}):
            raise ValueError(
                f"{quoted_path(self.path)} has columns of the same name, {quoted(names)}; rename or remove one"
            )
        self.unread_columns = tuple(name for name in names if name not in read)
        return used

    def _identify(self, cache: Path | None, selection: str = "") -> None:
        """Sets the digest and the checksum. selection: which rows of the files these are, if not all."""
        with named_errors(self.path):
            digests = [digest_of_file(cache, part) for part in self._parts]
        self._content_digest = sha256(repr((digests, selection)).encode())
        self.crc32 = zlib.crc32(self._content_digest.encode())

    def _digest(self, block: int) -> str:
        first, last = self.block_firsts[block : block + 2].tolist()
        return sha256(f"{self._content_digest} {first}:{last}".encode())

    def _values(self, first: int, last: int) -> Iterator[Any]:
        for table in self._tables(first, last):
            for name in self._seen:
                place = table.schema.get_field_index(name)
                table = table.set_column(place, name, _is_there(table.column(place)))
            yield from _objects(table)

    @abstractmethod
    def _tables(self, first: int, last: int) -> Iterator[pa.Table]:
        """Rows first:last, their columns in use, and of those in `_seen` what shows whether there is a value."""


class ParquetFile(TableFile):
    """A Parquet file, read in place. A block is a part of one row group.

    Args:
        footers: of files that are opened together, this one among them.
        path, parse, columns, cache: as of `JsonlFile`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        footers: "Footers",
        parse: Parse = parse_document,
        columns: Mapping[str, str] | None = None,
        cache: Path | None = None,
    ):
        name = os.fspath(path)
        super().__init__(name, parse, columns or {}, [name])
        with named_errors(name):
            footer = footers.of(name)
        self._used = self._used_columns(footer.names)
        self._group_firsts = np.cumsum([0, *footer.num_rows], dtype=np.int64)
        sizes = [_size_of(self._used, group) for group in footer.sizes]
        self.num_bytes = sum(sizes)
        firsts = [
            _block_firsts(first, num_rows, size)
            for first, num_rows, size in zip(self._group_firsts.tolist(), footer.num_rows, sizes, strict=False)
        ]
        self.block_firsts = np.concatenate([*firsts, self._group_firsts[-1:]])
        self._leaves = [_smallest_leaf(name, footer.sizes) for name in self._seen]
        seen_bytes = sum(group.get(leaf, 0) for group in footer.sizes for leaf in self._leaves)
        self._batch_rows = _num_rows(len(self), seen_bytes)
        self._identify(cache)

    def _tables(self, first: int, last: int) -> Iterator[pa.Table]:
        begin = int(np.searchsorted(self._group_firsts, first, side="right")) - 1
        end = int(np.searchsorted(self._group_firsts, last, side="left"))
        row = int(self._group_firsts[begin])
        with self._opened() as file:
            columns = [*self._used, *self._leaves]
            batches = file.iter_batches(self._batch_rows, range(begin, end), columns=columns, use_threads=False)
            for batch in batches:  # from the beginning of the row group: Parquet has no random access inside it
                start, stop = max(first - row, 0), min(last - row, len(batch))
                if start < stop:
                    yield pa.Table.from_batches([batch.slice(start, stop - start)])
                row += len(batch)
                if row >= last:
                    return
            if row < last:
                raise OSError("it has fewer rows than its footer says")

    @contextmanager
    def _opened(self) -> Iterator[pq.ParquetFile]:
        options = {"metadata": self._metadata, "buffer_size": 2**20}
        with named_errors(self.path), _arrow_errors(), pq.ParquetFile(self.path, **options) as file:
            yield file

    @functools.cached_property
    def _metadata(self) -> pq.FileMetaData:
        """The whole footer, read once by each process that reads records: it is as long as the file has row groups."""
        with named_errors(self.path), _arrow_errors():
            return pq.read_metadata(self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_metadata"}


class Footer(NamedTuple):
    """What a Parquet file's footer says. names: of the columns; num_rows: of each row group; sizes: for each row group,
    leaf -> bytes before compression. A leaf is a column, or a part of it that is stored by itself, `column.part`."""

    names: list[str]
    num_rows: list[int]
    sizes: list[dict[str, int]]


class Footers:
    """The footers of Parquet files, which a process of its own (`guard`) reads once the first is asked for, in their
    order and up to the first that it cannot read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._reading = threading.Lock()
        self._answers: list[Footer | OSError | MemoryError] | None = None

    def of(self, path: str) -> Footer:
        """Raises OSError, or MemoryError, if this or one before it cannot be read."""
        with self._reading:
            if self._answers is None:
                self._answers = _footers([*self._numbers])
        answer = self._answers[min(self._numbers[path], len(self._answers) - 1)]
        if isinstance(answer, Exception):
            raise answer
        if min(answer.num_rows, default=0) < 0 or sum(answer.num_rows) > _MAX_ROWS_OF_FILE:
            raise OSError(f"its footer says that it has {sum(answer.num_rows):,} rows")
        return answer


def _footers(paths: list[str]) -> list[Footer | OSError | MemoryError]:
    """The footers of files, up to the first error, which is the last of the list."""
    answers: list[Footer | OSError | MemoryError] = []
    reading, writing = Pipe(duplex=False)
    try:
        with reading:
            with writing:
                process = guard.start(_send_footers, writing.fileno(), paths, pass_fds=[writing.fileno()])
            with process:
                for _ in paths:
                    answer = guard.receive(reading, lambda: _end(process))
                    if isinstance(answer, Exception):
                        raise answer
                    answers.append(answer)
    except guard.Died as died:
        answers.append(OSError(f"the process that reads its footer {guard.describe_end(died.exitcode)}"))
    except (OSError, MemoryError) as error:
        answers.append(error)
    return answers


def _end(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    return process.wait()


def _send_footers(pipe: int, paths: Sequence[str]) -> None:
    """The process that reads footers. pipe: descriptor for its answers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with Connection(pipe, readable=False) as answers:
        for path in paths:
            try:
                regular_file(path)  # a pipe would never end
                answers.send(_read_footer(path))
            except (OSError, MemoryError) as error:
                answers.send(error)
                return


def _read_footer(path: str) -> Footer:
    with _arrow_errors(), pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        return Footer(file.schema_arrow.names, [group.num_rows for group in groups], [*map(_sizes, groups)])


def _sizes(group: pq.RowGroupMetaData) -> dict[str, int]:
    """Leaf -> its bytes in a row group before compression."""
    sizes = Counter[str]()
    for chunk in map(group.column, range(group.num_columns)):
        sizes[chunk.path_in_schema] += chunk.total_uncompressed_size
    return dict(sizes)


def _size_of(columns: list[str], sizes: dict[str, int]) -> int:
    return sum(size for leaf, size in sizes.items() if leaf.split(".")[0] in columns)


def _smallest_leaf(column: str, sizes: list[dict[str, int]]) -> str:
    """The leaf of a column that is read fastest: each shows which rows have a value, the path of an image as well as
    its bytes."""
    total = sum(map(Counter, sizes), Counter[str]())
    return min((leaf for leaf in total if leaf.split(".")[0] == column), key=lambda leaf: total[leaf], default=column)


class DatasetFile(TableFile):
    """One split of a data set, read in place from Arrow files that the `datasets` library has mapped into memory.

    Args:
        path: name for messages.
        dataset: a `datasets.Dataset`.
        selection: which rows of its files it has, if not all.
        parse, columns, cache: as of `JsonlFile`.
    """

    def __init__(
        self,
        path: str,
        dataset: "Dataset",
        selection: str = "",
        parse: Parse = parse_document,
        columns: Mapping[str, str] | None = None,
        cache: Path | None = None,
    ):
        parts = [file["filename"] for file in dataset.cache_files]
        if dataset._indices is not None or (len(dataset) and not parts):  # its files do not say which rows it has
            raise ValueError(f"{quoted_path(path)} has its rows, or their order, in memory; save it with save_to_disk")
        super().__init__(path, parse, columns or {}, parts)
        used = self._used_columns(dataset.column_names)
        self._dataset = dataset.select_columns([*used, *self._seen]).with_format("arrow")
        table = dataset.select_columns(used).data
        self.num_bytes = table.nbytes * len(dataset) // max(1, table.num_rows)
        self.block_firsts = np.append(_block_firsts(0, len(dataset), self.num_bytes), np.int64(len(dataset)))
        self._identify(cache, selection)

    def _tables(self, first: int, last: int) -> Iterator[pa.Table]:
        for start in range(first, last, _MAX_ROWS):
            yield self._dataset[start : min(start + _MAX_ROWS, last)]


@contextmanager
def _arrow_errors() -> Iterator[None]:
    """Turns pyarrow's errors for a damaged file into OSErrors."""
    try:
        yield
    except MemoryError:  # one of pyarrow's, too
        raise
    except (pa.ArrowException, UnicodeDecodeError, OverflowError) as error:
        raise OSError(one_line(error)) from None


def _block_firsts(first: int, num_rows: int, num_bytes: int) -> np.ndarray:
    """int64, the first row of each block of num_rows rows from `first`."""
    return np.arange(first, first + num_rows, _num_rows(num_rows, num_bytes), dtype=np.int64)


def _num_rows(num_rows: int, num_bytes: int) -> int:
    """How many of num_rows rows are read together."""
    return min(max(1, BLOCK_BYTES * num_rows // max(1, num_bytes)), _MAX_ROWS)


def _is_there(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """True for each row with a value that is not empty, else null. JSON text stays: it may say that there is none."""
    if isinstance(column.type, pa.JsonType):
        return column
    is_there = column if pa.types.is_boolean(column.type) else column.is_valid()
    for length in (lambda text: pc.binary_length(text.cast(pa.large_binary())), pc.list_value_length):
        with suppress(pa.ArrowNotImplementedError, pa.ArrowInvalid):  # it is no text, or no list
            is_there = pc.greater(length(column), 0)
    return pc.if_else(is_there, True, None)


def _objects(table: pa.Table) -> list[Any]:
    """The rows as JSON values, or ValueErrors."""
    if table.nbytes <= MAX_RECORD_BYTES:
        try:
            return _values_of(table)
        except _UNREADABLE:
            pass  # one of the rows
    return [_object(table.slice(number, 1)) for number in range(len(table))]


def _object(row: pa.Table) -> Any:
    if row.nbytes > MAX_RECORD_BYTES:
        return ValueError(f"the row has {row.nbytes:,} bytes, more than {MAX_RECORD_BYTES:,}; split the record")
    try:
        return _values_of(row)[0]
    except UnicodeDecodeError:
        return ValueError("a text is not UTF-8; write the file again")
    except _UNREADABLE as error:
        return ValueError(f"the row cannot be read ({one_line(error)}); write it again")


def _values_of(table: pa.Table) -> list[Any]:
    return [_fields(values, table.schema) for values in table.to_pylist(maps_as_pydicts="strict")]


def _plain(value: Any, kind: pa.DataType) -> Any:
    """The value that JSON would have: objects without the keys that have no value, JSON text as what it says."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return _fields(value, kind)
    if isinstance(kind, pa.MapType):
        return {key: _plain(item, kind.item_type) for key, item in value.items()}
    if isinstance(kind, _LISTS):
        return [_plain(item, kind.value_type) for item in value]
    if isinstance(kind, pa.JsonType):
        value = json_value(value.encode())
        if isinstance(value, ValueError):
            raise value
    return value


def _fields(value: dict[str, Any], kind: Iterable[pa.Field]) -> dict[str, Any]:
    return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
