"""Rollouts train as TRL's loss trains a model of transformers on each answer by itself, whatever the layout."""

import functools
import math
import shutil

import pytest
import torch
from support.degrees import degree_arguments, num_processes
from support.grpo import HIGH, LOW, train_grpo
from support.hf_loop import ARGUMENTS, STEPS, end_with_the_turn
from support.hf_models import hf_arguments, make_hf_folder
from support.rollouts import rollouts_file
from support.runs import IS_0_3, TrainingError, new_folder, train

from torchtitan_magi.data import PackedRolloutDataset
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer

SEQ_LEN = 1024
LONGEST = 400
KINDS = {  # of runs: normalization, beta, what rollouts have, whether their policy is known
    "dapo": ("dapo", 0.0, "advantage", True),
    "grpo": ("grpo", 0.0, "reward", True),
    "dr_grpo": ("dr_grpo", 0.0, "reward", True),
    "kl": ("dapo", 0.1, "advantage", True),
    "on_policy": ("grpo", 0.0, "reward", False),
}


@functools.cache
def folder_of(model):
    folder = make_hf_folder(model, rms_norm_eps=1e-4, initializer_range=0.1)
    end_with_the_turn(folder)
    return folder


@functools.cache
def expected(model, kind):
    normalization, beta, value, behaves = KINDS[kind]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    max_length = LONGEST if normalization == "dr_grpo" else 0
    path = rollouts_file(value, behaves)
    training = train_grpo(folder_of(model), path, normalization, beta, max_length, behaves)
    torch.set_num_threads(threads)
    return training


def packs_of(model, path, behaves):
    """A step takes all of them, so that every layout has the same rollouts in each."""
    tokenizer = load_chat_tokenizer(folder_of(model))
    packs = PackedRolloutDataset(path, tokenizer, SEQ_LEN, epochs=1, shuffle=False, on_policy=not behaves)
    return len(list(packs))


def options_of(model, kind):
    normalization, beta, value, behaves = KINDS[kind]
    path = rollouts_file(value, behaves)
    options = [*hf_arguments(folder_of(model), model), *ARGUMENTS, "--training.dataset", "rollouts"]
    options += ["--training.dataset_path", str(path), "--training.local_batch_size", "1", "--magi.no-shuffle"]
    options += ["--training.seq_len", str(SEQ_LEN), "--training.global_batch_size", str(packs_of(model, path, behaves))]
    options += ["--magi.rollouts.normalization", normalization, "--magi.rollouts.beta", str(beta)]
    options += ["--magi.rollouts.clip_low", str(LOW), "--magi.rollouts.clip_high", str(HIGH)]
    options += ["--magi.rollouts.max_length", str(LONGEST)] if normalization == "dr_grpo" else []
    options += [] if behaves else ["--magi.rollouts.on_policy"]
    return [*options, "--checkpoint.enable", "--checkpoint.initial_load_in_hf"]


def trained(model, kind, degrees, *options, folder=None):
    arguments = [*options_of(model, kind), "--job.dump_folder", str(folder or new_folder())]
    arguments += [*degree_arguments(degrees), *options]
    return train(num_processes(degrees), arguments, layers=None, entry="torchtitan_magi.train")


CASES = [pytest.param("llama", kind, {}, marks=pytest.mark.either) for kind in KINDS]
CASES += [
    ("llama", "grpo", {"tp": 2, "cp": 2}),
    ("llama", "dapo", {"dp": 2, "cp": 2}),
    ("qwen3_moe", "dapo", {"cp": 2}),
]
CASES += [
    pytest.param(*case, marks=pytest.mark.long) for case in (("llama", "kl", {"cp": 2}), ("qwen3", "grpo", {"tp": 2}))
]
if IS_0_3:
    CASES += [("qwen3_5", "kl", {"cp": 2}), ("gpt_oss", "grpo", {"cp": 2}), ("deepseek_v3", "dapo", {"cp": 2})]


@pytest.mark.parametrize(("model", "kind", "degrees"), CASES)
def test_it_is_the_training_of_answers_by_themselves(model, kind, degrees):
    run, wanted = trained(model, kind, degrees), expected(model, kind)
    assert len(run.losses) == STEPS
    scale = max(1.0, *map(abs, wanted.losses))
    assert run.losses == pytest.approx(wanted.losses, abs=1e-5 * scale)
    norms = [values["grad_norm"] for values in wanted.metrics]
    assert run.grad_norms == pytest.approx(norms, rel=1e-4)
    last = run.metrics[-1]
    assert {name for name in last if name.startswith("policy/")} == {"policy/ratio", "policy/clipped"} | (
        {"policy/kl"} if kind == "kl" else set()
    )
    assert all(math.isfinite(value) for value in last.values() if isinstance(value, float))
    if kind == "on_policy":
        assert last["policy/ratio"] == 1


def test_a_killed_run_goes_on(tmp_path):
    options = ["--checkpoint.interval", "2"]
    whole = trained("llama", "kl", {"cp": 2}, *options, folder=tmp_path)
    for step in (4, 5):
        shutil.rmtree(tmp_path / "checkpoint" / f"step-{step}")
    rest = trained("llama", "kl", {"cp": 2}, *options, folder=tmp_path)
    assert rest.losses == whole.losses[2:]
    assert rest.grad_norms == whole.grad_norms[2:]
    shutil.rmtree(tmp_path / "checkpoint" / "step-5")
    with pytest.raises(TrainingError, match="on_policy = False, this run has True; resume with the same value"):
        trained("llama", "kl", {"cp": 2}, "--magi.rollouts.on_policy", *options, folder=tmp_path)


@pytest.mark.skipif(not IS_0_3, reason="torchtitan 0.3 has pipelines and adapters here")
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"cp": 2}])
def test_pipelines_and_adapters(degrees):
    more = ["--magi.lora.rank", "4"] if "cp" in degrees else ["--training.local_batch_size", "2"]
    more += ["--training.steps", "3"]
    run, alone = (
        trained("llama", "kl", degrees, *more),
        trained("llama", "kl", {}, *(more if "cp" in degrees else more[2:])),
    )
    ours, theirs = ([values for _, values in found.of("metrics", len(found.events) - 1)] for found in (run, alone))
    assert len(ours) == 3  # of the last stage
    for one, other in zip(ours, theirs, strict=True):
        for name in ("loss_metrics/global_avg_loss", "grad_norm", "policy/kl", "policy/ratio"):
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), name


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--magi.rollouts.clip_low 1.5", "magi.rollouts.clip_low is 1.5; use a number above 0"),
        ("--magi.rollouts.beta=-1", "magi.rollouts.beta is -1.0; use a number of at least 0"),
        ("--magi.rollouts.normalization dr_grpo", "max_length is 0 with normalization 'dr_grpo'; give the tokens"),
        ("--magi.rollouts.max_length 100", "max_length is 100 with normalization 'dapo'; give the tokens"),
        ("--magi.long_documents split", "long_documents is 'split', but answers cannot be split"),
        ("--magi.positions pack", 'positions is "pack", but the answers to a prompt continue its positions'),
        ("--magi.loss_per document", "it needs the documents of dataset 'sft'"),
        ("--training.dataset_path=", "and so are the data; give the JSONL file"),
        (
            "--validation.enable --validation.dataset sft --validation.dataset_path x.jsonl",
            "validate on what is trained, 'rollouts' or not",
        ),
    ],
)
def test_settings_that_do_not_go_together(options, what):
    with pytest.raises(TrainingError, match=what):
        trained("llama", "dapo", {}, *options.split(" "))
