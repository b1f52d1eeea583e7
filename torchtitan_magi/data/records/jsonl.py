"""JSONL files: random access by byte offset, an index that is kept in the cache folder, and a check of every line."""

import hashlib
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from torchtitan_magi.data.records.formats import parse_document
from torchtitan_magi.data.records.kept_files import kept
from torchtitan_magi.data.records.mapping import mapped
from torchtitan_magi.data.records.record_file import MAX_RECORD_BYTES, Parse, RecordFile, named_errors, size_of_block
from torchtitan_magi.wording import quoted, quoted_path, shown

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 2**20
_IS_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))
_NEWLINE = ord("\n")
_DIGEST_WORDS = 4  # int64


class JsonlFile(RecordFile):
    """The records of one JSONL file; blank lines are skipped.

    The constructor reads the file for its index, unless that is kept from before. The index is 8 bytes per record, and
    mapped into memory when it is kept.

    Args:
        path: JSONL file, compressed if it ends in `.gz` or `.zst`.
        parse: see `RecordFile`.
        columns: see `RecordFile`.
        cache: folder that keeps the index, and the content of a compressed file; None: the index is made each time,
            and a compressed file is refused. What is damaged there is made again.
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
        self._cache, self._index = cache, _index_of(cache, name)
        self.check_unchanged()
        self.block_firsts = self._index.block_firsts
        self.num_bytes, self.crc32 = self._index.num_bytes, self._index.crc32

    def read(self, block: int) -> list[dict[str, Any] | ValueError]:
        """The records of a block, whose bytes are compared with what was indexed."""
        first, last = self.block_firsts[block : block + 2].tolist()
        self.check_unchanged()
        if last == first + 1 and self._too_long(first):
            return list(self.records(first, last))
        raw = self._checked(block)
        if raw is None and _is_compressed(self.path):
            logger.warning("%s is damaged and is made again", shown(self._content))
            self._forget_index()
            self._index = _index_of(self._cache, self.path)
            raw = self._checked(block)
        if raw is None:  # written twice within one tick of the file system's clock
            self._forget_index()
            raise self._changed("was rewritten since it was opened")
        offsets = self._index.offsets[first : last + 1] - self._index.offsets[first]
        return [
            self._parsed(json_value(raw[start:stop]))
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]

    def where(self, index: int) -> str:
        """`path:line` of a record, for messages; reads the file up to that line."""
        self.check_unchanged()
        with named_errors(self.path), open(self._content, "rb") as file:
            ends = sum(chunk.count(b"\n") for chunk in _read_range(file, 0, int(self._index.offsets[index])))
        return f"{shown(self.path)}:{1 + ends}"

    @property
    def _content(self) -> Path | str:
        """The file that holds the lines."""
        return self._index.path if self._index.path and _is_compressed(self.path) else self.path

    def _checked(self, block: int) -> bytes | None:
        """The bytes of a block; None if they are not those of the index."""
        with named_errors(self.path), suppress(FileNotFoundError), open(self._content, "rb") as file:
            raw = self._raw(file, *self.block_firsts[block : block + 2].tolist())
            return raw if hashlib.sha256(raw).hexdigest() == self._digest(block) else None
        return None

    def _forget_index(self) -> None:
        with named_errors(self.path):
            if self._index.path:
                self._index.path.unlink(missing_ok=True)

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
    """The index of a JSONL file.

    offsets: int64 [records + 1], first byte of each line that is not blank, and the size of the file; block_firsts: see
    `RecordFile`; digests: int64 [blocks, _DIGEST_WORDS], SHA-256 of each block; crc32: checksum of the file; path:
    where the index is kept.
    """

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

    def append_to(self, path: Path) -> None:
        """Writes the index to the end of a file, which may hold the content."""
        sizes = [len(self.offsets), len(self.block_firsts), self.crc32]
        words = np.concatenate([self.offsets, self.block_firsts, self.digests.ravel(), np.array(sizes, np.int64)])
        with open(path, "ab") as file:
            file.write(bytes(-file.tell() % 8))
            file.write(np.append(words, np.int64(zlib.crc32(words.data))).data)  # tofile says nothing of a full disk

    @classmethod
    def load(cls, path: Path) -> "_Index | None":
        """The index at the end of a file, mapped into memory; None if it is damaged, or the file has another size."""
        content = mapped(path)
        if len(content) < 32 or len(content) % 8:
            return None
        words = content.view(np.int64)
        num_offsets, num_firsts, crc32, checksum = words[-4:].tolist()
        first = len(words) - 4 - num_offsets - num_firsts - _DIGEST_WORDS * (num_firsts - 1)
        if min(first, num_offsets - 1, num_firsts - 1) < 0 or zlib.crc32(words[first:-1].data) != checksum:
            return None
        offsets, block_firsts, digests = np.split(words[first:-4], [num_offsets, num_offsets + num_firsts])
        if first not in (0, -(-offsets[-1] // 8)):
            return None
        return cls(offsets, block_firsts, digests.reshape(-1, _DIGEST_WORDS), crc32, path)


def _is_compressed(path: str) -> bool:
    return path.endswith((".gz", ".zst"))


def _index_of(cache: Path | None, path: str) -> _Index:
    """The index of a file; of a compressed one, behind its content in the cache folder."""
    if cache is None and _is_compressed(path):
        raise ValueError(
            f"records file {quoted_path(path)} is compressed; name a cache folder for its content, or unpack it"
        )

    def make(temporary: Path) -> None:
        content: Path | str = path
        if _is_compressed(path):
            content = temporary
            with open(temporary, "wb") as file:
                file.writelines(_chunks(path))
        with named_errors(path):
            index = _make_index(content)
        index.append_to(temporary)

    with named_errors(path):
        if cache is None:
            return _make_index(path)
        return kept(cache, path, "content" if _is_compressed(path) else "index", make, _Index.load)


def _chunks(path: str) -> Iterator[memoryview]:
    """The content of a compressed file; each chunk is valid until the next.

    Arrow's `read` would never free the bytes of a read that fails.
    """
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with named_errors(path), pa.input_stream(path) as file:
        while size := file.readinto(buffer):
            yield buffer[:size]


def _make_index(path: Path | str) -> _Index:
    """Reads the file once: the digest of a block is made as soon as its last line is found, while it is in memory."""
    lines, firsts, digests, crc32 = [], [0], [], 0
    pending = np.zeros(0, np.int64)  # lines of the block that has not ended
    with open(path, "rb") as file:
        for begins, crc32, is_end in _scan(file):  # noqa: B007 (the last is used)
            lines.append(begins)
            pending = np.append(pending, begins)
            while len(pending) > 1 and ((size := size_of_block(pending)) < len(pending) - 1 or is_end):
                digests.append(_digest_of_range(file, *pending[[0, size]].tolist()))
                firsts.append(firsts[-1] + size)
                pending = pending[size:]
    words = np.frombuffer(b"".join(digests), dtype=np.int64).reshape(-1, _DIGEST_WORDS)
    return _Index(np.concatenate(lines), np.array(firsts, np.int64), words, crc32)


def _scan(file: BinaryIO) -> Iterator[tuple[np.ndarray, int, bool]]:
    """Chunk by chunk: int64 [n], first byte of each line that is not blank; CRC-32 of the file so far; False. At the
    end: the size of the file, its CRC-32, True."""
    begins_line, size, crc32 = True, 0, 0
    while chunk := _read_at(file, size):
        crc32 = zlib.crc32(chunk, crc32)
        data = np.frombuffer(chunk, dtype=np.uint8)
        begins = np.flatnonzero(data == _NEWLINE) + 1
        if begins_line:
            begins = np.append(0, begins)
        begins_line = len(begins) > 0 and int(begins[-1]) == len(data)
        begins = begins[: len(begins) - begins_line]
        begins = begins[data[begins] != _NEWLINE]
        spaced = begins[_IS_SPACE[data[begins]]]
        blank = [begin for begin in spaced.tolist() if _is_blank_line(file, size + begin)]
        begins = np.setdiff1d(begins, blank, assume_unique=True) if blank else begins
        yield begins.astype(np.int64) + size, crc32, False
        size += len(data)
    yield np.array([size], np.int64), crc32, True


def _read_at(file: BinaryIO, start: int) -> bytes:
    file.seek(start)
    return file.read(_CHUNK_BYTES)


def _digest_of_range(file: BinaryIO, start: int, stop: int) -> bytes:
    digest = hashlib.sha256()
    for chunk in _read_range(file, start, stop):
        digest.update(chunk)
    return digest.digest()


def _read_range(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """The bytes start:stop of a file in chunks; fewer where it ends before."""
    file.seek(start)
    while chunk := file.read(min(stop - start, _CHUNK_BYTES)):
        yield chunk
        start += len(chunk)


def _is_blank_line(file: BinaryIO, offset: int) -> bool:
    file.seek(offset)
    while chunk := file.readline(_CHUNK_BYTES):
        if not chunk.isspace():
            return False
        if chunk.endswith(b"\n"):
            break
    return True


class _SpokenError(ValueError):
    """An error that has its message (`what; remedy`) already."""


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
        byte = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1}"  # no mark in it
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
