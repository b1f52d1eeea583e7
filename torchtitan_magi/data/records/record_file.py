"""Files of training records: what their formats have in common."""

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from torchtitan_magi.files import regular_file
from torchtitan_magi.machine import cause, lack
from torchtitan_magi.wording import quoted_path

Parse = Callable[[Any], dict[str, Any]]
T = TypeVar("T")

FORMS = ("messages", "conversations", "completion", "completions", "output", "text")
"""Keys by which a document is recognised: it has one of them."""
KEYS = (
    *FORMS, "prompt", "instruction", "input", "chosen", "rejected", "pairs", "system", "tools", "chat_template_kwargs",
    "prompt_ids", "completion_ids", "completion_mask", "advantage", "reward", "logprobs",
)  # fmt: skip
"""All keys of a record that the parsers of `formats` and `rollout_format` know."""

BLOCK_BYTES = 4 * 2**20
MAX_RECORD_BYTES = 16 * 2**20  # a longer record is malformed and never read into memory


class RecordFile(ABC):
    """The records of one file, or of one split of a data set; safe to use from forked and spawned processes.

    A block is a range of consecutive records, of at most BLOCK_BYTES bytes of raw text or of one record. The blocks
    depend on the content alone.

    Args:
        path: name for messages.
        parse: the JSON value of a record -> the record; a function of `formats`.
        columns: key that `parse` knows -> key under which the records hold its value. If it names some of FORMS, the
            others are left out.
        parts: the files that are read, of which none may change.

    Attributes:
        block_firsts: int64 [blocks + 1], first record of each block, and the number of records.
        num_bytes, crc32: size and checksum of the content.
        unread_columns: names of the columns of a table that hold no key of a record.

    Raises ValueError (`what; remedy`, with the file's name) for a file that cannot be read or changes.
    """

    unread_columns: tuple[str, ...] = ()

    block_firsts: np.ndarray
    num_bytes: int
    crc32: int

    def __init__(self, path: str, parse: Parse, columns: Mapping[str, str], parts: list[str]):
        self.path, self.parse, self.columns = path, parse, dict(columns)
        others = set(FORMS) - set(columns) if set(FORMS) & set(columns) else set()
        self._column_of = {key: columns.get(key, key) for key in KEYS if key not in others}
        with named_errors(path):
            self._parts = {part: regular_file(part) for part in parts}

    def __len__(self) -> int:
        return int(self.block_firsts[-1])

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.block_firsts) - 1

    @property
    def beside(self) -> str:
        """The file beside which training may keep what it computes of the records."""
        return next(iter(self._parts))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One record. Raises ValueError (`what; remedy`) if it is malformed."""
        (record,) = self.records(index, index + 1)
        if isinstance(record, ValueError):
            raise record
        return record

    def records(self, first: int, last: int) -> Iterator[dict[str, Any] | ValueError]:
        """Records first:last, parsed; a malformed one is its ValueError (`what; remedy`, without a place)."""
        self.check_unchanged()
        with named_errors(self.path):
            yield from map(self._parsed, self._values(first, last))

    def read(self, block: int) -> list[dict[str, Any] | ValueError]:
        """The records of a block, as `records` gives them."""
        first, last = self.block_firsts[block : block + 2].tolist()
        return list(self.records(first, last))

    def digest(self, block: int) -> str:
        """SHA-256, hexadecimal, of the block's content and of the names of its columns."""
        digest = self._digest(block)
        return sha256(f"{digest} {sorted(self.columns.items())}".encode()) if self.columns else digest

    def check_unchanged(self) -> None:
        """Raises ValueError if a file has vanished, or another size or time of modification than when it was opened."""
        for part, (size, time) in self._parts.items():
            try:
                now = os.stat(part)
            except OSError as error:
                raise self._changed(f"cannot be read any more: {error.strerror}") from None
            if now.st_size != size:
                verb = "shrank" if now.st_size < size else "grew"
                raise self._changed(f"{verb} from {size:,} to {now.st_size:,} bytes since it was opened")
            if now.st_mtime_ns != time:
                raise self._changed("was rewritten since it was opened")

    @abstractmethod
    def where(self, index: int) -> str:
        """`path:line` or `path:row` of a record, for messages; both count from 1."""

    @abstractmethod
    def _values(self, first: int, last: int) -> Iterator[Any]:
        """The JSON values of records first:last, or ValueErrors."""

    @abstractmethod
    def _digest(self, block: int) -> str: ...

    def _parsed(self, value: Any) -> dict[str, Any] | ValueError:
        if isinstance(value, ValueError):
            return value
        if self.columns and isinstance(value, dict):
            value = self._renamed(value)
        try:
            return self.parse(value)
        except ValueError as error:
            return error
        except RecursionError:
            return ValueError("the record is nested too deeply; remove it")

    def _renamed(self, record: dict[str, Any]) -> dict[str, Any]:
        given = {key: record[column] for key, column in self._column_of.items() if column in record}
        named = {*KEYS, *self.columns.values()}
        return {key: value for key, value in record.items() if key not in named} | given

    def _changed(self, what: str) -> ValueError:
        return ValueError(
            f"records file {quoted_path(self.path)} {what}; leave it as it is during a run, and start again"
        )


def size_of_block(offsets: np.ndarray) -> int:
    """Number of records of the first block. offsets: int64 [n + 1], where each of n >= 1 records begins and the last
    ends, in bytes."""
    return max(1, int(np.searchsorted(offsets, offsets[0] + BLOCK_BYTES, side="right")) - 1)


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Turns an OSError, or a lack of memory, into a ValueError that names the file."""
    try:
        yield
    except MemoryError as error:
        needed = lack(error, f"cannot read records file {quoted_path(path)}")
        raise ValueError(f"{needed}, or write the file again if it is damaged") from None
    except OSError as error:
        what = f"cannot read records file {quoted_path(path)}"
        raise ValueError(lack(error, what) or f"{what}: {cause(error)}; check the path") from None


def attempt(function: Callable[..., T], *arguments: Any) -> T | ValueError:
    """What the function returns or the ValueError that it raises; a ValueError among the arguments is passed on."""
    for argument in arguments:
        if isinstance(argument, ValueError):
            return argument
    try:
        return function(*arguments)
    except ValueError as error:
        return error


def sha256(content: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(content).hexdigest()
