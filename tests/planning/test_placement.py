"""Placement: every token once, equal tokens, balanced work, few rows that travel, the same answer everywhere."""

import numpy as np
import pytest
from bench_plan import TREES, draw_trees, lower_bound_mean
from hypothesis import given, settings
from hypothesis import strategies as st
from support.masks import dense_mask, document_lengths, square_slice_lists

from torchtitan_magi.masks.builders import block_causal, shared_prompt, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, LLAMA_HEADS, Heads
from torchtitan_magi.planning.needs import node_traffic, traffic
from torchtitan_magi.planning.placement import nodes as seats
from torchtitan_magi.planning.plan import PlanSpec, make_plans, plan_afresh, plan_ownership
from torchtitan_magi.planning.topology import Nodes
from torchtitan_magi.sizing.sample_packs import draw_pack
from torchtitan_magi.sizing.strategies.outcomes import contiguous
from torchtitan_magi.sizing.strategies.pack_masks import mask_of

CP_SIZES = st.sampled_from([1, 2, 3, 5, 6, 8, 12])


def place(slices, num_tokens, cp_size, nodes=None):
    """The ranges of each rank in a plan."""
    spec = PlanSpec(num_tokens, cp_size, -1, LLAMA_HEADS, nodes or Nodes((cp_size,)), H200)
    return plan_afresh(slices, spec).routes.owned


def placed(slices, at_least, cp_size, **options):
    """The ranges of each rank for at least so many tokens, checked: every token once, equally many each."""
    num_tokens = -(-at_least // cp_size) * cp_size
    owned = place(slices, num_tokens, cp_size, **options)
    assert len(owned) == cp_size
    for ranges in owned:
        assert ranges.dtype == np.int64
        assert (ranges[:, 0] < ranges[:, 1]).all()
        assert (ranges[1:, 0] > ranges[:-1, 1]).all()  # ascending, adjacent ones joined
        assert (ranges[:, 1] - ranges[:, 0]).sum() == num_tokens // cp_size
    parts = np.concatenate(owned)
    parts = parts[np.argsort(parts[:, 0])]
    assert (parts[1:, 0] == parts[:-1, 1]).all()
    if num_tokens:
        assert (parts[0, 0], parts[-1, 1]) == (0, num_tokens)
    return owned


def real_documents(total, seed):
    """cu_seqlens of documents with lengths of a real corpus, none longer than a quarter of the pack."""
    return np.append(0, draw_pack("histogram", total, seed).cumsum())


def pairs(lengths):
    """Documents as preference pairs: prompt, chosen, rejected of about a third each."""
    thirds = np.array(lengths) // 3
    return shared_prompt(np.stack([thirds, thirds, np.array(lengths) - 2 * thirds], 1))


@given(document_lengths(600), CP_SIZES, st.integers(0, 3), st.integers(0, 50))
@settings(max_examples=150)
def test_documents_of_any_lengths(lengths, cp_size, kind, padding):
    cu = np.cumsum([0, *lengths])
    slices = [varlen_causal(cu), varlen_full(cu), sliding_window(cu, 7), pairs(lengths)][kind]
    placed(slices, int(cu[-1]) + padding, cp_size)


@given(square_slice_lists(0, 90), CP_SIZES, st.booleans())
@settings(max_examples=150)
def test_any_slices(total_and_slices, cp_size, has_nodes):
    total, slices = total_and_slices
    placed(slices, total, cp_size, nodes=Nodes.of(2 if has_nodes else None, cp_size))


@given(square_slice_lists(1, 60), st.sampled_from([2, 4, 6]))
@settings(max_examples=60)
def test_traffic_is_what_the_dense_mask_says(total_and_slices, cp_size):
    total, slices = total_and_slices
    owned = placed(slices, total, cp_size)
    num_tokens = int(np.concatenate(owned).max())
    mask = dense_mask(slices.table, num_tokens, num_tokens)
    owner = np.zeros(num_tokens, int)
    for rank, ranges in enumerate(owned):
        for start, end in ranges:
            owner[start:end] = rank
    needed = np.stack([mask[owner == rank].any(0) & (owner != rank) for rank in range(cp_size)])
    area, received, sent = traffic(slices, owned)
    assert area.tolist() == [mask[owner == rank].sum() for rank in range(cp_size)]
    assert received.tolist() == needed.sum(1).tolist()
    assert sent.tolist() == [needed[:, owner == rank].sum() for rank in range(cp_size)]
    node = owner // 2
    across = np.stack([mask[node == n].any(0) & (node != n) for n in range(cp_size // 2)])
    received, sent = node_traffic(slices, owned, Nodes.of(2, len(owned)))
    assert received.tolist() == [-(-rows // 2) for rows in across.sum(1).tolist()]
    assert sent.tolist() == [across[:, owner == rank].sum() for rank in range(cp_size)]


@pytest.mark.parametrize(
    ("cu", "num_tokens", "cp_size"),
    [
        ([0, 1], 8, 8),  # one token, and padding
        ([0, 8], 8, 8),  # a token per rank
        (range(97), 96, 96),
        ([0], 0, 4),
        ([0, 5, 5, 6], 6, 3),  # an empty document
        ([0, 100], 999_936, 96),  # nearly nothing but padding
    ],
)
def test_tiny_packs(cu, num_tokens, cp_size):
    placed(varlen_causal(cu), num_tokens, cp_size)


@pytest.mark.parametrize("cp_size", [3, 4, 5, 8, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_work_is_balanced_and_little_travels(cp_size, seed):
    num_tokens = cp_size * 20_000
    slices = varlen_causal(real_documents(num_tokens, seed))
    area, received, sent = traffic(slices, placed(slices, num_tokens, cp_size))
    assert area.max() <= 1.02 * area.mean()
    assert received.mean() <= 0.3 * (cp_size - 1) * 20_000  # an all-gather is cp_size - 1 shares
    assert sent.max() <= 1.35 * max(received.max(), 2000)


@pytest.mark.parametrize("kind", ["full", "window", "block", "prompt", "inverse", "shared keys"])
def test_other_masks_are_balanced(kind):
    num_tokens, cp_size = 64_000, 8
    cu = real_documents(num_tokens, 3)
    causal = varlen_causal(cu).table
    slices = {
        "full": varlen_full(cu),
        "window": sliding_window(cu, 512),
        "block": block_causal(cu, 128),
        "prompt": pairs(np.diff(cu)),
        "inverse": AttnSlices(np.concatenate([causal[:, :4], np.full((len(causal), 1), 2)], 1)),
        "shared keys": AttnSlices(np.concatenate([causal, [[0, num_tokens, 0, 64, 0]]])),
    }[kind]
    area, received, _ = traffic(slices, place(slices, num_tokens, cp_size))
    assert area.max() <= 1.02 * area.mean()
    assert received.mean() <= 0.4 * (cp_size - 1) * num_tokens / cp_size


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("cp_size", [2, 8])
def test_trees_are_balanced_and_their_common_rows_travel_little(kind, cp_size):
    pack = draw_trees(kind, cp_size * 16384, 0)
    slices = mask_of(pack)
    area, received, sent = traffic(slices, placed(slices, cp_size * 16384, cp_size))
    least = lower_bound_mean(pack, cp_size)
    assert area.max() <= 1.026 * area.mean()
    assert least <= received.mean() / 16384 <= least + 0.7
    assert sent.max() <= 2 * max(received.max(), 8192)


def test_the_bound_of_trees_is_that_of_documents_where_they_are_such():
    answers = np.array([[100, -1], *[[900, 0]] * 8])
    assert lower_bound_mean(answers, 1) == 0
    assert lower_bound_mean(answers, 4) >= 3 * 100 / 7300  # four ranks have answers, three of them not the prompt
    documents = np.array([5000, 300, 2000, 7])
    as_nodes = np.stack([documents, np.full(4, -1)], 1)
    assert lower_bound_mean(documents, 4) == lower_bound_mean(as_nodes, 4)


def test_one_document_is_no_worse_than_zigzag():
    num_tokens, cp_size = 65_536, 8
    slices = varlen_causal([0, num_tokens])
    edges = np.arange(2 * cp_size + 1) * num_tokens // (2 * cp_size)
    zigzag = tuple(np.array([edges[r : r + 2], edges[2 * cp_size - r - 1 :][:2]]) for r in range(cp_size))
    area, received, sent = traffic(slices, place(slices, num_tokens, cp_size))
    _, zigzag_received, zigzag_sent = traffic(slices, zigzag)
    assert area.max() <= 1.02 * area.mean()
    assert received.mean() <= zigzag_received.mean()
    assert received.max() <= zigzag_received.max()
    assert sent.max() <= zigzag_sent.max()


def test_short_documents_stay_whole():
    slices = varlen_causal(np.arange(0, 8 * 4096 + 1, 256))
    _, received, _ = traffic(slices, place(slices, 8 * 4096, 8))
    assert received.sum() == 0


def few_documents(cp_size, tokens_per_rank, seed):
    """cu_seqlens of about 1.3 documents per rank, each at most as long as a rank's share."""
    rng = np.random.default_rng(seed)
    cu = np.append(0, rng.integers(tokens_per_rank // 2, tokens_per_rank, 2 * cp_size).cumsum())
    return np.append(cu[cu < cp_size * tokens_per_rank], cp_size * tokens_per_rank)


@pytest.mark.parametrize("cp_size", [8, 16, 32])
def test_few_documents_travel_little(cp_size):
    slices = [varlen_causal(few_documents(cp_size, 4096, seed)) for seed in range(4)]
    figures = [traffic(some, place(some, cp_size * 4096, cp_size)) for some in slices]
    assert max(area.max() / area.mean() for area, _, _ in figures) <= 1.025
    assert np.mean([received.mean() for _, received, _ in figures]) <= 0.53 * 4096


def test_ranks_that_share_documents_sit_in_one_node():
    num_tokens, cp_size, nodes = 16 * 8192, 16, Nodes.of(4, 16)
    slices = varlen_causal(np.arange(0, num_tokens + 1, num_tokens // 4))  # four documents, four nodes
    owned = placed(slices, num_tokens, cp_size, nodes=nodes)
    _, received, _ = traffic(slices, owned)
    from_nodes, to_nodes = node_traffic(slices, owned, nodes)
    assert max(from_nodes.max(), to_nodes.max()) <= 0.2 * received.mean()


@pytest.mark.parametrize(
    ("length", "window", "cp_size", "gpus_per_node"),
    [
        (17_000, None, 8, 8),  # of each document a little is left over, which must not all end on one rank
        (18_000, None, 6, 4),
        (5_000, None, 16, 4),
        (5_000, 4096, 16, 8),
    ],
)
def test_no_slower_than_shares_in_the_order_of_the_pack(length, window, cp_size, gpus_per_node):
    total, heads, nodes = 16_384 * cp_size, Heads(32, 32, 128), Nodes.of(gpus_per_node, cp_size)
    slices = sliding_window([*range(0, total, length), total], window or total).canonical()
    plan = plan_afresh(slices, PlanSpec(total, cp_size, -1, heads, nodes, H200))
    in_order = plan_ownership(slices, total, contiguous(slices, total, cp_size), -1, heads, nodes)
    seconds, others = (sum(part.seconds for part in each.predict()) for each in (plan, in_order))
    assert seconds <= 1.02 * others


def test_nodes_do_not_change_what_the_ranks_own():
    num_tokens, cp_size = 65_536, 8
    slices = varlen_causal(real_documents(num_tokens, 1))
    one_node, eight = (place(slices, num_tokens, cp_size, nodes=n) for n in (Nodes.of(8, 8), None))
    assert all(np.array_equal(a, b) for a, b in zip(one_node, eight, strict=True))


def test_masks_of_several_kinds_of_layers_are_not_merged(monkeypatch):
    """Merging goes over all rows; where tokens are placed, which rows and keys the masks reach is enough."""
    cu = real_documents(65536, 0)
    full, window = varlen_causal(cu).canonical(), sliding_window(cu, 128).canonical()
    merged = AttnSlices(np.concatenate([full.table, window.table])).canonical()
    monkeypatch.setattr("torchtitan_magi.masks.slices._merge_rows", None)
    assert merged == full
    plans = make_plans([full, window], 65536, 16, gpus_per_node=8)
    assert all(map(np.array_equal, *(plan.routes.owned for plan in plans)))


def test_swaps_between_nodes_do_not_grow_with_the_square_of_the_nodes(monkeypatch):
    tried = []
    reach_without = seats._reach_without
    monkeypatch.setattr(seats, "_reach_without", lambda reach: tried.append(reach.shape) or reach_without(reach))
    placed(varlen_causal(real_documents(2**20, 0)), 2**20, 320, nodes=Nodes.of(8, 320))
    assert tried
    assert all(len(shape) == 2 or shape[0] <= seats.SWAP_NODES for shape in tried)
