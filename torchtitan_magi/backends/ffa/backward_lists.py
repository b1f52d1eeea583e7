"""Work lists of the backward: which query blocks see each k-tile, in which chunks and in which order.

A query block is BACKWARD_ROWS // heads_per_tile query tokens, a k-tile up to KEYS keys (see `key_tiles`). Long tiles
are cut at common multiples of a number of query blocks: the chunks of all tiles that read the same queries run at the
same time, so that q, dout and dq stay in L2. The chunks of a tile add their dk and dv to sums in fp32.
"""

import functools
from dataclasses import dataclass

import numpy as np

from torchtitan_magi.backends.ffa.records import L2_SIZE, Field, Words, as_items, early_first, longest_first, radix_sort
from torchtitan_magi.backends.ffa.segments import FAR, SegmentRuns, is_new, starts_of
from torchtitan_magi.backends.interface import StageMask
from torchtitan_magi.masks.geometry import Bools, Int32Array, Int64Array
from torchtitan_magi.tiles import BACKWARD_ROWS, KEYS, NUM_SMS, stay_whole

# Sizes of chunks, in query blocks x groups of heads. Below 8 the prologue costs more than it gains, above 256 what the
# chunk reads leaves L2 (docs/internals/kernel-design.md: causal 2k to 64k, windows, histogram packs on an H200).
CHUNK_SIZES = 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256
QUERY_BYTES = 1024  # at least: q, dout (16 bits) and dq (fp32) of one token and one head, 128 columns
# Tiles that share at least 1 / SHARED of their query blocks go in step, if they have as many blocks as STEPS (what
# shorter ones share stays in L2 anyway), and if all are shorter than a chunk or as many as TILES_PER_SM are left to
# each SM: then SMs end at nearly the same time without cutting any.
SHARED, STEPS, TILES_PER_SM = 4, 16, 3
TAIL = 0.5  # what is kept for the end, in chunks per SM: enough to even out when SMs end, little as it works from HBM
TAIL_CHUNKS = 4  # chunks at the end that take as long as one of the usual size
# Where more k-tiles see a query block, or heads are narrower, tiles wait for each other longer than zeroing dq takes
# (whole backward on an H200: 1.39x with one tile, 1.1x with 2.5, 1.0x with 3.5, 0.88x with 8.5). In deterministic mode
# they wait for their turns anyway (1.05x with 9, 1.04x with 15, 0.99x with 24).
FEW_TILES, WIDER_THAN, FEW_IN_ORDER = 3.5, 64, 16
# Deterministic mode: what heads in step work on stays in L2 (causal 16k 0.76 -> 0.95 of the speed of the usual mode).
HEADS_IN_STEP = 4
BLOCKS_IN_STEP = 128  # query blocks of a chunk; half as many with more heads in step


@dataclass(frozen=True)
class BackwardSizes:
    """Where the backward's lists lie in the packed words (the last three), and what the launch needs to know."""

    heads_per_tile: int = 0  # 0: these lists were not made
    heads_per_wave: int = 0  # K/V heads that are worked on at a time
    num_q_blocks: int = 0
    num_k_tiles: int = 0
    num_items: int = 0  # chunks of k-tiles
    num_early: int = 0  # first items, done by all heads before any of the others
    num_tail: int = 0  # last items, done after all heads are through the others
    is_split: bool = False  # some tile has several chunks: dk and dv are sums in fp32
    awaits: bool = False  # some item has late keys
    begins_queries: bool = False  # dq needs no zeros: who comes first to a query block stores its dq
    deterministic: bool = False  # k-tiles ascend within a chunk of queries; there are `components`
    items: int = 0
    segments: int = 0
    components: int = 0


def backward_lists(
    mask: StageMask, runs: SegmentRuns, words: Words, deterministic: bool, heads_per_tile: int, chunk: int | None
) -> BackwardSizes:
    """Adds the backward's lists to `words`.

    Args:
        runs: segments of the query blocks.
        deterministic: each row of dq is added to in a fixed order.
        chunk: query blocks of a chunk; None: chosen.
    """
    groups_per_kv = mask.group // heads_per_tile
    starts = key_tiles(mask.rows, mask.num_k, mask.num_own)
    num_tiles = len(starts) - 1
    num_q_blocks = -(-mask.num_q // (BACKWARD_ROWS // heads_per_tile))
    tile, records = transpose_segments(runs, starts)
    num_blocks = query_blocks(tile, records, num_tiles)
    few = FEW_IN_ORDER if deterministic else FEW_TILES if mask.head_dim > WIDER_THAN else 0
    begins_queries = num_blocks.sum() <= few * num_q_blocks and covers(runs, num_q_blocks)
    heads_per_wave, best_chunk = _wave_and_chunk(mask, num_blocks, heads_per_tile, deterministic)
    steps = np.zeros(num_tiles, bool)
    if not deterministic and not chunk:
        per_sm = num_blocks.sum() * mask.num_heads_kv / NUM_SMS
        steps = tiles_in_step(tile, records, num_blocks, per_sm, best_chunk)
        if steps.any():
            best_chunk = max(best_chunk, int(num_blocks.max()))  # whole tiles find in L2 what chunks of them would
    chunk = chunk or best_chunk
    query_bytes = max(QUERY_BYTES, 6 * mask.head_dim + 2 * mask.value_dim)
    fits_l2 = mask.num_q * mask.num_heads_q * query_bytes <= L2_SIZE
    if deterministic or fits_l2:  # nothing is kept for the end, or everything: all heads are worked on together
        in_tail, tail_chunk = np.full(num_tiles, not deterministic), chunk
    else:
        in_tail = tail_tiles(num_blocks, chunk, mask.num_heads_kv)
        tail_chunk = max(chunk // TAIL_CHUNKS, CHUNK_SIZES[0] // groups_per_kv, 1)
    tile_of_item, item, is_split = np.arange(num_tiles), tile, False
    if num_blocks.max(initial=0) > chunk:
        sizes = np.where(in_tail, tail_chunk, chunk)
        if not deterministic:
            sizes[num_blocks <= sizes] = FAR  # such tiles stay whole
        pieces = split_tiles(tile, records, sizes)
        is_split = len(pieces[0]) > int(np.count_nonzero(num_blocks))
        if is_split:
            tile_of_item, item, records = pieces
            num_blocks = query_blocks(item, records, len(tile_of_item))
    items, further = as_items(tile_of_item, item, records)
    number, num_early = items[:, Field.FIRST].astype(np.int64) // chunk, 0
    if steps.any():  # then no tile is cut
        items, further = as_items(tile_of_item, *in_step(tile, records, steps, num_blocks))
    untouched = (items[:, Field.NUM_SEGMENTS] == 0).nonzero()[0]
    if len(untouched):  # their dk and dv are zeros
        first, end = starts[tile_of_item[untouched]], starts[tile_of_item[untouched] + 1]
        items[untouched, Field.FIRST_KEY], items[untouched, Field.END_KEY] = first, end
    in_tail, is_late = in_tail[tile_of_item], items[:, Field.END_KEY] > mask.num_own
    if deterministic:  # from the last chunk of queries to the first, in each from the first tile to the last
        order = ((-number if is_split else 0) * num_tiles + tile_of_item).argsort(kind="stable")
        items[:, Field.CHUNK] = np.bincount(tile_of_item).cumsum()[tile_of_item] - 1 - np.arange(len(items))
    else:
        order, num_early = _usual_order(mask, heads_per_tile, num_blocks, number, in_tail, is_late, begins_queries)
    awaits, num_tail = bool((is_late & (num_blocks > 0)).any()), int(np.count_nonzero(in_tail))
    return BackwardSizes(
        heads_per_tile=heads_per_tile, heads_per_wave=heads_per_wave, num_q_blocks=num_q_blocks, num_k_tiles=num_tiles,
        num_items=len(items), num_early=num_early, num_tail=num_tail,
        is_split=is_split, awaits=awaits, begins_queries=begins_queries, deterministic=deterministic,
        items=words.add(items, order), segments=words.add(further),
        components=words.add(addition_spans(runs, num_q_blocks, starts)) if deterministic else 0,
    )  # fmt: skip


def query_blocks(item: Int64Array, records: Int32Array, num_items: int) -> Int64Array:
    """Query blocks of each item, int64 [num_items]; item: that of each record [n, 12]."""
    return np.bincount(item, records[:, Field.END] - records[:, Field.FIRST], num_items).astype(np.int64)


def tiles_in_step(tile: Int64Array, records: Int32Array, num_blocks: Int64Array, per_sm: float, chunk: int) -> Bools:
    """Which k-tiles see many of the queries of a neighbour, and each some that the other does not, bool [num_tiles].

    Such tiles are those of windows. In a document without one all tiles see the last queries. None where they do not
    have half of the work, or would have to be cut.

    Args:
        tile, records: int64 [n], int32 [n, 12] from `transpose_segments`.
        num_blocks: query blocks of each tile, int64 [num_tiles].
        per_sm: query blocks, in all heads, that each SM works on.
        chunk: query blocks of a chunk.
    """
    steps, longest = np.zeros(len(num_blocks), bool), num_blocks.max(initial=0)
    if longest < STEPS or (longest > chunk and per_sm < TILES_PER_SM * longest):
        return steps
    begins = is_new(tile).nonzero()[0]
    seen, blocks = tile[begins], num_blocks[tile[begins]]
    first = np.minimum.reduceat(records[:, Field.FIRST], begins)
    end = np.maximum.reduceat(records[:, Field.END], begins)
    meets = (first[1:] > first[:-1]) & (end[1:] > end[:-1])
    meets &= SHARED * (end[:-1] - first[1:]) >= np.maximum(blocks[1:], blocks[:-1])
    steps[seen[1:][meets]] = steps[seen[:-1][meets]] = True
    return steps & (2 * num_blocks[steps].sum() >= num_blocks.sum())


def in_step(
    tile: Int64Array, records: Int32Array, steps: Bools, num_blocks: Int64Array
) -> tuple[Int64Array, Int32Array]:
    """Lets tiles that partly see the same queries pass over these at the same time.

    From its last query block to its first, a tile would be with shared blocks in its first half, and the next tile in
    its second half, when L2 no longer holds them. Where each begins at a multiple of the same number of blocks and goes
    on behind its last block, all are with the blocks of one remainder at one time.

    Args:
        tile, records, steps, num_blocks: see `tiles_in_step`.

    Returns:
        tile, records: some records cut in two, and in another order within a tile.
    """
    period = int(num_blocks[steps].max())
    seam = (records[:, Field.END] - 1) // period * period
    which = np.arange(len(tile)).repeat(1 + (steps[tile] & (records[:, Field.FIRST] < seam)))
    tile, records, seam = tile[which], records.take(which, 0), seam[which]
    second = ~is_new(which)
    first = np.append(second[1:], False)
    records[first, Field.END], records[second, Field.FIRST] = seam[first], seam[second]
    order = np.lexsort([np.where(steps[tile], records[:, Field.FIRST] % period, 0), tile])
    return tile[order], records.take(order, 0)


def _wave_and_chunk(mask: StageMask, blocks: Int64Array, heads_per_tile: int, deterministic: bool) -> tuple[int, int]:
    """K/V heads that are worked on at a time, and the query blocks of a chunk; blocks: query blocks of each k-tile."""
    tokens = BACKWARD_ROWS // heads_per_tile
    if deterministic:
        return heads_in_step(blocks, tokens, mask.num_heads_kv)
    if stay_whole(len(blocks), mask.num_heads_q, mask.num_heads_kv):
        return 1, max(1, -(-mask.num_q // tokens))
    return 1, backward_chunk(blocks, mask.num_heads_kv, mask.group // heads_per_tile)


def _usual_order(
    mask: StageMask, heads_per_tile: int, num_blocks: Int64Array, number: Int64Array, in_tail: Bools, is_late: Bools,
    begins_queries: bool,
) -> tuple[Int64Array, int]:  # fmt: skip
    """One chunk of queries after another, then the tail; in each, late keys last and then the longest items first.

    Args:
        num_blocks, number, in_tail, is_late: [items]; `number` counts the chunks of queries.

    Returns:
        the order, and how many items without late keys come before all others.
    """
    order = longest_first(num_blocks, np.where(in_tail, number.max(initial=0) + 1, number) * 2 + is_late)
    waits = is_late & (num_blocks > 0)
    if not waits.any():
        return order, 0
    heads = mask.heads
    zeros = 0 if begins_queries else heads.query_elements
    sums_bytes = mask.num_q * (4 * heads.out_elements + 4 * zeros)  # out, dout, dq are passed over first
    busy = sums_bytes / mask.cost.memory
    enough = mask.blocks_until_late(mask.cost.backward, BACKWARD_ROWS, heads_per_tile, busy)
    main = len(order) - int(np.count_nonzero(in_tail))
    first, num_early = early_first(order[:main], num_blocks, waits, enough)
    return np.concatenate([first, order[main:]]), num_early


# ------------------------------------------------------------------------------------------------- sizes of the chunks


@functools.cache
def choose_heads_per_tile(group: int) -> int:
    """Query heads that share a backward tile: as many as fill at least 63 of its 64 rows, or else 60.

    Heads 24:4 with three heads for six: 1.04 to 1.05 times as fast at causal 16k, 1.02 in eight documents of 8k (one
    H100).
    """
    several = [d for d in range(2, 9) if group % d == 0]
    filled = (d for least in (63, 60) for d in reversed(several) if BACKWARD_ROWS // d * d >= least)
    return next(filled, 1)


def backward_chunk(blocks_per_tile: Int64Array, num_heads_kv: int, groups_per_kv: int) -> int:
    """Query blocks of a chunk of a k-tile.

    The chunks of all tiles that read the same queries run at the same time and add to the same dq, so q, dout and dq
    stay in L2 while chunks are short against the tiles. Chunks also have to be many enough for all SMs to end at nearly
    the same time, and long enough to pay for loading their keys and adding up dk and dv.
    """
    longest = int(blocks_per_tile.max(initial=0)) * groups_per_kv
    per_sm = int(blocks_per_tile.sum()) * num_heads_kv * groups_per_kv / NUM_SMS
    wanted = max(min(per_sm / 2, max(longest / 8, 32)), 1)
    return max(1, min(CHUNK_SIZES, key=lambda size: max(size / wanted, wanted / size)) // groups_per_kv)


def heads_in_step(blocks_per_tile: Int64Array, tokens: int, num_heads_kv: int) -> tuple[int, int]:
    """K/V heads that the deterministic backward works on at a time, and the query blocks of a chunk.

    The tiles of a head follow each other through the queries of a chunk. Many heads keep the SMs busy where documents
    have few tiles. Few heads keep what they work on in L2 where tiles fall behind.

    Args:
        blocks_per_tile: int64 [num_tiles].
        tokens: query tokens per block.
    """
    longest = max(1, int(blocks_per_tile.max(initial=0)) * tokens // KEYS)  # tiles of the longest document
    wanted = max(HEADS_IN_STEP, 2 * NUM_SMS // longest)
    heads = next(d for d in range(1, num_heads_kv + 1) if num_heads_kv % d == 0 and d >= min(wanted, num_heads_kv))
    return heads, BLOCKS_IN_STEP // (1 if heads <= HEADS_IN_STEP else 2)


def tail_tiles(blocks_per_tile: Int64Array, chunk: int, num_heads_kv: int) -> Bools:
    """Which k-tiles are kept for the end, so that all SMs end at nearly the same time: short ones, bool [num_tiles]."""
    wanted = TAIL * NUM_SMS * min(chunk, blocks_per_tile.max(initial=0)) / num_heads_kv
    order = radix_sort(blocks_per_tile)
    before = blocks_per_tile[order].cumsum() - blocks_per_tile[order]
    tail = np.zeros(len(order), bool)
    tail[order[before < wanted]] = True
    return tail


# ------------------------------------------------------------------------------------------- k-tiles and their chunks


def key_tiles(table: Int64Array, num_k: int, apart: int = FAR) -> Int64Array:
    """Where the k-tiles start, and num_k: int64 [tiles + 1], in steps of at most KEYS.

    Tiles begin at the first key of a document (slices whose key ranges overlap), so that its queries meet as few tiles
    as possible. A document shares a tile with those before it only if all of it fits there.

    Args:
        table: slices, int64 [n, 5]; keys in [0, num_k).
        apart: key at which a tile starts.
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
    tile: Int64Array, records: Int32Array, chunk_of_tile: Int64Array
) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Cuts k-tiles into chunks that end at multiples of their size.

    Args:
        tile, records: int64 [n], int32 [n, 12] from `transpose_segments`.
        chunk_of_tile: query blocks of a chunk of each tile, int64 [num_tiles].

    Returns:
        tile_of_item: k-tile of each chunk, int64 [items]; tiles that no query sees have none.
        item: item of each record, int64 [m], ascending.
        records: int32 [m, 12].
    """
    chunk = chunk_of_tile[tile]
    first_chunk, last_chunk = records[:, Field.FIRST] // chunk, (records[:, Field.END] - 1) // chunk
    pieces = last_chunk - first_chunk + 1
    ends = pieces.cumsum()
    which = np.arange(len(tile)).repeat(pieces)
    at = np.arange(len(which)) + (first_chunk - (ends - pieces)).repeat(pieces)
    cut, chunk = records.take(which, 0), chunk[which]
    start = at * chunk
    cut[:, Field.FIRST], cut[:, Field.END] = start, start + chunk
    cut[ends - pieces, Field.FIRST], cut[ends - 1, Field.END] = records[:, Field.FIRST], records[:, Field.END]
    key = at + (tile * (int(last_chunk.max(initial=0)) + 1)).repeat(pieces)
    if (key[1:] < key[:-1]).any():
        order = key.argsort(kind="stable")
        key, which, cut = key[order], which[order], cut.take(order, 0)
    begins = is_new(key)
    return tile[which[begins]], begins.cumsum() - 1, cut


def transpose_segments(runs: SegmentRuns, starts: Int64Array) -> tuple[Int64Array, Int32Array]:
    """From the keys of each query block to the query blocks of each k-tile.

    Consecutive query blocks whose bounds never decrease form a chain. The blocks of a chain that see one k-tile are
    consecutive, and so are those that see all of it: two binary searches each find them for all k-tiles at once.
    Bounds never decrease inside a run, so the searches are among runs, and the place inside a run is a division.

    Args:
        runs: segments of the query blocks.
        starts: first key of each k-tile, from `key_tiles`.

    Returns:
        tile: k-tile of each record, int64 [n], ascending.
        records: int32 [n, 12], by tile, component and block; the words of the item are zero.
    """
    if len(runs) == 0:
        return np.zeros(0, np.int64), np.zeros((0, 12), np.int32)
    component = np.zeros(len(runs), np.int64)  # number of a segment among those of its query block
    if (runs.tile[1:] < (runs.tile + runs.count)[:-1]).any():
        component = starts_of(runs.count) - segments_before(runs, runs.tile)
    fields = np.array([runs.tile, runs.count, runs.layer, component])
    # Four bounds of a query block: its last and its first key, and where a whole tile of keys that all rows see may
    # start last, and first (plus KEYS - 1). They grow by `steps` from block to block.
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
    records[:, Field.LAYER : Field.COMPONENT + 1] = fields[2:, begin].T.take(entry_chain, 0)
    records[:, Field.FIRST_KEY], records[:, Field.END_KEY] = tile_start, tile_end
    records[:, Field.FIRST :] = np.where(beyond, (block + count)[end - 1][entry_chain], found).T
    records[tile_end - tile_start < KEYS, Field.FULL_FIRST :] = 0  # what lies beyond the tile is masked
    keep = records[:, Field.END] > records[:, Field.FIRST]
    tile, records = tile[keep], records.compress(keep, 0)
    if (tile[1:] < tile[:-1]).any():
        order = tile.argsort(kind="stable")  # chains are in the order of their components and blocks
        tile, records = tile[order], records.take(order, 0)
    return tile, records


# ---------------------------------------------------------------------------------------- the order of additions to dq


def addition_spans(runs: SegmentRuns, num_q_blocks: int, starts: Int64Array) -> Int32Array:
    """Which k-tiles add to the dq of each query block: a span of tiles for each of its segments.

    Returns:
        int32: where the spans of each query block start (num_q_blocks + 1 numbers, padded to an even count), then the
        first and the last k-tile of each span.
    """
    num_offsets = (num_q_blocks + 2) // 2 * 2
    words = np.zeros(num_offsets + 2 * int(runs.count.sum()), np.int32)
    words[: num_q_blocks + 1] = segments_before(runs, np.arange(num_q_blocks + 1))
    spans = words[num_offsets:]
    runs.write_ramps(runs.first, runs.end - 1, spans.view(np.int64))
    tile_of(starts).take(spans, out=spans)
    return words


def covers(runs: SegmentRuns, num_blocks: int) -> bool:
    """Whether each of the query blocks sees keys."""
    reach = np.maximum.accumulate(np.append(0, runs.tile + runs.count))
    return bool((runs.tile <= reach[:-1]).all() and reach[-1] >= num_blocks)


def segments_before(runs: SegmentRuns, tile: Int64Array) -> Int64Array:
    """How many segments belong to tiles before each of `tile` [n]; the runs ascend by tile."""
    count = np.zeros(len(tile), np.int64)
    for sign, edges in ((1, runs.tile), (-1, np.sort(runs.tile + runs.count))):
        number = edges.searchsorted(tile)
        count += sign * (number * tile - np.append(0, edges.cumsum())[number])
    return count


def tile_of(starts: Int64Array) -> Int32Array:
    """The k-tile of each key, int32 [num_k]."""
    return np.arange(len(starts) - 1, dtype=np.int32).repeat(np.diff(starts))
