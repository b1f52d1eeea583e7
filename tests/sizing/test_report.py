"""The sizing report: its figures against plans and brute force, its command line, its page, its errors."""

import gzip
import html
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.jsonl import write_jsonl
from support.masks import dense_mask
from support.published import OF_0_3, llama
from tokenizers import Tokenizer, models, pre_tokenizers

from torchtitan_magi.data import PackedSFTDataset
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer
from torchtitan_magi.masks.builders import shared_prompt, varlen_causal
from torchtitan_magi.models.model_config import read_model_config
from torchtitan_magi.planning.cost_model import H200, LLAMA_HEADS, CostModel, Heads, KernelCost, Link
from torchtitan_magi.planning.plan import make_plan
from torchtitan_magi.planning.summary import describe_plan
from torchtitan_magi.sizing import answer, sample_packs
from torchtitan_magi.sizing import command as report
from torchtitan_magi.sizing.memory import describe, predict
from torchtitan_magi.sizing.run_file import RunFile, setup_of_file
from torchtitan_magi.sizing.run_setup import setup_of
from torchtitan_magi.sizing.sample_packs import HISTOGRAM
from torchtitan_magi.sizing.strategies import outcomes as strategies
from torchtitan_magi.sizing.strategies import table as report_text
from torchtitan_magi.sizing.strategies.outcomes import FREE, Case
from torchtitan_magi.sizing.strategies.size import size_pack, size_run

NAMES = ["all-gather", "all-gather zigzag", "ring", "Ulysses", "min-heap"]
FREE_KERNEL = KernelCost(0.0, 0.0, 0.0, 0.0, 0.0)
# Attention, packing and adding cost nothing: what is left is the time of messages.
ONLY_LINKS = replace(H200, forward=FREE_KERNEL, backward=FREE_KERNEL, merge=0.0, stage=0.0, memory=float("inf"))


def case_of(lengths, cp_size, gpus_per_node=None, heads=LLAMA_HEADS, cost=H200, total=None):
    lengths = np.array(lengths)
    return Case(lengths, total or int(lengths.sum()), cp_size, gpus_per_node or cp_size, heads, cost)


def mask_of(case):
    return dense_mask(case.slices.table, case.total, case.total)


def owners_of(owned):
    """The rank of each token."""
    owner = np.full(sum(int((r[:, 1] - r[:, 0]).sum()) for r in owned), -1)
    for rank, ranges in enumerate(owned):
        for start, end in ranges:
            owner[start:end] = rank
    return owner


def needed_rows(mask, owner, cp_size):
    """K/V rows that each rank needs of each other, pair by pair from the dense mask."""
    rows = np.zeros((cp_size, cp_size))
    for rank in range(cp_size):
        for key in np.flatnonzero(mask[owner == rank].any(0)):
            rows[rank, owner[key]] += owner[key] != rank
    return rows


# ------------------------------------------------------------------------------------------------------ ours, the table


@pytest.fixture(scope="module")
def sizing():
    lengths = [sample_packs.draw_pack("histogram", 32768, seed) for seed in (0, 1)]
    return size_run("histogram", lengths, 32768, 8, 4, LLAMA_HEADS)


def test_our_row_holds_the_figures_of_the_plans(sizing):
    row = sizing.summary()[0]
    assert row["strategy"] == "ours"
    plans, ideal = [], []
    for seed in (0, 1):
        lengths = sample_packs.draw_pack("histogram", 32768, seed)
        plans.append(make_plan(varlen_causal(np.append(0, lengths.cumsum())), 32768, 8, gpus_per_node=4))
        # The kernel on the whole pack on one GPU, an eighth of the time.
        pairs = (lengths * (lengths + 1) / 2 * (1 + 15 / lengths)).sum()
        for kernel in (H200.forward, H200.backward):
            per_head = pairs * (kernel.pair + kernel.pair_dim * 128) + 32768 * (kernel.row + kernel.row_dim * 128)
            ideal.append((kernel.launch + 64 * per_head) / 8)
    seconds = np.array([[timeline.seconds for timeline in plan.predict()] for plan in plans])
    transfers = [plan.transfers.T for plan in plans]
    expected = {
        "balance_area": max(plan.areas.max() / plan.areas.mean() for plan in plans),
        "received_mean": np.mean([plan.received_rows.mean() for plan in plans]) / 4096,
        "received_max": max(plan.received_rows.max() for plan in plans) / 4096,
        "received_max_mib": max(plan.received_rows.max() for plan in plans) * 4096 / 2**20,
        "sent_max": max(np.bincount(source, end - start).max() for _, source, start, end in transfers) / 4096,
        "stages_forward": max(len(plan.forward) for plan in plans),
        "stages_backward": max(len(plan.backward) for plan in plans),
        "forward_ms": 1e3 * seconds[:, 0].mean(),
        "backward_ms": 1e3 * seconds[:, 1].mean(),
        "efficiency": sum(ideal) / seconds.sum(),
        "efficiency_worst": min(sum(ideal[:2]) / seconds[0].sum(), sum(ideal[2:]) / seconds[1].sum()),
        "tflops_per_gpu": np.mean([p.slices.area for p in plans]) * 14 * 64 * 128 / 8 / seconds.sum(1).mean() / 1e12,
    }
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["across_max_mib"] >= max(plan.rows_across_nodes.max() for plan in plans) * 4096 / 2**20
    assert row["efficiency"] < 1
    assert all(pack.plan_ms > 0 for pack in sizing.packs)


def test_exposed_time_is_what_infinitely_fast_links_would_save():
    lengths = sample_packs.draw_pack("histogram", 32768, 0)
    links = {
        name: replace(getattr(H200, name), latency=0.0, bandwidth=1e30, per_peer=0.0) for name in ("inside", "across")
    }
    fast, slow = (strategies.compare(case_of(lengths, 8, 4, cost=cost)) for cost in (replace(H200, **links), H200))
    for name in ("all-gather", "all-gather zigzag", "ring", "Ulysses"):
        left = np.array(fast[name].exposed) if name == "Ulysses" else 0
        hidden = np.array(slow[name].seconds) - slow[name].exposed
        assert hidden == pytest.approx(np.array(fast[name].seconds) - left)
        assert min(slow[name].exposed) > 0
    # The others move all K/V or heads; they never beat the ideal.
    ideal = sum(case_of(lengths, 8, 4).ideal_seconds)
    assert all(sum(outcome.seconds) > ideal for outcome in slow.values())


def test_times_of_ranks_add_up_to_the_timeline(sizing):
    pack = sizing.packs[0]
    for name, timeline in zip(("forward", "backward"), pack.plan.predict(), strict=True):
        ends = [rank[f"{name}_attention_ms"] + rank[f"{name}_other_ms"] for rank in report_text.rank_times(pack)]
        assert ends == pytest.approx(1e3 * timeline.end)


def test_one_gpu_is_the_ideal():
    sizing = size_run("dense", [np.array([4096])], 4096, 1, 8, LLAMA_HEADS)
    (row,) = sizing.summary()
    assert row["efficiency"] == pytest.approx(1)
    assert row["received_max"] == row["across_max_mib"] == row["exposed_share"] == 0
    assert "1 GPU: 100% of ideal" in report_text.headline(sizing)


# ----------------------------------------------------------------------------------------------------------- baselines


def test_contiguous_all_gather_against_the_dense_mask():
    case = case_of([7, 90, 3, 60, 32], 8, 4)
    outcome = strategies.compare(case)["all-gather"]
    areas = mask_of(case).reshape(8, 24, -1).sum((1, 2))
    assert outcome.balance_area == pytest.approx(areas.max() / areas.mean())
    assert outcome.received == pytest.approx(7 * 24 * 4096)
    assert outcome.sent == pytest.approx(7 * 24 * 4096)
    # The other node's 4 x 24 rows enter a node once, over four adapters; 24 rows each.
    assert outcome.across == pytest.approx(24 * 4096)
    assert outcome.stages == (1, 1)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_zigzag_work_against_the_dense_mask(cp_size):
    parts = 2 * cp_size
    case = case_of([parts * 3, parts, parts * 10], cp_size)
    work = strategies.zigzag_work(case)
    owner = np.concatenate([np.repeat([*range(cp_size), *range(cp_size)[::-1]], n // parts) for n in case.lengths])
    mask = mask_of(case)
    document = np.repeat(case.lengths, case.lengths)
    filling = 1 + (LLAMA_HEADS.tile_rows - 1) / (document / parts)  # of a part of so many rows
    pairs = mask * filling[:, None]
    for rank in range(cp_size):
        mine = owner == rank
        assert work.local_pairs[rank] == pytest.approx(pairs[mine][:, mine].sum())
        assert work.remote_pairs[rank] == pytest.approx(pairs[mine][:, ~mine].sum())
        assert work.received[rank] == (mask[mine].any(0) & ~mine).sum()
        # Rows that see keys of a source, in the mean over sources.
        rows = [mask[mine][:, owner == source].any(1).sum() for source in range(cp_size) if source != rank]
        assert work.remote_rows[rank] == pytest.approx(np.mean(rows))
        assert work.local_rows[rank] == mine.sum()
    assert strategies.zigzag_work(replace(case, gpus_per_node=1)).num_nodes == cp_size


def test_ring_passes_all_rows_round_step_by_step():
    for cp_size, gpus_per_node in ((4, 4), (8, 4)):
        case = case_of([512 * cp_size], cp_size, gpus_per_node, cost=ONLY_LINKS)
        outcome = strategies.compare(case)["ring"]
        link = H200.inside if cp_size == gpus_per_node else H200.across
        step = link.latency + 512 * 4096 / link.bandwidth
        assert outcome.seconds[0] == pytest.approx((cp_size - 1) * step)
        assert outcome.seconds[1] == pytest.approx(2 * (cp_size - 1) * step)  # K/V once more, and their gradients
        assert outcome.stages == (cp_size, cp_size)


def test_min_heap_against_the_dense_mask():
    case = case_of([7, 90, 3, 60, 96], 4, 2)  # chunks of 8
    outcome = strategies.compare(case)["min-heap"]
    mask = mask_of(case)
    cost = mask.reshape(32, 8, -1).sum((1, 2))
    load, chunks = [0] * 4, [[] for _ in range(4)]
    for chunk in sorted(range(32), key=lambda chunk: -cost[chunk]):  # stable
        rank = min((r for r in range(4) if len(chunks[r]) < 8), key=lambda r: (load[r], r))
        chunks[rank].append(chunk)
        load[rank] += cost[chunk]
    owner = np.empty(256, int)
    for rank in range(4):
        for chunk in chunks[rank]:
            owner[8 * chunk : 8 * chunk + 8] = rank
    assert (owners_of(strategies.min_heap(case.slices, 256, 4)) == owner).all()
    rows = needed_rows(mask, owner, 4)
    assert outcome.balance_area == pytest.approx(max(load) / np.mean(load))
    assert outcome.received == pytest.approx(rows.sum(1) * 4096)
    assert outcome.sent == pytest.approx(rows.sum(0) * 4096)
    node = np.arange(4) // 2
    far = rows * (node[:, None] != node)  # each row to each rank that needs it, over the network too
    assert outcome.across == pytest.approx(np.maximum(far.sum(0), far.sum(1)) * 4096)


@pytest.mark.parametrize("slow", ["inside", "across"])
def test_messages_take_the_time_of_the_slower_link(slow):
    """With attention for free: 8 ranks in 2 nodes, one kind of link much slower than the other."""
    link = Link(latency=1e-5, bandwidth=1e9)
    cost = replace(ONLY_LINKS, **{name: FREE for name in ("inside", "across") if name != slow}, **{slow: link})
    case = case_of([90, 3, 60, 359], 8, 4, cost=cost)
    outcomes = strategies.compare(case)
    # All-gather: 4 x 64 rows enter a node over 4 adapters; all others of the 7 x 64 come from GPUs of the node.
    rows = {"inside": 6 * 64, "across": 64}[slow]
    assert outcomes["all-gather"].seconds == pytest.approx([n * (1e-5 + rows * 4096 / 1e9) for n in (1, 2)])
    # Ulysses: a rank has 8 query heads and one K/V head; 3 others are in its node, 4 in the other.
    ranks = {"inside": 3, "across": 4}[slow]
    sizes = [ranks * 64 * heads * 128 * 2 for heads in (8 + 2, 8)]
    assert outcomes["Ulysses"].seconds == pytest.approx([sum(1e-5 + size / 1e9 for size in sizes)] * 2)
    # Min-heap: the rank that sends or receives most.
    assert 512 % (8 * strategies.chunks_per_rank(512, 8)) == 0
    rows = needed_rows(mask_of(case), owners_of(strategies.min_heap(case.slices, 512, 8)), 8)
    node = np.arange(8) // 4
    rows = rows * ((node[:, None] != node) == (slow == "across"))
    busiest = max(rows.sum(0).max(), rows.sum(1).max())
    assert outcomes["min-heap"].stages == (1, 1)
    assert outcomes["min-heap"].seconds == pytest.approx([n * (1e-5 + busiest * 4096 / 1e9) for n in (1, 2)])


@pytest.mark.parametrize(("heads", "cp_size"), [(Heads(8, 4, 16), 4), (Heads(8, 2, 16), 8), (Heads(8, 8, 16), 2)])
def test_ulysses_moves_each_head_of_each_token_to_who_computes_it(heads, cp_size):
    node = max(1, cp_size // 2)
    outcome = strategies.compare(case_of([40, 24], cp_size, node, heads))["Ulysses"]
    queries = range(heads.num_heads_q // cp_size)  # at rank 0
    keys = {head // (heads.num_heads_q // heads.num_heads_kv) for head in queries}
    # from each other rank its tokens: Q, K, V in; the rank's cut of out back
    moved = 64 // cp_size * 16 * 2 * (len(queries) + 2 * len(keys) + len(queries))
    assert outcome.received == pytest.approx((cp_size - 1) * moved)
    assert outcome.across == pytest.approx((cp_size - node) * moved)


def test_ulysses_is_left_out_where_heads_do_not_divide():
    for heads, cp_size in ((Heads(8, 2, 16), 3), (Heads(12, 4, 16), 6), (Heads(8, 2, 16), 16)):
        assert strategies.compare(case_of([96], cp_size, heads=heads))["Ulysses"] is None
    sizing = size_run("dense", [np.array([96])], 96, 3, 8, Heads(8, 2, 16))
    assert "Ulysses" not in [row["strategy"] for row in sizing.summary()]
    assert "Ulysses: cannot spread 8:2 heads over 3 GPUs" in report_text.notes(sizing)


def test_baselines_count_padding():
    """A pack that is not full: its documents are all that costs attention, its rows all travel in an all-gather."""
    outcomes = strategies.compare(case_of([64, 32], 4, total=256))
    assert outcomes["all-gather"].received == pytest.approx(3 * 64 * 4096)
    assert outcomes["all-gather"].balance_area == pytest.approx(4 * (64 * 65 / 2) / (64 * 65 / 2 + 32 * 33 / 2))
    # The min-heap pads to whole chunks.
    assert strategies.compare(case_of([7, 100, 13], 5))["min-heap"].balance_area < 2


# --------------------------------------------------------------------------------------------------------------- packs


@pytest.mark.parametrize("name", sample_packs.DISTRIBUTIONS)
def test_drawn_packs_are_full_and_repeat(name):
    for total in (1, 5, 4096, 100_003):
        lengths = sample_packs.draw_pack(name, total, 3)
        assert lengths.sum() == total
        assert lengths.min() >= 1
        assert lengths.max() <= max(1, total // 4) or name == "dense"
        assert (lengths == sample_packs.draw_pack(name, total, 3)).all()
    # The packs of the benchmarks in benchmarks/results, which draw one document at a time.
    assert sample_packs.draw_pack("histogram", 32768, 0, batch=1)[:6].tolist() == [109, 43, 469, 768, 852, 883]
    if name != "dense":
        assert sample_packs.draw_pack(name, 100_003, 3).tolist() != sample_packs.draw_pack(name, 100_003, 4).tolist()


def test_the_histogram_is_that_of_its_table():
    rng = np.random.default_rng(0)
    lengths = sample_packs.draw_lengths(rng, 102_400)
    for edge, percent in HISTOGRAM.items():
        assert 100 * (lengths <= edge).mean() == pytest.approx(percent, abs=0.6)


def test_lengths_are_packed_without_loss():
    lengths = np.array([300, 50, 20, 70, 100, 60, 5])
    made = sample_packs.pack_lengths(lengths, 100, count=50, seed=0)
    assert sorted(np.concatenate(made).tolist()) == [5, 20, 50, 60, 70, 100, 100]
    assert max(pack.sum() for pack in made) <= 100
    for seed in range(20):
        many = sample_packs.pack_lengths(np.arange(1, 1000) % 90 + 1, 1000, count=4, seed=seed)
        assert len(many) == 4
        assert min(pack.sum() for pack in many) > 950  # the last, half empty ones are left to the next window


# -------------------------------------------------------------------------------------------------------- command line


@pytest.fixture
def size(tmp_path, capsys):
    """Runs the command; what it prints, and its figures."""

    def size(*arguments):
        report.main([*map(str, arguments), "--json", str(tmp_path / "report.json")])
        return capsys.readouterr().out, json.loads((tmp_path / "report.json").read_text())

    return size


def words(length):
    return " ".join(["a"] * length)


def write_data_set(folder):
    """A tokenizer of one token per word, and texts of known lengths."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    lengths = [200, 40, 30, 600, 90]
    write_jsonl(folder / "data.jsonl", [{"text": words(length)} for length in lengths])
    return lengths


def test_every_kind_of_input(tmp_path, size):
    lengths = write_data_set(tmp_path)
    (tmp_path / "lengths.txt").write_text(", ".join(map(str, lengths[:3])) + "\n" + " ".join(map(str, lengths[3:])))
    np.save(tmp_path / "lengths.npy", np.array(lengths, np.int32))
    sources = [*sample_packs.DISTRIBUTIONS, *(tmp_path / name for name in ("lengths.txt", "lengths.npy", "data.jsonl"))]
    for source in sources:
        options = ["--tokenizer", tmp_path] if source == tmp_path / "data.jsonl" else []
        printed, figures = size(source, "--total", "1k", "--cp", "4", "--packs", "2", *options)
        assert [row["strategy"] for row in figures["summary"]] == ["ours", *NAMES]
        assert f"{figures['summary'][0]['forward_ms']:.2f}" in printed
        assert re.search(r"^4 GPUs: \d+% of ideal", printed, re.M)
        assert figures["headline"].split()[:3] == ["4", "GPUs:", printed.split("4 GPUs: ")[1].split()[0]]
        assert max(len(line) for line in printed.splitlines()) <= 125
        for pack in figures["packs"]:
            assert len(pack["ranks"]) == 4
            if isinstance(source, Path):  # BOS comes on top, the last label off
                assert (pack["documents"], pack["tokens"], pack["longest"]) == (5, 960, 600)


def test_lengths_may_lie_beside_a_data_set(tmp_path):
    path = tmp_path / "data.jsonl.lengths.txt"
    path.write_text("200 40 30")
    assert sorted(sample_packs.make_packs(str(path), 1024, 1)[0]) == [30, 40, 200]


def test_data_sets_are_named_as_training_names_them(tmp_path, size):
    write_data_set(tmp_path)
    (tmp_path / "more.jsonl").write_text((tmp_path / "data.jsonl").read_text())
    with gzip.open(tmp_path / "zipped.jsonl.gz", "wt") as file:
        file.write((tmp_path / "data.jsonl").read_text())
    for source in (f"{tmp_path}/data.jsonl, {tmp_path}/m*.jsonl=1", f"{tmp_path}/zipped.jsonl.gz=2"):
        printed, _ = size(source, "--total", "2k", "--cp", "4", "--packs", "1", "--tokenizer", tmp_path)
        assert "10 causal documents" in " ".join(printed.split())
    with pytest.raises(ValueError, match=r"zipped.jsonl.gz is a data set; give --tokenizer"):
        sample_packs.make_packs(str(tmp_path / "zipped.jsonl.gz"), 1024, 1)


def write_pairs(folder):
    """Preference pairs of known lengths, beside `write_data_set`'s tokenizer: prompt, chosen, rejected in words."""
    write_data_set(folder)
    lengths = [(100, 30, 61), (7, 90, 12), (200, 20, 33)]
    names = ("prompt", "chosen", "rejected")
    write_jsonl(folder / "pairs.jsonl", [dict(zip(names, map(words, pair), strict=True)) for pair in lengths])
    return lengths


@pytest.mark.parametrize("pairs", [[[0, 1], [0, 2], [0, 3]], [[0, 1], [2, 3]]])
def test_several_answers_are_a_tree(tmp_path, pairs):
    lengths = write_pairs(tmp_path)
    prompt, *answers = 100, 30, 20, 10, 5
    record = {"prompt": words(prompt), "completions": [*map(words, answers)], "pairs": pairs}
    pair = dict(zip(("prompt", "chosen", "rejected"), map(words, lengths[0]), strict=True))
    write_jsonl(tmp_path / "pairs.jsonl", [record, pair])
    (pack,) = sample_packs.make_packs(str(tmp_path / "pairs.jsonl"), 1024, 1, tokenizer=tmp_path, dataset="dpo")
    case = case_of(pack, 4, total=1024)
    assert case.kind == "tree"
    trees = [
        sizes - np.array(expected)
        for sizes, expected in zip(_trees(pack), ((prompt, *answers), lengths[0]), strict=True)
    ]
    assert all((differences[1:] == differences[1]).all() for differences in trees)  # tokens of the plain template
    areas = [(sizes * (sizes + 1) // 2).sum() + sizes[0] * sizes[1:].sum() for sizes in _trees(pack)]
    assert case.slices.area == sum(areas)


def _trees(pack):
    """The tokens of the nodes of each tree, the one with more nodes first."""
    roots = np.flatnonzero(pack[:, 1] < 0)
    return sorted(np.split(pack[:, 0], roots[1:]), key=len, reverse=True)


def test_preference_pairs_are_packed_and_masked_as_in_training(tmp_path, size):
    lengths = write_pairs(tmp_path)
    (pack,) = sample_packs.make_packs(str(tmp_path / "pairs.jsonl"), 1024, 2, tokenizer=tmp_path, dataset="dpo")
    assert pack.shape == (3, 3)
    differences = np.array(sorted(pack.tolist())) - np.array(sorted(lengths))  # tokens of the plain template
    assert (differences == differences[0]).all()
    case = case_of(pack, 4, total=1024)
    assert case.slices.area == shared_prompt(pack).area
    assert case.documents.tolist() == pack.sum(1).tolist()
    prompts, answers = case.lengths[:, :1], case.lengths[:, 1:]
    areas = [lengths * (lengths + 1) // 2 for lengths in (prompts, answers)] + [answers * prompts]
    assert case.slices.area == sum(area.sum() for area in areas)

    alone = size_run("pairs", [np.array([[4000, 3000, 1192]])], 8192, 1, 8, LLAMA_HEADS).summary()[0]
    assert alone["efficiency"] == pytest.approx(1, abs=1e-3)  # rows that are in two slices count once

    options = ["--total", "1k", "--cp", "4", "--tokenizer", tmp_path, "--dataset", "dpo"]
    printed, figures = size(tmp_path / "pairs.jsonl", *options)
    assert "3 preference pairs in one" in " ".join(printed.split())
    assert [row["strategy"] for row in figures["summary"]] == ["ours", "all-gather", "Ulysses", "min-heap"]
    assert (figures["packs"][0]["documents"], figures["packs"][0]["tokens"]) == (3, pack.sum())
    assert "\nring: cuts causal documents; a preference pair is none\n" in printed


def test_several_numbers_of_gpus(size):
    printed, figures = size("lognormal", "--total", "16k", "--packs", "1", "--nodes", "2", "--cp", "4", "8")
    lines = [line.split() for line in printed.splitlines() if re.match(r" +[48] ", line)]
    assert [(line[0], line[1]) for line in lines] == [("4", "4,096"), ("8", "2,048")]
    assert [f["gpus_per_node"] for f in figures] == [2, 4]
    assert [line[6] for line in lines] == [f"{f['summary'][0]['efficiency']:.0%}" for f in figures]


def test_a_cost_model_of_another_machine(tmp_path, size):
    slow = replace(H200, inside=replace(H200.inside, bandwidth=1e9))
    slow.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == slow
    exposed = []
    for options in ([], ["--cost", tmp_path / "cost.json"]):
        _, figures = size("histogram", "--total", "16k", "--cp", "4", "--packs", "1", *options)
        exposed.append(figures["summary"][0]["exposed_share"])
    assert exposed[1] > 2 * exposed[0]


WRONG_FILES = {
    "empty.txt": b"\n", "negative.txt": b"3 -5 7", "words.txt": b"1 2 ten", "bad.jsonl": b'{"texts": 1}\n',
    "broken.npy": b"not an array", "nothing.npy": b"",
    "answers.jsonl": b'{"prompt": "a", "completions": ["a", "a a"]}\n',
    "head.npy": b"\x93NUMPY\x01\x00\x76\x00" + b"{'descr': (".ljust(0x76),
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("histgram --total 1k --cp 2", "'histgram' is neither a file nor a distribution; .* lognormal"),
        ("empty.txt --total 1k --cp 2", "holds no document length"),
        ("negative.txt --total 1k --cp 2", "length -5 at index 1; documents have at least 1 token"),
        ("words.txt --total 1k --cp 2", "'ten' at index 2 is not a length; write integers"),
        ("float.npy --total 1k --cp 2", r"float64 of shape \(2,\); give one list of integers"),
        ("broken.npy --total 1k --cp 2", "cannot be read as document lengths"),
        ("head.npy --total 1k --cp 2", "cannot be read as document lengths"),
        ("nothing.npy --total 1k --cp 2", "cannot be read as document lengths"),
        ("several.npy --total 1k --cp 2", "several.npy holds several arrays; give one list of integers"),
        (",".join(f"part-{i:04}.jsonl" for i in range(400)) + " --total 1k --cp 2", "is a data set; give --tokenizer"),
        ("data.jsonl --total 1k --cp 2", "give --tokenizer, the directory that holds tokenizer.json"),
        ("data.jsonl --total 1k --cp 2 --tokenizer nowhere", "tokenizer.json does not exist"),
        ("bad.jsonl --total 1k --cp 2 --tokenizer .", "bad.jsonl:1: "),
        ("pairs.jsonl --total 1k --cp 2 --tokenizer .", "is a preference pair, .*use it with dataset .dpo."),
        ("dense --total 1k --cp 2 --dataset dpo", "dense has no preference pairs; give a .jsonl data set of them"),
        ("words.txt --total 1k --cp 2 --dataset dpo", "words.txt has no preference pairs"),
        ("dense --total 1k --cp 2 --share-prefixes", "dense has no tokens to share; give a data set of records"),
        ("pairs.jsonl --total 1k --cp 2 --tokenizer . --dataset dpo --share-prefixes", "--share-prefixes is for --da"),
        ("answers.jsonl --total 1k --cp 2 --tokenizer .", "records with .completions., .*; set magi.share_prefixes"),
        ("dense --total 12 --cp 16", "total is 12 tokens for 16 GPUs; give at least one token per GPU"),
        ("dense --total 1x --cp 2", "--total is '1x'; write tokens as 300000, 512k or 1M"),
        ("dense --total 0 --cp 2", "total is 0 tokens; give 1 to"),
        ("dense --total 9000M --cp 2", "total is 9437184000 tokens"),
        ("dense --total 1k --cp 0", "0 GPUs, 8 per node; both must be at least 1"),
        ("dense --total 1k --cp 6 --nodes 4", "--nodes is 4 for --cp 6; give a number that divides it"),
        ("dense --total 1k --cp 2 --heads 10:4", "10 query heads, 4 K/V heads"),
        ("dense --total 1k --cp 2 --heads many", "--heads is 'many'; write query heads : K/V heads, as 64:8"),
        ("dense --total 1k --cp 2 --packs 0", "0 packs with seed 0; give at least 1"),
        ("dense --total 1k --cp 2 --json nowhere/x.json", "cannot write nowhere/x.json; give a file in a folder"),
        ("dense --total 1k --cp 2 --json /proc/x", "cannot write /proc/x.*; give a"),
        ("dense --total 1k --cp 2 --json /dev/full", "cannot write /dev/full: No space left on device; make room"),
        ("dense --total 1k --cp 2 --cost words.txt", "words.txt is no cost model"),
        ("dense --total 1k --cp 2 4 --png x.png", "pictures are of one layout"),
        ("dense --total 1k --cp 2 --memory", "--memory is of a run's TOML file, but SOURCE is 'dense'"),
        (
            "dense --total 1k --cp 2 --tokenizer .",
            "dense has no records to tokenize; give a data set of records",
        ),
        ("dense --total 1k --cp 2 --gpu H200", "--gpu is of a run's TOML file, but SOURCE is 'dense'"),
        ("dense --total 1k --cp 2 --gpus 8", "--gpus is of a run's TOML file, but SOURCE is 'dense'"),
    ],
)
def test_bad_input_is_one_line_that_names_the_value(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path)
    for name, content in WRONG_FILES.items():
        (tmp_path / name).write_bytes(content)
    np.save("float.npy", np.ones(2))
    np.savez("several", one=np.ones(2), two=np.ones(2))
    Path("several.npz").rename("several.npy")
    with pytest.raises(SystemExit) as stop:
        report.main(arguments.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("error: .*" + message, error), error


RUN = """
[model]
flavor = "hf"
hf_assets_path = "model"
[training]
dataset = "sft"
dataset_path = "records.jsonl"
seq_len = 64
[parallelism]
context_parallel_degree = 4
tensor_parallel_degree = 2
"""


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A function that writes a run's TOML file, with changes, beside its records and its model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    write_data_set(tmp_path / "model")
    model = llama(512, 1024, 2, 8, num_key_value_heads=2)
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    write_jsonl(tmp_path / "records.jsonl", [{"text": words(20)}] * 6)

    def run_file(before="", after=""):
        assert before in RUN
        (tmp_path / "run.toml").write_text(RUN.replace(before, after))
        return "run.toml"

    return run_file


def test_a_runs_file_says_pack_layout_data_and_heads(run_file, size):
    out, figures = size(run_file())
    assert "4 GPUs, 4 per node; packs of 64 tokens, T = 16 on each GPU; heads 4:1, head_dim 64" in out
    assert "records.jsonl" in out
    by_hand = ["--tokenizer", "model", "--total", "64", "--cp", "4", "--heads", "4:1", "--head-dim", "64"]
    assert size("records.jsonl", *by_hand)[1]["packs"][0]["documents"] == figures["packs"][0]["documents"]
    assert "2 GPUs, 2 per node; packs of 128 tokens" in size(run_file(), "--cp", "2", "--total", "128")[0]


def test_options_of_the_command_hold_for_the_answer_too(run_file, size, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "model" / "tokenizer.json").rename(tmp_path / "elsewhere" / "tokenizer.json")
    assert "tokenizer.json is not there yet" in size(run_file())[0]
    assert "is not there yet" not in size(run_file(), "--tokenizer", "elsewhere")[0]
    _, as_pairs = size(run_file('"records.jsonl"', '"none.jsonl"'), "--dataset", "dpo")
    assert as_pairs["run"]["memory"]["reference"] > 0


def test_that_the_degrees_leave_gpus_open_is_said(run_file, size):
    path = run_file("degree = 4", "degree = 2")
    said = "data_parallel_shard_degree is -1, so the run is sized on 8 GPUs of a node; --gpus gives another number"
    assert said in " ".join(size(path)[0].split())
    assert "sized on" not in size(path, "--gpus", "8")[0]


@pytest.mark.parametrize(("given", "flavor"), [("", "debugmodel"), ('flavor = "70B_varlen"', "70B_varlen")])
def test_that_training_takes_another_model_than_is_sized_is_said(run_file, size, given, flavor):
    def said(file):
        return " ".join(size(file)[0].split())

    assert f"model.flavor is '{flavor}', which training takes from torchtitan" in said(run_file('flavor = "hf"', given))
    assert "model.flavor" not in said(run_file())


def test_a_thousand_epochs_are_not_1e03():
    assert answer._length(SimpleNamespace(steps=9, hours=0.5, epochs=1234.5)) == "9 steps = 30 min; 1,234 epochs."


def test_a_run_with_its_data_says_how_many_epochs_its_steps_are(run_file, size, tmp_path):
    out, figures = size(run_file("seq_len = 64", "seq_len = 64\nlocal_batch_size = 1\nsteps = 12"))
    dataset = PackedSFTDataset("records.jsonl", load_chat_tokenizer(tmp_path / "model"), 64, epochs=1)
    per_epoch = sum(1 for _ in dataset)
    run = figures["run"]
    assert (run["gpus"], run["steps"]) == (8, 12)
    assert "sized on" not in out  # cp 4 x tp 2 fill a node
    assert run["epochs"] == pytest.approx(12 / per_epoch, rel=0.2)  # an estimate
    assert f"12 steps = {60 * run['hours']:.0f} min; {run['epochs']:.3g} epochs." in out
    steps = size(run_file("seq_len = 64", "seq_len = 64\nlocal_batch_size = 1\n[magi]\nepochs = 3"))[1]
    assert steps["run"]["steps"] == pytest.approx(3 * per_epoch, abs=2)


def test_a_runs_file_of_another_model_is_sized_by_its_heads(run_file, size, tmp_path):
    def use(name):
        (tmp_path / "model" / "config.json").write_text(json.dumps(OF_0_3[name]))

    use("DeepSeek V3")
    assert "heads 64:64, head_dim 192/128" in size(run_file())[0]
    use("gpt-oss 20b")
    printed, figures = size(run_file())
    assert "Strategies for a layer without a window, 12 of 24:" in printed
    assert figures["heads"] == "32:4"
    assert figures["run"]["gpus"] == 8
    by_hand, figures = size(run_file(), "--heads", "32:4", "--head-dim", "64")
    assert "heads 32:4, head_dim 64" in by_hand
    assert "run" not in figures  # heads of one's own are of no run
    assert "run" not in size(run_file(), "--head-dim", "128")[1]


def test_a_runs_file_says_the_memory_without_data_and_torchtitan(run_file, tmp_path):
    (tmp_path / "records.jsonl").unlink()
    path, model = run_file(), read_model_config("model")
    code = "import sys; sys.modules['torchtitan'] = None; from torchtitan_magi.sizing.command import main; main()"
    command = [sys.executable, "-c", code, path, "--memory", "--cp", "2", "4", "--total", "4k"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for cp_size in (2, 4):
        setup = setup_of(RunFile(path).read, model, 1)
        setup = replace(setup, cp=cp_size, seq_len=4096)
        assert describe(predict(setup)) in " ".join(printed.split())
        modes = [replace(setup, checkpointing=mode, every=0) for mode in ("none", "selective", "full")]
        gib = [f"{predict(each).total / 2**30:.0f}" for each in modes]
        (line,) = [line.split() for line in printed.splitlines() if line.startswith(f"{cp_size:4}  ")]
        assert line == [str(cp_size), f"{setup.tokens:,}", *gib]


def test_memory_is_that_of_the_gpus_that_are_given(run_file, capsys):
    path, model = run_file(), read_model_config("model")
    read = RunFile(path).read
    others = setup_of(read, model, 1).world_size
    report.main([path, "--memory", "--gpus", str(2 * others)])
    printed = " ".join(capsys.readouterr().out.split())
    alone, shared = (describe(predict(setup_of(read, model, shard))) for shard in (1, 2))
    assert shared in printed
    assert alone not in printed


@pytest.mark.parametrize("nodes", ["--gpus-per-node 8", "--nodes 2"])
def test_memory_alone_leaves_tensor_parallel_ranks_their_share_of_a_node(run_file, nodes, capsys):
    path, model = run_file(), read_model_config("model")
    report.main([path, "--memory", "--cp", "8", "--total", "64k", *nodes.split()])
    printed = " ".join(capsys.readouterr().out.split())
    of_eight = replace(setup_of(RunFile(path).read, model, 1), cp=8, seq_len=65536)
    assert describe(predict(replace(of_eight, cp_per_machine=4))) in printed
    assert describe(predict(of_eight)) not in printed  # all in one node


def test_stages_may_have_no_layer_less_than_others(run_file):
    less = "\npipeline_parallel_first_stage_less_layers = 0\npipeline_parallel_last_stage_less_layers = 0"
    path = run_file("degree = 2", f"degree = 2\npipeline_parallel_degree = 2{less}")
    assert setup_of_file(RunFile(path)).rank_layers == ((0,), (1,))


NO_LIST = "[compile]\nenable = true\ncomponents = 'model'\n[training]"


@pytest.mark.parametrize(
    ("before", "after", "options", "message"),
    [
        ("seq_len = 64", "seq_len = 72", "", "seq_len is 72; use a multiple of 16, twice context_parallel_degree"),
        ("seq_len = 64", "", "", "run.toml has no training.seq_len; set it"),
        ("seq_len = 64", 'seq_len = "64"', "", "run.toml has a wrong training.seq_len"),
        ('"sft"', '"c4"', "", "training.dataset is 'c4'; sizing reads 'sft', 'dpo' and 'rollouts'"),
        ("degree = 4", "degree = 0", "", "parallelism.context_parallel_degree is 0; use at least 1"),
        ("degree = 2", "degree = 0", "", "parallelism.tensor_parallel_degree is 0; use at least 1"),
        (
            "degree = 2",
            "degree = 8",
            "--cp 2 --total 32",
            "degree is 8, but the model has 8 query heads and 2 K/V heads",
        ),
        (
            '"model"',
            '"models"',
            "",
            "models/config.json: .*; put the config.json of the weights there, or give --heads",
        ),
        ("[training]", "[training", "", "cannot read 'run.toml' .*; give a run's TOML file"),
        ('"model"', '"models"', "--memory", "put the config.json of the weights there$"),
        ("", "", "--memory --cost nowhere.json", "nowhere.json is no cost model"),
        ("", "", "--memory --heads 8:8", "--heads has no effect on --memory, which goes by the model's config.json;"),
        ("", "", "--memory --head-dim 64", "--head-dim has no effect on --memory"),
        ("", "", "--memory --json x.json", "--memory writes no file; leave out --json"),
        ("", "", "--memory --gpus 7", "--gpus is 7, but the degrees of run.toml multiply to 8; give a multiple"),
        ("", "", "--memory --gpus 0", "--gpus is 0; give at least 1"),
        ("", "", "--memory --cp 0", "0 GPUs, 8 per node; both must be at least 1"),
        ("", "", "--gpus-per-node 0", "4 GPUs, 0 per node; both must be at least 1"),
        ("", "", "--cp 3", "seq_len is 64; use a multiple of 12, twice context_parallel_degree"),
        ("", "", "--total 8", "seq_len is 8; use a multiple of 16, twice context_parallel_degree"),
        ("seq_len = 64", "seq_len = -64", "", "training.seq_len is -64; use at least 1"),
        ("[parallelism]", "[paralelism]", "", "paralelism is no option of torchtitan .*; did you mean parallelism"),
        ("seq_len", "seqlen = 8\nseq_len", "", "training.seqlen is no option of .*; did you mean training.seq_len"),
        ("[model]", "[training.dataloader]\nworkers = 2\n[model]", "", "training.dataloader.workers is no option of"),
        ("[model]", "[magi]\nepoch = 2\n[model]", "", "magi.epoch is no option of .*; did you mean magi.epochs"),
        ("[model]", "[magi.dpo]\nbta = 2\n[model]", "", "magi.dpo.bta is no option of .*; did you mean magi.dpo.beta"),
        (
            "[training]",
            "[training]\nlocal_batch_size = 0",
            "--memory",
            "training.local_batch_size is 0; use at least 1",
        ),
        ("[training]", "[training]\ndtype = 'int8'", "--memory", "run.toml has a wrong training.dtype; set it as"),
        ("[training]", NO_LIST, "--memory", "has a wrong compile.components"),
        ("[training]", "[[compile]]\n[training]", "--memory", "has a wrong compile.enable"),
    ],
)
def test_a_wrong_run_file_is_one_line_that_names_the_value(run_file, before, after, options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        report.main([run_file(before, after), *options.split()])
    assert stop.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("error: .*" + message, error), error


def test_the_module_needs_no_matplotlib_for_the_table_and_says_so_for_pictures():
    code = "import runpy, sys; sys.modules['matplotlib'] = None; "
    code += "runpy.run_module('torchtitan_magi.report', run_name='__main__')"
    command = [sys.executable, "-W", "error", "-c", code, "dense", "--total", "64", "--cp", "2"]
    table = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "2 GPUs: " in table.stdout
    assert table.stderr == ""
    page = subprocess.run([*command, "--html", "x.html"], capture_output=True, text=True)
    assert page.stderr.splitlines()[-1].endswith("need matplotlib; install it, or torchtitan_magi[report]")


def test_predictions_are_compared_with_measurements_of_the_same_packs(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    import check_prediction

    rows = []
    for pack, seed in (("histogram", 1), ("dense", 0)):
        settings = {"pack": pack, "tokens_per_gpu": 4096, "heads": "8:4", "seed": seed, "cp": 4}
        case = check_prediction.case_of(settings, H200)
        assert case.lengths.sum() == 4 * 4096
        outcomes = {"ours": size_pack(case).outcomes["ours"], "ulysses": strategies.compare(case)["Ulysses"]}
        times = {name: outcome.seconds for name, outcome in outcomes.items()} | {"ideal": case.ideal_seconds}
        for name, (forward, backward) in times.items():
            factor = 1e3 * (2 if name == "ulysses" else 1)  # Ulysses takes twice as long as predicted
            rows.append(settings | {"strategy": name, "fwd_ms": factor * forward, "bwd_ms": factor * backward})
    found = check_prediction.comparisons(rows, H200)
    assert [line[0].split()[-1] for line in found] == ["ours", "Ulysses"] * 2
    for label, measured, predicted, share, predicted_share in found:
        factor = 1 if "ours" in label else 2
        assert measured == pytest.approx(factor * predicted)
        assert factor * share == pytest.approx(predicted_share)


# ------------------------------------------------------------------------------------------------------------ pictures


@pytest.fixture
def picture():
    return pytest.importorskip("torchtitan_magi.sizing.strategies.picture")


def test_the_page_is_self_contained_and_has_the_parts(sizing, picture):
    page = picture.html_page(sizing)
    assert "http" not in page
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="([^"]{5})', page) == ["data:"]
    for row in sizing.summary():
        assert f"<th>{row['strategy']}</th>" in page
        assert f"<td>{row['forward_ms']:.2f}</td>" in page
    assert report_text.headline(sizing) in html.unescape(page)


def test_pictures_of_few_and_many_ranks(picture):
    for lengths, cp_size, node in (([64], 1, 8), ([100, 28], 2, 8), ([500], 20, 32), ([900, 124], 24, 7)):
        sizing = size_run("lengths.txt", [np.array(lengths)], sum(lengths), cp_size, node, LLAMA_HEADS)
        assert picture.png(sizing).startswith(b"\x89PNG")
        figure = picture.draw(sizing)
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        for word in ("Who computes what", "Who needs what of whom", "When:", "How long:", "How much:"):
            assert sum(title.startswith(word) for title in titles) == 1


def test_the_mask_is_drawn_in_the_colours_of_its_owners(picture):
    plan = make_plan(varlen_causal([0, 70, 75, 128]), 128, 4, gpus_per_node=2)
    mask, owner = dense_mask(plan.slices.table, 128, 128), owners_of([share.ranges for share in plan.ranks])
    colors = picture.rank_colors(4, 2)
    assert len(np.unique(colors, axis=0)) == 4
    assert picture.mask_image(plan) == pytest.approx(np.where(mask[..., None], colors[owner][:, None], 1.0))
    rough = mask[2::4].reshape(32, 32, 4).any(2)  # four tokens to a pixel; the third one's row is shown
    expected = np.where(rough[..., None], colors[owner[2::4]][:, None], 1.0)
    assert picture.mask_image(plan, 32) == pytest.approx(expected)
    long = picture.mask_image(make_plan(varlen_causal([0, 1 << 22]), 1 << 22, 1), 64)  # products beyond 32 bits
    assert ((long != 1).any(2) == np.tri(64, dtype=bool)).all()
    assert (picture.transfer_matrix(plan) == needed_rows(mask, owner, 4)).all()


def test_colours_tell_ranks_apart(picture):
    for cp_size, gpus_per_node in ((8, 8), (10, 5), (64, 8), (72, 72), (80, 8)):
        assert len(np.unique(picture.rank_colors(cp_size, gpus_per_node), axis=0)) == cp_size


def test_a_plan_in_one_line():
    plan = make_plan(varlen_causal([0, 70, 75, 128]), 128, 4)
    line = describe_plan(plan)
    assert line.startswith("Plan: 32 tokens on each of 4 ranks, heaviest rank 1.")
    assert f"K/V received {plan.received_rows.mean():,.0f} rows per rank (at most {plan.received_rows.max()}" in line
    assert "K/V" not in describe_plan(make_plan(varlen_causal([0, 8]), 8, 1))
