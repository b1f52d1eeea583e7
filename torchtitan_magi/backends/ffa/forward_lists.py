"""Work lists of the forward: which key blocks each q-tile sees, and in which order the GPU takes the tiles.

A q-tile is rows // heads_per_tile query tokens, a key block KEYS keys from a segment's first key on. Tiles that would
keep some SMs busy when the others are done are cut into chunks of their key blocks; the kernel joins the results.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchtitan_magi.backends.ffa.records import L2_SIZE, Field, Words, as_items, early_first, longest_first
from torchtitan_magi.backends.ffa.segments import SegmentRuns, starts_of
from torchtitan_magi.backends.interface import StageMask
from torchtitan_magi.masks.geometry import Int32Array, Int64Array
from torchtitan_magi.tiles import (
    KEYS,
    MAX_CUT,
    NUM_SMS,
    forward_heads_per_tile,
    forward_rows,
    largest_divisor,
    tile_cost,
)

KEY_BYTES = 512  # at least: k and v of one token and one head, 128 columns
# What it costs to cut a tile, in blocks. Fitted to kernel times of packs of equal documents on an H200.
CHUNK_COST = 6.0  # a chunk leaves its fp32 rows in memory
JOIN_COST = 1.0  # per chunk that the last one of the tile adds up
WORTH_CUTTING = 0.01  # part of the forward's time that cutting must save; tiles that fill smaller gaps are short
CHUNK_MEMORY = 0.009  # fp32 rows that chunks may leave, per row of q, out, k and v of one head


@dataclass(frozen=True)
class ForwardSizes:
    """Where the forward's lists lie in the packed words (`items`, `segments`), and what the launch needs to know."""

    rows: int = 0  # of a tile; 0: these lists were not made
    heads_per_tile: int = 0
    heads_per_wave: int = 0  # groups of heads_per_tile heads that are worked on at a time
    num_items: int = 0  # q-tiles, a tile that is cut counted by its chunks
    num_items_with_work: int = 0
    num_early: int = 0  # first items, done by all heads before any of the others
    num_chunks: int = 0  # items that are chunks of a tile
    chunks_per_tile: int = 0
    num_blocks: int = 0  # rows x KEYS blocks computed per group of heads
    awaits: bool = False  # some item has late keys
    items: int = 0
    segments: int = 0


def forward_lists(mask: StageMask, runs: SegmentRuns, words: Words, chunks_per_tile: int | None) -> ForwardSizes:
    """Adds the forward's lists to `words`.

    Args:
        runs: segments of the q-tiles.
        chunks_per_tile: cuts each tile that has as many blocks, up to MAX_CUT; None: those that are worth it.
    """
    rows, heads = forward_rows(mask.head_dim, mask.value_dim), forward_heads_per_tile(mask.group)
    num_tiles, num_groups = -(-mask.num_q // (rows // heads)), mask.num_heads_q // heads
    tile, records, num_blocks = forward_records(runs, num_tiles)
    if mask.heads.is_wide:  # whose registers the kernel does not join
        cut, num_chunks = np.zeros(0, np.int64), 0
    elif chunks_per_tile:
        cut, num_chunks = (num_blocks >= chunks_per_tile).nonzero()[0][: MAX_CUT // num_groups], chunks_per_tile
    else:
        kept = mask.num_q * mask.num_heads_q + mask.num_k * mask.num_heads_kv  # 16 bits, twice: q, out and k, v
        cut, num_chunks = tiles_to_cut(num_blocks, num_groups, int(CHUNK_MEMORY * kept / rows))
    tile_of_item, item = np.arange(num_tiles), tile
    if num_chunks:
        tile_of_item, item, records, num_blocks = cut_tiles(tile, records, num_blocks, cut, num_chunks)
    items, further = as_items(tile_of_item, item, records)
    if num_chunks:
        items[np.isin(tile_of_item, cut), Field.CHUNK] = np.arange(len(cut) * num_chunks) + 1
    order = longest_first(num_blocks)
    waits, num_early = np.zeros(len(items), bool), 0
    if mask.num_own < mask.num_k:
        waits[item[records[:, Field.END] > mask.num_own]] = True
    if waits.any():
        enough = mask.blocks_until_late(mask.cost.forward, rows, heads)
        order, num_early = early_first(order, num_blocks, waits, enough)
    key_bytes = max(KEY_BYTES, 2 * (mask.head_dim + mask.value_dim))
    kv_heads_in_l2 = L2_SIZE // (key_bytes * max(1, mask.num_k))
    return ForwardSizes(
        rows=rows, heads_per_tile=heads,
        heads_per_wave=largest_divisor(num_groups, kv_heads_in_l2 * (mask.group // heads)),
        num_items=len(items), num_items_with_work=int(np.count_nonzero(num_blocks)), num_early=num_early,
        num_chunks=len(cut) * num_chunks, chunks_per_tile=num_chunks, num_blocks=int(num_blocks.sum()),
        awaits=bool(waits.any()), items=words.add(items, order), segments=words.add(further),
    )  # fmt: skip


def forward_records(runs: SegmentRuns, num_tiles: int) -> tuple[Int64Array, Int32Array, Int64Array]:
    """The segments of the q-tiles as the forward reads them.

    Returns:
        tile: q-tile of each record, int64 [n], ascending.
        records: int32 [n, 12]; the words of the item are zero.
        num_blocks: key blocks of each q-tile, int64 [num_tiles].
    """
    tile = runs.tiles()
    records = np.zeros((len(tile), 12), np.int32)
    if runs.layer.any():
        records[:, Field.LAYER] = runs.layer.repeat(runs.count)
    pairs = records.view(np.int64)  # FIRST with END, FULL_FIRST with FULL_END
    bounds, full_bounds = pairs[:, Field.FIRST // 2], pairs[:, Field.FULL_FIRST // 2]
    runs.write_ramps(runs.first, runs.end, bounds)
    from_bounds = (runs.full_first - runs.first) + ((runs.full_end - runs.end) << 32)  # constant within a run
    np.add(bounds, from_bounds.repeat(runs.count), out=full_bounds)
    return tile, records, np.bincount(tile, key_blocks(records), num_tiles).astype(np.int64)


def key_blocks(records: Int32Array) -> Int32Array:
    """Blocks of KEYS keys of forward records [n, 12]."""
    return (records[:, Field.END] - records[:, Field.FIRST] + (KEYS - 1)) // KEYS


# ------------------------------------------------------------------------------------------------------ cutting tiles


def tiles_to_cut(blocks_per_tile: Int64Array, num_groups: int, room: int) -> tuple[Int64Array, int]:
    """Which q-tiles are cut, and into how many chunks each, so that the SMs end at nearly the same time.

    When all SMs have had equally many long tiles of one length, some tiles are left over. So the longest tiles, as many
    as make one chunk for each SM, are cut if that shortens the schedule. Tiles of different lengths fill it anyway.

    Args:
        blocks_per_tile: int64 [num_tiles].
        num_groups: groups of heads, each with all tiles.
        room: most chunks of all groups together.

    Returns:
        the tiles, int64, ascending; chunks of each, 0 if there are no such tiles.
    """
    cut, num_chunks = np.zeros(0, np.int64), 0
    tiles = np.bincount(blocks_per_tile)  # by their number of blocks
    costs = tile_cost(np.arange(len(tiles)))
    per_sm = float(tiles @ costs) * num_groups / NUM_SMS
    num_short = int(costs.searchsorted(WORTH_CUTTING * per_sm, "right"))
    if float(tiles[:num_short] @ costs[:num_short]) * num_groups >= NUM_SMS * costs.max(initial=0):
        return cut, num_chunks  # short tiles fill the gaps that long ones leave
    costs = tile_cost(blocks_per_tile)
    shortest = (1 - WORTH_CUTTING) * last_end(costs, num_groups)
    if shortest < per_sm:
        return cut, num_chunks
    order = longest_first(blocks_per_tile)
    for count in (2, 4, 8, 16):
        some = order[: min(room, NUM_SMS) // (count * num_groups)]
        some = some[blocks_per_tile[some] >= 2 * count]
        chunk_costs = tile_cost(-(-blocks_per_tile[some] // count)) + CHUNK_COST + JOIN_COST * count
        end = last_end(np.append(np.delete(costs, some), chunk_costs.repeat(count)), num_groups)
        if end < shortest:
            cut, num_chunks, shortest = np.sort(some), count, end
    return cut, num_chunks


def last_end(costs: npt.NDArray[np.float64], num_groups: int) -> float:
    """About when the last SM ends if each SM takes the longest item left whenever it is free."""
    items, busy = np.sort(costs)[::-1].repeat(num_groups), np.zeros(NUM_SMS)
    for start in range(0, len(items), NUM_SMS):
        few = items[start : start + NUM_SMS]
        busy.sort()
        busy[: len(few)] += few
    return float(busy.max())


def cut_tiles(
    tile: Int64Array, records: Int32Array, blocks_per_tile: Int64Array, cut: Int64Array, num_chunks: int
) -> tuple[Int64Array, Int64Array, Int32Array, Int64Array]:
    """Cuts q-tiles into chunks of equally many key blocks (give or take one).

    Args:
        tile, records: as `forward_records` returns them.
        blocks_per_tile: int64 [num_tiles].
        cut: the tiles, with at least num_chunks blocks each.

    Returns:
        tile_of_item: tile of each chunk and of each tile that stays whole, int64 [items], ascending.
        item: item of each record, int64 [m], ascending.
        records: int32 [m, 12].
        num_blocks: int64 [items].
    """
    chunks = np.ones(len(blocks_per_tile), np.int64)
    chunks[cut] = num_chunks
    tile_of_item = np.arange(len(chunks)).repeat(chunks)
    first_item = starts_of(chunks)
    blocks = key_blocks(records)
    begin = blocks.cumsum() - blocks
    begin -= begin[tile.searchsorted(tile)]  # the record's first block among the blocks of its tile
    which = np.arange(len(tile)).repeat(chunks[tile])  # each record once per chunk of its tile
    chunk = np.arange(len(which)) - starts_of(chunks[tile]).repeat(chunks[tile])
    of_tile = tile[which]
    first, end = (blocks_per_tile[of_tile] * (chunk + i) // chunks[of_tile] - begin[which] for i in (0, 1))
    first, end = np.maximum(first, 0), np.minimum(end, blocks[which])
    item, pieces = first_item[of_tile] + chunk, records.take(which, 0)
    pieces[:, Field.END] = np.minimum(pieces[:, Field.END], pieces[:, Field.FIRST] + KEYS * end)
    pieces[:, Field.FIRST] += KEYS * first
    kept = (first < end).nonzero()[0]
    kept = kept[item[kept].argsort(kind="stable")]
    item, pieces = item[kept], pieces.take(kept, 0)
    return tile_of_item, item, pieces, np.bincount(item, key_blocks(pieces), len(tile_of_item)).astype(np.int64)
