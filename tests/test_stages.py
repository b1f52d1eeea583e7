"""The cost model: what it predicts, and which stages are chosen for it."""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import dense_mask, slice_lists

from torchtitan_magi.plan import make_plan
from torchtitan_magi.slices import varlen_causal
from torchtitan_magi.stages import (
    CANDIDATES,
    H200,
    LLAMA_HEADS,
    RESIDENT,
    CostModel,
    Heads,
    KernelCost,
    Link,
    choose_stages,
    equal_stages,
    predict,
)

# One second per pair and query head; everything else is free.
PLAIN = CostModel(
    forward=KernelCost(0, 1, 0, 0, 0),
    backward=KernelCost(0, 1, 0, 0, 0),
    merge=0,
    stage=0,
    memory=float("inf"),
    slowdown=0,
    inside=Link(0, float("inf")),
    across=Link(0, float("inf")),
)
ONE_ROW_TILES = Heads(num_heads_q=128, num_heads_kv=1, head_dim=1)
PER_PAIR = replace(PLAIN, forward=KernelCost(0, 1 / 128, 0, 0, 0), backward=KernelCost(0, 1 / 128, 0, 0, 0))


def documents(cp_size, tokens_per_rank, count=1, **options):
    total = cp_size * tokens_per_rank
    return make_plan(varlen_causal(np.linspace(0, total, count + 1).astype(int)), total, cp_size, **options)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), slice_lists(n, n))), st.sampled_from([2, 3, 4]))
@settings(max_examples=60)
def test_the_work_is_what_the_dense_mask_says(total_and_slices, cp_size):
    total, slices = total_and_slices
    plan = make_plan(slices, total, cp_size, heads=ONE_ROW_TILES, gpus_per_node=2)
    mask = dense_mask(slices.table, plan.padded_tokens, plan.padded_tokens)
    for rank, share in enumerate(plan.ranks):
        rows = mask[share.tokens]
        own = np.isin(np.arange(plan.padded_tokens), share.tokens)
        work = plan.work
        tiles = 1 + (ONE_ROW_TILES.tile_rows - 1)  # at most so many times the pairs
        pairs = work.local_pairs[rank] + work.remote_pairs[rank]
        assert rows.sum() <= pairs <= tiles * rows.sum()
        assert work.received[rank] == (rows.any(0) & ~own).sum()
        assert bool(work.remote_pairs[rank]) == rows[:, ~own].any()
        assert work.remote_rows[rank] >= rows[:, ~own].any(1).sum()


def test_without_other_costs_a_layer_takes_as_long_as_its_heaviest_rank_has_pairs():
    plan = documents(4, 512, heads=Heads(128, 8, 1))
    assert plan.heads.tile_rows == 8
    pairs = plan.work.local_pairs + plan.work.remote_pairs
    assert plan.areas.max() <= pairs.max() <= 1.1 * plan.areas.max()
    for shares in CANDIDATES:
        for backward in (False, True):
            timeline = predict(PER_PAIR, plan.work, plan.heads, shares, backward)
            np.testing.assert_allclose(timeline.attends[-1, 1], pairs)
            np.testing.assert_allclose(timeline.end, pairs.max() if backward else pairs)  # gradients wait for all ranks
            assert (timeline.attends[:, 1] >= timeline.attends[:, 0]).all()
            assert (timeline.casts[:, 1].max(1) <= timeline.attends[:, 0].min(1) + 1e-9).all()


def test_what_travels_under_attention_costs_nothing():
    plan = documents(4, 512, heads=ONE_ROW_TILES)
    nothing = predict(PER_PAIR, plan.work, plan.heads, equal_stages(1), False).seconds
    local = plan.work.local_pairs.min() * plan.heads.num_heads_q / 128
    row_bytes = plan.work.inside.max() * plan.heads.row_bytes
    hidden = replace(PER_PAIR, inside=Link(0, row_bytes / (0.9 * local)))
    assert predict(hidden, plan.work, plan.heads, equal_stages(1), False).seconds == pytest.approx(nothing)
    exposed = predict(hidden, plan.work, plan.heads, equal_stages(0), False).seconds
    assert exposed == pytest.approx(nothing + 0.9 * local, rel=0.05)
    returned = predict(hidden, plan.work, plan.heads, equal_stages(1), True)
    assert returned.seconds > nothing  # the last gradients return when nothing is left to hide them
    assert returned.reduces[1, 1].max() == pytest.approx(returned.seconds)


def test_nodes_are_slow_to_reach_and_each_row_crosses_once():
    slow = replace(PLAIN, across=Link(0, 1.0))
    flat, nodes = (documents(8, 64, gpus_per_node=n, heads=ONE_ROW_TILES) for n in (1, 4))
    times = [predict(slow, plan.work, plan.heads, equal_stages(0), False).casts[0, 1].max() for plan in (flat, nodes)]
    row_bytes = ONE_ROW_TILES.row_bytes
    assert times[0] == flat.received_rows.max() * row_bytes
    assert nodes.rows_across_nodes.max() * row_bytes <= times[1] < 0.6 * times[0]


def test_little_to_hide_needs_no_stages():
    plan = documents(4, 256)
    assert len(plan.transfers)
    assert plan.forward == plan.backward == equal_stages(0)


def test_nothing_travels_nothing_is_cut():
    plan = documents(4, 256, count=4)
    assert plan.forward == plan.backward == RESIDENT


def test_much_to_hide_is_cut_and_more_when_stages_are_cheap():
    cost = replace(H200, merge=0.0, memory=1e15)
    slow = replace(cost, inside=Link(1e-6, 2e10))
    plan = documents(8, 4096)
    counts = [len(choose_stages(c, plan.work, LLAMA_HEADS)[0]) for c in (cost, slow)]
    assert counts[0] <= counts[1]
    assert counts[1] > 2
    costly = replace(slow, stage=1e-2)
    assert len(choose_stages(costly, plan.work, LLAMA_HEADS)[0]) <= 2


def test_forward_and_backward_are_chosen_apart():
    plan = documents(8, 4096)
    slow_merge = replace(H200, merge=1e-9, inside=Link(1e-6, 5e10))
    forward, backward = choose_stages(slow_merge, plan.work, LLAMA_HEADS)
    assert forward == equal_stages(0)
    assert len(backward) > 1


@pytest.mark.parametrize("shares", CANDIDATES)
def test_shares_bring_everything_once_in_order(shares):
    assert shares[0][0] == 0
    assert shares[-1][1] == 1
    assert all(before[1] == after[0] for before, after in itertools.pairwise(shares))
    assert all(isinstance(edge, Fraction) for share in shares for edge in share)


def test_the_model_repeats_the_measured_kernel():
    """Figures of benchmarks/results/kernel_h200.json: one causal document of 16k tokens, one of 8k, 64:8 heads."""
    for tokens, forward, backward in ((8192, 1.5853e-3, 5.386e-3), (16384, 6.5905e-3, 19.7659e-3)):
        plan = make_plan(varlen_causal([0, tokens]), tokens, 1)
        times = [timeline.seconds for timeline in plan.predict()]
        assert times == pytest.approx([forward, backward], rel=0.12)


def test_a_cost_model_survives_a_file(tmp_path):
    H200.save(tmp_path / "cost.json", device="NVIDIA H200")
    assert CostModel.load(tmp_path / "cost.json") == H200


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="12 query heads, 8 K/V heads"):
        Heads(12, 8, 128)
