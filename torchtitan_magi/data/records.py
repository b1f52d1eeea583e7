"""Training records in a JSONL file: checked once, line by line, then read at random by byte offset.

A record is `{"messages": [{"role": ..., "content": ...}, ...]}` or `{"text": ...}`; other keys are ignored, other keys
of a message reach the chat template.
"""

import json
import os
from array import array
from typing import Any

import numpy as np

ROLES = ("system", "user", "assistant", "tool")


class RecordFile:
    """The records of one JSONL file. Only an int64 offset per record stays in memory; blank lines are skipped.

    Raises ValueError, in one line `path:line: what; remedy`, for a file that cannot be read or holds no record and for
    the first malformed line.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
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
            return parse_record(file.read(stop - start))

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
                        parse_record(line)
                    except ValueError as error:
                        raise ValueError(f"{self.path}:{number}: {error}") from None
                    offsets.append(offset)
                offset += len(line)
        offsets.append(offset)
        return np.array(offsets, dtype=np.int64)


def parse_record(line: bytes) -> dict[str, Any]:
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
    _check_record(record)
    if b"\\u" in line:
        _check_surrogates(record)
    return record


def _check_record(record: Any) -> None:
    if not isinstance(record, dict):
        raise ValueError(f'the line is {_kind(record)}; write an object with "messages" or "text"')
    if ("messages" in record) == ("text" in record):
        have = 'both "messages" and "text"' if "text" in record else f"only the keys {_short(sorted(record))}"
        raise ValueError(f'the record has {have}; give it either "messages" or "text"')
    if "text" in record:
        if not isinstance(record["text"], str):
            raise ValueError(f'"text" is {_kind(record["text"])}; write a string')
        if not record["text"]:
            raise ValueError('"text" is empty; remove the line')
        return
    messages = record["messages"]
    if not isinstance(messages, list):
        raise ValueError(f'"messages" is {_kind(messages)}; write a list of objects with "role" and "content"')
    if not messages:
        raise ValueError('"messages" is empty; remove the line')
    for index, message in enumerate(messages):
        _check_message(f"messages[{index}]", message)


def _check_message(name: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise ValueError(f'{name} is {_kind(message)}; write an object with "role" and "content"')
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f'{name} has no "{key}", only the keys {_short(sorted(message))}; add it')
        if not isinstance(message[key], str):
            raise ValueError(f"{name}.{key} is {_kind(message[key])}; write a string")
    if message["role"] not in ROLES:
        raise ValueError(f"{name}.role is {_short(message['role'])}; use one of {', '.join(ROLES)}")


def _check_surrogates(record: dict[str, Any]) -> None:
    """An escape such as \\ud83d without its other half is JSON, but no text that a tokenizer takes."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"the escape {escape} is half of a surrogate pair; write the character itself") from None


def _kind(value: Any) -> str:
    return "null" if value is None else f"{_short(value)} ({type(value).__name__})"


def _short(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
