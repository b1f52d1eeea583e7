"""The kernel's work lists, walked on the host as the kernel walks them, compute every visible pair exactly once."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_magi.backends.ffa.worklists import (
    BACKWARD_BLOCK_US,
    BLOCK_US,
    LATE_US,
    LATE_US_PER_MIB,
    SUMS_BYTES_PER_US,
    WorkLists,
    build_worklists,
    early_first,
    heads_in_step,
)
from torchtitan_magi.masks.builders import shared_prompt, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.tiles import KEYS, largest_divisor, tile_cost


def dense_mask(table: np.ndarray, num_q: int, num_k: int) -> np.ndarray:
    mask = np.zeros((num_q, num_k), bool)
    q, k = np.arange(num_q)[:, None], np.arange(num_k)[None]
    for q_start, q_end, k_start, k_end, mask_type in table:
        lo = k_start + (mask_type >> 1) * (q - q_start)
        hi = k_end - (mask_type & 1) * (q_end - 1 - q)
        mask |= (q >= q_start) & (q < q_end) & (k >= np.maximum(lo, k_start)) & (k < np.minimum(hi, k_end))
    return mask


def read(lists: WorkLists, offset: int, count: int, width: int) -> np.ndarray:
    return lists.words[offset : offset + count * width].reshape(count, width)


def segments_of(lists: WorkLists, item: np.ndarray, segments: int) -> list[np.ndarray]:
    further = [lists.words[segments + 8 * (item[2] + i) :][:8] for i in range(item[1] - 1)]
    return [item[4:], *further] if item[1] else []


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
    s, bands = lists.sizes, bands_of(lists)
    seen = np.zeros((s.num_q, s.num_k + KEYS), int)
    tokens = 128 // s.forward_pack
    items = read(lists, s.forward_items, s.num_forward_items, 12)
    parts = items[items[:, 3] > 0]  # of each tile that is cut, numbered one after another
    parts = parts[np.argsort(parts[:, 3])]
    assert (parts[:, 3] == np.arange(s.num_forward_parts) + 1).all()
    if s.num_forward_parts:
        of_tile = parts[:, 0].reshape(-1, s.forward_parts_per_tile)
        assert (of_tile == of_tile[:, :1]).all()
        assert len(set(of_tile[:, 0].tolist())) == len(of_tile)
    assert len(items) - len(parts) + s.num_forward_parts // max(1, s.forward_parts_per_tile) == -(-s.num_q // tokens)
    for item in items:
        rows = np.arange(item[0] * tokens, min((item[0] + 1) * tokens, s.num_q))
        for layer, _, _, _, first, end, full_first, full_end in segments_of(lists, item, s.forward_segments):
            for key in range(first, end, KEYS):
                keys = np.arange(key, key + KEYS)
                visible = (keys >= bands[layer, rows, :1]) & (keys < np.minimum(bands[layer, rows, 1:], end))
                if key >= full_first and key + KEYS <= full_end:
                    assert visible.all()
                seen[rows, key : key + KEYS] += visible
    assert not seen[:, s.num_k :].any()
    return seen[:, : s.num_k]


def walk_backward(lists: WorkLists) -> np.ndarray:
    s, bands = lists.sizes, bands_of(lists)
    seen = np.zeros((s.num_q, s.num_k + KEYS), int)
    stored = np.zeros(s.num_k, int)
    tokens = 64 // s.backward_pack
    if s.deterministic:
        offsets = lists.words[s.components :][: s.num_q_blocks + 1]
        spans = lists.words[s.components + (s.num_q_blocks + 2) // 2 * 2 :][: 2 * offsets[-1]].reshape(-1, 2)
    additions, parts = np.zeros(s.num_q_blocks, int), np.zeros(s.num_k_tiles, int)
    for item in read(lists, s.backward_items, s.num_backward_items, 12):
        tile = item[0]
        keys = np.arange(item[6], item[6] + KEYS)
        stored[item[6] : item[7]] += 1
        if s.deterministic:
            assert item[3] == parts[tile]
            parts[tile] += 1
        segments = segments_of(lists, item, s.backward_segments)[::-1]
        for layer, component, _, _, first, end, full_first, full_end in segments:
            for block in range(first, end)[::-1]:
                rows = np.arange(block * tokens, min((block + 1) * tokens, s.num_q))
                visible = (keys >= bands[layer, rows, :1]) & (keys < np.minimum(bands[layer, rows, 1:], item[7]))
                if full_first <= block < full_end:
                    assert visible.all()
                seen[np.ix_(rows, keys)] += visible
                if s.deterministic:  # the kernel's addition_rank
                    rank = 0
                    for c in range(offsets[block], offsets[block + 1]):
                        a, b = spans[c]
                        rank += max(0, min(tile, b + 1) - a)
                        rank += c - offsets[block] > component and a <= tile <= b
                    assert rank == additions[block]
                    additions[block] += 1
    if not s.is_split:  # each key's gradient is stored once
        assert (stored == 1).all()
    return seen[:, : s.num_k]


@st.composite
def masks(draw: st.DrawFn) -> tuple[AttnSlices, int, int]:
    num_q, num_k = draw(st.integers(1, 700)), draw(st.integers(1, 900))
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        q0, q1 = sorted((draw(st.integers(0, num_q)), draw(st.integers(0, num_q))))
        k0, k1 = sorted((draw(st.integers(0, num_k)), draw(st.integers(0, num_k))))
        rows.append([q0, q1, k0, k1, draw(st.integers(0, 3))])
    return AttnSlices(rows), num_q, num_k


def check(
    slices: AttnSlices,
    num_q: int,
    num_k: int,
    heads: tuple[int, int],
    parts: int | None = None,
    backward_pack: int | None = None,
    chunk: int | None = None,
) -> None:
    want = dense_mask(slices.table, num_q, num_k).astype(int)
    for deterministic in (False, True):
        overrides = {"deterministic": deterministic, "parts": parts, "backward_pack": backward_pack, "chunk": chunk}
        lists = build_worklists(slices, num_q, num_k, *heads, **overrides)
        np.testing.assert_array_equal(walk_forward(lists), want)
        np.testing.assert_array_equal(walk_backward(lists), want)


@settings(max_examples=60, deadline=None)
@given(
    masks(),
    st.sampled_from([(8, 8, 1), (8, 1, 8), (7, 1, 7), (5, 1, 1), (16, 1, 4)]),
    st.sampled_from([None, 1, 3, 20]),
    st.sampled_from([None, 2, 3]),
)
def test_every_visible_pair_is_computed_once(
    mask: tuple[AttnSlices, int, int], heads: tuple[int, int, int], chunk: int | None, parts: int | None
) -> None:
    check(*mask, heads[:2], parts, heads[2], chunk)


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


@settings(max_examples=60, deadline=None)
@given(masks())
def test_row_bands_are_those_of_the_slices(mask: tuple[AttnSlices, int, int]) -> None:
    slices, num_q, num_k = mask
    want = np.stack(slices.row_bands(num_q), 2)
    np.testing.assert_array_equal(bands_of(build_worklists(slices, num_q, num_k, 1, 1)), want)


def test_lists_of_one_direction_are_those_of_both() -> None:
    slices = shared_prompt([[300, 200, 150], [20, 40, 500]])
    whole = build_worklists(slices, 1210, 1210, 8, 1)
    one = build_worklists(slices, 1210, 1210, 8, 1, backward=False)
    assert one.sizes.backward_pack == 0
    np.testing.assert_array_equal(walk_forward(one), walk_forward(whole))
    other = build_worklists(slices, 1210, 1210, 8, 1, forward=False)
    assert other.sizes.forward_pack == 0
    np.testing.assert_array_equal(walk_backward(other), walk_backward(whole))
    slices_too = -(-5 * whole.sizes.num_slices // 4) * 4  # are in both
    assert len(one.words) + len(other.words) == len(whole.words) + slices_too


def test_holes_between_keys_are_not_walked() -> None:
    slices = AttnSlices([[0, 8, 0, 256, 0], [8, 16, 100_000, 100_256, 0]])
    assert build_worklists(slices, 16, 100_256, 8, 1).sizes.num_forward_blocks == 4


def test_longest_items_come_first() -> None:
    lists = build_worklists(varlen_causal([0, 700, 4000]), 4000, 4000, 8, 1)
    items = read(lists, lists.sizes.forward_items, lists.sizes.num_forward_items, 12)
    blocks = -(-(items[:, 9] - items[:, 8]) // KEYS)
    assert (np.diff(blocks) <= 0).all()
    assert (np.diff(tile_cost(np.arange(5))) > 0).all()


def test_what_needs_no_late_keys_goes_first() -> None:
    slices = AttnSlices([[0, 512, 0, 256, 0], [512, 1024, 0, 256, 0], [512, 3000, 640, 4000, 0]])
    lists = build_worklists(slices, 3000, 4000, 8, 1, late_from=600)
    forward = read(lists, lists.sizes.forward_items, lists.sizes.num_forward_items, 12)
    is_late = (forward[:, 1] > 1) | (forward[:, 9] > 600)
    assert lists.sizes.num_forward_early == 512 // 16
    assert is_late[: 512 // 16].sum() == 0  # the shortest ones
    assert is_late[512 // 16 :].all()
    backward = read(lists, lists.sizes.backward_items, lists.sizes.num_backward_items, 12)
    is_late = backward[:, 7] > 600
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
    want = dense_mask(slices.table, num_q, num_k).astype(int)
    for deterministic in (False, True):
        lists = build_worklists(slices, num_q, num_k, 8, 1, deterministic=deterministic, late_from=late_from)
        s = lists.sizes
        for item in read(lists, s.forward_items, s.num_forward_items, 12):
            for *_, first, end, _, _ in segments_of(lists, item, s.forward_segments):
                assert end <= late_from or first >= late_from
        for item in read(lists, s.backward_items, s.num_backward_items, 12):
            assert item[7] <= late_from or item[6] >= late_from
        assert s.forward_awaits == s.backward_awaits == want[:, late_from:].any()
        for item in read(lists, s.forward_items, s.num_forward_early, 12):
            assert item[1] > 0
            assert all(end <= late_from for *_, end, _, _ in segments_of(lists, item, s.forward_segments))
        assert (read(lists, s.backward_items, s.num_backward_early, 12)[:, 7] <= late_from).all()
        assert (read(lists, s.backward_items, s.num_backward_early, 12)[:, 1] > 0).all()
        assert s.num_backward_early == 0 or not deterministic
        work = [item for item in read(lists, s.backward_items, s.num_backward_items, 12) if item[1] > 0]
        assert s.backward_awaits == any(item[6] >= late_from for item in work)  # as the kernel has it
        np.testing.assert_array_equal(walk_forward(lists), want)
        np.testing.assert_array_equal(walk_backward(lists), want)


def test_only_as_much_goes_first_as_covers_the_wait() -> None:
    blocks, waits = np.array([9, 8, 7, 6, 5]), np.array([True, False, True, False, False])
    order = np.arange(5)

    def ordered(enough: int) -> tuple[list[int], int]:
        found, num_early = early_first(order, blocks, waits, enough)
        return found.tolist(), num_early

    assert ordered(8) == ([1, 0, 2, 3, 4], 1)
    assert ordered(9) == ([1, 3, 0, 2, 4], 2)
    assert ordered(1000) == ([1, 3, 4, 0, 2], 3)
    assert ordered(0) == (order.tolist(), 0)
    blocks[4] = 0
    assert ordered(1000) == ([1, 3, 0, 2, 4], 2)


def test_all_heads_have_work_until_late_keys_are_there() -> None:
    """Half of the queries see only keys of this rank; 12 MiB come late."""
    num_q, late = 8192, 3072
    slices = AttnSlices([[0, 4096, 0, 4096, 1], [4096, num_q, num_q, num_q + late, 0]])
    lists = build_worklists(slices, num_q, num_q + late, 64, 8, late_from=num_q)
    s = lists.sizes
    items = read(lists, s.forward_items, s.num_forward_early, 12)
    blocks = -(-(items[:, 9] - items[:, 8]) // KEYS)
    wanted = (LATE_US + 12 * LATE_US_PER_MIB) / BLOCK_US * 132 / 8
    assert wanted <= blocks.sum() < wanted + blocks.max()
    lists = build_worklists(slices, num_q, num_q + late, 8, 8, late_from=num_q)  # fewer query heads: little else to do
    s = lists.sizes
    items = read(lists, s.backward_items, s.num_backward_early, 12)
    blocks = items[:, 9] - items[:, 8]
    wanted = (LATE_US + 12 * LATE_US_PER_MIB - 8192 * 8 * 1024 / SUMS_BYTES_PER_US) / BACKWARD_BLOCK_US * 132 / 8
    main = read(lists, s.backward_items, s.num_backward_items - s.num_backward_tail, 12)
    assert (wanted <= blocks.sum() < wanted + blocks.max()) or (main[len(items) :, 7] > num_q).all()
    assert len(items) > 0


def test_parts_of_tiles_fill_the_gpu_and_end_at_chunks() -> None:
    lists = build_worklists(varlen_causal([0, 16384]), 16384, 16384, 64, 8)
    assert lists.sizes.is_split
    items = read(lists, lists.sizes.backward_items, lists.sizes.num_backward_items, 12)
    assert (items[:, 8] // 256 == (items[:, 9] - 1) // 256).all()
    assert lists.sizes.num_backward_items * 8 > 4 * 132
    main = len(items) - lists.sizes.num_backward_tail
    assert (np.diff(items[:main, 8] // 256) >= 0).all()  # one chunk of queries after another
    blocks = items[:, 9] - items[:, 8]
    assert blocks[:main].max() == 256
    assert blocks[main:].max() == 64  # at the end short ones, longest first
    assert (np.diff(blocks[main:]) <= 0).all()
    assert 132 * 128 <= blocks[main:].sum() * 8 <= 132 * 256
    assert not build_worklists(varlen_causal(np.arange(0, 65536, 64)), 65472, 65472, 64, 8).sizes.is_split


def test_equal_tiles_that_would_be_left_over_are_cut() -> None:
    sizes = build_worklists(varlen_full([0, 8192]), 8192, 8192, 64, 8).sizes  # 512 tiles of 8 heads: 31.03 for each SM
    assert (sizes.num_forward_items, sizes.num_forward_parts, sizes.forward_parts_per_tile) == (511 + 4, 4, 4)
    for slices in (varlen_causal([0, 8192]), varlen_causal(range(0, 8193, 512)), AttnSlices([])):
        assert build_worklists(slices, 8192, 8192, 64, 8).sizes.num_forward_parts == 0


def test_tiles_without_queries_are_stored_too_where_long_ones_turn_out_to_be_whole() -> None:
    """Three layers over 200 query blocks: more blocks than a chunk of 256, but no end of a chunk among them."""
    slices = AttnSlices([[0, 1600, 0, 40, 0], [0, 1600, 50, 80, 0], [0, 1600, 90, 128, 0]])
    check(slices, 1600, 1000, (8, 1), chunk=256)


@pytest.mark.filterwarnings("error")
def test_tiles_stay_whole_where_each_query_head_has_its_own_keys() -> None:
    assert build_worklists(varlen_causal([0, 16384]), 16384, 16384, 8, 2).sizes.is_split
    assert not build_worklists(varlen_causal([0, 16384]), 16384, 16384, 8, 8).sizes.is_split
    assert build_worklists(varlen_causal([0, 4096]), 4096, 4096, 2, 2).sizes.is_split  # for 132 SMs
    assert not build_worklists(AttnSlices([]), 0, 16384, 8, 8).sizes.is_split


def test_a_deterministic_tile_counts_its_parts_in_the_order_of_the_list() -> None:
    lists = build_worklists(varlen_causal([0, 16384]), 16384, 16384, 64, 8, deterministic=True)
    items = read(lists, lists.sizes.backward_items, lists.sizes.num_backward_items, 12)
    assert (np.diff(items[:, 8] // 128) <= 0).all()  # from the last chunk of queries to the first
    for chunk in range(16):
        assert (np.diff(items[items[:, 8] // 128 == chunk, 0]) == 1).all()  # in each, one tile after another
    assert items[items[:, 0] == 0, 3].tolist() == list(range(16))
    assert lists.sizes.num_backward_tail == 0  # which would be out of order


@pytest.mark.parametrize(
    ("tiles", "heads", "wanted"),
    [(128, 8, (4, 128)), (20, 8, (8, 64)), (20, 32, (16, 64)), (128, 2, (2, 128)), (0, 5, (5, 64)), (128, 5, (5, 64))],
)
def test_few_heads_at_a_time_are_kept_in_step_where_documents_are_long(
    tiles: int, heads: int, wanted: tuple[int, int]
) -> None:
    assert heads_in_step(np.arange(16 * tiles + 1), 8, heads) == wanted


def test_largest_divisor() -> None:
    assert [largest_divisor(n, 16) for n in (1, 5, 7, 8, 16, 32, 34, 71)] == [1, 5, 7, 8, 16, 16, 2, 1]


def test_slices_beyond_the_tensors_are_an_error() -> None:
    with pytest.raises(ValueError, match="slices reach"):
        build_worklists(AttnSlices([[0, 9, 0, 4, 0]]), 8, 8, 1, 1)
    with pytest.raises(ValueError, match="multiple"):
        build_worklists(AttnSlices([]), 8, 8, 3, 2)


@pytest.mark.parametrize(("tokens", "documents", "wanted"), [(65536, 150, 0.001), (1 << 20, 1000, 0.010)])
def test_building_is_fast(tokens: int, documents: int, wanted: float) -> None:
    """The figures wanted of a free core; a shared test machine gets ten times that."""
    cuts = np.sort(np.random.default_rng(0).choice(tokens, documents - 1, replace=False))
    slices = varlen_causal(np.concatenate([[0], cuts, [tokens]]))
    slices.canonical()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        build_worklists(slices, tokens, tokens, 64, 8)
        times.append(time.perf_counter() - start)
    assert min(times) < 10 * wanted
