"""The kernel's work lists: made on the host from attention slices, in NumPy only, then on the device.

Vocabulary (kernels/ffa_layout.cuh has the records):
    band            a query row's interval of keys on one mask layer; the intervals of a row are disjoint; made on the
                    device
    heads per tile  query heads of one K/V head that share a tile; a tile's row = token * heads_per_tile + head
    segment         a run of key blocks of a q-tile, or of query blocks of a k-tile, on one layer, and which of them
                    need no mask
    item            what one CTA does at a time: a tile, or a chunk of a tile that is cut, with its segments
    wave            heads that are worked on at the same time
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.backends.ffa.backward_lists import BackwardSizes, backward_lists, choose_heads_per_tile
from torchtitan_magi.backends.ffa.forward_lists import ForwardSizes, forward_lists
from torchtitan_magi.backends.ffa.params import check_count
from torchtitan_magi.backends.ffa.records import Words
from torchtitan_magi.backends.ffa.row_kernels import write_bands
from torchtitan_magi.backends.ffa.segments import FAR, tile_segments
from torchtitan_magi.backends.interface import StageMask
from torchtitan_magi.masks.geometry import Int32Array
from torchtitan_magi.tiles import BACKWARD_ROWS, KEYS


@dataclass(frozen=True)
class ListSizes:
    """Where the lists lie in the packed words (offsets in words, counts in records), and what they are for."""

    num_q: int
    num_k: int
    num_heads_q: int
    num_heads_kv: int
    num_bands: int  # rows of all mask layers
    num_slices: int
    slices: int
    forward: ForwardSizes
    backward: BackwardSizes


@dataclass(frozen=True, eq=False)
class DeviceLists:
    """Work lists of one mask on a device; `words` int32 [n], 16-byte aligned; `bands` int32 [layers * rows, 2]."""

    words: Tensor
    bands: Tensor
    sizes: ListSizes
    launches: dict[Any, Any] = field(default_factory=dict)  # what repeats from call to call

    @property
    def num_bytes(self) -> int:
        """Memory beside `words`."""
        return self.bands.nbytes

    def pointer(self, offset: int) -> int:
        """Address of the word at `offset`."""
        return self.words.data_ptr() + 4 * offset


@dataclass(frozen=True, eq=False)
class WorkLists:
    """`words`: int32 [n], n a multiple of 4, everything the kernel reads; `sizes`: what the launch needs."""

    words: Int32Array
    sizes: ListSizes

    def to(self, device_words: Tensor) -> DeviceLists:
        """The lists around `device_words`, a copy of `words` on the device; cloned when not 16-byte aligned."""
        assert device_words.dtype == torch.int32
        assert len(device_words) == len(self.words)
        s = self.sizes
        aligned = device_words.data_ptr() % 16 == 0 and device_words.is_contiguous()
        words = device_words if aligned else device_words.clone()
        bands = words.new_empty(s.num_bands + s.forward.rows + 2, 2)  # the forward copies a whole tile's, in pairs
        write_bands(words[s.slices :][: 5 * s.num_slices].view(-1, 5), bands[: s.num_bands])
        return DeviceLists(words, bands, s)


def build_worklists(
    mask: StageMask,
    *,
    deterministic: bool = False,
    chunks_per_tile: int | None = None,
    backward_heads_per_tile: int | None = None,
    blocks_per_chunk: int | None = None,
) -> WorkLists:
    """Lists for one call of the kernel, forward and backward.

    Args:
        mask: the mask; without lists of a direction that will not be called.
        deterministic: the backward adds to each row of dq in a fixed order.
        chunks_per_tile: overrides the heuristic: cuts forward tiles that have as many blocks, up to MAX_CUT.
        backward_heads_per_tile: overrides the heuristic; a divisor of the group size.
        blocks_per_chunk: overrides the heuristic: query blocks of a chunk of a backward tile.

    Raises:
        ValueError: head counts do not divide, a slice reaches beyond num_q or num_k, or rows, keys or mask layers are
            too many for the kernel's 32-bit numbers.
    """
    num_q, num_k, num_heads_q, num_heads_kv = mask.num_q, mask.num_k, mask.num_heads_q, mask.num_heads_kv
    if num_heads_kv < 1 or num_heads_q % num_heads_kv:
        raise ValueError(f"num_heads_q {num_heads_q} must be a multiple of num_heads_kv {num_heads_kv}")
    table = mask.slices.canonical().table
    if len(table) and (table[:, 1].max() > num_q or table[:, 3].max() > num_k):
        raise ValueError(
            f"slices reach query {table[:, 1].max()} and key {table[:, 3].max()} of {num_q} queries and {num_k} keys"
        )
    _keep_freed_memory()
    assert ((table[:, 3] <= mask.num_own) | (table[:, 2] >= mask.num_own)).all()
    num_layers, by_layer = int(mask.layer.max(initial=0)) + 1, table
    check_count(f"{num_layers} mask layers x {num_q} queries", num_layers * num_q)
    check_count(f"{num_heads_q} heads x {num_q} queries", num_heads_q * num_q)
    check_count("keys", num_k, FAR - KEYS)
    if num_layers > 1:
        order = mask.layer.argsort(kind="stable")
        by_layer = table[order]
        by_layer[:, :2] += (mask.layer[order] * num_q)[:, None].astype(np.int32)
    words = Words()
    in_words = words.add(by_layer)
    backward_heads_per_tile = backward_heads_per_tile or choose_heads_per_tile(mask.group)
    tokens = [mask.heads.tile_rows] * mask.forward
    tokens += [BACKWARD_ROWS // backward_heads_per_tile] * mask.backward
    runs = iter(tile_segments(mask.rows, mask.layer, num_q, tokens, mask.num_own) if tokens else ())
    of_forward = forward_lists(mask, next(runs), words, chunks_per_tile) if mask.forward else ForwardSizes()
    of_backward = BackwardSizes()
    if mask.backward:
        of_backward = backward_lists(mask, next(runs), words, deterministic, backward_heads_per_tile, blocks_per_chunk)
    shape = num_q, num_k, num_heads_q, num_heads_kv
    sizes = ListSizes(*shape, num_layers * num_q, len(table), in_words, of_forward, of_backward)
    return WorkLists(words.packed(), sizes)


@functools.cache
def _keep_freed_memory() -> None:
    """Has glibc keep freed memory for the next lists.

    It keeps up to twice the largest block freed so far, of blocks of at most 32 MiB. Without such a block the pages of
    the lists of a pack of 1M tokens go back to the system each time: 8.3 instead of 3.7 ms to build them (one core,
    medians of 30).
    """
    np.empty((32 << 20) - 8192, np.uint8)
