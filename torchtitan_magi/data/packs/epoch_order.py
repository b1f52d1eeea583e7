"""The order in which an epoch reads its records: blocks, cut into windows.

Each source is passed over without end, each pass in its own seeded order of the blocks and of the records in each. An
epoch takes the next `weight` passes; at its ends it may take a part of a block. The parts of all sources are permuted
and cut into windows, whose records are packed together. The first windows of an epoch are smaller, so that training
begins sooner. All this depends on the data and the options, never on the machine.
"""

from dataclasses import dataclass

import numpy as np

from torchtitan_magi.data.records import record_file
from torchtitan_magi.data.records.corpus import Corpus, Source

WINDOW_BLOCKS = 32
_FIRST_WINDOW = 1 / 8  # size of an epoch's first window; each is twice the one before it, up to 1


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch.

    parts: int64 [n, 4], rows (block, pass over its source, first, last): records first:last of the block's order in
    that pass; windows: int64 [w + 1], first part of each window, and n.
    """

    corpus: Corpus
    seed: int | None
    parts: np.ndarray
    windows: np.ndarray

    @classmethod
    def of(
        cls, corpus: Corpus, weights: list[float], epoch: int, seed: int | None, window_blocks: int = WINDOW_BLOCKS
    ) -> "EpochOrder":
        """The order of an epoch, counted from 0.

        Args:
            weights: of the sources, passes per epoch.
            seed: None for the order of the files.
            window_blocks: size of a window in blocks of BLOCK_BYTES.
        """
        sources = zip(corpus.sources, weights, strict=True)
        parts = np.concatenate([_picks(corpus, source, weight, epoch, seed) for source, weight in sources])
        if seed is not None:
            parts = np.random.default_rng([seed, epoch]).permutation(parts)
        block, _, first, last = parts.T
        sizes = _sizes_of_blocks(corpus)[block] * (last - first) / np.diff(corpus.block_firsts)[block]
        return cls(corpus, seed, parts, _cut(np.cumsum(sizes), window_blocks * record_file.BLOCK_BYTES))

    @property
    def num_windows(self) -> int:
        """Number of windows."""
        return len(self.windows) - 1

    def blocks_from(self, window: int) -> list[int]:
        """The blocks that this window and those after it need, each once, in their order."""
        return list(dict.fromkeys(self.parts[self.windows[window] :, 0].tolist()))

    def num_records(self, window: int) -> int:
        """Number of records of a window."""
        first, last = self._parts_of(window)[:, 2:].sum(axis=0).tolist()
        return last - first

    def records(self, window: int) -> list[tuple[int, np.ndarray]]:
        """(block, indices of records in it) of each part of a window, in the order in which they are read."""
        found = []
        for block, number, first, last in self._parts_of(window).tolist():
            indices = np.arange(first, last)
            if self.seed is not None:
                size = int(self.corpus.block_firsts[block + 1] - self.corpus.block_firsts[block])
                indices = np.random.default_rng([self.seed, number, block]).permutation(size)[first:last]
            found.append((block, indices))
        return found

    def _parts_of(self, window: int) -> np.ndarray:
        return self.parts[slice(*self.windows[window : window + 2])]


def _sizes_of_blocks(corpus: Corpus) -> np.ndarray:
    """Bytes of each block: an estimate, from sizes of files alone."""
    sizes = [min(record_file.BLOCK_BYTES, file.num_bytes / max(1, file.num_blocks)) for file in corpus.files]
    return np.repeat(sizes, [file.num_blocks for file in corpus.files])


def _picks(corpus: Corpus, source: Source, weight: float, epoch: int, seed: int | None) -> np.ndarray:
    """Rows as in `EpochOrder.parts`, of one source."""
    size, blocks = len(source), np.arange(source.first_block, source.first_block + source.num_blocks)
    begin, end = (round(number * weight * size) for number in (epoch, epoch + 1))
    rows = [np.zeros((0, 4), np.int64)]
    for number in range(begin // size, -(-end // size)):
        order = blocks
        if seed is not None:
            order = np.random.default_rng([seed, source.first, number]).permutation(blocks)
        ends = number * size + np.cumsum(np.diff(corpus.block_firsts)[order])
        starts = np.append(number * size, ends[:-1])
        first, last = np.maximum(begin, starts) - starts, np.minimum(end, ends) - starts
        part = np.stack([order, np.full(len(order), number), first, last], axis=1)
        rows.append(part[first < last])
    return np.concatenate(rows)


def _cut(ends: np.ndarray, size: int) -> np.ndarray:
    """First part of each window of at most `size` bytes or one part. ends: bytes up to the end of each part."""
    firsts, target = [0], _FIRST_WINDOW * size
    while firsts[-1] < len(ends):
        first = firsts[-1]
        begin = ends[first - 1] if first else 0
        firsts.append(max(first + 1, int(np.searchsorted(ends, begin + target, side="right"))))
        target = min(size, 2 * target)
    return np.array(firsts)
