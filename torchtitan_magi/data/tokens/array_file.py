"""Files of arrays that are written whole and mapped into memory.

A file is a head, the arrays of an index one after the other, and one array of content. The head has a checksum of
itself and of the index. The index has checksums of what is read together of the content, which its readers compare: who
reads little of it reads no more than that.
"""

import json
import math
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_magi.data.records.mapping import mapped

_FIXED = struct.Struct("<8sII")  # magic, bytes of the head, checksum of head and index
_ALIGNMENT = 64


class Damaged(Exception):
    """A file that is not as it was written."""


@dataclass(frozen=True)
class Layout:
    """A kind of file. magic: 8 bytes; index: name -> dtype; content: name of an int32 array of one dimension."""

    magic: bytes
    index: Mapping[str, type]
    content: str

    def write(self, path: str, head: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Writes the file under another name and renames it: it is there as a whole or not at all. Raises OSError.

        head: what JSON can hold, besides the arrays.
        """
        index = b"".join(arrays[name].astype(kind, copy=False).tobytes() for name, kind in self.index.items())
        shapes = {name: arrays[name].shape for name in self.index}
        content = arrays[self.content].astype(np.int32, copy=False).tobytes()
        text = json.dumps(head | {self.content: len(content) // 4, "shapes": shapes}).encode()
        text += b" " * (-(_FIXED.size + len(text)) % _ALIGNMENT)
        checksum = zlib.crc32(index, zlib.crc32(text))
        handle, unfinished = tempfile.mkstemp(".unfinished", dir=os.path.dirname(path))
        try:
            with os.fdopen(handle, "wb") as file:
                for part in (_FIXED.pack(self.magic, len(text), checksum), text, index, content):
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(unfinished, 0o644)  # the folder may be shared
            os.replace(unfinished, path)
        except BaseException:
            os.unlink(unfinished)
            raise

    def open(self, path: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Maps a file: head and arrays. Raises FileNotFoundError, OSError, and Damaged if head, index or size is not as
        it was written."""
        data = mapped(path)
        if len(data) < _FIXED.size:
            raise Damaged
        magic, size, checksum = _FIXED.unpack_from(data.data)
        begin = _FIXED.size + size
        if magic != self.magic or len(data) < begin:
            raise Damaged
        try:
            head = json.loads(data[_FIXED.size : begin].tobytes())
            place, arrays = begin, {}
            for name, kind in self.index.items():
                shape = head["shapes"][name]
                arrays[name] = np.frombuffer(data, kind, math.prod(shape), place).reshape(shape)
                place += arrays[name].nbytes
            content = arrays[self.content] = np.frombuffer(data, np.int32, head[self.content], place)
        except (ValueError, LookupError, TypeError):
            raise Damaged from None
        if zlib.crc32(data[_FIXED.size : place].data) != checksum or place + content.nbytes != len(data):
            raise Damaged
        return head, arrays
