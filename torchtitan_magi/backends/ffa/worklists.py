"""The kernel's work lists, made on the host from attention slices. NumPy only.

Vocabulary (kernels/ffa_layout.cuh has the records):
    band       a query row's interval of keys on one mask layer; the intervals of a row are disjoint; made on the device
    pack       query heads of one KV head that share a tile; a tile's row = token * pack + head
    q-tile     128 // pack query tokens (forward)        q-block   64 // pack query tokens (backward)
    k-block    128 keys from a segment's first (forward)  k-tile    up to 128 keys, see key_tiles (backward)
    segment    a run of k-blocks of a q-tile, or of q-blocks of a k-tile, on one layer, and the part of it without a
               mask
    record     12 words: four for the work item whose first segment it may become, then the segment
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_magi.backends.ffa.segments import (
    FAR,
    Int32Array,
    Int64Array,
    SegmentRuns,
    is_new,
    starts_of,
    tile_segments,
    write_ramps,
)
from torchtitan_magi.masks.geometry import slice_layers
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.tiles import (
    BACKWARD_ROWS,
    KEYS,
    MAX_CUT,
    MAX_PACK,
    NUM_SMS,
    ROWS,
    largest_divisor,
    tile_cost,
)

FIRST, END, FULL = 8, 9, 10  # words of a record
CHUNKS = 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256  # query blocks of a part of a backward tile, times packs
WHOLE_TILES_PER_SM = 4  # enough not to split them where sums of dk and dv would be as large as dq: no grouped heads
L2_BYTES = 32 << 20  # share of the L2 cache that one wave of heads may claim
HEADS_IN_STEP = 4  # deterministic: at a time, where that keeps the SMs busy
BLOCKS_IN_STEP = 128  # deterministic: query blocks of a part; half as many with more heads
TAIL = 0.5  # of what all SMs do during the longest part, in blocks: as much is kept for the end, in small parts
TAIL_PARTS = 4  # small parts in one of usual length
BLOCK_US, BACKWARD_BLOCK_US = 1.6, 2.6  # of an SM, 128 columns
LATE_US, LATE_US_PER_MIB = 70.0, 3.4  # until keys that come late are there, with a fifth to spare
SUMS_BYTES_PER_US = 4.2e6  # of the row sums and zeros that are made meanwhile, before a backward
PART_COST = 6.0  # more for a part of a forward tile: to leave its rows
JOIN_COST = 1.0  # to add up a part
PART_MEMORY = 0.009  # what parts leave, in fp32, against inputs and outputs
WORTH_CUTTING = 0.01  # share of the forward's time

# glibc keeps freed memory for later up to twice the largest block freed so far, of at most 32 MiB. Without this one the
# pages of the lists of a pack of 1M tokens go back to the system and come anew each time: a third of the time it takes.
np.empty((32 << 20) - 8192, np.uint8)


@dataclass(frozen=True)
class ListSizes:
    """Where the lists lie in the packed words (offsets in words, counts in records), and what they are for."""

    num_q: int
    num_k: int
    num_heads_q: int
    num_heads_kv: int
    num_bands: int  # rows, on all layers
    num_slices: int
    slices: int

    forward_pack: int = 0  # 0: no lists of that direction
    forward_heads_per_wave: int = 0
    num_forward_items: int = 0  # q-tiles, or parts of them
    num_forward_items_with_work: int = 0
    num_forward_early: int = 0  # the first of them, done by all heads before any of the others
    num_forward_parts: int = 0  # how many of them are parts of tiles that are cut
    forward_parts_per_tile: int = 0
    num_forward_blocks: int = 0  # 128 x 128 blocks that the forward computes per pack of heads
    forward_awaits: bool = False  # some item has keys that come late
    forward_items: int = 0
    forward_segments: int = 0

    backward_pack: int = 0
    num_q_blocks: int = 0
    num_k_tiles: int = 0
    backward_heads_per_wave: int = 0
    num_backward_items: int = 0  # parts of k-tiles
    num_backward_early: int = 0  # the first of them, done by all heads before any of the others
    num_backward_tail: int = 0  # the last of them, done when all heads are through the others
    is_split: bool = False  # some tile has several parts: dk and dv are sums in fp32
    backward_awaits: bool = False
    deterministic: bool = False  # k-tiles ascend inside a chunk of queries; there are `components`
    backward_items: int = 0
    backward_segments: int = 0
    components: int = 0


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
    forward: bool = True,
    backward: bool = True,
    deterministic: bool = False,
    late_from: int | None = None,
    parts: int | None = None,
    backward_pack: int | None = None,
    chunk: int | None = None,
) -> WorkLists:
    """Lists for one call of the kernel, forward and backward.

    Args:
        slices: the mask; its rows index [0, num_q), its keys [0, num_k).
        forward, backward: whether to make the lists of that direction.
        deterministic: the backward adds to each row of dq in a fixed order.
        late_from: keys from this one on lie elsewhere and come while the kernel runs: what can begin without them goes
            first. No canonical slice reaches across.
        parts: overrides the heuristic; parts of forward tiles that have as many blocks, up to MAX_CUT.
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
    rows = table.astype(np.int64)
    late_from = num_k if late_from is None else late_from
    assert late_from >= num_k or ((rows[:, 3] <= late_from) | (rows[:, 2] >= late_from)).all()
    mask = _Mask(rows, slice_layers(rows), num_q, num_k, num_heads_q, num_heads_kv, late_from)
    words = _Words()
    num_layers, by_layer = int(mask.layer.max(initial=0)) + 1, table
    if num_layers > 1:
        order = mask.layer.argsort(kind="stable")
        by_layer = table[order]
        by_layer[:, :2] += (mask.layer[order] * num_q)[:, None].astype(np.int32)
    in_words = words.add(by_layer)
    sizes: dict[str, Any] = {}
    group = num_heads_q // num_heads_kv
    forward_pack, backward_pack = largest_divisor(group, MAX_PACK), backward_pack or choose_backward_pack(group)
    tokens = [ROWS // forward_pack] * forward + [BACKWARD_ROWS // backward_pack] * backward
    runs = iter(tile_segments(rows, mask.layer, num_q, tokens, late_from) if tokens else ())
    if forward:
        sizes |= _forward_lists(mask, next(runs), words, forward_pack, parts)
    if backward:
        sizes |= _backward_lists(mask, next(runs), words, deterministic, backward_pack, chunk)
    shape = num_q, num_k, num_heads_q, num_heads_kv
    return WorkLists(words.packed(), ListSizes(*shape, num_layers * num_q, len(table), in_words, **sizes))


@dataclass(frozen=True)
class _Mask:
    """rows: canonical slices, int64 [n, 5]; layer: of each, int64 [n]."""

    rows: Int64Array
    layer: Int64Array
    num_q: int
    num_k: int
    num_heads_q: int
    num_heads_kv: int
    late_from: int

    @property
    def late_us(self) -> float:
        """From when a forward could begin until late keys are there."""
        return LATE_US + LATE_US_PER_MIB * (self.num_k - self.late_from) * self.num_heads_kv * 512 / 2**20


def _forward_lists(mask: _Mask, runs: SegmentRuns, words: "_Words", pack: int, parts: int | None) -> dict[str, Any]:
    """Adds them to `words`; fields of ListSizes."""
    tokens, groups_per_kv = ROWS // pack, mask.num_heads_q // mask.num_heads_kv // pack
    num_tiles = -(-mask.num_q // tokens)
    tile, records, num_blocks = forward_records(runs, num_tiles)
    key_bytes = max(1, mask.num_k) * 512
    num_groups = mask.num_heads_q // pack
    heads_per_wave = largest_divisor(num_groups, L2_BYTES // key_bytes * groups_per_kv)
    if parts:
        cut, num_parts = (num_blocks >= parts).nonzero()[0][: MAX_CUT // num_groups], parts
    else:
        rows = mask.num_q * mask.num_heads_q + mask.num_k * mask.num_heads_kv  # 16 bits, twice: q, out and k, v
        cut, num_parts = tiles_to_cut(num_blocks, num_groups, int(PART_MEMORY * rows / ROWS))
    tile_of_item, item = np.arange(num_tiles), tile
    if num_parts:
        tile_of_item, item, records, num_blocks = cut_tiles(tile, records, num_blocks, cut, num_parts)
    items, further = _items(tile_of_item, item, records)
    if num_parts:
        items[np.isin(tile_of_item, cut), 3] = np.arange(len(cut) * num_parts) + 1
    order = longest_first(num_blocks)
    waits, num_early = np.zeros(len(items), bool), 0
    if mask.late_from < mask.num_k:
        waits[item[records[:, END] > mask.late_from]] = True
    if waits.any():
        order, num_early = early_first(order, num_blocks, waits, mask.late_us / BLOCK_US * NUM_SMS / num_groups)
    return {
        "forward_pack": pack,
        "forward_heads_per_wave": heads_per_wave,
        "num_forward_items": len(items),
        "num_forward_items_with_work": int(np.count_nonzero(num_blocks)),
        "num_forward_early": num_early,
        "num_forward_parts": len(cut) * num_parts,
        "forward_parts_per_tile": num_parts,
        "num_forward_blocks": int(num_blocks.sum()),
        "forward_awaits": bool(waits.any()),
        "forward_items": words.add(items, order),
        "forward_segments": words.add(further),
    }


def _backward_lists(
    mask: _Mask, runs: SegmentRuns, words: "_Words", deterministic: bool, pack: int, chunk: int | None
) -> dict[str, Any]:
    """Adds them to `words`; fields of ListSizes."""
    group = mask.num_heads_q // mask.num_heads_kv
    tokens, num_packs = BACKWARD_ROWS // pack, group // pack
    num_q_blocks = -(-mask.num_q // tokens)
    starts = key_tiles(mask.rows, mask.num_k, mask.late_from)
    num_tiles = len(starts) - 1
    tile, records = transpose_segments(runs, starts)
    num_blocks = np.bincount(tile, records[:, END] - records[:, FIRST], num_tiles).astype(np.int64)
    heads_per_wave = 1
    fits_l2 = mask.num_q * mask.num_heads_q * 1024 <= L2_BYTES  # q, dout and dq, 128 columns
    if deterministic:
        heads_per_wave, own_chunk = heads_in_step(num_blocks, tokens, mask.num_heads_kv)
    elif group == 1 and num_tiles * mask.num_heads_kv >= WHOLE_TILES_PER_SM * NUM_SMS:
        own_chunk = max(1, num_q_blocks)
    else:
        own_chunk = backward_chunk(num_blocks, mask.num_heads_kv, num_packs)
    chunk = chunk or own_chunk
    if deterministic or fits_l2:  # nothing is kept for the end, or everything: then all heads are worked on together
        in_tail = np.full(num_tiles, not deterministic)
    else:
        in_tail = tail_tiles(num_blocks, chunk, mask.num_heads_kv)
    part_tile, part, is_split = np.arange(num_tiles), tile, False
    if num_blocks.max(initial=0) > chunk:
        finer = chunk if fits_l2 else max(chunk // TAIL_PARTS, CHUNKS[0] // num_packs, 1)
        parts = split_tiles(tile, records, num_blocks, np.where(in_tail, finer, chunk), everywhere=deterministic)
        is_split = len(parts[0]) > int(np.count_nonzero(num_blocks))
        if is_split:
            part_tile, part, records = parts
            num_blocks = np.bincount(part, records[:, END] - records[:, FIRST]).astype(np.int64)
    items, further = _items(part_tile, part, records)
    untouched = (items[:, 1] == 0).nonzero()[0]
    if len(untouched):  # their dk and dv are zeros
        items[untouched, 6], items[untouched, 7] = starts[part_tile[untouched]], starts[part_tile[untouched] + 1]
    in_tail = in_tail[part_tile]
    stage = items[:, FIRST].astype(np.int64) // chunk
    is_late = items[:, 7] > mask.late_from
    num_tail, num_early, waits = int(np.count_nonzero(in_tail)), 0, is_late & (num_blocks > 0)
    if deterministic:  # from the last chunk of queries to the first, in each from the first tile to the last
        order = ((-stage if is_split else 0) * num_tiles + part_tile).argsort(kind="stable")
        items[:, 3] = np.bincount(part_tile).cumsum()[part_tile] - 1 - np.arange(len(items))  # parts of its tile before
    else:  # one chunk of queries after another, then the tail; what waits for keys comes last
        order = longest_first(num_blocks, np.where(in_tail, stage.max(initial=0) + 1, stage) * 2 + is_late)
        if waits.any():
            main = len(order) - num_tail
            sums_us = mask.num_q * mask.num_heads_q * 1024 / SUMS_BYTES_PER_US  # out, dout and dq, 128 columns
            enough = (mask.late_us - sums_us) / BACKWARD_BLOCK_US * NUM_SMS / (mask.num_heads_kv * num_packs)
            first, num_early = early_first(order[:main], num_blocks, waits, enough)
            order = np.concatenate([first, order[main:]])
    return {
        "backward_pack": pack,
        "num_q_blocks": num_q_blocks,
        "num_k_tiles": num_tiles,
        "backward_heads_per_wave": heads_per_wave,
        "num_backward_items": len(items),
        "num_backward_early": num_early,
        "num_backward_tail": num_tail,
        "is_split": is_split,
        "backward_awaits": bool(waits.any()),
        "deterministic": deterministic,
        "backward_items": words.add(items, order),
        "backward_segments": words.add(further),
        "components": words.add(addition_spans(runs, num_q_blocks, starts)) if deterministic else 0,
    }


@functools.cache
def choose_backward_pack(group: int) -> int:
    """Query heads per backward tile: as many as fill at least 60 of its 64 rows."""
    return max(d for d in range(1, 9) if group % d == 0 and BACKWARD_ROWS // d * d >= 60)


def backward_chunk(blocks_per_tile: Int64Array, num_heads_kv: int, packs: int) -> int:
    """Query blocks of a part of a k-tile.

    Parts end at multiples of it. The parts of one chunk run at the same time, read the same queries and add to the same
    dq, so both stay in L2 while chunks are short against the tiles. Parts also have to be many enough for all SMs to
    end at nearly the same time, and long enough to pay for loading their keys and adding up dk and dv.
    """
    longest = int(blocks_per_tile.max(initial=0)) * packs
    per_sm = int(blocks_per_tile.sum()) * num_heads_kv * packs / NUM_SMS
    wanted = max(min(per_sm / 2, max(longest / 8, 32)), 1)
    return max(1, min(CHUNKS, key=lambda chunk: max(chunk / wanted, wanted / chunk)) // packs)


def heads_in_step(blocks_per_tile: Int64Array, tokens: int, num_heads_kv: int) -> tuple[int, int]:
    """How many heads the deterministic backward works on at a time, and the query blocks of a part of a k-tile.

    The tiles of a head follow each other through the queries of a part. Many heads keep the SMs busy where documents
    have few tiles, few heads keep what they work on in L2 where tiles fall behind.

    Args:
        blocks_per_tile: int64 [num_tiles]; tokens: of a query block.
    """
    longest = max(1, int(blocks_per_tile.max(initial=0)) * tokens // KEYS)  # tiles of the longest document
    wanted = max(HEADS_IN_STEP, 2 * NUM_SMS // longest)
    heads = next(d for d in range(1, num_heads_kv + 1) if num_heads_kv % d == 0 and d >= min(wanted, num_heads_kv))
    return heads, BLOCKS_IN_STEP // (1 if heads <= HEADS_IN_STEP else 2)


def tail_tiles(blocks_per_tile: Int64Array, chunk: int, num_heads_kv: int) -> npt.NDArray[np.bool_]:
    """Which k-tiles are kept for the end, so that all SMs end at nearly the same time: short ones, bool [num_tiles]."""
    wanted = TAIL * NUM_SMS * min(chunk, blocks_per_tile.max(initial=0)) / num_heads_kv
    order = _radix_sort(blocks_per_tile)
    before = blocks_per_tile[order].cumsum() - blocks_per_tile[order]
    tail = np.zeros(len(order), bool)
    tail[order[before < wanted]] = True
    return tail


def tiles_to_cut(blocks_per_tile: Int64Array, num_groups: int, room: int) -> tuple[Int64Array, int]:
    """Which q-tiles are cut, and into how many parts each, so that the SMs end at nearly the same time.

    Of long tiles of one length some are left over when each SM has had as many as the others. So the longest tiles, as
    many as make one part for each SM, are cut if that makes the schedule shorter; tiles that differ fill it anyway.

    Args:
        blocks_per_tile: int64 [num_tiles]; num_groups: of heads, each with all tiles.
        room: how many parts there may be, of all groups.

    Returns:
        the tiles, int64, ascending; parts of each, 0 without any.
    """
    cut, num_parts = np.zeros(0, np.int64), 0
    tiles = np.bincount(blocks_per_tile)  # by their number of blocks
    costs = tile_cost(np.arange(len(tiles)))
    per_sm = float(tiles @ costs) * num_groups / NUM_SMS
    num_short = int(costs.searchsorted(WORTH_CUTTING * per_sm, "right"))
    if float(tiles[:num_short] @ costs[:num_short]) * num_groups >= NUM_SMS * costs.max(initial=0):
        return cut, num_parts  # they fill what gaps long ones leave
    costs = tile_cost(blocks_per_tile)
    shortest = (1 - WORTH_CUTTING) * last_end(costs, num_groups)
    if shortest < per_sm:
        return cut, num_parts
    order = longest_first(blocks_per_tile)
    for parts in (2, 4, 8, 16):
        some = order[: min(room, NUM_SMS) // (parts * num_groups)]
        some = some[blocks_per_tile[some] >= 2 * parts]
        of_part = tile_cost(-(-blocks_per_tile[some] // parts)) + PART_COST + JOIN_COST * parts
        end = last_end(np.append(np.delete(costs, some), of_part.repeat(parts)), num_groups)
        if end < shortest:
            cut, num_parts, shortest = np.sort(some), parts, end
    return cut, num_parts


def last_end(costs: npt.NDArray[np.float64], num_groups: int) -> float:
    """When the last SM ends if each takes the longest item left when it is through with one; nearly."""
    items, busy = np.sort(costs)[::-1].repeat(num_groups), np.zeros(NUM_SMS)
    for start in range(0, len(items), NUM_SMS):
        few = items[start : start + NUM_SMS]
        busy.sort()
        busy[: len(few)] += few
    return float(busy.max())


def cut_tiles(
    tile: Int64Array, records: Int32Array, blocks_per_tile: Int64Array, cut: Int64Array, num_parts: int
) -> tuple[Int64Array, Int64Array, Int32Array, Int64Array]:
    """Cuts q-tiles into parts with as many key blocks each.

    Args:
        tile: int64 [n], ascending; records: int32 [n, 12]; blocks_per_tile: int64 [num_tiles].
        cut: the tiles, with at least num_parts blocks each.

    Returns:
        tile_of_item: int64 [items], ascending, of the parts and of the other tiles.
        item: int64 [m], ascending, of each record; records: int32 [m, 12]; num_blocks: int64 [items].
    """
    parts = np.ones(len(blocks_per_tile), np.int64)
    parts[cut] = num_parts
    tile_of_item = np.arange(len(parts)).repeat(parts)
    first_item = starts_of(parts)
    blocks = key_blocks(records)
    begin = blocks.cumsum() - blocks
    begin -= begin[tile.searchsorted(tile)]  # among the blocks of its tile
    which = np.arange(len(tile)).repeat(parts[tile])  # each record for each part of its tile
    part = np.arange(len(which)) - starts_of(parts[tile]).repeat(parts[tile])
    of_tile = tile[which]
    first, end = (blocks_per_tile[of_tile] * (part + i) // parts[of_tile] - begin[which] for i in (0, 1))
    first, end = np.maximum(first, 0), np.minimum(end, blocks[which])
    item, pieces = first_item[of_tile] + part, records.take(which, 0)
    pieces[:, END] = np.minimum(pieces[:, END], pieces[:, FIRST] + KEYS * end)
    pieces[:, FIRST] += KEYS * first
    kept = (first < end).nonzero()[0]
    kept = kept[item[kept].argsort(kind="stable")]
    item, pieces = item[kept], pieces.take(kept, 0)
    return tile_of_item, item, pieces, np.bincount(item, key_blocks(pieces), len(tile_of_item)).astype(np.int64)


def key_blocks(records: Int32Array) -> Int32Array:
    """Blocks of KEYS keys of forward records [n, 12]."""
    return (records[:, END] - records[:, FIRST] + (KEYS - 1)) // KEYS


def longest_first(num_blocks: Int64Array, at: Int64Array | None = None) -> Int64Array:
    """The order of work items by `at`, then from the most blocks to the fewest, then as they are. Both [n]."""
    order = _radix_sort(num_blocks.max(initial=0) - num_blocks)
    return order if at is None else order[_radix_sort(at[order])]


def _radix_sort(key: Int64Array) -> Int64Array:
    """Stable order of numbers from 0 on [n]."""
    return key.astype(np.min_scalar_type(key.max(initial=0))).argsort(kind="stable")  # 16 bits: a radix sort


def early_first(
    order: Int64Array, num_blocks: Int64Array, waits: npt.NDArray[np.bool_], enough: float
) -> tuple[Int64Array, int]:
    """`order` [n], but items that do not wait come first, as they come, until they have `enough` blocks.

    Returns:
        the order, and how many come first; none without blocks does.
    """
    blocks = np.where(waits, 0, num_blocks)[order]
    early = (blocks > 0) & (blocks.cumsum() - blocks < enough)
    return np.concatenate([order[early], order[~early]]), int(np.count_nonzero(early))


def forward_records(runs: SegmentRuns, num_tiles: int) -> tuple[Int64Array, Int32Array, Int64Array]:
    """What the forward reads of the segments of its q-tiles.

    Returns:
        tile: int64 [n], ascending: the q-tile of each record.
        records: int32 [n, 12], with the kernel's forward segments.
        num_blocks: int64 [num_tiles], key blocks of each q-tile.
    """
    tile = runs.tiles()
    records = np.zeros((len(tile), 12), np.int32)
    if runs.layer.any():
        records[:, 4] = runs.layer.repeat(runs.count)
    pairs = records.view(np.int64)
    write_ramps(runs.count, runs.first, runs.end, runs.step_lo, runs.step_hi, pairs[:, FIRST // 2])
    further = (runs.full_first - runs.first) + ((runs.full_end - runs.end) << 32)  # in a run always the same
    np.add(pairs[:, FIRST // 2], further.repeat(runs.count), out=pairs[:, FULL // 2])
    return tile, records, np.bincount(tile, key_blocks(records), num_tiles).astype(np.int64)


def key_tiles(table: Int64Array, num_k: int, apart: int = FAR) -> Int64Array:
    """Where the k-tiles start, and num_k: int64 [tiles + 1], steps of at most KEYS.

    The keys of one document (slices whose key ranges overlap) are cut from its first key on, so that its queries meet
    as few tiles as can be; a document shares a tile with those before it only if it fits there whole.

    Args:
        table: slices, int64 [n, 5]; keys in [0, num_k).
        apart: a tile starts there.
    """
    if num_k == 0:
        return np.zeros(1, np.int64)
    k_start, k_end = table[:, 2], table[:, 3]
    if (k_start[1:] < k_start[:-1]).any():
        order = k_start.argsort()
        k_start, k_end = k_start[order], k_end[order]
    reach = np.maximum.accumulate(k_end)
    documents = np.concatenate([[0], k_start[:1], k_start[1:][k_start[1:] >= reach[:-1]]])  # no slice reaches across
    if 0 < apart < num_k:
        documents = np.sort(np.append(documents, apart))
    documents = documents[is_new(documents)].tolist()
    openers, room_to = [], 0  # documents that open a tile; where the open tile ends
    for start, end in zip(documents, [*documents[1:], num_k], strict=True):
        if end > room_to or start == apart:
            openers.append(start)
            room_to = end + (start - end) % KEYS
    first = np.array(openers)
    end = np.append(first[1:], num_k)  # with the documents that share its last tile
    count = -(-(end - first) // KEYS)
    tiles = np.arange(count.sum()) - starts_of(count).repeat(count)
    return np.append(first.repeat(count) + tiles * KEYS, num_k)


def split_tiles(
    tile: Int64Array,
    records: Int32Array,
    blocks_per_tile: Int64Array,
    chunk_of_tile: Int64Array,
    everywhere: bool = False,
) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Cuts the segments of k-tiles with more query blocks than their chunk at multiples of it.

    Args:
        tile: int64 [n]; records: int32 [n, 12]; blocks_per_tile, chunk_of_tile: int64 [num_tiles].
        everywhere: shorter tiles too.

    Returns:
        part_tile: int64 [parts], the k-tile of each part; tiles that nothing touches have none.
        part: int64 [m], of each cut record, ascending; records: int32 [m, 12], the cut records.
    """
    if not everywhere:
        chunk_of_tile = np.where(blocks_per_tile <= chunk_of_tile, FAR, chunk_of_tile)
    chunk = chunk_of_tile[tile]
    first_chunk, last_chunk = records[:, FIRST] // chunk, (records[:, END] - 1) // chunk
    pieces = last_chunk - first_chunk + 1
    ends = pieces.cumsum()
    which = np.arange(len(tile)).repeat(pieces)
    at = np.arange(len(which)) + (first_chunk - (ends - pieces)).repeat(pieces)
    cut, chunk = records.take(which, 0), chunk[which]
    start = at * chunk
    cut[:, FIRST], cut[:, END] = start, start + chunk
    cut[ends - pieces, FIRST], cut[ends - 1, END] = records[:, FIRST], records[:, END]
    key = at + (tile * (int(last_chunk.max(initial=0)) + 1)).repeat(pieces)
    if (key[1:] < key[:-1]).any():
        order = key.argsort(kind="stable")
        key, which, cut = key[order], which[order], cut.take(order, 0)
    begins = is_new(key)
    return tile[which[begins]], begins.cumsum() - 1, cut


def addition_spans(runs: SegmentRuns, num_q_blocks: int, starts: Int64Array) -> Int32Array:
    """Which k-tiles add to each q-block: a span of tiles for each of its segments.

    Returns:
        int32: where the spans of each q-block start (num_q_blocks + 1, padded to an even number), then the first and
        the last k-tile of each span.
    """
    num_offsets = (num_q_blocks + 2) // 2 * 2
    words = np.zeros(num_offsets + 2 * int(runs.count.sum()), np.int32)
    words[: num_q_blocks + 1] = segments_before(runs, np.arange(num_q_blocks + 1))
    spans = words[num_offsets:]
    write_ramps(runs.count, runs.first, runs.end - 1, runs.step_lo, runs.step_hi, spans.view(np.int64))
    tile_of(starts).take(spans, out=spans)
    return words


def segments_before(runs: SegmentRuns, tile: Int64Array) -> Int64Array:
    """How many segments belong to tiles before each of `tile`. The runs ascend by tile."""
    count = np.zeros(len(tile), np.int64)
    for sign, edges in ((1, runs.tile), (-1, np.sort(runs.tile + runs.count))):
        number = edges.searchsorted(tile)
        count += sign * (number * tile - np.append(0, edges.cumsum())[number])
    return count


def tile_of(starts: Int64Array) -> Int32Array:
    """The k-tile of each key."""
    return np.arange(len(starts) - 1, dtype=np.int32).repeat(np.diff(starts))


def transpose_segments(runs: SegmentRuns, starts: Int64Array) -> tuple[Int64Array, Int32Array]:
    """From the keys of each q-block to the q-blocks of each k-tile.

    Consecutive q-blocks whose bounds never decrease form a chain; the blocks of a chain that see one k-tile are
    consecutive, and so are those that see all of it, so two binary searches each find them for all k-tiles at once.
    Bounds never decrease inside a run: the searches are among runs, and the place inside a run is a division.

    Args:
        starts: of the k-tiles, from `key_tiles`.

    Returns:
        tile: int64 [n], ascending: the k-tile of each record.
        records: int32 [n, 12], with the kernel's backward segments, per tile by component and block.
    """
    if len(runs) == 0:
        return np.zeros(0, np.int64), np.zeros((0, 12), np.int32)
    component = np.zeros(len(runs), np.int64)  # of a segment: its number among those of its q-block
    if (runs.tile[1:] < (runs.tile + runs.count)[:-1]).any():
        component = starts_of(runs.count) - segments_before(runs, runs.tile)
    fields = np.array([runs.tile, runs.count, runs.layer, component])
    # Four bounds of a q-block: its last and its first key, and where a whole tile of keys that all rows see may start
    # last, and first (plus KEYS - 1). They grow by `steps` from block to block.
    keys = np.array([runs.end - 1, runs.first, runs.full_end - KEYS, runs.full_first + (KEYS - 1)])
    steps = np.array([runs.step_hi, runs.step_lo, runs.step_hi, runs.step_lo])
    if component.any():
        by_chain = component.argsort(kind="stable")
        fields, keys, steps = fields[:, by_chain], keys[:, by_chain], steps[:, by_chain]
    block, count, layer, component = fields
    last_bounds = keys + steps * (count - 1)
    breaks = is_new(component) | is_new(layer)
    breaks[1:] |= (block[1:] != (block + count)[:-1]) | (keys[:, 1:] < last_bounds[:, :-1]).any(0)
    begin = breaks.nonzero()[0]
    end = np.append(begin[1:], len(block))
    first_tile, last_tile = starts.searchsorted([keys[1, begin], last_bounds[0, end - 1]], "right") - 1
    num_tiles = last_tile - first_tile + 1
    chain, entry_chain = breaks.cumsum() - 1, np.arange(len(begin)).repeat(num_tiles)
    tile = np.arange(len(entry_chain)) + (first_tile - starts_of(num_tiles)).repeat(num_tiles)

    # A record's four numbers: the first block of the chain whose bound is at least what is wanted.
    tile_start, tile_end = starts[tile], starts[tile + 1]
    wanted = np.array([tile_start, tile_end, tile_start, tile_start + KEYS])
    row = np.arange(4)[:, None]  # one search among all four bounds of all chains
    stride, row_stride = FAR + 4 * KEYS, (FAR + 4 * KEYS) * len(begin)
    bounds = (last_bounds + (chain * stride + row * row_stride)).ravel()
    sought = (wanted + (entry_chain * stride + row * row_stride)).ravel()
    # Both ascend: how many bounds lie before each that is sought is counted, which takes a search per bound only.
    run = np.bincount(sought.searchsorted(bounds, "right"), minlength=len(sought) + 1)[:-1].cumsum().reshape(4, -1)
    beyond = run == end[entry_chain] + row * len(block)  # no block of the chain
    run -= beyond
    # Integers this small divide exactly in floating point, which is several times as fast.
    inside = np.ceil((wanted - keys.take(run)) / np.maximum(steps, 1).take(run)).astype(np.int64)
    found = block[run - row * len(block)] + np.maximum(inside, 0)
    records = np.zeros((len(tile), 12), np.int32)
    records[:, 4:6] = fields[2:, begin].T.take(entry_chain, 0)
    records[:, 6], records[:, 7] = tile_start, tile_end
    records[:, FIRST:] = np.where(beyond, (block + count)[end - 1][entry_chain], found).T
    records[tile_end - tile_start < KEYS, FULL:] = 0  # what lies beyond the tile is masked
    keep = records[:, END] > records[:, FIRST]
    tile, records = tile[keep], records.compress(keep, 0)
    if (tile[1:] < tile[:-1]).any():
        order = tile.argsort(kind="stable")  # chains are in the order of their components and blocks
        tile, records = tile[order], records.take(order, 0)
    return tile, records


def _items(tile_of_item: Int64Array, item: Int64Array, records: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Work items [num_items, 12] with their first segment inside, and the further segments [.., 8].

    Args:
        tile_of_item: int64 [num_items]; item: of each record, int64 [n], ascending; records: int32 [n, 12]; they become
            the items where each has one.
    """
    num_items = len(tile_of_item)
    counts = np.bincount(item, minlength=num_items)
    used = counts > 0
    if used.all() and len(item) == num_items:
        items, further = records, records[:0, 4:]
    else:
        items = np.zeros((num_items, 12), np.int32)
        is_first = is_new(item)
        items[used], further = records.compress(is_first, 0), records.compress(~is_first, 0)[:, 4:]
        items[:, 2] = starts_of(counts - used)  # further segments of all earlier items
    items.view(np.int64)[:, 0] = tile_of_item + (counts << 32)  # both words at once; the machine is little-endian
    return items, further


class _Words:
    """Collects integer arrays into one int32 array; every part starts at a multiple of 4 words."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Int32Array, Int64Array | None]] = []
        self.size = 0

    def add(self, array: Int32Array, order: Int64Array | None = None) -> int:
        """Copies `array`, or its rows in that order, when packed; returns where to."""
        start, end = self.size, self.size + array.size
        self.parts.append((start, array, order))
        self.size = -(-end // 4) * 4
        return start

    def packed(self) -> Int32Array:
        words = np.empty(self.size, np.int32)
        for start, array, order in self.parts:
            end = start + array.size
            words[end : -(-end // 4) * 4] = 0
            part = words[start:end].reshape(array.shape)
            if order is None:
                part[:] = array
            else:
                array.take(order, 0, part, "clip")  # the default mode would copy twice
        return words
