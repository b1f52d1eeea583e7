"""Predicted memory: what layouts and options change, which remedies help, what the log says."""

import json
import logging
import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.runs import ROOT, call

from torchtitan_magi.models.model_config import Experts, ModelConfig, Rope
from torchtitan_magi.models.published import published_sizes
from torchtitan_magi.planning.choose_stages import MOST_BYTES
from torchtitan_magi.sizing.activations import attention_gradients, kept_activations
from torchtitan_magi.sizing.exchanged_rows import (
    fullest_plan,
    maps_held,
    rows_and_sums,
    rows_in_flight,
    states_of_parts,
)
from torchtitan_magi.sizing.memory import GIB, describe, moments, predict, remedies
from torchtitan_magi.sizing.run_setup import Setup, setup_of
from torchtitan_magi.training.memory_log import give_back_before

LLAMA_8B = ModelConfig("llama3", 4096, 32, 32, 8, 128, 14336, 128256, 1e-5, Rope(5e5))
QWEN_30B = ModelConfig("qwen3", 2048, 48, 32, 4, 128, 6144, 151936, 1e-6, Rope(1e6), False, Experts(128, 8, 768, True))
QWEN_9B = published_sizes("Qwen3.5-9B")
MEASURED = sorted((ROOT / "benchmarks" / "results").glob("train_*.json"))
SETUP = Setup(LLAMA_8B, 131072, cp=4, compiled=True, compiled_loss=True)


# ----------------------------------------------------------------------------------------------------------- properties


def parts_at(setup, moment):
    return next(each.parts for each in moments(setup) if each.moment == moment)


def totals(setup):
    return {each.moment: each.total for each in moments(setup)}


@pytest.mark.parametrize("model", [LLAMA_8B, QWEN_30B], ids=lambda model: model.model)
def test_twice_the_shards_take_half_the_states(model):
    setup = Setup(model, 131072, cp=4, ep=4 if model.experts else 1, reference=True)
    end = "the optimizer's step"
    half, whole = parts_at(replace(setup, dp_shard=2), end), parts_at(setup, end)
    for part in ("parameters", "gradients", "optimizer states", "reference"):
        assert half[part] == pytest.approx(whole[part] / 2, rel=1e-6)
    copies = replace(setup, dp_replicate=2)
    assert parts_at(copies, end) == parts_at(setup, end)  # a replica shares nothing
    for each in moments(copies):  # a third stream's memory, which stays its own
        assert each.parts["gradients"] == parts_at(setup, end)["gradients"]


def test_parts_add_up_and_the_largest_moment_is_predicted():
    for setup in (SETUP, replace(SETUP, checkpointing="full", cp=8, seq_len=2**20)):
        assert predict(setup).total == sum(predict(setup).parts.values()) == max(totals(setup).values())
        assert all(size > 0 for size in predict(setup).parts.values())


@pytest.mark.parametrize("model", [LLAMA_8B, QWEN_30B, QWEN_9B], ids=lambda model: model.model)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_more_checkpointing_keeps_less(model, compiled, tp):
    setup = Setup(model, 131072, cp=4, tp=tp, compiled=compiled)

    def kept(mode, **fields):
        return kept_activations(replace(setup, checkpointing=mode, **fields))

    order = [kept("full"), kept("selective"), kept("selective", every=2), kept("none")]
    assert order == sorted(set(order))
    assert kept("memory_budget", budget=0.0) == kept("full")
    assert kept("memory_budget", budget=1.0) == kept("none")
    assert kept("selective", every=1) == kept("full")


@pytest.mark.parametrize(
    ("fields", "part", "gib"),
    [
        ({"reference": True}, "reference", 8.03e9 * 4 / 4 / GIB),  # parameters in float32 over four GPUs
        ({"microbatches": 2}, "gradients", 8.03e9 * 4 / 4 / GIB),
        ({"whole_logits": True}, "logits", 131072 / 4 * 128256 * 2 * 2 / GIB + 128256 * 4096 * 4 / GIB + 0.5),
        ({"packs": 2}, "rows in flight", 4),
        ({"cp_per_machine": 2}, "rows in flight", 0),
        ({"gpu": False}, "CUDA and NCCL", 0),
        ({"offload": True}, "parameters", 0),
        # DDP's and autocast's copies; by torchtitan 0.3 a block's of FSDP2, and what the output layer's gradients take
        ({"cp": 1, "dp_replicate": 4, "by_02": True}, "gathered parameters", 8.03e9 * (4 + 2) / GIB),
        (
            {"cp": 1, "dp_replicate": 4},
            "gathered parameters",
            (2.181e8 * 3 * 2 + 128256 * 4096 * 4) / GIB,
        ),
    ],
)
def test_what_an_option_takes(fields, part, gib):
    now, changed = totals(SETUP), totals(replace(SETUP, **fields))
    moment = "the output layer" if part == "logits" else "the last block's backward"
    assert parts_at(replace(SETUP, **fields), moment).get(part, 0) / GIB == pytest.approx(gib, rel=0.02)
    assert (changed[moment] > now[moment]) == (gib > 0)


def test_linear_attention_holds_maps_of_parts_where_a_document_is_cut():
    setup = Setup(QWEN_9B, 65536, cp=8)
    num_parts, one_map = len(fullest_plan(setup).document_parts), 32 * 128 * 256 * 4  # [H, K, V + K] in float32
    assert 8 <= num_parts <= 48
    assert maps_held(setup) == num_parts * one_map
    assert maps_held(replace(setup, tp=2)) == len(fullest_plan(replace(setup, tp=2)).document_parts) * one_map / 2
    per_layer = -(-num_parts // 8) * one_map
    assert states_of_parts(setup) == per_layer
    assert states_of_parts(replace(setup, cp=1, seq_len=8192)) == maps_held(replace(setup, cp=1)) == 0
    kept = [kept_activations(one) for one in (setup, replace(setup, cp=1, seq_len=8192))]
    assert kept[0] - kept[1] == 24 * per_layer
    assert kept_activations(replace(setup, checkpointing="full")) == 32 * setup.tokens * 4096 * 2


def test_a_dense_document_receives_the_rest_of_its_pack():
    """One layer's attention alone over a million tokens on two H200 was measured to take 36 GiB of PyTorch's."""
    setup = Setup(LLAMA_8B, 2**20, cp=2)
    qkv_and_out, residual = setup.tokens * (2 * 4096 + 2 * 1024) * 2, setup.tokens * 4096 * 2
    alone = qkv_and_out + attention_gradients(setup) - residual + rows_and_sums(setup)
    assert alone / GIB == pytest.approx(36, rel=0.1)


def test_rows_that_come_in_stages_are_predicted_as_they_are_planned():
    setup = Setup(LLAMA_8B, 4 << 20, cp=32, cp_per_machine=8)
    plan, own = fullest_plan(setup), setup.tokens * 2048 * 4
    assert len(plan.backward) > 8
    assert rows_and_sums(setup) <= MOST_BYTES + own
    whole = rows_and_sums(replace(setup, overlap_stages=0))
    assert whole > own + setup.tokens * 31 * 2048 * (2 + 4)  # all rows, and the sums of their gradients
    in_stages = replace(setup, cp=8, cp_per_machine=None)
    assert rows_in_flight(in_stages) == 4 * GIB + 4096  # of the forward alone
    assert rows_in_flight(replace(in_stages, overlap_stages=4)) == 0


# ------------------------------------------------------------------------------------------------------------ in words


def test_a_prediction_above_the_gpus_memory_names_remedies_that_help():
    setup = replace(SETUP, seq_len=2**20, dp_shard=2, dp_replicate=2, reference=True)
    now, text = predict(setup).total / GIB, remedies(setup)
    for option in (
        "parallelism.data_parallel_replicate_degree = 1, data_parallel_shard_degree = 4",
        "parallelism.context_parallel_degree = 8, data_parallel_shard_degree = 1",
        "parallelism.tensor_parallel_degree = 2 on twice the GPUs",
        'activation_checkpoint.mode = "full"',
        'magi.dpo.reference = "file"',
        "training.enable_cpu_offload = true",
        "training.seq_len = 524288",
    ):
        (gib,) = re.findall(re.escape(option) + r" \(([\d.]+) GiB\)", text)
        assert float(gib) < now
    assert "\n" not in text
    small = remedies(replace(setup, checkpointing="full", reference=False, offload=True, dp_replicate=1, dp_shard=1))
    assert not re.search("checkpoint|reference|offload|replicate", small)
    assert "context_parallel_degree = 8 on twice the GPUs" in small
    assert f"at most {now:.1f} GiB of 80.0, in " in describe(predict(setup), 80 * GIB)


def test_no_remedy_is_named_that_training_refuses():
    def run(**options):
        given = {"training.seq_len": 2**20, "training.dataset": "dpo", "magi.rollouts.beta": 0.1, **options}
        return setup_of(
            lambda name, default: given.get(name, default[0] if type(default) is tuple else default), LLAMA_8B, 1
        )

    pairs, rollouts = run(), run(**{"training.dataset": "rollouts"})
    stages = run(**{"parallelism.pipeline_parallel_degree": 2})
    assert all(setup.reference for setup in (pairs, rollouts, stages))
    assert ["magi.dpo.reference" in remedies(setup) for setup in (pairs, rollouts, stages)] == [True, False, False]
    for setup, has_fsdp in (
        (replace(pairs, by_02=True), False),
        (replace(pairs, by_02=True, dp_shard=2), True),
        (replace(pairs, by_02=False), True),
    ):
        assert ("training.enable_cpu_offload" in remedies(setup)) == has_fsdp


def lines_on_a_gpu(retries, before=0):
    """What a GPU of 80 GiB logs: predictions that fit and that do not, measurements of steps 1, 10 and 20 after those
    before, from which a run goes on."""
    import torch.distributed as dist

    from torchtitan_magi.training.activations.gpu_memory import GpuMemory
    from torchtitan_magi.training.memory_log import MeasuredMemory, log_prediction

    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    gpu = {
        "is_available": lambda: True,
        "mem_get_info": lambda: (15 * GIB, 80 * GIB),
        "memory_reserved": lambda: 62 * GIB,
        "max_memory_allocated": iter([50 * GIB, 51 * GIB, 52 * GIB]).__next__,
        "max_memory_reserved": iter([64 * GIB, 63 * GIB, 66 * GIB]).__next__,
        "memory_stats": map(lambda count: {"num_alloc_retries": count}, retries).__next__,
    }
    with mock.patch.multiple(torch.cuda, **gpu), mock.patch.object(dist, "all_reduce"):
        log_prediction(SETUP, 80 * GIB)
        setup = replace(SETUP, checkpointing="full", cp=8)
        memory = GpuMemory(80 * GIB)
        measured = MeasuredMemory(setup, log_prediction(setup, memory.capacity), "cpu", None, memory)
        outside = [measured.look(before + step)["memory/outside_pytorch(GiB)"] for step in (1, 10, 20)]
    return lines, outside


@pytest.mark.parametrize("before", [0, 100])
def test_the_log_warns_of_what_does_not_fit_and_says_once_what_was_measured(before):
    lines, outside = call(lines_on_a_gpu, (2, 5, 5), before)
    levels, texts = zip(*lines, strict=True)
    assert levels == ("INFO", "WARNING", "INFO", "INFO")
    assert "GiB of 80.0, in the last block's backward (parameters 7.5, " in texts[0]
    assert "on each GPU of 80.0" in texts[1]
    assert 'activation_checkpoint.mode = "full" (' in texts[1]
    measured = "Measured memory per GPU: at most 51.0 GiB allocated by PyTorch (64.0 reserved) and 3.0 GiB outside it; "
    assert texts[3].startswith(measured)
    assert outside == [3, 3, 3]


def test_the_log_says_once_that_the_allocator_searches_for_memory_in_settled_steps():
    (level, text), *more = call(lines_on_a_gpu, (0, 0, 20))[0][4:]
    assert (level, more) == ("WARNING", [])
    assert text.startswith("The GPU's memory is full: PyTorch's allocator searched for free memory 20 times since the ")
    assert "which slows steps; change one or more of: parallelism.context_parallel_degree = 16 " in text


def test_free_memory_goes_back_once_before_the_first_update(monkeypatch):
    calls, weight = [], torch.nn.Parameter(torch.ones(1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(weight.item()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    give_back_before(optimizer)
    for _ in range(3):
        weight.grad = torch.ones(1)
        optimizer.step()
    assert (calls, weight.item()) == ([1], -2)


def offload_without_fsdp():
    from torchtitan_magi.training.settings.degrees import check_offload

    check_offload(False, fsdp_enabled=False)
    check_offload(True, fsdp_enabled=True)
    try:
        check_offload(True, fsdp_enabled=False)
    except ValueError as error:
        return str(error)


def test_offload_without_fsdp_is_refused():
    assert "enable_cpu_offload is true, but FSDP is off" in str(call(offload_without_fsdp))


# ------------------------------------------------------------------------------------------- against measured GPU runs


def compared():
    """File -> GiB per GPU of its runs, measured and predicted."""
    from docs_memory import comparisons

    results = {path.stem: json.loads(path.read_text()) for path in MEASURED}
    return {name: [(row["peak_memory_gib"], gib) for row, gib in comparisons(facts)] for name, facts in results.items()}


def test_runs_took_what_is_predicted():
    for name, found in call(compared).items():
        assert found, name
        for measured, predicted in found:
            assert predicted == pytest.approx(measured, rel=0.05 if "_8b_" in name else 0.1), name
