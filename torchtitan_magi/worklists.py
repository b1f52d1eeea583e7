"""The kernel's work lists, made on the host from attention slices. NumPy only.

Vocabulary (kernels/ffa_layout.cuh has the records):
    band       a query row's interval of keys on one mask layer; the intervals of a row are disjoint
    pack       query heads of one KV head that share a tile; a tile's row = token * pack + head
    q-tile     128 // pack query tokens (forward)        q-block   64 // pack query tokens (backward)
    k-block    128 keys from a segment's first (forward)  k-tile    128 keys from a multiple of 128 (backward)
    segment    a run of k-blocks of a q-tile, or of q-blocks of a k-tile, on one layer, and the part of it without a
    mask
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchtitan_magi.bands import FAR, KEYS, Int32Array, Int64Array, Segments, row_bands, tile_segments
from torchtitan_magi.slices import AttnSlices

ROWS = 128  # of a forward tile
BACKWARD_ROWS = 64  # of a backward query block
MAX_PACK = 16
NUM_SMS = 132  # of an H200; only heuristics use it
ITEMS_PER_SM = 10  # parts per SM that backward tiles are split into
MIN_CHUNK, MAX_CHUNK = 16, 256  # query blocks of a part, times packs
L2_BYTES = 32 << 20  # share of the L2 cache that one wave of heads may claim
FIXED_COST = 1.2  # of a work item, in blocks: prologue and epilogue


def tile_cost(num_blocks: Int64Array) -> npt.NDArray[np.float64]:
    """Run time of work items by their number of blocks, in units of one 128 x 128 block; no blocks, no cost."""
    return np.where(num_blocks > 0, num_blocks + FIXED_COST, 0.0)


def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit` (at least 1)."""
    return next(d for d in range(max(1, min(n, limit)), 0, -1) if n % d == 0)


@dataclass(frozen=True)
class ListSizes:
    """Where the lists lie in the packed words (offsets in words, counts in records), and what they are for."""

    num_q: int
    num_k: int
    num_heads_q: int
    num_heads_kv: int
    forward_pack: int
    backward_pack: int
    forward_heads_per_wave: int
    backward_heads_per_wave: int
    num_forward_tiles: int
    num_forward_tiles_with_work: int
    num_backward_tiles: int
    num_backward_items: int  # parts of k-tiles
    is_split: bool  # some tile has several parts: dk and dv are sums in fp32
    num_q_blocks: int
    bands: int
    forward_items: int
    forward_segments: int
    backward_items: int
    backward_segments: int
    whole_items: int  # k-tiles in one part each, from the last to the first: deterministic mode
    whole_segments: int
    components: int
    num_forward_blocks: int  # 128 x 128 blocks that the forward computes per pack of heads


@dataclass(frozen=True)
class WorkLists:
    """`words`: int32 [n], n a multiple of 4, everything the kernel reads; `sizes`: what the launch needs."""

    words: Int32Array
    sizes: ListSizes


def build_worklists(
    slices: AttnSlices,
    num_q: int,
    num_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    *,
    backward_pack: int | None = None,
    chunk: int | None = None,
) -> WorkLists:
    """Lists for one call of the kernel, forward and backward.

    Args:
        slices: the mask; its rows index [0, num_q), its keys [0, num_k).
        backward_pack: overrides the heuristic; a divisor of the group size.
        chunk: overrides the heuristic; query blocks of a part of a backward tile.

    Raises:
        ValueError: head counts do not divide, or a slice reaches beyond num_q or num_k.
    """
    if num_heads_kv < 1 or num_heads_q % num_heads_kv:
        raise ValueError(f"num_heads_q {num_heads_q} must be a multiple of num_heads_kv {num_heads_kv}")
    table = slices.canonical().table
    if len(table) and (table[:, 1].max() > num_q or table[:, 3].max() > num_k):
        raise ValueError(
            f"slices reach query {table[:, 1].max()} and key {table[:, 3].max()} of {num_q} queries and {num_k} keys"
        )
    group = num_heads_q // num_heads_kv
    forward_pack = largest_divisor(group, MAX_PACK)
    backward_pack = backward_pack or choose_backward_pack(group)
    lo, hi = row_bands(table, num_q)
    words = _Words()
    bands = words.add(np.stack([lo, hi], 2))

    tokens, block_tokens = ROWS // forward_pack, BACKWARD_ROWS // backward_pack
    blocks, tiles = tile_segments(table, num_q, block_tokens), tile_segments(table, num_q, tokens)
    num_forward_tiles = -(-num_q // tokens)
    num_blocks = np.bincount(tiles.tile, -(-(tiles.end - tiles.first) // KEYS), num_forward_tiles).astype(np.int64)
    records = np.zeros((len(tiles), 8), np.int64)
    records[:, 0] = tiles.layer
    records[:, 4:] = np.stack([tiles.first, tiles.end, tiles.full_first, tiles.full_end], 1)
    order = np.argsort(-tile_cost(num_blocks), kind="stable")
    forward_items, forward_segments = (words.add(x) for x in _items(tiles.tile, records, order))

    num_q_blocks = -(-num_q // block_tokens)
    tile, records, components = transpose_segments(blocks, num_q_blocks)
    num_backward_tiles = -(-num_k // KEYS)
    packs = group // backward_pack
    blocks_per_tile = np.bincount(tile, records[:, 5] - records[:, 4], num_backward_tiles).astype(np.int64)
    chunk = chunk or backward_chunk(blocks_per_tile, num_heads_kv, packs)
    in_order = np.arange(num_backward_tiles)[::-1]
    whole_items, whole_segments = (words.add(x) for x in _items(tile, records, in_order))
    part_tile, part, part_records = split_tiles(tile, records, blocks_per_tile, chunk)
    is_split = len(part_tile) > len(np.unique(tile))
    fits_l2 = num_q * num_heads_q * 1024 <= L2_BYTES  # q, dout and dq, 128 columns
    if is_split:
        items, further = _items(part, part_records, np.arange(len(part_tile)))
        items[:, 0] = part_tile
        num_blocks_b = np.bincount(part, part_records[:, 5] - part_records[:, 4])
    else:
        items, further = _items(tile, records, np.arange(num_backward_tiles))
        num_blocks_b = blocks_per_tile
    # Longest first, or, where the queries do not fit L2, one chunk of them after another.
    at = np.zeros(len(items), np.int64) if fits_l2 else items[:, 8] // chunk
    items = items[np.lexsort((-tile_cost(num_blocks_b), at))]
    backward_items, backward_segments = words.add(items), words.add(further)

    groups_per_kv = group // forward_pack
    key_bytes = max(1, num_k) * 512
    sizes = ListSizes(
        num_q=num_q,
        num_k=num_k,
        num_heads_q=num_heads_q,
        num_heads_kv=num_heads_kv,
        forward_pack=forward_pack,
        backward_pack=backward_pack,
        forward_heads_per_wave=largest_divisor(num_heads_q // forward_pack, L2_BYTES // key_bytes * groups_per_kv),
        backward_heads_per_wave=num_heads_kv if fits_l2 else 1,
        num_forward_tiles=num_forward_tiles,
        num_forward_tiles_with_work=int((num_blocks > 0).sum()),
        num_backward_tiles=num_backward_tiles,
        num_backward_items=len(items),
        is_split=is_split,
        num_q_blocks=num_q_blocks,
        bands=bands,
        forward_items=forward_items,
        forward_segments=forward_segments,
        backward_items=backward_items,
        backward_segments=backward_segments,
        whole_items=whole_items,
        whole_segments=whole_segments,
        components=words.add(components),
        num_forward_blocks=int(num_blocks.sum()),
    )
    return WorkLists(words.packed(), sizes)


def choose_backward_pack(group: int) -> int:
    """Query heads per backward tile: as many as fill at least 60 of its 64 rows."""
    return max(d for d in range(1, 9) if group % d == 0 and BACKWARD_ROWS // d * d >= 60)


def backward_chunk(blocks_per_tile: Int64Array, num_heads_kv: int, packs: int) -> int:
    """Query blocks of a part of a k-tile.

    Parts end at multiples of it. The parts of one chunk run at the same time, read the same queries and add to the same
    dq, so both stay in L2: the shorter the chunk against the tiles, the better. Parts also have to be many enough for
    all SMs to end at nearly the same time, and long enough to pay for loading their keys and adding up dk and dv.
    """
    longest = blocks_per_tile.max(initial=0) * packs
    wanted = min(blocks_per_tile.sum() * num_heads_kv * packs / (ITEMS_PER_SM * NUM_SMS), longest / 8)
    chunk = 2 ** round(np.log2(np.clip(wanted, MIN_CHUNK, MAX_CHUNK)))  # a power of two: chunks end where k-tiles do
    return max(1, chunk // packs)


def split_tiles(
    tile: Int64Array, records: Int64Array, blocks_per_tile: Int64Array, chunk: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cuts the segments of k-tiles with more than `chunk` query blocks at multiples of `chunk` blocks.

    Returns:
        part_tile: the k-tile of each part; tiles that nothing touches have none.
        part: of each cut record, ascending; records: the cut records.
    """
    whole = (blocks_per_tile <= chunk)[tile]
    first_chunk, last_chunk = records[:, 4] // chunk, (records[:, 5] - 1) // chunk
    first_chunk[whole] = last_chunk[whole] = 0
    pieces = last_chunk - first_chunk + 1
    which = np.repeat(np.arange(len(tile)), pieces)
    at = first_chunk[which] + np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cut = records[which]
    end = np.where(whole[which], FAR, (at + 1) * chunk)
    cut[:, 4], cut[:, 5] = np.maximum(cut[:, 4], at * chunk), np.minimum(cut[:, 5], end)
    num_chunks = int(last_chunk.max(initial=0)) + 1
    keys, part = np.unique(tile[which] * num_chunks + at, return_inverse=True)
    order = np.argsort(part, kind="stable")
    return keys // num_chunks, part[order], cut[order]


def transpose_segments(blocks: Segments, num_q_blocks: int) -> tuple[Int64Array, Int64Array, Int32Array]:
    """From the keys of each q-block to the q-blocks of each k-tile.

    Consecutive q-blocks whose bounds never decrease form a chain; the blocks of a chain that see one k-tile are
    consecutive,
    and so are those that see all of it, so two binary searches each find them for all k-tiles at once.

    Returns:
        tile: int64 [n], ascending: the k-tile of each record.
        records: int64 [n, 8], the kernel's backward segments, per tile by component and block.
        components: int32: num_q_blocks + 1 offsets (padded to an even number), then the first and last k-tile of each
            component, i.e. of each segment of each q-block.
    """
    offsets = np.zeros((num_q_blocks + 2) // 2 * 2, np.int64)
    counts = np.bincount(blocks.tile, minlength=num_q_blocks)
    offsets[1 : num_q_blocks + 1] = np.cumsum(counts)
    tile_a, tile_b = blocks.first // KEYS, (blocks.end - 1) // KEYS
    full_a = np.minimum(-(-blocks.full_first // KEYS), FAR // KEYS)  # k-tiles [full_a, full_b] need no mask
    full_b = blocks.full_end // KEYS - 1
    components = np.concatenate([offsets, np.stack([tile_a, tile_b], 1).ravel()]).astype(np.int32)
    if len(blocks) == 0:
        return np.zeros(0, np.int64), np.zeros((0, 8), np.int64), components

    component = np.arange(len(blocks)) - offsets[blocks.tile]
    if component.any():
        by_chain = np.lexsort((blocks.tile, component))
    else:
        by_chain = np.arange(len(blocks))
    block, layer, component = blocks.tile[by_chain], blocks.layer[by_chain], component[by_chain]
    bounds = np.stack([tile_a, tile_b, full_a, full_b])[:, by_chain]
    breaks = np.ones(len(block), bool)
    breaks[1:] = (
        (np.diff(component) != 0) | (np.diff(layer) != 0) | (np.diff(block) != 1) | (np.diff(bounds, axis=1) < 0).any(0)
    )
    begin = np.flatnonzero(breaks)
    chain = np.cumsum(breaks) - 1
    last = np.append(begin[1:], len(block)) - 1
    num_tiles = bounds[1, last] - bounds[0, begin] + 1
    entry_chain = np.repeat(np.arange(len(begin)), num_tiles)
    tile = np.arange(len(entry_chain)) - np.repeat(np.cumsum(num_tiles) - num_tiles - bounds[0, begin], num_tiles)
    stride = FAR // KEYS + 2
    keys, query = bounds + 1 + chain * stride, tile + 1 + entry_chain * stride
    first, end = np.searchsorted(keys[1], query, "left"), np.searchsorted(keys[0], query, "right")
    full_first, full_end = np.searchsorted(keys[3], query, "left"), np.searchsorted(keys[2], query, "right")
    shift = (block - np.arange(len(block)))[begin][entry_chain]  # from position in the chain to q-block
    records = np.zeros((len(tile), 8), np.int64)
    records[:, 0], records[:, 1] = layer[begin][entry_chain], component[begin][entry_chain]
    records[:, 4:] = np.stack([first, end, full_first, full_end], 1) + shift[:, None]
    keep = end > first
    tile, records = tile[keep], records[keep]
    order = np.lexsort((records[:, 4], records[:, 1], tile))
    return tile[order], records[order], components


def _items(tile: Int64Array, records: Int64Array, order: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Work items [len(order), 12] with their first segment inside, and the further segments [.., 8]. tile ascends."""
    counts = np.bincount(tile, minlength=len(order))
    used = counts > 0
    begin = np.cumsum(counts) - counts
    items = np.zeros((len(order), 12), np.int64)
    items[:, 0], items[:, 1] = np.arange(len(order)), counts
    items[:, 2] = begin - (np.cumsum(used) - used)  # further segments of all earlier tiles
    if len(tile) == used.sum():
        items[used, 4:] = records
        return items[order], records[:0]
    is_first = np.zeros(len(tile), bool)
    is_first[begin[used]] = True
    items[used, 4:] = records[is_first]
    return items[order], records[~is_first]


class _Words:
    """Collects integer arrays into one int32 array; every part starts at a multiple of 4 words."""

    def __init__(self) -> None:
        self.parts: list[Int32Array] = []
        self.size = 0

    def add(self, array: npt.NDArray[np.integer]) -> int:
        start, padding = self.size, -array.size % 4
        self.parts += [array.astype(np.int32, copy=False).ravel(), np.zeros(padding, np.int32)]
        self.size += array.size + padding
        return start

    def packed(self) -> Int32Array:
        return np.concatenate(self.parts)
