"""The options of the ``[magi]`` section of a TOML file, and the checks of their values."""

import importlib
import math
import os
from dataclasses import dataclass, field, fields
from datetime import date
from pathlib import Path
from typing import Literal, get_args, get_origin

from torchtitan_magi.planning.cost_model import CostModel
from torchtitan_magi.planning.plan import MAX_STAGES
from torchtitan_magi.wording import quoted, quoted_path

SFT_DATASET = "sft"
DPO_DATASET = "dpo"
OUR_DATASETS = (SFT_DATASET, DPO_DATASET)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (arXiv 2305.18290), for dataset "dpo"."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair's margin: "sigmoid" (DPO), "ipo" (arXiv 2310.12036, by means over tokens) or "hinge" (arXiv
    2305.10425)."""

    beta: float = 0.1
    """How strongly the policy is held to the reference, above 0 (no unit). It is also the scale of the rewards."""

    label_smoothing: float = 0.0
    """Assumed fraction of pairs whose labels are swapped, 0 to 0.5 (exclusive). For loss "sigmoid" only."""

    reference: Literal["model", "file"] = "model"
    """Source of the reference log-probabilities: a frozen copy of the initial weights ("model") or a file ("file").
    "model": sharded by FSDP2 like the policy. "file": computed once before training and kept, so training holds no
    second model in memory; a file of another model or other data is refused."""

    reference_path: str = ""
    """Path of the file for reference "file"; "": ``<file of pairs>.reference.npz`` beside the data. Validation has one
    beside it, with ".validation" in its name. Several models on the same pairs need a path each."""

    shared_prompt: bool = True
    """Compute each prompt once, with chosen and rejected both attending to it. false: two documents, each with the
    prompt."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (arXiv 2106.09685) beside frozen weights, by torchtitan 0.3."""

    rank: int = 0
    """Of the adapters' matrices (a count). 0: none, all weights are trained."""

    alpha: float = 16.0
    """Scale of what adapters add: alpha / rank (no unit)."""

    target_modules: list[str] = field(default_factory=lambda: ["wqkv", "wo", "w1", "w2", "w3"])
    """torchtitan's names of the linear layers that get one: the projection of queries, keys and values, that of
    attention's output, and the three of the feed-forward."""


@dataclass(frozen=True)
class Magi:
    """Varlen context parallelism, packed SFT data and preference training."""

    backend: Literal["auto", "ffa", "flex"] = "auto"
    """Attention kernel: ours for Hopper GPUs ("ffa") or torch's flex_attention ("flex": any machine, slower). "auto":
    ffa on CUDA, flex on CPU; it never falls back from one to the other."""

    overlap_stages: int = -1
    """Number of stages in which remote K/V arrive while attention runs, 0 to 16; -1: chosen. 0: one attention call
    over all K/V; inside a node our kernel starts before they have arrived. -1: the cost model
    chooses for each microbatch, for the forward and for the backward: inside a node 0, and more where one document is
    so long that its rows and their sums would take more than 16 GiB."""

    cost_model: str = ""
    """File from ``torchrun ... -m torchtitan_magi.calibrate``, by which stages are chosen. "": measured on H200 GPUs;
    between nodes an estimate for 400 Gb/s per GPU."""

    deterministic: bool = False
    """Repeat forward and backward bit for bit on a fixed layout; slower. debug.deterministic asks for it as well."""

    fp32_reduce: bool = False
    """Send dK and dV between ranks in float32 instead of the training dtype. They are summed in float32 either way."""

    positions: Literal["auto", "document", "pack"] = "auto"
    """Rotary positions restart at 0 in every document ("document") or run over the whole pack ("pack"). "auto":
    document for datasets "sft" and "dpo", pack for torchtitan's own."""

    long_documents: Literal["truncate", "split"] = "truncate"
    """Cut documents longer than training.seq_len tokens at the end, or split them into several. For dataset "sft"."""

    epochs: int = -1
    """Number of passes over the data, which sets training.steps and the schedule of the learning rate; -1: no end.
    Lower training.steps end both earlier; left at 10,000 they count as not given. For datasets "sft" and "dpo"."""

    shuffle: bool = True
    """A new seeded order in every epoch. false: the order of the files, as far as packing allows. For datasets "sft"
    and "dpo"."""

    bad_records: Literal["error", "skip"] = "error"
    """Malformed records stop the run ("error") or are left out, counted and named ("skip"). "error" stops it before the
    first step where that can be told. "skip" logs the first of them with file and line. For datasets "sft" and
    "dpo"."""

    findings: Literal["error", "warn"] = "error"
    """What surely goes wrong in the chat template, or in each of the few records that are looked at before the first
    step, stops the run ("error") or is logged ("warn"): BOS or EOS twice, no end of turn that is learned, nothing or
    everything learned, a template of another model. What may be meant is logged. For datasets "sft" and "dpo"."""

    template_date: str = ""
    """Date that the chat template prints if it prints one, such as "2024-07-26". "": that of the run's first start,
    which is kept in job.dump_folder."""

    token_cache: str = ""
    """Folder of the tokens, which are made once for all ranks and later runs. "": ``tokens/`` in
    $TORCHTITAN_MAGI_CACHE, else ~/.cache/torchtitan_magi/tokens. Machines may share it."""

    loss_per: Literal["token", "document"] = "token"
    """The loss is a mean over the labels of a step ("token") or over its documents ("document"). Each document counts
    by the mean over its labels, so that short answers weigh as much as long ones. For dataset "sft"."""

    verify_checkpoint: bool = True
    """Compare every byte of a checkpoint with its digests before it is loaded. The ranks together read each file once.
    false: only the sizes of its files are checked."""

    random_weights: bool = False
    """Train random weights although model.hf_assets_path holds a model's, which otherwise ends the run unless
    [checkpoint] loads them."""

    imports: list[str] = field(default_factory=list)
    """Modules of your own that add flavors, converters or datasets; imported before these are looked up."""

    dpo: DPO = field(default_factory=DPO)
    lora: LoRA = field(default_factory=LoRA)


def check_options(magi: Magi) -> None:
    """Checks each option by itself.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    for options, prefix in ((magi, "magi"), (magi.dpo, "magi.dpo"), (magi.lora, "magi.lora")):
        for option in fields(options):
            choices = get_args(option.type) if get_origin(option.type) is Literal else ()
            value = getattr(options, option.name)
            if choices and value not in choices:
                raise ValueError(
                    f"{prefix}.{option.name} is {quoted(value)}; use one of {', '.join(map(repr, choices))}"
                )
            if option.type is bool and type(value) is not bool:
                raise ValueError(f"{prefix}.{option.name} is {quoted(value)}; use true or false")
            if option.type is float and type(value) not in (int, float):
                raise ValueError(f"{prefix}.{option.name} is {quoted(value)}; use a number")
            if option.type is str and type(value) is not str:
                raise ValueError(f"{prefix}.{option.name} is {quoted(value)}; use text in quotes")
    if type(magi.overlap_stages) is not int or not -1 <= magi.overlap_stages <= MAX_STAGES:
        raise ValueError(
            f"magi.overlap_stages is {quoted(magi.overlap_stages)}; use 0 for no overlap, the number of stages (at "
            f"most {MAX_STAGES}), or -1 to have it chosen"
        )
    if type(magi.epochs) is not int or (magi.epochs < 1 and magi.epochs != -1):
        raise ValueError(
            f"magi.epochs is {quoted(magi.epochs)}; use a number of passes over the data, or -1 for no end"
        )
    if type(magi.lora.rank) is not int or magi.lora.rank < 0:
        raise ValueError(f"magi.lora.rank is {quoted(magi.lora.rank)}; use a rank such as 16, or 0 for no adapters")
    _check_date(magi.template_date)
    if magi.cost_model:
        CostModel.load(magi.cost_model)


def _check_date(day: str) -> None:
    try:
        if day != "":
            date.fromisoformat(day)
    except (TypeError, ValueError):
        raise ValueError(f'magi.template_date is {quoted(day)}; use a date such as "2024-07-26"') from None


def check_options_for_pairs(magi: Magi) -> None:
    """Checks what training on preference pairs asks of the options. Raises ValueError as ``check_options``."""
    dpo = magi.dpo
    if not 0 < dpo.beta < math.inf:
        raise ValueError(f"magi.dpo.beta is {quoted(dpo.beta)}; use a positive number, such as 0.1")
    if not 0 <= dpo.label_smoothing < 0.5:
        raise ValueError(f"magi.dpo.label_smoothing is {dpo.label_smoothing}; use 0 or more and less than 0.5")
    if dpo.label_smoothing and dpo.loss != "sigmoid":
        raise ValueError(
            f"magi.dpo.label_smoothing is {dpo.label_smoothing} with magi.dpo.loss {quoted(dpo.loss)}; "
            'use it with loss "sigmoid", or set it to 0'
        )
    if dpo.reference_path and dpo.reference != "file":
        raise ValueError(
            f"magi.dpo.reference_path is {quoted_path(dpo.reference_path)} with magi.dpo.reference "
            f"{quoted(dpo.reference)}; "
            'use it with reference "file", or leave it out'
        )
    if dpo.reference_path and not Path(dpo.reference_path).name:
        raise ValueError(
            f"magi.dpo.reference_path is {quoted_path(dpo.reference_path)}, a folder; add the name of a file"
        )
    if magi.long_documents != "truncate":
        raise ValueError(
            f"magi.long_documents is {quoted(magi.long_documents)}, but a preference pair cannot be split; "
            'use "truncate" with dataset "dpo"'
        )
    if magi.positions == "pack":
        raise ValueError(
            'magi.positions is "pack", but both answers of a pair continue the positions of its prompt; '
            'use "auto" with dataset "dpo"'
        )


def import_modules(names: list[str]) -> None:
    """Imports the modules of ``magi.imports``, in their order. What a module raises passes through.

    Raises:
        ValueError: one line that names the value and the remedy: it is no list of module names, or a module is missing.
    """
    if type(names) is not list or not all(type(name) is str and _is_module_name(name) for name in names):
        raise ValueError(
            f'magi.imports is {quoted(names)}; use a list of module names, such as ["my_package.my_module"]'
        )
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that this one imports
            raise ValueError(
                f"magi.imports has {quoted(name)}, but there is no module {quoted(error.name)} in the folder where "
                f"the run starts, {os.getcwd()}, in PYTHONPATH, {quoted_path(os.environ.get('PYTHONPATH', ''))}, or "
                "among the installed packages; install it, or add the folder that holds it to PYTHONPATH"
            ) from None


def _is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
