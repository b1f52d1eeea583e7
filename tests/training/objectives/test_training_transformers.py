"""Trains as transformers and TRL do: loss and metrics of every step and the exported model, whatever the layout."""

import functools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.degrees import degree_arguments, num_processes
from support.hf_loop import (
    ARGUMENTS,
    LOSSES,
    PACKS,
    PAIR_SEQ_LEN,
    SEQ_LEN,
    Training,
    answers_file,
    end_with_the_turn,
    pairs_file,
    train_dpo,
    train_sft,
)
from support.hf_models import TEXT_PARTS, hf_arguments, load_hf, make_hf_folder
from support.runs import IS_0_3, corpus, new_folder, train
from support.trees import trees_file
from transformers import AutoModelForCausalLM

from torchtitan_magi.losses.preference import PREFERENCE_METRICS

LOSS_TOLERANCE = 1e-5  # relative: five digits
LOGITS_TOLERANCE = 5e-5  # absolute; the largest logits are about 4
# Norms of what a query reads from a state enlarge rounding where that is little: there transformers' own float32 is
# 2e-5 from its float64 before training.
LOGITS_TOLERANCE_OF = {"qwen3_5": 1e-3, "tied_qwen3_5": 1e-3, "qwen3_5_moe": 1e-3}

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 256}  # of four frequencies one stays, one is scaled in part
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0}
LONG_ROPE = {"rope_theta": 5_000_000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MODELS = {  # what make_hf_folder is told, little of it torchtitan's default
    "llama": {"kind": "llama", "rms_norm_eps": 1e-4},
    "llama3_rope": {"kind": "llama", "rms_norm_eps": 1e-4, "rope": LLAMA3_ROPE},
    "linear_rope": {"kind": "llama", "rms_norm_eps": 1e-4, "rope": LINEAR_ROPE},
    "qwen3": {"kind": "qwen3", "rms_norm_eps": 1e-4, "rope": LONG_ROPE},
    "tied_qwen3": {"kind": "qwen3", "tied": True, "layout": "base"},
    "qwen3_moe": {"kind": "qwen3_moe", "rope": LONG_ROPE, "layout": "fused"},
    "qwen3_moe_unscaled": {"kind": "qwen3_moe", "norm_topk_prob": False},
}
# Degrees. All have 2 K/V heads, which four shards of the weights cut in halves.
DENSE = ({}, {"cp": 2}, {"tp": 2, "cp": 2})
EXPERTS = ({"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "cp": 2, "ep": 2})
SFT = {
    "llama": DENSE,
    "llama3_rope": ({"cp": 2},),
    "linear_rope": ({"cp": 4},),
    "qwen3": DENSE,
    "tied_qwen3": ({}, {"tp": 2}, {"tp": 2, "cp": 2}),
    "qwen3_moe": (*DENSE, *EXPERTS),
    "qwen3_moe_unscaled": ({},),
}
DPO = {"llama": DENSE, "qwen3_moe": EXPERTS}
TREES = {"llama": DENSE, "qwen3": ({"dp": 2},), "qwen3_moe": ({"cp": 2, "ep": 2},)}
if IS_0_3:  # models that torchtitan 0.2.2 has not, or not under FSDP
    MODELS |= {
        "tied_llama": {"kind": "llama", "tied": True},
        "yarn_llama": {"kind": "llama", "rope": YARN},
        "yarn_qwen3": {"kind": "qwen3", "rope": YARN},
        "linear_qwen3": {"kind": "qwen3", "rope": LINEAR_ROPE},
        "gpt_oss": {"kind": "gpt_oss"},
        "deepseek_v3": {"kind": "deepseek_v3", "layout": "fused"},
        "muse_glimmer": {"kind": "muse_glimmer"},
        "kimi_k2_7": {"kind": "kimi_k25"},
        "qwen3_5": {"kind": "qwen3_5", "rope": LONG_ROPE},
        "tied_qwen3_5": {"kind": "qwen3_5", "tied": True, "rope": YARN},
        "qwen3_5_moe": {"kind": "qwen3_5_moe"},
    }
    TIED = ({"cp": 2}, {"dp": 2}, {"tp": 2, "cp": 2})
    SFT |= {"tied_llama": TIED, "tied_qwen3": ({}, *TIED), "yarn_llama": ({"cp": 2},), "yarn_qwen3": ({}, {"cp": 2})}
    SFT |= {"linear_qwen3": ({"cp": 2},)}
    SFT |= {
        "gpt_oss": ({"cp": 2}, {"tp": 2, "cp": 2}, {"cp": 2, "ep": 2}),
        "deepseek_v3": ({"cp": 2}, {"tp": 2, "ep": 2}),
        "muse_glimmer": ({"cp": 2}, {"dp": 2}, {"tp": 2, "cp": 2}),
        "kimi_k2_7": ({"cp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "ep": 2}),
        "qwen3_5": (*DENSE, {"cp": 4}, {"dp": 2, "cp": 2}),
        "tied_qwen3_5": ({"tp": 2, "cp": 2},),
        "qwen3_5_moe": ({}, {"cp": 2}, {"cp": 2, "ep": 2}, {"tp": 2, "ep": 2}),
    }
    DPO |= {name: ({"cp": 2},) for name in ("gpt_oss", "deepseek_v3", "muse_glimmer", "kimi_k2_7", "qwen3_5_moe")}
    DPO |= {"qwen3_5": DENSE}
    TREES |= {name: ({"cp": 2},) for name in ("gpt_oss", "deepseek_v3", "qwen3_5")}


@functools.cache
def folder_of(name: str) -> Path:
    """The model's folder; its weights are larger than usual, so that attention and the choice of experts matter."""
    folder = make_hf_folder(**MODELS[name], initializer_range=0.1)
    end_with_the_turn(folder)
    return folder


def records_of(dataset: str) -> Path:
    return corpus() / "train.jsonl" if dataset == "sft" else pairs_file()


@functools.cache
def expected(dataset: str, name: str, *how: Any, path: Path | None = None, **options: Any) -> Training:
    """That of transformers or TRL. path: of other records."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_alone: Any = {"sft": train_sft, "dpo": train_dpo}[dataset]
    training = train_alone(folder_of(name), path or records_of(dataset), *how, **options)
    torch.set_num_threads(threads)
    training.model.eval()
    return training


@torch.no_grad()
def difference_of_logits(one: torch.nn.Module, other: torch.nn.Module) -> float:
    tokens = torch.arange(SEQ_LEN)[None]
    return (one(tokens).logits - other(tokens).logits).abs().max().item()


def largest_difference(losses: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(losses, wanted, strict=True))


def assert_trains_as(expected: Training, dataset: str, name: str, degrees: dict[str, int], *options: str) -> None:
    folder = new_folder()
    packs = PACKS // degrees.get("dp", 1)
    arguments = hf_arguments(folder_of(name), MODELS[name]["kind"])
    arguments += ["--training.dataset", dataset, "--training.dataset_path", str(records_of(dataset))]
    arguments += ["--job.dump_folder", folder, "--training.local_batch_size", str(packs), *ARGUMENTS]
    arguments += ["--checkpoint.enable", "--checkpoint.initial_load_in_hf", "--checkpoint.last_save_in_hf"]
    arguments += [*degree_arguments(degrees), *options]
    run = train(num_processes(degrees), arguments, layers=None, entry="torchtitan_magi.train")

    exported_folder = f"{folder}/checkpoint/step-{len(expected.losses)}"
    exported = load_hf(exported_folder)
    automatic = "AutoModelForImageTextToText" if MODELS[name]["kind"] in TEXT_PARTS else "AutoModelForCausalLM"
    assert run.output.splitlines()[-1].endswith(f': {automatic}.from_pretrained("{exported_folder}")')
    if MODELS[name]["kind"] in TEXT_PARTS:
        assert_pictures_are_seen_as_before(exported, load_hf(folder_of(name)))
    assert exported.config.architectures == [type(exported).__name__]
    worst = largest_difference(run.losses, expected.losses)
    difference = difference_of_logits(exported, expected.model)
    print(f"{dataset} {name} {degrees}: losses {worst:.1e}, logits {difference:.1e}")
    assert worst <= LOSS_TOLERANCE, f"{run.losses} instead of {expected.losses}"
    assert difference <= LOGITS_TOLERANCE_OF.get(name, LOGITS_TOLERANCE)
    if dataset == "dpo":
        assert_same_metrics(run.metrics, expected.metrics)


def assert_pictures_are_seen_as_before(exported: torch.nn.Module, source: torch.nn.Module) -> None:
    before = {name: x for name, x in source.named_parameters() if re.search("vis(ion|ual)|mm_projector", name)}
    assert len(before) > 15
    assert all(torch.equal(exported.get_parameter(name), x) for name, x in before.items())


def assert_same_metrics(ours: list[dict[str, float]], trls: list[dict[str, float]]) -> None:
    """TRL takes rewards, of about 0.1, from differences of float32 sums of about 300."""
    for step, (our, trl) in enumerate(zip(ours, trls, strict=True)):
        for key in PREFERENCE_METRICS:
            if step or key != "rewards/accuracies":  # at first all margins are 0 but for rounding
                assert our[key] == pytest.approx(trl[key], rel=1e-5, abs=1e-5), key


def cases(layouts: dict[str, tuple[dict[str, int], ...]], long: tuple[str, ...] = ()) -> list:
    """long: those whose parts others have, too."""
    found = []
    for name, degrees in ((name, degrees) for name, chosen in layouts.items() for degrees in chosen):
        case = "-".join([name, *(f"{axis}{degree}" for axis, degree in degrees.items())])
        found.append(pytest.param(name, degrees, id=case, marks=[pytest.mark.long] if case in long else []))
    return found


LONG = ("qwen3_5-cp2", "qwen3_5-dp2-cp2", "qwen3_5_moe-cp2", "gpt_oss-cp2", "muse_glimmer-cp2", "kimi_k2_7-cp2")
LONG += ("tied_llama-cp2", "tied_llama-dp2", "tied_qwen3-cp2", "tied_qwen3-tp2-cp2", "yarn_qwen3", "linear_qwen3-cp2")
LONG += ("llama-tp2-cp2", "qwen3-cp2", "qwen3_moe-cp2", "qwen3_moe-dp2-ep2", "qwen3_moe-cp2-ep2", "qwen3_5-tp2-cp2")
LONG += ("muse_glimmer-dp2", "kimi_k2_7-tp2-ep2")


@pytest.mark.parametrize(("name", "degrees"), cases(SFT, LONG))
def test_sft_is_that_of_transformers(name, degrees):
    assert_trains_as(expected("sft", name), "sft", name, degrees)


@pytest.mark.parametrize(("name", "degrees"), cases(TREES, ("llama", "llama-cp2")))
def test_sft_on_trees_is_that_of_transformers_on_each_record_by_itself(name, degrees):
    seq_len, per = 1024, "document" if degrees.get("tp") else "token"
    path = trees_file(has_weights=False)
    alone = expected("sft", name, per, seq_len, path=path, share_prefixes=True)
    options = ["--training.seq_len", str(seq_len), "--training.dataset_path", str(path), "--magi.loss_per", per]
    assert_trains_as(alone, "sft", name, degrees, "--magi.share_prefixes", *options)


LONG_DPO = ("llama-cp2", "qwen3_moe-dp2-ep2", "qwen3_moe-cp2-ep2", "qwen3_5", "qwen3_5-cp2")


@pytest.mark.parametrize(("name", "degrees"), cases(DPO, LONG_DPO))
def test_dpo_is_that_of_trl(name, degrees):
    assert_trains_as(expected("dpo", name, "sigmoid", True), "dpo", name, degrees)


STORED = "--magi.dpo.reference file"
ACCUMULATED = "--training.local_batch_size 1"


@pytest.mark.parametrize(
    ("loss", "shared_prompt", "degrees", "options"),
    [
        ("hinge", False, {"dp": 2}, ""),
        ("ipo", True, {"cp": 2}, ACCUMULATED),
        ("ipo", False, {"dp": 2, "cp": 2}, STORED),
        ("smoothed", True, {"cp": 2}, STORED),
    ],
)
def test_every_loss_of_pairs_is_that_of_trl(loss, shared_prompt, degrees, options):
    path = shutil.copy(records_of("dpo"), new_folder())  # a stored reference lies beside its pairs
    arguments = ["--training.dataset_path", path, "--training.seq_len", str(PAIR_SEQ_LEN[shared_prompt])]
    arguments += [f"--magi.dpo.{'' if shared_prompt else 'no-'}shared_prompt", *LOSSES[loss][0].split()]
    trls = expected("dpo", "llama", loss, shared_prompt)
    assert_trains_as(trls, "dpo", "llama", degrees, *arguments, *options.split())


ANSWERS = [("llama", 4, {"cp": 2}, ""), ("llama", 8, {"dp": 2}, STORED), ("llama", 8, {"tp": 2, "cp": 2}, ACCUMULATED)]
ANSWERS += [("qwen3_5", 4, {"cp": 2}, "")] if IS_0_3 else []


@pytest.mark.parametrize(("name", "num_answers", "degrees", "options"), ANSWERS)
def test_dpo_of_several_answers_is_that_of_trl_on_each_pair(name, num_answers, degrees, options):
    trls = expected("dpo", name, "sigmoid", True, path=answers_file(num_answers))
    path = shutil.copy(answers_file(num_answers), new_folder())
    assert_trains_as(trls, "dpo", name, degrees, "--training.dataset_path", path, *options.split())


def test_models_differ_by_more_than_the_tolerances():
    """So the comparison can tell a wrong model, and one that has not been trained."""
    trained, *others = (expected("sft", name) for name in ("llama", "llama3_rope", "linear_rope"))
    for other in others:
        assert largest_difference(other.losses[:1], trained.losses[:1]) > 100 * LOSS_TOLERANCE  # of the same weights
        assert difference_of_logits(other.model, trained.model) > 100 * LOGITS_TOLERANCE
    untrained = AutoModelForCausalLM.from_pretrained(folder_of("llama"))
    assert difference_of_logits(untrained, trained.model) > 100 * LOGITS_TOLERANCE
