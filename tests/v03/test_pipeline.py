"""Pipeline parallelism: every microbatch has its own plan, and the step is that of one process that accumulates."""

import functools
import math

import pytest
from hf_models import make_hf_folder
from training import TrainingError, corpus, train

DEGREES = {"pp": "pipeline_parallel", "cp": "context_parallel", "tp": "tensor_parallel", "dp": "data_parallel_shard"}
PACKS = 4  # per step
FOUR_LAYERS = {"num_hidden_layers": 4}


@functools.cache
def folder(kind="llama", tied=False):
    return make_hf_folder(kind, tied=tied, **FOUR_LAYERS)


def run(degrees, *options, kind="llama", tied=False):
    """Of the last rank, which has the last stage: losses and gradient norms of two steps."""
    name = {"llama": "llama3"}.get(kind, kind)
    local = PACKS // degrees.get("dp", 1) if "pp" in degrees else 1
    arguments = ["--model.name", name, "--model.flavor", "hf", "--model.hf_assets_path", str(folder(kind, tied))]
    arguments += ["--training.dataset_path", f"{corpus()}/train.jsonl", "--training.steps", "2"]
    arguments += ["--training.local_batch_size", str(local), "--training.global_batch_size", str(PACKS)]
    arguments += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    for axis, degree in degrees.items():
        arguments += [f"--parallelism.{DEGREES[axis]}_degree", str(degree)]
    processes = math.prod(degrees.values())
    events = train(processes, [*arguments, *options], layers=None).of("metrics", rank=processes - 1)
    values = [values for _, values in events if "grad_norm" in values]
    return [(step["loss_metrics/global_avg_loss"], step["grad_norm"]) for step in values]


@functools.cache
def alone(kind="llama"):
    return run({}, kind=kind)


def assert_alike(found, expected):
    for (loss, norm), (loss_alone, norm_alone) in zip(found, expected, strict=True):
        assert loss == pytest.approx(loss_alone, rel=1e-5)
        assert norm == pytest.approx(norm_alone, rel=1e-4)  # float32 sums


@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [
        ({"pp": 2, "cp": 2}, "1F1B"),
        ({"pp": 2}, "Interleaved1F1B"),
        ({"pp": 2, "cp": 2}, "GPipe"),
        ({"pp": 2, "tp": 2, "cp": 2}, "1F1B"),
        ({"pp": 2, "dp": 2, "cp": 2}, "1F1B"),
    ],
)
def test_a_step_is_that_of_one_process(degrees, schedule):
    assert_alike(run(degrees, "--parallelism.pipeline_parallel_schedule", schedule), alone())


@pytest.mark.parametrize("kind", ["gpt_oss", "deepseek_v3"])
def test_models_with_experts_and_several_masks_train_alike(kind):
    assert_alike(run({"pp": 2, "cp": 2}, kind=kind), alone(kind))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--parallelism.pipeline_parallel_schedule ZBVZeroBubble", "schedule is 'ZBVZeroBubble'; use one of 1F1B, "),
        ("--training.dataset dpo", "degree is 2, but training.dataset does not go with it"),
        ("--magi.lora.rank 2", "degree is 2, but magi.lora.rank does not go with it"),
        (
            "--validation.enable --validation.dataset sft --validation.dataset_path x --validation.seq_len 256",
            "but validation.enable does not",
        ),
    ],
)
def test_what_does_not_go_with_it_is_named(options, message):
    with pytest.raises(TrainingError, match=message) as caught:
        run({"pp": 2}, *options.split())
    assert caught.value.type == "ValueError"


def test_tied_weights_are_named():
    with pytest.raises(TrainingError, match="but tie_word_embeddings does not go with it"):
        run({"pp": 2}, tied=True)
