"""What both directions' work lists share: the mask, the words of a record, work items, their order.

A record is 12 words (int32): a work item, then a segment. A further segment of an item is the last 8 words alone.
"""

import numpy as np

from torchtitan_magi.backends.ffa.params import check_count
from torchtitan_magi.backends.ffa.segments import is_new, starts_of
from torchtitan_magi.masks.geometry import Bools, Int32Array, Int64Array

L2_SIZE = 32 << 20  # bytes of the L2 cache that one wave of heads may claim; an H200 has 50 MiB


class Field:
    """Words of a record: WorkItem, then Segment in kernels/ffa_layout.cuh.

    FIRST to FULL_END count keys in the forward and query blocks in the backward.
    """

    TILE, NUM_SEGMENTS, FIRST_SEGMENT, CHUNK = range(4)
    LAYER, COMPONENT, FIRST_KEY, END_KEY, FIRST, END, FULL_FIRST, FULL_END = range(4, 12)


# ------------------------------------------------------------------------------------------------------- work items


def as_items(tile_of_item: Int64Array, item: Int64Array, records: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Work items [num_items, 12] that hold their first segment, and all further segments [.., 8].

    Args:
        tile_of_item: int64 [num_items].
        item: item of each record, int64 [n], ascending.
        records: int32 [n, 12]; where each item has one, they become the items in place.
    """
    num_items = len(tile_of_item)
    counts = np.bincount(item, minlength=num_items)
    used = counts > 0
    if used.all() and len(item) == num_items:
        items, further = records, records[:0, Field.LAYER :]
    else:
        items = np.zeros((num_items, 12), np.int32)
        is_first = is_new(item)
        items[used], further = records.compress(is_first, 0), records.compress(~is_first, 0)[:, Field.LAYER :]
        items[:, Field.FIRST_SEGMENT] = starts_of(counts - used)
    # TILE and NUM_SEGMENTS, both words at once: the machine is little-endian.
    items.view(np.int64)[:, 0] = tile_of_item + (counts << 32)
    return items, further


def longest_first(num_blocks: Int64Array, at: Int64Array | None = None) -> Int64Array:
    """Order of work items [n]: by `at` [n], then from the most blocks to the fewest, then as they are."""
    order = radix_sort(num_blocks.max(initial=0) - num_blocks)
    return order if at is None else order[radix_sort(at[order])]


def radix_sort(key: Int64Array) -> Int64Array:
    """Stable order of non-negative numbers [n]."""
    return key.astype(np.min_scalar_type(key.max(initial=0))).argsort(kind="stable")  # up to 16 bits: a radix sort


def early_first(order: Int64Array, num_blocks: Int64Array, waits: Bools, enough: float) -> tuple[Int64Array, int]:
    """Moves to the front of `order` [n] items that do not wait, until they have `enough` blocks.

    Items without blocks are not moved.

    Returns:
        the new order, and how many items are at its front.
    """
    blocks = np.where(waits, 0, num_blocks)[order]
    early = (blocks > 0) & (blocks.cumsum() - blocks < enough)
    return np.concatenate([order[early], order[~early]]), int(np.count_nonzero(early))


class Words:
    """Collects integer arrays into one int32 array, each at a multiple of 4 words (16 bytes)."""

    def __init__(self) -> None:
        self.arrays: list[tuple[int, Int32Array, Int64Array | None]] = []
        self.size = 0

    def add(self, array: Int32Array, order: Int64Array | None = None) -> int:
        """Takes `array`, or its rows in `order`; returns its offset in words."""
        start = self.size
        self.arrays.append((start, array, order))
        self.size = -(-(start + array.size) // 4) * 4
        return start

    def packed(self) -> Int32Array:
        """All arrays as one, int32 [n], n a multiple of 4.

        Raises:
            ValueError: more words than the kernels count.
        """
        check_count("words of the work lists", self.size)
        words = np.empty(self.size, np.int32)
        for start, array, order in self.arrays:
            end = start + array.size
            words[end : -(-end // 4) * 4] = 0
            place = words[start:end].reshape(array.shape)
            if order is None:
                place[:] = array
            else:
                array.take(order, 0, place, "clip")  # the default mode would copy twice
        return words
