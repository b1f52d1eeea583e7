"""Records that a program has in memory, as if they were a file."""

import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torchtitan_magi.data.records.record_file import Parse, RecordFile, sha256
from torchtitan_magi.wording import one_line


class RecordList(RecordFile):
    """The JSON values of a list, see `RecordFile`. name: of the list, for messages."""

    def __init__(self, name: str, values: Sequence[Any], parse: Parse) -> None:
        super().__init__(name, parse, {}, [])
        self.values = values
        self.block_firsts = np.array([0, len(values)])
        try:
            content = json.dumps(values, default=repr).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{name} cannot be written as JSON ({one_line(error)}); give plain values") from None
        self.num_bytes, self.crc32, self._sha256 = len(content), zlib.crc32(content), sha256(content)

    def where(self, index: int) -> str:
        """`name[index]`, which counts from 0."""
        return f"{self.path}[{index}]"

    def _values(self, first: int, last: int) -> Iterator[Any]:
        return iter(self.values[first:last])

    def _digest(self, block: int) -> str:
        return self._sha256
