"""Pipeline parallelism: every microbatch has its own plan, and the step is that of one process that accumulates."""

import functools
import math
import os
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file
from support.degrees import degree_arguments, num_processes
from support.errors import run_ends
from support.hf_loop import EPS, answers_file, pairs_file
from support.hf_models import hf_arguments, make_hf_folder
from support.marks import marked_long
from support.runs import TrainingError, corpus, new_folder, train, watch
from support.trees import trees_file

from torchtitan_magi.training.experts import EXPERT_LOAD_METRICS

PACKS = 4  # per step
FOUR_LAYERS = {"num_hidden_layers": 4}


@functools.cache
def folder(kind="llama", tied=False):
    seed = 2 if kind == "qwen3_5_moe" else 0  # with others the experts of some token hang on rounding
    return make_hf_folder(kind, tied=tied, seed=seed, **FOUR_LAYERS)


@dataclass
class Result:
    """What the last rank, which has the last stage, logs by step."""

    losses: list[float]
    norms: list[float]
    accuracies: list[float]
    validation: list[float]
    tokens: list[int]
    expert_load: list[tuple[float, ...]]


def run(degrees, *options, kind="llama", tied=False, setup=None, expanded=None):
    """Two steps. expanded: gets how often each rank has made K and V of latent rows."""
    local = PACKS // degrees.get("dp", 1) if "pp" in degrees else 1
    processes = num_processes(degrees)
    arguments = [*hf_arguments(folder(kind, tied), kind), "--training.dataset_path", f"{corpus()}/train.jsonl"]
    arguments += ["--training.steps", "2"]
    arguments += ["--training.local_batch_size", str(local), "--training.global_batch_size", str(PACKS)]
    arguments += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"]
    arguments += [*degree_arguments(degrees), *options]
    found = train(processes, arguments, layers=None, setup=setup)
    if expanded is not None:
        expanded += [len(found.of("expanded", rank)) for rank in range(processes)]
    assert "Predicted memory per GPU: at most " in found.output
    assert len(found.losses) == 2  # the same on every rank
    logged = [values for _, values in found.of("metrics")]
    keys = "loss_metrics/global_avg_loss", "grad_norm", "rewards/accuracies", "validation_metrics/loss", "n_tokens_seen"
    load = [tuple(values[key] for key in EXPERT_LOAD_METRICS if key in values) for values in logged]
    found = ([float(values[key]) for values in logged if key in values] for key in keys)
    return Result(*found, [figures for figures in load if figures])


VALIDATION = "--validation.enable --validation.dataset sft --validation.freq 2 --validation.seq_len 256"


def with_validation():
    return [*VALIDATION.split(), "--validation.dataset_path", f"{corpus()}/validation.jsonl"]


@functools.cache
def alone(kind="llama"):
    return run({}, "--validation.local_batch_size", "1", *with_validation(), kind=kind)


def check(found, expected):
    """Losses and gradient norms, and losses of validations."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)  # float32 sums
    assert found.validation == pytest.approx(expected.validation, rel=1e-5)
    assert found.tokens == expected.tokens
    assert found.tokens[0] > 0
    assert len(found.expert_load) == len(expected.expert_load)
    for figures, of_one in zip(found.expert_load, expected.expert_load, strict=True):
        assert figures == pytest.approx(of_one, rel=1e-5)


@pytest.mark.parametrize(
    ("degrees", "schedule"),
    [
        ({"pp": 2, "cp": 2}, "1F1B"),
        ({"pp": 2}, "Interleaved1F1B"),
        pytest.param({"pp": 2, "cp": 2}, "GPipe", marks=pytest.mark.long),
        ({"pp": 2, "tp": 2, "cp": 2}, "1F1B"),
        ({"pp": 2, "dp": 2, "cp": 2}, "1F1B"),
    ],
)
def test_a_step_is_that_of_one_process(degrees, schedule):
    found = run(degrees, "--parallelism.pipeline_parallel_schedule", schedule, *with_validation())
    assert len(found.losses) == len(found.validation) == 2
    check(found, alone())


def test_trees_are_those_of_one_process():
    options = ["--magi.share_prefixes", "--magi.loss_per", "document", "--training.seq_len", "1024"]
    options += ["--training.dataset_path", str(trees_file())]
    check(run({"pp": 2, "cp": 2}, *options), run({}, *options))


def expect_batches_of_a_pass(report):
    from torchtitan_magi.titan.v03.trainer import MagiTrainer

    def check_both(_, trainer):
        assert (trainer.dataloader.at_once, trainer.validator.batches.at_once) == (PACKS, PACKS)

    watch(MagiTrainer, "train", check_both)


def test_the_batches_of_a_pass_are_planned_ahead():
    check(run({"pp": 2}, *with_validation(), setup=expect_batches_of_a_pass), alone())


EXPERTS_OR_MASKS = ["gpt_oss", "deepseek_v3", "muse_glimmer", "qwen3_5", "qwen3_5_moe"]


@pytest.mark.parametrize("kind", marked_long(EXPERTS_OR_MASKS, ("deepseek_v3", "muse_glimmer", "qwen3_5_moe")))
def test_models_with_experts_and_several_masks_train_alike(kind):
    check(run({"pp": 2, "cp": 2}, *with_validation(), kind=kind), alone(kind))


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        pytest.param("qwen3_moe", {"tp": 2}, marks=pytest.mark.long),
        pytest.param("gpt_oss", {"tp": 2, "pp": 2}, marks=pytest.mark.long),
        ("deepseek_v3", {"tp": 2, "cp": 2}),
    ],
)
def test_experts_under_tensor_parallelism_train_alike_on_microbatches_of_one_pack(kind, degrees):
    check(run(degrees, *with_validation(), kind=kind), alone(kind))


def ranks_in_nodes_of_their_own(report):
    from torchtitan_magi.attention.latents import Latents
    from torchtitan_magi.exchange import mesh

    mesh.machine = lambda: os.environ["RANK"]
    watch(Latents, "expand", lambda *_: report("expanded"))


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"cp": 2}, "--magi.overlap_stages 2"),
        ({"tp": 2, "cp": 2}, "--activation_checkpoint.mode full"),
        pytest.param({"cp": 2, "dp": 2}, "--compile.enable --compile.backend aot_eager", marks=pytest.mark.long),
    ],
)
def test_latent_vectors_that_travel_between_nodes_train_alike(degrees, options):
    kind, expanded = "deepseek_v3", []
    options = [*options.split(), *with_validation()]
    found = run(degrees, *options, kind=kind, setup=ranks_in_nodes_of_their_own, expanded=expanded)
    check(found, alone(kind))
    assert all(of_rank for of_rank in expanded)


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({"ddp": 2, "dp": 2}, ""),
        pytest.param(
            {"tp": 2, "dp": 2, "ep": 2},
            "--compile.enable --compile.backend aot_eager --validation.local_batch_size 2",
            marks=pytest.mark.long,
        ),
    ],
)
def test_experts_are_read_under_hsdp_and_compile_for_packs_of_training_and_of_validation(degrees, options):
    check(run(degrees, *options.split(), *with_validation(), kind="qwen3_moe"), alone("qwen3_moe"))


def pairs(num_answers=2):
    path = pairs_file() if num_answers == 2 else answers_file(num_answers)
    return ["--training.dataset", "dpo", "--training.dataset_path", str(path)]


@functools.cache
def dpo_alone(num_answers):
    return run({}, *pairs(num_answers))


@pytest.mark.parametrize(
    ("degrees", "num_answers"),
    [({"pp": 2, "cp": 2}, 2), pytest.param({"tp": 2}, 2, marks=pytest.mark.long), ({"pp": 2, "cp": 2}, 4)],
)
def test_the_frozen_copy_of_dpo_is_laid_out_like_the_policy(degrees, num_answers):
    one, found = dpo_alone(num_answers), run(degrees, *pairs(num_answers))
    check(found, one)
    assert found.accuracies == one.accuracies
    assert found.losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert abs(found.losses[1] - found.losses[0]) > 0.01  # of other pairs, by a policy that is not the copy's any more


def test_adapters_of_all_stages_are_trained_and_written():
    """They begin as those of one process, although torchtitan seeds each stage by itself."""
    options = [*pairs(), "--magi.lora.rank", "4", "--checkpoint.last_save_in_hf", "--optimizer.eps", f"{EPS}"]
    dumps = [new_folder(), new_folder()]
    one, pipeline = (
        run(degrees, *options, "--job.dump_folder", dump)
        for degrees, dump in zip(({}, {"pp": 2, "cp": 2}), dumps, strict=True)
    )
    check(pipeline, one)
    assert pipeline.losses[1] < pipeline.losses[0]
    written, expected = (load_file(f"{dump}/checkpoint/step-2/adapter_model.safetensors") for dump in reversed(dumps))
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=1e-5)  # the learning rate is 3e-3


def test_gradients_of_several_passes_are_added_up():
    """Between them the stages compute the reference, which has no backward."""
    options = [*pairs(), "--magi.lora.rank", "4"]
    check(run({"pp": 2}, *options, "--training.local_batch_size", "2"), run({}, *options))


@pytest.mark.parametrize("adapters", [[], ["--magi.lora.rank", "4"]])
def test_packs_of_validation_may_be_shorter(adapters):
    """The reference has no backward in either, so torch would take its stages to be set up already."""
    options = [*pairs(), *VALIDATION.split(), "--validation.dataset", "dpo", "--validation.local_batch_size", "1"]
    options += ["--validation.dataset_path", str(pairs_file()), "--training.seq_len", "512", *adapters]
    check(run({"pp": 2}, *options), run({}, *options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--parallelism.pipeline_parallel_schedule ZBVZeroBubble", "schedule is 'ZBVZeroBubble'; use one of 1F1B, "),
        ("--training.local_batch_size 1", "local_batch_size is 1, and .*_size 1: .* needs 2 at least; change"),
        ("--training.dataset dpo --magi.dpo.reference file", 'reference is "file", but a pipeline'),
        ("--parallelism.pipeline_parallel_first_stage_less_layers 9", "2 stages get 7 of 14 layers each, "),
        (
            "--magi.lora.rank 4 --parallelism.pipeline_parallel_schedule Interleaved1F1B",
            r"target_modules is .*, but stage 3 of the pipeline, with layers \[\], has none of these matrices; add",
        ),
    ],
)
def test_what_does_not_go_with_it_is_named(options, message):
    with run_ends(message):
        run({"pp": 2}, *options.split())


def with_stages_of_an_older_torch(report):
    from torchtitan_magi.training.settings import degrees

    degrees.PipelineStage = lambda submodule: None


def test_a_torch_that_is_too_old_is_named():
    with run_ends("pipeline_parallel_degree is 2, but torch .* is too old for torchtitan's pipelines; install"):
        run({"pp": 2}, setup=with_stages_of_an_older_torch)


def test_tied_weights_are_named():
    with pytest.raises(TrainingError, match="but tie_word_embeddings does not go with it"):
        run({"pp": 2}, tied=True)
