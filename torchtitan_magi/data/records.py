"""Training records in a JSONL file: checked once, line by line, then read at random by byte offset."""

import json
import os
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from torchtitan_magi.data.formats import parse_document

Parse = Callable[[Any], dict[str, Any]]


class RecordFile:
    """The records of one JSONL file. Only an int64 offset per record stays in memory; blank lines are skipped.

    parse: the JSON value of a line -> the record, a function of `formats`.

    Raises ValueError, in one line `path:line: what; remedy`, for a file that cannot be read or holds no record and for
    the first malformed line.
    """

    def __init__(self, path: str | os.PathLike[str], parse: Parse = parse_document):
        self.path, self.parse = os.fspath(path), parse
        try:
            self._offsets = self._index()
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"cannot read records file {self.path!r}: {reason}; check the path") from None
        if len(self) == 0:
            raise ValueError(f"records file {self.path!r} holds no record; write one JSON object per line")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> dict[str, Any]:
        start, stop = self._offsets[index : index + 2].tolist()
        with open(self.path, "rb") as file:  # opened anew, so that forked workers share no file position
            file.seek(start)
            return parse_line(file.read(stop - start), self.parse)

    @property
    def num_bytes(self) -> int:
        """Size of the file when it was indexed."""
        return int(self._offsets[-1])

    def where(self, index: int) -> str:
        """`path:line` of a record, for messages; reads the file up to there."""
        number, offset = 1, 0
        with open(self.path, "rb") as file:
            while offset < self._offsets[index]:
                offset += len(file.readline())
                number += 1
        return f"{self.path}:{number}"

    def _index(self) -> np.ndarray:
        """Check every line; int64 [records + 1] byte offsets, the last one the end of the file."""
        offsets, offset = array("q"), 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    try:
                        parse_line(line, self.parse)
                    except ValueError as error:
                        raise ValueError(f"{self.path}:{number}: {error}") from None
                    offsets.append(offset)
                offset += len(line)
        offsets.append(offset)
        return np.array(offsets, dtype=np.int64)


def parse_line(line: bytes, parse: Parse) -> dict[str, Any]:
    """The record on one line of JSON. Raises ValueError (`what; remedy`) when it is malformed."""
    try:
        record = json.loads(line.rstrip().decode("utf-8-sig"))  # a byte order mark is let through
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
    """An escape such as \\ud83d without its other half is JSON, but no text that a tokenizer takes."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"the escape {escape} is half of a surrogate pair; write the character itself") from None
