"""Training records in a JSONL file: random access by byte offset, and a check of every line."""

import json
import os
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from torchtitan_magi.data.formats import parse_document

Parse = Callable[[Any], dict[str, Any]]

MAX_RECORD_BYTES = 16 * 2**20  # a longer line is malformed and never read into memory
_CHUNK_BYTES = 2**20
_IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))
_NEWLINE = ord("\n")


class RecordFile:
    """The records of one JSONL file. Only an int64 offset per record stays in memory; blank lines are skipped.

    The constructor reads the file once, for the offsets and a checksum. Indexing parses one line; `check` parses all.

    Args:
        path: JSONL file.
        parse: the JSON value of a line -> the record; a function of `formats`.

    Attributes:
        num_bytes: size of the file.
        crc32: checksum of its bytes.

    Raises ValueError for a file that cannot be read and, when indexed, for a malformed line (`what; remedy`).
    """

    def __init__(self, path: str | os.PathLike[str], parse: Parse = parse_document):
        self.path, self.parse = os.fspath(path), parse
        self.num_bytes = self.crc32 = 0
        try:
            self._offsets = self._index()
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot read records file {self.path!r}: {reason}; check the path") from None

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        with open(self.path, "rb") as file:  # opened each time: forked workers would share a file position
            return self._read(file, index)

    def _read(self, file: BinaryIO, index: int) -> dict[str, Any]:
        start, stop = self._offsets[index : index + 2].tolist()
        if stop - start > MAX_RECORD_BYTES:
            raise ValueError(f"the line has {stop - start:,} bytes, more than {MAX_RECORD_BYTES:,}; split the record")
        if file.tell() != start:
            file.seek(start)
        return parse_line(file.read(stop - start), self.parse)

    def where(self, index: int) -> str:
        """`path:line` of a record, for messages; reads the file up to that line."""
        number, left = 1, int(self._offsets[index])
        with open(self.path, "rb") as file:
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.path}:{number}"

    def check(self, first: int = 0, last: int | None = None) -> None:
        """Parses records[first:last]. Raises ValueError (`path:line: what; remedy`) for the first malformed one."""
        with open(self.path, "rb") as file:
            for index in range(first, len(self) if last is None else last):
                try:
                    self._read(file, index)
                except ValueError as error:
                    raise ValueError(f"{self.where(index)}: {error}") from None

    def _index(self) -> np.ndarray:
        """int64 [records + 1]: first byte of each line that is not blank, and the size of the file."""
        found, spaced, begins_line = [], [], True
        with open(self.path, "rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                self.crc32 = zlib.crc32(chunk, self.crc32)
                data = np.frombuffer(chunk, dtype=np.uint8)
                begins = np.flatnonzero(data == _NEWLINE) + 1
                if begins_line:
                    begins = np.append(0, begins)
                begins_line = len(begins) > 0 and int(begins[-1]) == len(data)
                begins = begins[: len(begins) - begins_line]
                begins = begins[data[begins] != _NEWLINE]
                found.append(begins + self.num_bytes)
                spaced.append(begins[_IS_SPACE[data[begins]]] + self.num_bytes)  # may be blank
                self.num_bytes += len(data)
            offsets = np.concatenate([*found, [self.num_bytes]]).astype(np.int64)
            blank = [offset for offsets in spaced for offset in offsets.tolist() if _is_blank_line(file, offset)]
        return np.setdiff1d(offsets, blank)


def _is_blank_line(file: BinaryIO, offset: int) -> bool:
    file.seek(offset)
    while chunk := file.readline(_CHUNK_BYTES):
        if not chunk.isspace():
            return False
        if chunk.endswith(b"\n"):
            break
    return True


def parse_line(line: bytes, parse: Parse) -> dict[str, Any]:
    """The record on one line of JSON. Raises ValueError (`what; remedy`) when it is malformed."""
    try:
        record = json.loads(line.rstrip().decode("utf-8-sig"))  # a byte order mark is accepted
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        raise ValueError(f"{byte} is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno}); write one JSON object per line") from None
    except (ValueError, RecursionError):
        raise ValueError("the JSON is nested too deeply or has a number of too many digits; remove the line") from None
    if b"\\u" in line:
        _check_surrogates(record)
    return parse(record)


def _check_surrogates(record: Any) -> None:
    """Raises ValueError for an escape such as \\ud83d without its other half: valid JSON, but not valid text."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"the escape {escape} is half of a surrogate pair; write the character itself") from None
