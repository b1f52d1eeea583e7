"""The cost model: what it predicts, and which stages are chosen for it."""

import itertools
import json
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import one_line
from support.masks import dense_mask, square_slice_lists
from support.runs import ROOT

from check_prediction import comparisons  # isort: skip

from torchtitan_magi.calibrate import Sample, fit_kernel, fit_link, recorded_samples
from torchtitan_magi.masks.builders import varlen_causal
from torchtitan_magi.planning import choose_stages as stages
from torchtitan_magi.planning.choose_stages import CANDIDATES, MANY, MOST_BYTES, SIMPLER, choose_stages, equal_stages
from torchtitan_magi.planning.cost_model import H200, LLAMA_HEADS, CostModel, Heads, KernelCost, Link
from torchtitan_magi.planning.plan import make_plan
from torchtitan_magi.planning.relays import RESIDENT
from torchtitan_magi.planning.row_memory import memory_of_rows
from torchtitan_magi.planning.timeline import predict
from torchtitan_magi.sizing.sample_packs import draw_pack

RESULTS = ROOT / "benchmarks" / "results"

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


@given(square_slice_lists(1, 60), st.sampled_from([2, 3, 4]))
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
        assert rows[:, own].sum() <= work.local_pairs[rank] <= tiles * rows[:, own].sum()
        assert rows[:, ~own].sum() <= work.remote_pairs[rank] <= tiles * rows[:, ~own].sum()
        assert work.local_rows[rank] == rows[:, own].any(1).sum()
        assert work.received[rank] == (rows.any(0) & ~own).sum()
        assert rows[:, ~own].any(1).sum() <= work.remote_rows[rank] <= rows.any(1).sum()


def test_without_other_costs_a_layer_takes_as_long_as_its_heaviest_rank_has_pairs():
    plan = documents(4, 512, heads=Heads(128, 8, 1))
    assert plan.heads.tile_rows == 12
    pairs = plan.work.local_pairs + plan.work.remote_pairs
    assert plan.areas.max() <= pairs.max() <= 1.1 * plan.areas.max()
    for spans in CANDIDATES:
        for backward in (False, True):
            timeline = predict(PER_PAIR, plan.work, plan.heads, spans, backward)
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
    together = predict(hidden, plan.work, plan.heads, equal_stages(0), False).seconds
    assert together == pytest.approx(nothing, rel=0.05)  # keys that are there go first
    slow = replace(hidden, inside=Link(0, row_bytes / (1.8 * local)))
    exposed = predict(slow, plan.work, plan.heads, equal_stages(0), False).seconds
    assert exposed == pytest.approx(nothing + 0.8 * local, rel=0.05)
    returned = predict(hidden, plan.work, plan.heads, equal_stages(1), True)
    assert returned.seconds > nothing  # the last gradients return when nothing is left to hide them
    assert returned.reduces[1, 1].max() == pytest.approx(returned.seconds)


def test_gradients_of_an_only_exchange_are_written_inside_a_node():
    cost = replace(PLAIN, inside=Link(latency=7.0, bandwidth=1e3), across=Link(latency=11.0, bandwidth=1e3))
    inside, nodes = (documents(4, 64, gpus_per_node=n, heads=ONE_ROW_TILES) for n in (4, 2))
    taken = {}
    for plan, name in ((inside, "inside"), (nodes, "nodes")):
        for count in (0, 1, 2):
            start, end = predict(cost, plan.work, plan.heads, equal_stages(count), True).reduces[-1]
            taken[name, count] = (end - start).max()
    num_bytes = inside.work.inside.max() * ONE_ROW_TILES.row_bytes
    assert taken["inside", 0] == taken["inside", 1] == pytest.approx(num_bytes / 1e3)
    assert taken["inside", 2] == pytest.approx(7 + num_bytes / 2e3)
    assert taken["nodes", 0] == taken["nodes", 1] > 11


@pytest.mark.parametrize(("count", "of_returned"), [(0, 1), (1, 1), (2, 3)])
def test_gradients_that_are_sums_take_passes_over_memory(count, of_returned):
    plan, alone = documents(4, 64, heads=ONE_ROW_TILES), documents(4, 64, count=4, heads=ONE_ROW_TILES)
    narrow = replace(PLAIN, memory=1e3)

    def added(plan, spans):
        wide, passes = (predict(cost, plan.work, plan.heads, spans, True).end for cost in (PLAIN, narrow))
        return (passes - wide) * 1e3 / ONE_ROW_TILES.row_bytes

    expected = 4 * 64 + 3 * plan.work.received + of_returned * plan.work.sent
    np.testing.assert_allclose(added(plan, equal_stages(count)), expected, rtol=1e-6)
    assert not added(alone, RESIDENT).any()


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


@pytest.mark.parametrize("bandwidth", [3.8e11, 2e10])
def test_inside_a_node_there_is_one_stage_however_slow_the_links(bandwidth):
    plan, cost = documents(8, 4096), replace(H200, merge=0.0, inside=Link(1e-6, bandwidth))
    assert choose_stages(cost, plan.work, plan.heads) == (equal_stages(0), equal_stages(0))


def test_several_nodes_do_not_await_keys_while_they_run_even_if_nothing_crosses():
    plan = documents(4, 4096, count=2, gpus_per_node=2)
    assert len(plan.transfers)
    assert not plan.work.across.any()
    whole = predict(H200, plan.work, plan.heads, equal_stages(0), False)
    assert (whole.casts[0, 1] <= whole.attends[0, 0]).all()


def test_nothing_travels_nothing_is_cut():
    for plan in (documents(4, 256, count=4), documents(4, 1024, count=4096)):
        assert len(plan.transfers) == 0
        assert plan.forward == plan.backward == RESIDENT
        assert [stage.exchanges for stage in plan.ranks[0].forward] == [()]


def test_much_to_hide_is_cut_and_more_when_stages_are_cheap():
    cost = replace(H200, merge=0.0, memory=1e15)
    slow = replace(cost, across=Link(1e-6, 2e10))
    plan = documents(8, 4096, gpus_per_node=1)
    counts = [len(choose_stages(c, plan.work, LLAMA_HEADS)[0]) for c in (cost, slow)]
    assert counts[0] <= counts[1]
    assert counts[1] > 2
    costly = replace(slow, stage=1e-2)
    assert len(choose_stages(costly, plan.work, LLAMA_HEADS)[0]) <= 2


@pytest.mark.parametrize("cp_size", [4, 16, 64])
def test_an_exchange_takes_time_for_each_peer_of_a_rank(cp_size):
    plan = documents(cp_size, 64, gpus_per_node=1, heads=ONE_ROW_TILES)  # one document over all
    assert plan.work.across_peers.max() == cp_size - 1
    cost = replace(PLAIN, across=Link(latency=11.0, bandwidth=1e30, per_peer=0.5))
    start, end = predict(cost, plan.work, plan.heads, equal_stages(4), False).casts[1:].transpose(1, 0, 2)
    np.testing.assert_allclose((end - start).max(1), 11 + 0.5 * (cp_size - 1))  # each stage has all peers


def test_many_peers_make_fewer_stages_pay():
    plan = documents(128, 2048, gpus_per_node=1)
    cost = replace(H200, merge=0.0, memory=1e15, across=Link(1e-6, 2e10))
    distant = replace(cost, across=replace(cost.across, per_peer=1e-4))
    few, many = (len(choose_stages(c, plan.work, LLAMA_HEADS)[0]) for c in (distant, cost))
    assert few < many


@pytest.mark.parametrize("cp_size", [4, 8, 16])
def test_each_stage_must_promise_to_pay(cp_size):
    heads = Heads(32, 32, 128)
    plan = documents(cp_size, 8192, heads=heads, gpus_per_node=2)
    (forward, _), one = choose_stages(H200, plan.work, heads), equal_stages(0)
    staged, whole = (predict(H200, plan.work, heads, spans, False).seconds for spans in (forward, one))
    assert staged <= SIMPLER ** (len(forward) - 1) * whole


def test_forward_and_backward_are_chosen_apart():
    plan = documents(8, 4096, gpus_per_node=1)
    slow_merge = replace(H200, merge=1e-9, across=Link(1e-6, 5e10))
    forward, backward = choose_stages(slow_merge, plan.work, LLAMA_HEADS)
    assert forward == equal_stages(0)
    assert len(backward) > 1


# ------------------------------------------------------------------------------------------------------ rows find room

MILLION = 1 << 20


@pytest.mark.parametrize(("total", "cp_size"), [(4 * MILLION, 32), (16 * MILLION, 128), (2 * MILLION, 8)])
def test_where_a_document_fills_a_long_pack_rows_come_in_as_many_stages_as_find_room(total, cp_size):
    plan = documents(cp_size, total // cp_size, gpus_per_node=8)
    assert memory_of_rows(plan.work, plan.heads, equal_stages(0), True).max() > MOST_BYTES
    for spans, backward, whole in zip((plan.forward, plan.backward), (False, True), (0.0, 0.01), strict=True):
        assert memory_of_rows(plan.work, plan.heads, spans, backward).max() <= MOST_BYTES
        one, chosen = (predict(H200, plan.work, plan.heads, x, backward).seconds for x in (equal_stages(0), spans))
        assert chosen <= (1 + whole) * one
    assert len(plan.backward) > len(equal_stages(2))


# Stages of the forward and of the backward that plans had when nothing asked for their memory.
@pytest.mark.parametrize(
    ("distribution", "total", "cp_size", "forward", "backward"),
    [
        ("histogram", MILLION // 4, 8, 0, 0),
        ("histogram", MILLION // 2, 64, 3, 3),
        ("histogram", 2 * MILLION, 32, 1, 1),
        ("histogram", 4 * MILLION, 64, 0, 0),
        ("histogram", 16 * MILLION, 128, 1, 1),
        ("lognormal", 4 * MILLION, 64, 0, 1),
        ("few-huge", 4 * MILLION, 64, 0, 0),
        ("dense", MILLION, 8, 0, 0),
        ("dense", MILLION // 2, 64, 2, 2),
    ],
)
def test_ordinary_packs_have_room(distribution, total, cp_size, forward, backward):
    cu_seqlens = np.append(0, np.cumsum(draw_pack(distribution, total, 0)))
    plan = make_plan(varlen_causal(cu_seqlens), total, cp_size, gpus_per_node=8)
    assert (plan.forward, plan.backward) == (equal_stages(forward), equal_stages(backward))


def test_what_fits_nowhere_is_cut_into_the_stages_that_need_least(monkeypatch):
    plan = documents(8, 4096, gpus_per_node=4)
    monkeypatch.setattr(stages, "MOST_BYTES", 0)
    for spans, backward in zip(choose_stages(H200, plan.work, plan.heads), (False, True), strict=True):
        needed = [memory_of_rows(plan.work, plan.heads, x, backward).max() for x in (*CANDIDATES, *MANY)]
        assert memory_of_rows(plan.work, plan.heads, spans, backward).max() == min(needed)


@pytest.mark.parametrize("gpus_per_node", [1, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_the_memory_of_a_forward_is_that_of_the_rows_in_its_stages(gpus_per_node, count):
    plan, heads = documents(8, 1024, gpus_per_node=gpus_per_node), Heads(8, 8, 16)
    own, results = plan.tokens_per_rank, plan.tokens_per_rank * heads.out_elements * 4 * (count > 0)
    found = []
    for share in plan_with(plan, count).ranks:
        rows = [stage.num_rows - own * stage.holds_local for stage in share.forward]
        if gpus_per_node < 8 or count:
            sent = [sum(len(exchange.send_rows) for exchange in stage.exchanges) for stage in share.forward]
            rows = [a + b for a, b in zip(rows, sent, strict=True)]
        found.append(max(map(sum, itertools.pairwise([0, *rows]))) * heads.row_bytes + results)
    predicted = memory_of_rows(plan.work, heads, equal_stages(count), False)
    assert max(found) <= predicted.max() * 1.001 + 64 * heads.row_bytes  # stages are of whole rows
    assert predicted.max() <= 1.4 * max(found)  # rows that relays keep count twice


def plan_with(plan, count):
    return make_plan(plan.slices, plan.total_tokens, plan.cp_size, count, gpus_per_node=plan.nodes.sizes)


@pytest.mark.parametrize("spans", CANDIDATES)
def test_spans_bring_everything_once_in_order(spans):
    assert spans[0][0] == 0
    assert spans[-1][1] == 1
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    assert all(isinstance(edge, Fraction) for span in spans for edge in span)


@pytest.mark.parametrize("cost", [KernelCost(2e-5, 1e-13, 2e-15, 3e-10, 4e-12), KernelCost(0.0, 1e-13, 0.0, 0.0, 0.0)])
def test_calibration_finds_the_constants_of_a_kernel_from_its_timings(cost):
    samples = []
    for heads in (Heads(64, 8, 128), Heads(64, 8, 64), Heads(16, 16, 128), Heads(8, 1, 96)):
        for tokens, length in ((2048, 2048), (8192, 128), (8192, 1024), (16384, 512)):
            samples.append(Sample(varlen_causal(np.arange(0, tokens + 1, length)), tokens, heads, 0.0, 0.0))
    works = [make_plan(sample.slices, sample.num_tokens, 1, heads=sample.heads).work for sample in samples]
    seconds = [
        float(cost.seconds(work.local_pairs, work.local_rows, sample.heads)[0])
        for work, sample in zip(works, samples, strict=True)
    ]
    fitted, ratio = fit_kernel(samples, np.array(seconds))
    np.testing.assert_allclose(ratio, 1, rtol=1e-6)
    for name, value in vars(cost).items():
        assert getattr(fitted, name) == pytest.approx(value, rel=1e-4, abs=1e-19), name


def test_calibration_finds_latency_and_bandwidth():
    sizes = [1 << 20, 1 << 24, 1 << 28]
    link = fit_link(sizes, [3e-5 + size / 2e11 for size in sizes])
    assert (link.latency, link.bandwidth) == (pytest.approx(3e-5), pytest.approx(2e11))


def test_the_shipped_constants_fit_the_stored_figures():
    samples = recorded_samples(RESULTS / "kernel_h200.json")
    assert len(samples) > 30
    for name in ("forward", "backward"):
        for sample in samples:
            plan = make_plan(sample.slices, sample.num_tokens, 1, heads=sample.heads)
            predicted = plan.predict()[name == "backward"].seconds
            assert predicted == pytest.approx(getattr(sample, name), rel=0.15), sample


def test_the_shipped_constants_know_wide_heads():
    rows = json.loads((RESULTS / "variants_h200.json").read_text())["rows"]
    plain = [row for row in rows if row["impl"] == "ours" and not (row["sinks"] or row["softcap"] or row["window"])]
    wide = [row for row in plain if max(row["head_dim"], row["value_dim"]) > 128 and row["case"] == "causal"]
    assert {(row["head_dim"], row["value_dim"]) for row in wide} == {(192, 128), (192, 192), (256, 256)}
    for row in wide:
        heads = Heads(*map(int, row["heads"].split(":")), row["head_dim"], row["value_dim"])
        plan = make_plan(varlen_causal([0, row["tokens"]]), row["tokens"], 1, heads=heads)
        for predicted, way in zip(plan.predict(), ("fwd_ms", "bwd_ms"), strict=True):
            assert 1e3 * predicted.seconds == pytest.approx(row[way], rel=0.1), row


@pytest.mark.parametrize(
    "name", ["cp_h200x2", "cp_h200x4", "cp_h200x2_64k", "cp_h200x4_64k", "cp_h200x2_32_32", "cp_h100x4_32_32"]
)
def test_the_shipped_constants_predict_the_layers_that_were_measured(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    found = [
        (share, predicted) for label, *_, share, predicted in comparisons(rows, H200) if label.split()[-1] == "ours"
    ]
    assert len(found) >= 3
    for share, predicted in found:
        assert predicted == pytest.approx(share, abs=0.05)


def test_a_cost_model_survives_a_file(tmp_path):
    H200.save(tmp_path / "cost.json", device="NVIDIA H200")
    assert CostModel.load(tmp_path / "cost.json") == CostModel.load(str(tmp_path / "cost.json")) == H200


@pytest.mark.parametrize(
    "content",
    [
        *(None, "words", "{}", "[]", '{"cost_model": {"merge": 1}}', '{"cost_model": {"forward": 1}}'),
        *("[" * 100_000, '{"cost_model": {"forward": {"\\u001b\\n": 1}}}'),
        *({"merge": "6e-13"}, {"stage": None}, {"slowdown": [1]}, {"across": Link(1e-6, "fast")}),
        *({"merge": float("nan")}, {"stage": -1.0}, {"memory": 0.0}),
        *({"stage": 10**400}, {"inside": Link(1e-6, 10**400)}, {"slowdown": True}),
        *({"slowdown": 1.5}, {"backward": replace(H200.backward, pair=0, pair_dim=0)}),
    ],
)
def test_what_is_no_cost_model_is_refused(tmp_path, content):
    path = tmp_path / "cost.json"
    if isinstance(content, dict):
        replace(H200, **content).save(path)
    elif content is not None:
        path.write_text(content)
    with one_line(r"cost\.json is no cost model .*torchrun -m torchtitan_magi.calibrate") as error:
        CostModel.load(path)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "shape",
    [(12, 8, 128), (8, 8, 0), (8, 0, 64), (8, 8, 64.0), ("8", 8, 64), (True, 1, 64), (8, 8, 64, -1), (8, 8, 64, 1.5)],
)
def test_heads_that_do_not_divide_are_refused(shape):
    query, keys, dim, *value = shape
    named = f"{query!r} query heads, {keys!r} K/V heads, head_dim {dim!r}, value_dim {(value or [dim])[0]!r};"
    with pytest.raises(ValueError, match=named):
        Heads(*shape)
    assert (Heads(8, 2, 192, 128).row_bytes, Heads(8, 2, 192, 128).out_elements) == (2 * 2 * 320, 8 * 128)
    assert Heads(*np.array([8, 2, 64])) == Heads(8, 2, 64)
