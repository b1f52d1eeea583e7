"""The numbers a user sees are those of the same training without context parallelism, and none of them is NaN."""

import functools
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from support.corpus import WORDS, chat_tokenizer
from support.parity import feed, trained_anew
from support.runs import LAYERS, call, corpus, new_folder, train, watch

from layouts import LAYOUTS  # isort: skip

OURS = "torchtitan_magi.train"
SEQ_LEN = 256
TOKENS = 2 * SEQ_LEN  # of a step
ATTENTION_FLOPS = 12 * LAYERS * 256  # per (query, key) pair: forward and backward, layers, width of the debug model


def close(value):
    return pytest.approx(value, rel=1e-5)


@functools.cache
def validation_file():
    """Records of an odd number of packs, so that one of two data-parallel ranks gets padding only in the last round."""
    path = Path(new_folder()) / "validation.jsonl"
    path.write_text("".join((corpus() / "validation.jsonl").read_text().splitlines(keepends=True)[:13]))
    areas, last_of_two = call(packs_of, str(path), str(corpus()), True)
    assert len(areas) == 5
    assert last_of_two == ([], 0)
    return str(path)


def packs_of(path, data, whole):
    """(query, key) pairs of each pack; documents and number of labels in the last pack of the second of two ranks."""
    from torchtitan_magi.data import PackedSFTDataset

    tokenize, options = chat_tokenizer(data), {"shuffle": not whole, "epochs": 1 if whole else -1}
    options |= {"packs_per_step": 1 if whole else TOKENS // SEQ_LEN}
    areas = []
    for inputs, _ in PackedSFTDataset(path, tokenize, SEQ_LEN, **options):
        lengths = np.diff(inputs["documents"].astype(np.int64), axis=1)
        areas.append(int((lengths * (lengths + 1) // 2).sum()))
        if len(areas) == 6 and not whole:
            return areas
    *_, (inputs, labels) = PackedSFTDataset(path, tokenize, SEQ_LEN, 1, 2, **options)
    return areas, (inputs["documents"].tolist(), int((labels != -100).sum()))


@functools.cache
def areas_in_training():
    return call(packs_of, f"{corpus()}/train.jsonl", str(corpus()), False)


@functools.cache
def run(name):
    """Three steps with validation after the first and the second."""
    arguments = ["--validation.enable", "--validation.dataset", "sft", "--validation.dataset_path", validation_file()]
    arguments += ["--validation.steps=-1", "--validation.freq", "2", "--validation.seq_len", f"{SEQ_LEN}"]
    return trained_anew(name, *arguments, "--training.steps", "3")


@pytest.mark.parametrize("name", ["cp2", "dp2", "dp2_cp2", "cp2_accumulation"])
def test_validation_loss_with_a_last_round_that_leaves_a_rank_without_a_pack(name):
    """Validation batches hold one pack and the loader one pass: all layouts see every pack once."""
    assert len(run(name).validation_losses) == 2
    assert run(name).validation_losses == close(run("cp1").validation_losses)
    assert run("cp1").validation_losses[1] < run("cp1").validation_losses[0]


@pytest.mark.parametrize("name", ["cp1", "cp2", "dp2", "dp2_cp2", "cp2_accumulation"])
def test_tokens_and_flops_per_second(name):
    """Per process: the tokens of all over the time of a step are those of the step. The attention of the documents
    counts, of the packs of rank 0's data-parallel rank."""
    for step, metrics in enumerate(run(name).metrics, 1):
        assert metrics["n_tokens_seen"] == step * TOKENS
        seconds = metrics["time_metrics/end_to_end(s)"]
        assert metrics["throughput(tps)"] * seconds * LAYOUTS[name].processes == close(TOKENS)
    areas = areas_in_training()
    if name.startswith("dp2"):
        areas, tokens = areas[::2], SEQ_LEN
    else:
        areas, tokens = [a + b for a, b in zip(areas[::2], areas[1::2], strict=True)], TOKENS
        assert len(set(areas)) > 1
    flops = [metrics["tflops"] * 1e12 / metrics["throughput(tps)"] for metrics in run(name).metrics]
    without_attention = {count - ATTENTION_FLOPS * area / tokens for count, area in zip(flops, areas, strict=True)}
    assert max(without_attention) == close(min(without_attention))
    assert 6 * 2.2e6 < min(without_attention) < 6 * 2.8e6  # 6 per weight and token; the embedding has no product


@pytest.mark.parametrize(("name", "against"), [("cp2", "cp1"), ("cp2_accumulation", "cp1"), ("dp2_cp2", "dp2")])
def test_the_largest_loss_of_a_data_parallel_rank(name, against):
    ours, reference = ([m["loss_metrics/global_max_loss"] for m in run(n).metrics] for n in (name, against))
    assert ours == close(reference)
    if against == "cp1":
        assert ours == close(run(name).losses)
    else:
        assert all(largest > mean for largest, mean in zip(ours, run(name).losses, strict=True))


# ------------------------------------------------------------------------------------------------- no label, no NaN


def report_labels(report):
    """How many labels this rank has in each microbatch after context parallelism has cut it."""
    from torchtitan_magi.training.objectives.objective import SFT

    watch(SFT, "read", lambda batch, *_: report("labels", int((batch.local.labels != -100).sum())))


def all_finite(run):
    logged = [metrics for rank in range(len(run.events)) for _, metrics in run.of("metrics", rank)]
    return all(math.isfinite(value) for metrics in logged for value in metrics.values())


def test_a_context_parallel_rank_without_a_label(tmp_path):
    messages = [{"role": "user", "content": f" {WORDS[1]}" * 180}, {"role": "assistant", "content": "so"}]
    (tmp_path / "records.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 20)
    arguments = ["--training.dataset_path", f"{tmp_path}/records.jsonl", "--training.steps", "2"]
    arguments += ["--training.local_batch_size", "1", "--parallelism.context_parallel_degree", "4"]
    run = train(4, arguments, entry=OURS, setup=report_labels)
    labels = [count for rank in range(4) for (count,) in run.of("labels", rank)]
    assert 0 in labels
    assert sum(labels) > 0
    assert all_finite(run)


def every_other_pack_without_label(shape, dp_rank, dp_world_size):
    import torch

    for number in itertools.count(dp_rank, dp_world_size):
        tokens = torch.from_numpy(np.random.default_rng(number).integers(10, 2000, shape))
        yield {"input": tokens}, tokens.roll(-1, 1) if number % 2 == 0 else torch.full(shape, -100)


def feed_every_other_pack_without_label(report):
    report_labels(report)
    feed(every_other_pack_without_label)


@pytest.mark.parametrize("name", ["dp2_cp2", "cp2_accumulation"])
def test_a_microbatch_or_a_data_parallel_rank_without_a_label(name):
    arguments = ["--training.dataset", "c4_test", "--training.steps", "2"]
    run = trained_anew(name, *arguments, entry=OURS, setup=feed_every_other_pack_without_label)
    without = [count for rank in range(len(run.events)) for (count,) in run.of("labels", rank)].count(0)
    assert without == 2 * 2  # one of two microbatches of a step, on both context-parallel ranks
    assert all_finite(run)
    assert [m["loss_metrics/global_max_loss"] for m in run.metrics] == close(run.losses)
