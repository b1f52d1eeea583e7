"""The kernel's work lists, walked on the host as the kernel walks them, compute every visible pair exactly once."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.masks import dense_mask, slice_lists

import torchtitan_magi
from torchtitan_magi.backends.ffa import backward_lists
from torchtitan_magi.backends.ffa.backward_lists import HEADS_IN_STEP, heads_in_step
from torchtitan_magi.backends.ffa.forward_lists import last_end
from torchtitan_magi.backends.ffa.records import Field, early_first
from torchtitan_magi.backends.ffa.worklists import WorkLists, build_worklists
from torchtitan_magi.backends.interface import LATE_MARGIN, StageMask
from torchtitan_magi.masks.builders import shared_prompt, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, CostModel, Link
from torchtitan_magi.tiles import KEYS, NUM_SMS, largest_divisor, tile_cost


def read(lists: WorkLists, offset: int, count: int, width: int) -> np.ndarray:
    return lists.words[offset : offset + count * width].reshape(count, width)


def forward_items(lists: WorkLists) -> np.ndarray:
    return read(lists, lists.sizes.forward.items, lists.sizes.forward.num_items, 12)


def backward_items(lists: WorkLists) -> np.ndarray:
    return read(lists, lists.sizes.backward.items, lists.sizes.backward.num_items, 12)


def segments_of(lists: WorkLists, item: np.ndarray, segments: int) -> list[np.ndarray]:
    count, first = item[Field.NUM_SEGMENTS], item[Field.FIRST_SEGMENT]
    return [item[Field.LAYER :], *read(lists, segments + 8 * first, count - 1, 8)] if count else []


def lists_of(
    *shape: Any, chunks_per_tile: int | None = None, blocks_per_chunk: int | None = None, deterministic: bool = False,
    backward_heads_per_tile: int | None = None, **mask: Any,
) -> WorkLists:  # fmt: skip
    """The lists of a StageMask(*shape, **mask)."""
    return build_worklists(
        StageMask(*shape, **mask), deterministic=deterministic, chunks_per_tile=chunks_per_tile,
        backward_heads_per_tile=backward_heads_per_tile, blocks_per_chunk=blocks_per_chunk,
    )  # fmt: skip


def bands_of(lists: WorkLists) -> np.ndarray:
    """What write_bands in rows.cu makes of the slices: lo and hi, [layers, num_q, 2]."""
    s = lists.sizes
    bands, last = np.zeros((s.num_bands, 2), int), 0
    for start, end, lo, hi, mask_type in read(lists, s.slices, s.num_slices, 5):
        assert last <= start < end  # it finds a row's slice by bisection
        rows, last = np.arange(start, end), end
        bands[rows, 0], bands[rows, 1] = lo + (mask_type >> 1) * (rows - start), hi - (mask_type & 1) * (end - 1 - rows)
    return bands.reshape(-1, s.num_q, 2) if s.num_q else np.zeros((1, 0, 2), int)


def walk_forward(lists: WorkLists) -> np.ndarray:
    s, bands, sizes = lists.sizes, bands_of(lists), lists.sizes.forward
    seen = np.zeros((s.num_q, s.num_k + KEYS), int)
    tokens, items = sizes.rows // sizes.heads_per_tile, forward_items(lists)
    chunks = items[items[:, Field.CHUNK] > 0]  # of each tile that is cut, numbered one after another
    chunks = chunks[np.argsort(chunks[:, Field.CHUNK])]
    assert (chunks[:, Field.CHUNK] == np.arange(sizes.num_chunks) + 1).all()
    if sizes.num_chunks:
        of_tile = chunks[:, Field.TILE].reshape(-1, sizes.chunks_per_tile)
        assert (of_tile == of_tile[:, :1]).all()
        assert len(set(of_tile[:, 0].tolist())) == len(of_tile)
    assert len(items) - len(chunks) + sizes.num_chunks // max(1, sizes.chunks_per_tile) == -(-s.num_q // tokens)
    for item in items:
        rows = np.arange(item[Field.TILE] * tokens, min((item[Field.TILE] + 1) * tokens, s.num_q))
        for layer, _, _, _, first, end, full_first, full_end in segments_of(lists, item, sizes.segments):
            for key in range(first, end, KEYS):
                keys = np.arange(key, key + KEYS)
                visible = (keys >= bands[layer, rows, :1]) & (keys < np.minimum(bands[layer, rows, 1:], end))
                if key >= full_first and key + KEYS <= full_end:
                    assert visible.all()
                seen[rows, key : key + KEYS] += visible
    assert not seen[:, s.num_k :].any()
    return seen[:, : s.num_k]


def walk_backward(lists: WorkLists) -> np.ndarray:
    s, bands, sizes = lists.sizes, bands_of(lists), lists.sizes.backward
    seen = np.zeros((s.num_q, s.num_k + KEYS), int)
    stored = np.zeros(s.num_k, int)
    tokens = 64 // sizes.heads_per_tile
    if sizes.deterministic:
        offsets = lists.words[sizes.components :][: sizes.num_q_blocks + 1]
        spans = lists.words[sizes.components + (sizes.num_q_blocks + 2) // 2 * 2 :][: 2 * offsets[-1]].reshape(-1, 2)
    additions, chunks = np.zeros(sizes.num_q_blocks, int), np.zeros(sizes.num_k_tiles, int)
    for item in backward_items(lists):
        tile = item[Field.TILE]
        keys = np.arange(item[Field.FIRST_KEY], item[Field.FIRST_KEY] + KEYS)
        stored[item[Field.FIRST_KEY] : item[Field.END_KEY]] += 1
        if sizes.deterministic:
            assert item[Field.CHUNK] == chunks[tile]
            chunks[tile] += 1
        segments = segments_of(lists, item, sizes.segments)[::-1]
        for layer, component, _, _, first, end, full_first, full_end in segments:
            for block in range(first, end)[::-1]:
                rows = np.arange(block * tokens, min((block + 1) * tokens, s.num_q))
                ends = np.minimum(bands[layer, rows, 1:], item[Field.END_KEY])
                visible = (keys >= bands[layer, rows, :1]) & (keys < ends)
                if full_first <= block < full_end:
                    assert visible.all()
                seen[np.ix_(rows, keys)] += visible
                if sizes.deterministic:  # the kernel's addition_rank
                    rank = 0
                    for c in range(offsets[block], offsets[block + 1]):
                        a, b = spans[c]
                        rank += max(0, min(tile, b + 1) - a)
                        rank += c - offsets[block] > component and a <= tile <= b
                    assert rank == additions[block]
                    additions[block] += 1
    if not sizes.is_split:  # each key's gradient is stored once
        assert (stored == 1).all()
    return seen[:, : s.num_k]


@st.composite
def masks(draw: st.DrawFn) -> tuple[AttnSlices, int, int]:
    num_q, num_k = draw(st.integers(1, 700)), draw(st.integers(1, 900))
    return draw(slice_lists(num_q, num_k, max_slices=6)), num_q, num_k


def tiles_of_query_blocks(lists: WorkLists) -> np.ndarray:
    """How many k-tiles see each query block."""
    tiles = np.zeros(lists.sizes.backward.num_q_blocks, int)
    for item in backward_items(lists):
        for segment in segments_of(lists, item, lists.sizes.backward.segments):
            tiles[segment[4] : segment[5]] += 1
    return tiles


def check(slices: AttnSlices, num_q: int, num_k: int, heads: tuple[int, int], **overrides: int | None):
    """The lists of both backwards, and of forward tiles of 128 and 192 rows, which are walked, and the mask."""
    want = dense_mask(slices.table, num_q, num_k)
    shape = slices, num_q, num_k, *heads
    both = [lists_of(*shape, deterministic=dim == 64, head_dim=dim, **overrides) for dim in (128, 64)]
    assert [lists.sizes.forward.rows for lists in both] == [128, 192]
    for lists in both:
        np.testing.assert_array_equal(walk_forward(lists), want)
        np.testing.assert_array_equal(walk_backward(lists), want)
        sizes, tiles = lists.sizes.backward, tiles_of_query_blocks(lists)
        few = backward_lists.FEW_IN_ORDER if sizes.deterministic else backward_lists.FEW_TILES
        # Without any tile a block's dq would never be written.
        assert sizes.begins_queries == bool(tiles.all() and tiles.sum() <= few * len(tiles))
    return both, want


@settings(max_examples=60, deadline=None)
@given(
    masks(),
    st.sampled_from([(8, 8, 1), (8, 1, 8), (7, 1, 7), (5, 1, 1), (12, 2, 3), (16, 1, 4)]),
    st.sampled_from([None, 1, 3, 20]),
    st.sampled_from([None, 2, 3]),
)
def test_every_visible_pair_is_computed_once(
    mask: tuple[AttnSlices, int, int], heads: tuple[int, int, int], blocks: int | None, chunks: int | None
) -> None:
    overrides = {"backward_heads_per_tile": heads[2], "blocks_per_chunk": blocks, "chunks_per_tile": chunks}
    check(*mask, heads[:2], **overrides)


@st.composite
def windows(draw: st.DrawFn) -> tuple[AttnSlices, int, int]:
    cu_seqlens = np.cumsum([0, *draw(st.lists(st.integers(1, 500), min_size=1, max_size=3))])
    return sliding_window(cu_seqlens, draw(st.integers(1, 400))), int(cu_seqlens[-1]), int(cu_seqlens[-1])


@settings(max_examples=60, deadline=None)
@given(st.one_of(masks(), windows()), st.sampled_from([(8, 8), (8, 1), (7, 1)]), st.integers(1, 200))
def test_every_visible_pair_is_computed_once_by_tiles_in_step(
    mask: tuple[AttnSlices, int, int], heads: tuple[int, int], shared: int
) -> None:
    with mock.patch.multiple(backward_lists, STEPS=1, TILES_PER_SM=0, SHARED=shared):
        check(*mask, heads)


@pytest.mark.parametrize(
    ("slices", "num_q", "num_k"),
    [
        (varlen_causal([0, 3, 100, 101, 640, 900]), 900, 900),
        (sliding_window([0, 700, 1100], 130), 1100, 1100),
        (shared_prompt([[300, 200, 150], [20, 40, 500]]), 1210, 1210),
        (AttnSlices([[0, 40, 0, 100, 0], [40, 80, 5000, 5100, 0], [60, 200, 2000, 2300, 3]]), 200, 6000),
        (AttnSlices([]), 5, 5),
        (AttnSlices([]), 0, 0),
        (AttnSlices([[0, 5, 0, 7, 1]]), 5, 7),
    ],
)
def test_named_masks(slices: AttnSlices, num_q: int, num_k: int) -> None:
    for heads in ((8, 8), (8, 1)):
        check(slices, num_q, num_k, heads)


@pytest.mark.parametrize("window", [100, 128, 130, 300])
@pytest.mark.parametrize("cu_seqlens", [[0, 1400], [0, 500, 1400], [0, 10, 20, 700, 1400]])
def test_tiles_of_a_window_pass_over_shared_queries_at_the_same_time(window: int, cu_seqlens: list[int]) -> None:
    slices, heads = sliding_window(cu_seqlens, window), (1024, 128)
    (lists, _), _ = check(slices, 1400, 1400, heads)
    visits = []
    for item in backward_items(lists):
        segments = segments_of(lists, item, lists.sizes.backward.segments)[::-1]
        visits.append([b for *_, first, end, _, _ in segments for b in range(first, end)[::-1]])
    assert not lists.sizes.backward.is_split
    period = max(map(len, visits))
    whole = [blocks for blocks in visits if len(blocks) == period]
    assert len(whole) > 2
    for blocks in whole:
        assert [b % period for b in blocks] == [*range(period)][::-1]
    assert len({blocks[0] for blocks in whole}) < len(whole)  # neighbours begin with the same queries


@pytest.mark.parametrize(
    "slices", [varlen_causal([0, 700, 1400]), varlen_full([0, 1400]), sliding_window([0, 1400], 9000)]
)
def test_tiles_of_documents_go_from_the_last_queries_to_the_first(slices: AttnSlices) -> None:
    lists = lists_of(slices, 1400, 1400, 1024, 128)
    for item in backward_items(lists):
        firsts = [first for *_, first, _, _, _ in segments_of(lists, item, lists.sizes.backward.segments)]
        assert firsts == sorted(firsts)


@settings(max_examples=60, deadline=None)
@given(masks())
def test_row_bands_are_those_of_the_slices(mask: tuple[AttnSlices, int, int]) -> None:
    slices, num_q, num_k = mask
    want = np.stack(slices.row_bands(num_q), 2)
    np.testing.assert_array_equal(bands_of(lists_of(slices, num_q, num_k, 1, 1)), want)


def test_lists_of_one_direction_are_those_of_both() -> None:
    slices = shared_prompt([[300, 200, 150], [20, 40, 500]])
    whole = lists_of(slices, 1210, 1210, 8, 1)
    one = lists_of(slices, 1210, 1210, 8, 1, backward=False)
    assert one.sizes.backward.heads_per_tile == 0
    np.testing.assert_array_equal(walk_forward(one), walk_forward(whole))
    other = lists_of(slices, 1210, 1210, 8, 1, forward=False)
    assert other.sizes.forward.heads_per_tile == 0
    np.testing.assert_array_equal(walk_backward(other), walk_backward(whole))
    slices_too = -(-5 * whole.sizes.num_slices // 4) * 4  # are in both
    assert len(one.words) + len(other.words) == len(whole.words) + slices_too


def test_holes_between_keys_are_not_walked() -> None:
    slices = AttnSlices([[0, 8, 0, 256, 0], [8, 16, 100_000, 100_256, 0]])
    assert lists_of(slices, 16, 100_256, 8, 1).sizes.forward.num_blocks == 4


def test_longest_items_come_first() -> None:
    items = forward_items(lists_of(varlen_causal([0, 700, 4000]), 4000, 4000, 8, 1))
    assert (np.diff(-(-(items[:, Field.END] - items[:, Field.FIRST]) // KEYS)) <= 0).all()
    assert (np.diff(tile_cost(np.arange(5))) > 0).all()


def test_what_needs_no_late_keys_goes_first() -> None:
    slices = AttnSlices([[0, 512, 0, 256, 0], [512, 1024, 0, 256, 0], [512, 3000, 640, 4000, 0]])
    lists = lists_of(slices, 3000, 4000, 8, 1, late_from=600)
    items = forward_items(lists)
    is_late = (items[:, Field.NUM_SEGMENTS] > 1) | (items[:, Field.END] > 600)
    assert lists.sizes.forward.num_early == (~is_late).sum() == 512 // 16
    assert (np.diff(is_late.astype(int)) >= 0).all()  # though the others are the shortest ones
    is_late = backward_items(lists)[:, Field.END_KEY] > 600
    assert 0 < is_late.sum() < len(is_late)
    assert (np.diff(is_late.astype(int)) >= 0).all()


@given(masks(), masks())
@settings(max_examples=60, deadline=None)
def test_late_keys_share_no_block_and_no_tile_with_others(
    own: tuple[AttnSlices, int, int], others: tuple[AttnSlices, int, int]
) -> None:
    late_from, num_q, num_k = own[2], max(own[1], others[1]), own[2] + others[2]
    table = np.concatenate(
        [own[0].canonical().table, others[0].canonical().table + np.array([0, 0, late_from, late_from, 0])]
    )
    slices = AttnSlices._trusted(table[np.lexsort((table[:, 2], table[:, 0]))])  # as a plan has them
    both, want = check(slices, num_q, num_k, (8, 1), late_from=late_from)
    for lists in both:
        forward, backward = lists.sizes.forward, lists.sizes.backward
        assert forward.awaits == backward.awaits == want[:, late_from:].any()
        for number, item in enumerate(forward_items(lists)):
            is_early, segments = number < forward.num_early, segments_of(lists, item, forward.segments)
            assert segments or not is_early
            for *_, first, end, _, _ in segments:
                assert end <= late_from or (first >= late_from and not is_early)
        items = backward_items(lists)
        is_own, has_work = items[:, Field.END_KEY] <= late_from, items[:, Field.NUM_SEGMENTS] > 0
        is_late = items[:, Field.FIRST_KEY] >= late_from
        assert (is_own | is_late).all()
        assert (is_own & has_work)[: backward.num_early].all()
        assert not backward.num_early or not backward.deterministic
        assert backward.awaits == (is_late & has_work).any()  # as the kernel has it


def test_only_as_much_goes_first_as_covers_the_wait() -> None:
    blocks, waits = np.array([9, 8, 7, 6, 5]), np.array([True, False, True, False, False])
    for enough, last, expected, early in (
        (8, 5, [1, 0, 2, 3, 4], 1),
        (9, 5, [1, 3, 0, 2, 4], 2),
        (1000, 5, [1, 3, 4, 0, 2], 3),
        (0, 5, [0, 1, 2, 3, 4], 0),
        (1000, 0, [1, 3, 0, 2, 4], 2),
    ):
        blocks[4] = last
        found, num_early = early_first(np.arange(5), blocks, waits, enough)
        assert (found.tolist(), num_early) == (expected, early)


@pytest.mark.parametrize(
    ("head_dim", "cost"), [(128, H200), (64, H200), (128, replace(H200, inside=Link(90e-6, 1.9e11)))]
)
def test_all_heads_have_work_until_late_keys_are_there(head_dim: int, cost: CostModel) -> None:
    """Half of the queries see only keys of this rank; 3072 rows come late. Times are the cost model's."""
    num_q, late = 8192, 3072
    slices = AttnSlices([[0, 4096, 0, 4096, 1], [4096, num_q, num_q, num_q + late, 0]])
    seconds = LATE_MARGIN * (cost.stage + cost.inside.latency + late * 8 * head_dim * 4 / cost.inside.bandwidth)
    shape, timing = (num_q, num_q + late), {"late_from": num_q, "head_dim": head_dim, "cost": cost}

    lists = lists_of(slices, *shape, 64, 8, **timing)
    items = forward_items(lists)[: lists.sizes.forward.num_early]
    blocks = -(-(items[:, Field.END] - items[:, Field.FIRST]) // KEYS)
    tokens = {64: 24, 128: 16}[head_dim]  # of a tile, which 8 heads share
    block_seconds = 64 * tokens * KEYS * (cost.forward.pair + head_dim * cost.forward.pair_dim)
    assert seconds <= blocks.sum() * block_seconds < seconds + blocks.max() * block_seconds

    lists = lists_of(slices, *shape, 8, 8, **timing)  # fewer query heads: little else to do
    sizes = lists.sizes.backward
    main = backward_items(lists)[: sizes.num_items - sizes.num_tail]
    items = main[: sizes.num_early]
    blocks = items[:, Field.END] - items[:, Field.FIRST]
    block_seconds = 8 * 64 * KEYS * (cost.backward.pair + head_dim * cost.backward.pair_dim)
    seconds -= num_q * 8 * head_dim * 8 / cost.memory  # row sums and zeros are made meanwhile
    enough = seconds <= blocks.sum() * block_seconds < seconds + blocks.max() * block_seconds
    assert enough or (main[len(items) :, Field.END_KEY] > num_q).all()
    assert len(items) > 0


def test_chunks_of_tiles_fill_the_gpu_and_end_at_common_multiples() -> None:
    lists = lists_of(varlen_causal([0, 16384]), 16384, 16384, 64, 8)
    sizes, items = lists.sizes.backward, backward_items(lists)
    assert sizes.is_split
    assert sizes.num_items * 8 > 4 * NUM_SMS
    blocks, main = items[:, Field.END] - items[:, Field.FIRST], sizes.num_items - sizes.num_tail
    chunk = blocks.max()
    number = items[:, Field.FIRST] // chunk
    assert (number == (items[:, Field.END] - 1) // chunk).all()
    assert (np.diff(number[:main]) >= 0).all()  # one chunk of queries after another
    assert 2 * blocks[main:].max() <= blocks[:main].max() == chunk  # at the end short ones, longest first
    assert (np.diff(blocks[main:]) <= 0).all()
    assert NUM_SMS * chunk / 2 <= blocks[main:].sum() * 8 <= NUM_SMS * chunk  # no more than a chunk for each SM
    short = lists_of(varlen_causal(np.arange(0, 65536, 64)), 65472, 65472, 64, 8)
    assert not short.sizes.backward.is_split


def test_equal_tiles_that_would_be_left_over_are_cut() -> None:
    lists = lists_of(varlen_full([0, 8192]), 8192, 8192, 64, 8)  # 512 tiles of 8 heads: 31.03 for each SM
    sizes, items = lists.sizes.forward, forward_items(lists)
    assert 0 < sizes.num_chunks <= NUM_SMS
    assert sizes.num_items == 512 - sizes.num_chunks // sizes.chunks_per_tile + sizes.num_chunks
    blocks = (items[:, Field.END] - items[:, Field.FIRST]) // KEYS
    assert np.bincount(items[:, Field.TILE], blocks).tolist() == [64] * 512
    assert last_end(tile_cost(blocks), 8) < 0.98 * last_end(tile_cost(np.full(512, 64)), 8)
    for slices in (varlen_causal([0, 8192]), varlen_causal(range(0, 8193, 512)), AttnSlices([])):
        assert lists_of(slices, 8192, 8192, 64, 8).sizes.forward.num_chunks == 0


def test_tiles_without_queries_are_stored_too_where_long_ones_turn_out_to_be_whole() -> None:
    """Three layers over 200 query blocks: more blocks than a chunk of 256, but no end of a chunk among them."""
    slices = AttnSlices([[0, 1600, 0, 40, 0], [0, 1600, 50, 80, 0], [0, 1600, 90, 128, 0]])
    check(slices, 1600, 1000, (8, 1), blocks_per_chunk=256)


@pytest.mark.filterwarnings("error")
def test_tiles_stay_whole_where_each_query_head_has_its_own_keys() -> None:
    assert lists_of(varlen_causal([0, 16384]), 16384, 16384, 8, 2).sizes.backward.is_split
    assert not lists_of(varlen_causal([0, 16384]), 16384, 16384, 8, 8).sizes.backward.is_split
    assert lists_of(varlen_causal([0, 4096]), 4096, 4096, 2, 2).sizes.backward.is_split  # for 132 SMs
    assert not lists_of(AttnSlices([]), 0, 16384, 8, 8).sizes.backward.is_split


@pytest.mark.parametrize(
    ("group", "heads"), [(1, 1), (4, 4), (5, 5), (6, 3), (7, 7), (8, 8), (11, 1), (12, 4), (16, 8)]
)
def test_heads_share_a_backward_tile_that_they_fill(group: int, heads: int) -> None:
    assert backward_lists.choose_heads_per_tile(group) == heads


def test_a_deterministic_tile_counts_its_chunks_in_the_order_of_the_list() -> None:
    lists = lists_of(varlen_causal([0, 16384]), 16384, 16384, 64, 8, deterministic=True)
    items = backward_items(lists)
    number = items[:, Field.FIRST] // (items[:, Field.END] - items[:, Field.FIRST]).max()
    assert (np.diff(number) <= 0).all()  # from the last chunk of queries to the first
    for chunk in range(number.max() + 1):
        assert (np.diff(items[number == chunk, Field.TILE]) == 1).all()  # in each, one tile after another
    assert items[items[:, Field.TILE] == 0, Field.CHUNK].tolist() == list(range(number.max() + 1))
    assert lists.sizes.backward.num_tail == 0  # which would be out of order


@pytest.mark.parametrize(("tiles", "heads"), [(128, 8), (20, 8), (20, 32), (128, 2), (0, 5), (128, 5)])
def test_few_heads_are_kept_in_step_where_documents_are_long(tiles: int, heads: int) -> None:
    found, blocks = heads_in_step(np.arange(16 * tiles + 1), 8, heads)
    enough = max(HEADS_IN_STEP, 2 * NUM_SMS // max(1, tiles))  # to keep the SMs busy
    assert heads % found == 0
    assert found == heads or found >= enough
    assert all(fewer < enough for fewer in range(1, found) if heads % fewer == 0)
    few_blocks = heads_in_step(np.arange(16 * 128), 8, HEADS_IN_STEP)[1]
    assert blocks == few_blocks if found <= HEADS_IN_STEP else 0 < blocks < few_blocks  # what they work on stays in L2


def test_largest_divisor() -> None:
    assert [largest_divisor(n, 16) for n in (1, 5, 7, 8, 16, 32, 34, 71)] == [1, 5, 7, 8, 16, 16, 2, 1]


def test_slices_beyond_the_tensors_are_an_error() -> None:
    with pytest.raises(ValueError, match="slices reach"):
        lists_of(AttnSlices([[0, 9, 0, 4, 0]]), 8, 8, 1, 1)
    with pytest.raises(ValueError, match="multiple"):
        lists_of(AttnSlices([]), 8, 8, 3, 2)


@pytest.mark.parametrize(
    ("slices", "num_q", "num_k", "message"),
    [
        ([[0, 1 << 20, 2 * i, 2 * i + 1, 0] for i in range(2100)], 1 << 20, 4200, "2100 mask layers x 1048576 queries"),
        ([], 1 << 25, 8, "64 heads x 33554432 queries"),
        ([], 8, 1 << 30, "keys: 1073741824"),
    ],
)
def test_what_the_kernel_cannot_count_in_32_bits_is_refused(
    slices: list[list[int]], num_q: int, num_k: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message + ".*use shorter packs or more ranks"):
        lists_of(AttnSlices(slices), num_q, num_k, 64, 8, forward=False, backward=False)


@pytest.mark.parametrize(("tokens", "documents"), [(1 << 16, 150), (1 << 20, 150), (1 << 20, 1000)])
def test_no_loop_runs_over_tiles(tokens: int, documents: int) -> None:
    """Lines of this package that run: some for each document, none for each tile (8192 of 1M tokens)."""
    cuts = np.sort(np.random.default_rng(0).choice(tokens, documents - 1, replace=False))
    slices = varlen_causal(np.concatenate([[0], cuts, [tokens]])).canonical()
    package, lines = str(Path(torchtitan_magi.__file__).parent), 0

    def count(frame, event, _):  # type: ignore[no-untyped-def]
        nonlocal lines
        lines += event == "line"
        return count if frame.f_code.co_filename.startswith(package) else None

    before = sys.gettrace()
    sys.settrace(count)
    try:
        lists_of(slices, tokens, tokens, 64, 8)
    finally:
        sys.settrace(before)
    assert lines < 1000 + 5 * documents
