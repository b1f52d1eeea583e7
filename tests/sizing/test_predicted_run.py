"""A run's answer: whether it fits and how long it takes, beside what was measured; what would be faster."""

import json
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from support.published import CONFIGS, OF_0_3, SHIPPED, WITH_PICTURES, read
from support.runs import ROOT

from torchtitan_magi.masks.builders import shared_prompt, sliding_window, varlen_causal
from torchtitan_magi.models.published import SIZES, published_sizes
from torchtitan_magi.models.shapes import block_of, parameters_of
from torchtitan_magi.sizing import command
from torchtitan_magi.sizing.gpus import (
    A100,
    DETERMINISTIC,
    FLEX,
    GPUS,
    H100,
    H200,
    RULE,
    RULE_BACKWARD,
    gpu_named,
)
from torchtitan_magi.sizing.keeping.kinds import as_option, parse
from torchtitan_magi.sizing.memory import GIB, predict
from torchtitan_magi.sizing.predicted_run import Place, _area, expected_largest, faster, predict_run
from torchtitan_magi.sizing.run_setup import Setup
from torchtitan_magi.sizing.sample_packs import make_packs, pairs_of, sample
from torchtitan_magi.sizing.step_time import time_of_step

RESULTS = ROOT / "benchmarks" / "results"
CONFIG_FILES = sorted((ROOT / "train_configs").glob("*_*_*.toml"))
LLAMA = SIZES["Llama-3.1-8B"]
SETUP = Setup(LLAMA, 131072, cp=8, checkpointing="full", compiled=True, compiled_loss=True, microbatches=4)
PLACE = Place(H100, 8, tuple(make_packs("histogram", 131072, 3)))


# --------------------------------------------------------------------------------------------- beside what was measured


def measured_steps():
    """(name, setup, seconds of attention, seconds of a step) of bench_train.py's runs of ours."""
    for path in sorted(RESULTS.glob("train_*.json")):
        facts = json.loads(path.read_text())
        moe = facts.get("model", "llama3") == "qwen3"
        model = replace(SIZES["Qwen3-30B-A3B"] if moe else LLAMA, num_layers=facts["layers"])
        for row in facts["rows"]:
            if row["strategy"] in ("ours", "no attention") and (row["strategy"] != "ours" or row["ideal_attention_ms"]):
                setup = Setup(
                    model, row["tokens_per_gpu"] * row["cp"], dp_shard=row["dp_shard"], cp=row["cp"],
                    ep=facts.get("expert_parallel", 1), checkpointing=row.get("checkpointing", "none"), compiled=True,
                    compiled_loss=True, by_02=True,
                )  # fmt: skip
                yield path.stem, setup, (row["ideal_attention_ms"] or 0) / 1e3, row["step_ms"] / 1e3


def test_steps_took_what_is_predicted():
    found = list(measured_steps())
    assert len(found) > 12
    for name, setup, attention, measured in found:
        rest = time_of_step(setup, H200, 8, (0.0, 0.0), 0).total
        assert rest + attention == pytest.approx(measured, rel=0.15), (name, setup)


def test_models_of_every_family_took_what_is_predicted():
    from bench_models import CASES, predicted

    facts = json.loads((RESULTS / "models_h200.json").read_text())
    assert {row["case"] for row in facts["rows"]} == set(CASES)
    for row in facts["rows"]:
        run = predicted(CASES[row["case"]], facts["device"])
        assert 1e3 * run.time.total == pytest.approx(row["step_ms"], rel=0.15), row
        assert run.memory.allocated / GIB == pytest.approx(row["peak_gib"], rel=0.1), row


# ----------------------------------------------------------------------------------------------------------- properties


def test_parts_add_up_and_fewer_tokens_take_less():
    run = predict_run(SETUP, PLACE)
    assert run.time.total == pytest.approx(sum(run.time.parts.values()))
    assert all(seconds > 0 for seconds in run.time.parts.values())
    assert predict_run(replace(SETUP, microbatches=2), PLACE).time.total < 0.6 * run.time.total
    assert run.tokens == pytest.approx(4 * 131072, rel=0.01)
    assert 0.3 < run.mfu < 0.6
    assert predict_run(SETUP, replace(PLACE, gpu=H200)).time.total < run.time.total
    assert predict_run(SETUP, replace(PLACE, gpu=A100)).time.total > 2.5 * run.time.total


@pytest.mark.parametrize(
    ("change", "part", "grows"),
    [
        ({"tp": 2}, "tensor parallelism", True),
        ({"checkpointing": "none"}, "recomputation", False),
        ({"checkpointing": "selective"}, "recomputation", False),
        ({"pp": 2, "at_once": 4}, "idle in the pipeline", True),
        ({"pp": 2, "at_once": 4, "schedule": "Interleaved1F1B"}, "idle in the pipeline", True),
        ({"reference": True}, "reference", True),
        ({"logits_again": True}, "output layer and loss", True),
        ({"lora_rank": 16, "lora_targets": ("wqkv",)}, "optimizer", False),
        ({"lora_rank": 16, "lora_targets": ("wqkv",)}, "matrix products", False),
        ({"compiled": False}, "element-wise passes", True),
    ],
)
def test_what_an_option_costs(change, part, grows):
    before, after = (predict_run(setup, PLACE).time.parts.get(part, 0) for setup in (SETUP, replace(SETUP, **change)))
    assert before != after
    assert (after > before) == grows


def test_tensor_parallelism_alone_computes_in_16_bits_but_with_torchtitan_0_2():
    alone = replace(SETUP, cp=1, tp=8)
    in_float32 = replace(alone, by_02=True)
    assert (alone.compute_bytes, in_float32.compute_bytes) == (2, 4)
    assert replace(in_float32, tp=4, cp=2).compute_bytes == replace(in_float32, tp=1).compute_bytes == 2
    seconds = [predict_run(setup, PLACE).time.parts["tensor parallelism"] for setup in (alone, in_float32)]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.01)


def test_attention_takes_what_its_backend_and_its_order_take():
    def attention(gpu=H100, **fields):
        return predict_run(replace(SETUP, **fields), replace(PLACE, gpu=gpu)).time.parts["attention"]

    usual = attention()
    assert attention(flex=True) == attention(flex=True, deterministic=True) == pytest.approx(FLEX * usual)
    assert 1.15 * usual < attention(deterministic=True) < DETERMINISTIC * usual  # of the backward alone
    assert attention(A100, flex=True) == attention(A100, deterministic=True) == attention(A100)  # which has no other


def test_a_label_less_token_needs_no_logits():
    half = predict_run(SETUP, replace(PLACE, learned=0.5)).time.parts
    whole = predict_run(SETUP, PLACE).time.parts
    assert half["output layer and loss"] == pytest.approx(whole["output layer and loss"] / 2, rel=0.01)
    assert half["matrix products"] == whole["matrix products"]


QWEN = SIZES["Qwen3.5-9B"]
HYBRID = replace(SETUP, model=QWEN)


def test_layers_of_linear_attention_take_what_tokens_take_not_what_pairs_take():
    """Beside the same model whose layers all attend: a quarter of the attention, and the rule by its operations."""
    run, dense = predict_run(HYBRID, PLACE), predict_run(replace(HYBRID, model=replace(QWEN, linear=None)), PLACE)
    assert run.time.parts["attention"] == pytest.approx(dense.time.parts["attention"] / 4)
    assert "linear attention" not in dense.time.parts
    one_document = replace(PLACE, packs=(np.array([131072]),))
    parts = predict_run(HYBRID, one_document).time.parts
    assert parts["attention"] > 4 * run.time.parts["attention"]
    for part in ("linear attention", "element-wise passes"):
        assert parts[part] == pytest.approx(run.time.parts[part])
    twice = predict_run(replace(HYBRID, tp=2, cp=4), PLACE).time.parts["linear attention"]
    assert twice == pytest.approx(run.time.parts["linear attention"])  # half of the heads of twice the tokens
    again = predict_run(replace(HYBRID, checkpointing="none"), PLACE).time.parts
    assert again["linear attention"] == run.time.parts["linear attention"]


def test_operations_that_count_for_mfu_are_those_of_the_recurrence():
    """6 K V per token and head forward, twice that backward, in 24 layers; chunks take almost twice as many."""
    pairs = 1e6
    found = time_of_step(HYBRID, H100, 8, (0.0, 0.0), pairs)
    blocks = sum(block_of(QWEN, number).used for number in range(32))
    products = 6 * (blocks + 248320 * 4096) * HYBRID.tokens
    recurrence = 3 * 24 * 6 * 32 * 128 * 128 * HYBRID.tokens
    attention = 6 * 8 * 16 * 2 * 256 * pairs
    assert found.flops == pytest.approx(4 * (products + recurrence + attention))
    chunks = 24 * 32 * (6 * 128 * 128 + 64 * 10 * 128) * HYBRID.tokens
    seconds = chunks / (RULE * H100.products) * (1 + RULE_BACKWARD)
    assert found.parts["linear attention"] == pytest.approx(4 * seconds)


def test_linear_attention_took_what_is_predicted():
    rows = json.loads((RESULTS / "linear_h200.json").read_text())["layers"]
    ours = [row for row in rows if row["impl"] == "ours" and row["documents"] == "pack"]
    assert len(ours) == 6
    for row in ours:
        model = SIZES[f"Qwen3.5-{row['model']}"]
        one = replace(model, num_layers=1, linear=replace(model.linear, layers=(0,)))
        found = time_of_step(Setup(one, row["tokens"]), H200, 1, (0.0, 0.0), 0).parts["linear attention"]
        assert 1e3 * found == pytest.approx(row["both_ms"], rel=0.25), row
        assert 1e3 * found / (1 + RULE_BACKWARD) == pytest.approx(row["fwd_ms"], rel=0.25), row


def test_stages_of_a_pipeline_have_the_kinds_of_layers_of_their_place():
    model = replace(QWEN, num_layers=30, linear=QWEN.linear.among(range(30)))
    first, *_, last = replace(HYBRID, model=model, pp=4).stages()
    assert first.model.linear.layers == (0, 1, 2, 4, 5, 6)  # layers 0 to 6: 7 and the embedding
    assert last.model.linear.layers == (1, 2, 3, 5, 6)  # layers 23 to 29, of which 23 and 27 attend
    assert last.model.num_attention_layers == 2
    run = predict_run(replace(HYBRID, pp=2, cp=4, at_once=4), PLACE)
    assert run.time.parts["linear attention"] == pytest.approx(
        predict_run(HYBRID, PLACE).time.parts["linear attention"]
    )


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_stages_of_a_pipeline_hold_the_model_once_and_their_microbatches(schedule):
    setup = replace(SETUP, pp=4, microbatches=8, at_once=8, schedule=schedule)
    of_ranks = [setup._stage(rank, layers) for rank, layers in enumerate(setup.rank_layers)]
    assert sum(rank.stored for rank in of_ranks) == pytest.approx(replace(SETUP, pp=1).stored, rel=1e-5)
    first, *_, last = setup.stages()
    assert first.in_flight == {"1F1B": 4, "GPipe": 8, "Interleaved1F1B": 5.5}[schedule]
    assert last.in_flight == {"1F1B": 1, "GPipe": 8, "Interleaved1F1B": 2.5}[schedule]
    assert predict(setup).total > predict(replace(setup, microbatches=2, at_once=2)).total


def test_windows_and_pairs_count_the_pairs_of_their_masks():
    lengths = np.array([300, 40, 7, 1])
    bounds = np.append(0, lengths.cumsum())
    assert _area(lengths, 0) == (varlen_causal(bounds).canonical().area, 1)
    pairs, share = _area(lengths, 64)
    assert pairs == sliding_window(bounds, 64).canonical().area
    assert share == pairs / varlen_causal(bounds).canonical().area
    of_pairs = np.array([[30, 8, 12], [5, 1, 2]])
    assert _area(of_pairs, 0)[0] == shared_prompt(of_pairs).canonical().area
    gpt_oss = replace(SETUP, model=SIZES["gpt-oss-20b"])
    all_full = replace(gpt_oss, model=replace(gpt_oss.model, windows=()))
    with_windows, without = (predict_run(setup, PLACE).time.parts["attention"] for setup in (gpt_oss, all_full))
    assert 0.5 * without < with_windows < 0.7 * without  # half of the layers see 128 tokens


def test_ranks_wait_for_the_largest_of_their_packs():
    values = np.array([1.0, 2.0, 4.0])
    assert expected_largest(values, 1) == pytest.approx(values.mean())
    draws = np.random.default_rng(0).choice(values, (200_000, 3)).max(1)
    assert expected_largest(values, 3) == pytest.approx(draws.mean(), rel=0.01)


def test_what_is_called_faster_fits_and_takes_less_time_for_the_same_packs():
    slow = replace(SETUP, cp=1, tp=8, microbatches=4)
    run = predict_run(slow, PLACE)
    found = faster(run)
    assert found
    times = [other.time.total for _, other in found]
    assert times == sorted(times)
    for words, other in found:
        assert other.fits
        assert other.time.total < run.time.total
        assert other.tokens == pytest.approx(run.tokens)
        assert other.setup.world_size == slow.world_size
        assert re.search(r"context_parallel_degree = \d|activation_checkpoint.mode = ", words)
    large = predict_run(replace(SETUP, checkpointing="none", seq_len=2**20), replace(PLACE, packs=(np.array([2**20]),)))
    assert not large.fits
    assert all(other.fits for _, other in faster(large))


# ------------------------------------------------------------------------------------------------------ sizes of models


FILES = SHIPPED | {
    "Llama-3.1-8B": "Llama 3.1 8B",
    "Llama-3.1-70B": "Llama 3.1 70B",
    "gpt-oss-20b": "gpt-oss 20b",
    **dict.fromkeys(("Qwen3.5-27B", "Qwen3.8-27B"), "Qwen3.6 27B"),
    **dict.fromkeys(("Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B"), "Qwen3.5 35B-A3B"),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_sizes_of_published_models_are_those_of_their_files(name):
    found = read((CONFIGS | OF_0_3 | WITH_PICTURES)[FILES[name]])
    sizes = published_sizes(f"assets/hf/{name}-Instruct")
    assert replace(sizes, rope=found.rope) == found
    assert parameters_of(sizes) == parameters_of(found)
    assert published_sizes("assets/hf/Another-8B") is None


# ---------------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.stem)
def test_every_shipped_file_fits_and_says_how_long_it_takes(path, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command.main([str(path), "--packs", "2", "--json", "size.json"])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(r" Fits: \d+ of 79 GiB on each of \d+ H100\. For the backward layers [^.]*\. A step of ", text), (
        text[:500]
    )
    assert re.search(r" s: [\d,]+ tokens/s per GPU, MFU \d+%, attention at \d+% of ideal\. ", text)
    steps = tomllib.loads(path.read_text())["training"]["steps"]
    assert re.search(rf" {steps:,} steps = [\d.]+ (h|min|days)\. ", text)
    found = json.loads((tmp_path / "size.json").read_text())["run"]
    assert found["fits"]
    assert found["host_memory"] <= 64 * GIB
    num_layers = sum(int(number) for number in re.findall(r"\d+", found["keep"]))
    assert as_option(parse(found["keep"], num_layers)) == found["keep"]
    assert sum(found["memory"].values()) == found["memory_total"] < found["capacity"]
    assert sum(found["step"].values()) == pytest.approx(found["step_total"])
    assert found["hours"] == pytest.approx(steps * found["step_total"] / 3600)


def test_memory_alone_is_that_of_what_is_chosen_too(capsys):
    path = str(ROOT / "train_configs" / "llama3_8b_sft_128k.toml")
    command.main([path, "--memory", "--cp", "8"])
    alone = " ".join(capsys.readouterr().out.split())
    command.main([path])
    whole = " ".join(capsys.readouterr().out.split())
    (kept,) = re.findall(r"For the backward layers [^.]*\.", whole)
    assert alone.endswith(kept)
    assert f"Fits: {float(re.search(r'at most ([0-9.]+)', alone)[1]):.0f} of " in whole


RUN = """
[model]
name = "{model}"
hf_assets_path = "assets/hf/{folder}"
[training]
dataset = "sft"
dataset_path = "data.jsonl"
seq_len = 65536
steps = 100
local_batch_size = {batch}
enable_cpu_offload = {offload}
[parallelism]
{degrees}
[activation_checkpoint]
mode = "full"
{more}
"""
LORA = "[magi.lora]\nrank = 16"


@pytest.mark.parametrize(
    ("model", "folder", "degrees", "batch", "more", "expected"),
    [
        ("gpt_oss", "gpt-oss-20b", "context_parallel_degree = 8", 1, "", "each of 8 H100"),
        ("qwen3", "Qwen3-30B-A3B", "expert_parallel_degree = 8\ncontext_parallel_degree = 8", 1, "", "moving tokens"),
        ("llama3", "Llama-3.1-70B", "context_parallel_degree = 8", 1, LORA, "each of 8 H100"),
        ("llama3", "Llama-3.1-70B", "tensor_parallel_degree = 8", 1, "", "Takes less memory: "),
        (
            "qwen3",
            "Qwen3-8B",
            "pipeline_parallel_degree = 2\ncontext_parallel_degree = 4",
            4,
            "",
            "idle in the pipeline",
        ),
        ("llama3", "Llama-3.1-8B", "data_parallel_shard_degree = 16", 1, "", "each of 16 H100"),
        ("qwen3_5", "Qwen3.6-27B", "context_parallel_degree = 8", 1, LORA, "for a layer that attends, 16 of 64:"),
        ("qwen3_5", "Qwen3.6-35B-A3B", "context_parallel_degree = 8", 1, "", "linear attention"),
    ],
)
def test_every_kind_of_run_has_an_answer(model, folder, degrees, batch, more, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = RUN.format(model=model, folder=folder, degrees=degrees, batch=batch, more=more, offload="false")
    (tmp_path / "run.toml").write_text(text)
    command.main(["run.toml", "--packs", "1"])
    said = " ".join(capsys.readouterr().out.split())
    assert expected in said
    assert f"assets/hf/{folder} has no config.json yet; the model is the published {folder}." in said
    assert "data.jsonl is not there yet; documents are those of the histogram" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpu", "V100"], "--gpu is 'V100'; use one of H100, H200, A100, B200"),
        (["--gpus", "12"], "--gpus is 12, but the degrees of run.toml multiply to 8; give a multiple"),
        (["--gpus", "0"], "--gpus is 0; give at least 1"),
    ],
)
def test_a_wrong_gpu_is_one_line(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = RUN.format(
        model="llama3", folder="Qwen3-8B", degrees="context_parallel_degree = 8", batch=1, more="", offload="true"
    )
    (tmp_path / "run.toml").write_text(run)
    with pytest.raises(SystemExit):
        command.main(["run.toml", *options])
    assert capsys.readouterr().err.strip().splitlines()[-1].endswith(message)


def test_a_flavor_without_a_file_is_named(capsys):
    with pytest.raises(SystemExit):
        command.main([str(ROOT / "train_configs" / "debug.toml")])
    assert "model.flavor is 'debugmodel_varlen_attn', a model of torchtitan's; sizing" in capsys.readouterr().err


def test_nodes_are_those_of_the_run_too(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    degrees = "context_parallel_degree = 4\ntensor_parallel_degree = 2"
    run = RUN.format(model="llama3", folder="Llama-3.1-8B", degrees=degrees, batch=1, more="", offload="false")
    (tmp_path / "run.toml").write_text(run)
    found = {}
    for nodes in ("1", "2"):
        command.main(["run.toml", "--packs", "1", "--nodes", nodes, "--json", "size.json"])
        found[nodes] = json.loads((tmp_path / "size.json").read_text())["run"]["step"]["attention"]
    command.main(["run.toml", "--packs", "1", "--gpus-per-node", "4", "--json", "size.json"])
    assert json.loads((tmp_path / "size.json").read_text())["run"]["step"]["attention"] == found["2"] > found["1"]


def test_what_is_not_counted_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    degrees = "context_parallel_degree = 8"
    run = RUN.format(model="qwen3", folder="Qwen3-8B", degrees=degrees, batch=1, more="", offload="true")
    (tmp_path / "run.toml").write_text(run)
    command.main(["run.toml", "--packs", "1"])
    said = " ".join(capsys.readouterr().out.split())
    assert "enable_cpu_offload is true; what copies and the optimizer on the CPU take is not counted" in said


def test_tensor_parallel_ranks_gather_their_part_of_the_experts():
    setup = Setup(SIZES["Qwen3-30B-A3B"], 8192, dp_shard=8)
    whole, split = (time_of_step(each, H100, 8, (0.0, 0.0), 0.0).parts for each in (setup, replace(setup, tp=4)))
    assert split["FSDP's copies"] == pytest.approx(whole["FSDP's copies"] / 4, rel=0.01)


def test_gpus_are_named_in_any_case_and_slower_ones_are_slower():
    assert gpu_named("h100") is GPUS["H100"]
    assert A100.cost.forward.pair > H100.cost.forward.pair
    assert H200.cost.inside == H100.cost.inside
    assert sample("histogram", 4096, 2).learned == 1
    assert pairs_of(sample("histogram", 4096, 2)).learned == 0.5
