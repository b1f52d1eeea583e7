"""JSONL files: random access by byte offset, an index that is kept in the cache folder, and a check of every line."""

import hashlib
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from torchtitan_magi.data.formats import parse_document
from torchtitan_magi.data.kept_files import kept_file
from torchtitan_magi.data.records import (
    MAX_RECORD_BYTES,
    Parse,
    RecordFile,
    blocks_of,
    named_errors,
    regular_file,
)
from torchtitan_magi.wording import quoted, quoted_path

_CHUNK_BYTES = 2**20
_IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))
_NEWLINE = ord("\n")
_DIGEST_WORDS = 4  # int64
_COMPRESSED = (".gz", ".zst")


class JsonlFile(RecordFile):
    """The records of one JSONL file; blank lines are skipped.

    The constructor reads the file for its index, unless that is kept from before. The index is 8 bytes per record, and
    mapped into memory when it is kept.

    Args:
        path: JSONL file, compressed if it ends in `.gz` or `.zst`.
        parse, columns: see `RecordFile`.
        cache: folder that keeps the index, and the content of a compressed file; None: the index is made each time,
            and a compressed file is refused.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        parse: Parse = parse_document,
        columns: Mapping[str, str] | None = None,
        cache: Path | None = None,
    ):
        name = os.fspath(path)
        super().__init__(name, parse, columns or {}, [name])
        self._content = name
        if name.endswith(_COMPRESSED):
            self._content = str(_decompressed(cache, name))
            self._parts[self._content] = regular_file(self._content)
        with named_errors(name):
            self._index = _make_index(self._content) if cache is None else _kept_index(cache, self._content)
        self.check_unchanged()
        self.block_firsts = self._index.block_firsts
        self.num_bytes, self.crc32 = self._index.num_bytes, self._index.crc32

    def read(self, block: int) -> list[dict[str, Any] | ValueError]:
        first, last = self.block_firsts[block : block + 2].tolist()
        self.check_unchanged()
        if last == first + 1 and self._too_long(first):
            return list(self.records(first, last))
        with named_errors(self.path), open(self._content, "rb") as file:
            raw = self._raw(file, first, last)
        if hashlib.sha256(raw).hexdigest() != self._digest(block):
            if self._index.path:  # written twice within one tick of the file system's clock
                self._index.path.unlink(missing_ok=True)
            raise self._changed("was rewritten since it was opened")
        offsets = self._index.offsets[first : last + 1] - self._index.offsets[first]
        return [
            self._parsed(json_value(raw[start:stop]))
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]

    def where(self, index: int) -> str:
        """`path:line` of a record, for messages; reads the file up to that line."""
        self.check_unchanged()
        number, left = 1, int(self._index.offsets[index])
        with named_errors(self.path), open(self._content, "rb") as file:
            while chunk := file.read(min(left, _CHUNK_BYTES)):
                number += chunk.count(b"\n")
                left -= len(chunk)
        return f"{self.path}:{number}"

    def _values(self, first: int, last: int) -> Iterator[Any]:
        with open(self._content, "rb") as file:
            for index in range(first, last):
                if self._too_long(index):
                    size = int(self._index.offsets[index + 1] - self._index.offsets[index])
                    yield ValueError(f"the line has {size:,} bytes, more than {MAX_RECORD_BYTES:,}; split the record")
                else:
                    yield json_value(self._raw(file, index, index + 1))

    def _raw(self, file: BinaryIO, first: int, last: int) -> bytes:
        start, stop = self._index.offsets[[first, last]].tolist()
        if file.tell() != start:
            file.seek(start)
        return file.read(stop - start)

    def _too_long(self, index: int) -> bool:
        return bool(self._index.offsets[index + 1] - self._index.offsets[index] > MAX_RECORD_BYTES)

    def _digest(self, block: int) -> str:
        return self._index.digests[block].tobytes().hex()


@dataclass(frozen=True)
class _Index:
    """offsets: int64 [records + 1], first byte of each line that is not blank, and the size of the file. block_firsts:
    see `RecordFile`. digests: int64 [blocks, _DIGEST_WORDS], SHA-256 of each block. crc32: checksum of the file. path:
    where the index is kept."""

    offsets: np.ndarray
    block_firsts: np.ndarray
    digests: np.ndarray
    crc32: int
    path: Path | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.path:
            return _Index.load, (self.path,)
        return _Index, (self.offsets, self.block_firsts, self.digests, self.crc32)

    @property
    def num_bytes(self) -> int:
        return int(self.offsets[-1])

    def save(self, path: Path) -> None:
        body = np.concatenate([self.offsets, self.block_firsts, self.digests.ravel()])
        head = [zlib.crc32(body.data), len(self.offsets), len(self.block_firsts), self.crc32]
        with open(path, "wb") as file:
            np.concatenate([np.array(head, dtype=np.int64), body]).tofile(file)

    @classmethod
    def load(cls, path: Path) -> "_Index | None":
        """The index, mapped into memory; None if it is damaged."""
        size = path.stat().st_size
        if size < 32 or size % 8:
            return None
        words = np.asarray(np.memmap(path, dtype=np.int64, mode="r"))
        (checksum, num_offsets, num_firsts, crc32), body = words[:4].tolist(), words[4:]
        if checksum != zlib.crc32(body.data):
            return None
        offsets, block_firsts, digests = np.split(body, [num_offsets, num_offsets + num_firsts])
        return cls(offsets, block_firsts, digests.reshape(-1, _DIGEST_WORDS), crc32, path)


def _kept_index(cache: Path, path: str) -> _Index:
    def make(temporary: Path) -> None:
        with named_errors(path):
            index = _make_index(path)
        index.save(temporary)

    kept = kept_file(cache, path, "index", make)
    index = _Index.load(kept)
    if index is None:
        kept.unlink(missing_ok=True)
        index = _Index.load(kept_file(cache, path, "index", make))
    assert index is not None
    return index


def _decompressed(cache: Path | None, path: str) -> Path:
    """The content of a compressed file, in the cache folder."""
    if cache is None:
        raise ValueError(
            f"records file {quoted_path(path)} is compressed; name a cache folder for its content, or unpack it"
        )

    def make(temporary: Path) -> None:
        with open(temporary, "wb") as file:
            file.writelines(_chunks(path))

    return kept_file(cache, path, "content", make)


def _chunks(path: str) -> Iterator[memoryview]:
    """Each is valid until the next. Arrow's `read` would never free the bytes of a read that fails."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with named_errors(path), pa.input_stream(path) as file:
        while size := file.readinto(buffer):
            yield buffer[:size]


def _make_index(path: str) -> _Index:
    with open(path, "rb") as file:
        offsets, crc32 = _scan(file)
        block_firsts = blocks_of(offsets)
        ends = offsets[block_firsts].tolist()
        digests = [_digest_of_range(file, start, stop) for start, stop in pairwise(ends)]
    words = np.frombuffer(b"".join(digests), dtype=np.int64).reshape(-1, _DIGEST_WORDS)
    return _Index(offsets, block_firsts, words, crc32)


def _scan(file: BinaryIO) -> tuple[np.ndarray, int]:
    """int64 [records + 1]: first byte of each line that is not blank, and the size of the file; and its CRC-32."""
    found, spaced, begins_line, size, crc32 = [], [], True, 0, 0
    while chunk := file.read(_CHUNK_BYTES):
        crc32 = zlib.crc32(chunk, crc32)
        data = np.frombuffer(chunk, dtype=np.uint8)
        begins = np.flatnonzero(data == _NEWLINE) + 1
        if begins_line:
            begins = np.append(0, begins)
        begins_line = len(begins) > 0 and int(begins[-1]) == len(data)
        begins = begins[: len(begins) - begins_line]
        begins = begins[data[begins] != _NEWLINE]
        found.append(begins + size)
        spaced.append(begins[_IS_SPACE[data[begins]]] + size)  # may be blank
        size += len(data)
    offsets = np.concatenate([*found, [size]]).astype(np.int64)
    blank = [offset for offsets in spaced for offset in offsets.tolist() if _is_blank_line(file, offset)]
    return np.setdiff1d(offsets, blank, assume_unique=True) if blank else offsets, crc32


def _digest_of_range(file: BinaryIO, start: int, stop: int) -> bytes:
    file.seek(start)
    digest, left = hashlib.sha256(), stop - start
    while chunk := file.read(min(left, _CHUNK_BYTES)):
        digest.update(chunk)
        left -= len(chunk)
    return digest.digest()


def _is_blank_line(file: BinaryIO, offset: int) -> bool:
    file.seek(offset)
    while chunk := file.readline(_CHUNK_BYTES):
        if not chunk.isspace():
            return False
        if chunk.endswith(b"\n"):
            break
    return True


class _SpokenError(ValueError):
    """Has its message (`what; remedy`) already."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _SpokenError(f"the key {quoted(twice)} comes twice in one object; leave it once")
    return value


def json_value(line: bytes) -> Any:
    """The value of a line of JSON, or a ValueError (`what; remedy`)."""
    try:
        value = json.loads(line.rstrip().decode("utf-8-sig"), object_pairs_hook=_object)  # a byte order mark is let in
        if b"\\u" in line:
            _check_surrogates(value)
    except UnicodeDecodeError as error:
        byte = f"byte 0x{line[error.start]:02x} at column {error.start + 1}"
        return ValueError(f"{byte} is not UTF-8; save the file as UTF-8")
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON ({error.msg}, column {error.colno}); write one JSON object per line")
    except _SpokenError as error:
        return error
    except (ValueError, RecursionError):
        return ValueError("the JSON is nested too deeply or has a number of too many digits; remove the line")
    return value


def _check_surrogates(value: Any) -> None:
    """Raises for an escape such as \\ud83d without its other half: valid JSON, but not valid text."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise _SpokenError(f"the escape {escape} is half of a surrogate pair; write the character itself") from None
