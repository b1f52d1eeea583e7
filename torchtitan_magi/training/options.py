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

SFT_DATASET = "sft"
DPO_DATASET = "dpo"
OUR_DATASETS = (SFT_DATASET, DPO_DATASET)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (arXiv 2305.18290), for dataset "dpo"."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair's margin. "ipo" (arXiv 2310.12036, by means over tokens) and "hinge" (arXiv 2305.10425) instead of
    DPO's own."""

    beta: float = 0.1
    """How strongly the policy is held to the reference; the scale of the rewards (no unit)."""

    label_smoothing: float = 0.0
    """Probability that a pair's preference is the wrong way round, 0 to 0.5 (exclusive), for loss "sigmoid"."""

    reference: Literal["model", "file"] = "model"
    """Source of the reference log-probabilities. "model": a frozen copy of the initial model, sharded like the policy.
    "file": computed once before training and kept in a file, which needs no second model in memory."""

    reference_path: str = ""
    """File of reference "file"; validation has one beside it, with ".validation" in its name. "": beside the data, as
    <file of pairs>.reference.npz. Give each model one of its own to train several on the same pairs."""

    shared_prompt: bool = True
    """Compute a pair's prompt once, chosen and rejected both attending to it. False: two separate documents."""


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
    """Attention kernel. "ffa": ours, for Hopper GPUs. "flex": torch's flex_attention, for any machine, slower. "auto":
    ffa on CUDA, flex on CPU; it never falls back from one to the other."""

    overlap_stages: int = -1
    """Into how many stages the K/V of other ranks is cut, to travel while attention runs (a count). 0: no overlap. -1:
    chosen for each microbatch, for the forward and for the backward, by what a cost model predicts."""

    cost_model: str = ""
    """Path of the cost model for that choice, from ``torchrun -m torchtitan_magi.calibrate`` on this kind of machine.
    "": what was measured on H200 GPUs, and between nodes an estimate for 400 Gb/s per GPU."""

    deterministic: bool = False
    """Repeat bit for bit, forward and backward, on a fixed layout. Slower."""

    fp32_reduce: bool = False
    """Send the gradients of K and V between ranks in float32 instead of the training dtype. Sums are always float32."""

    positions: Literal["auto", "document", "pack"] = "auto"
    """Rotary positions. "document": restart at 0 in every document. "pack": run over the whole pack. "auto": document
    for datasets "sft" and "dpo", pack for torchtitan's own."""

    long_documents: Literal["truncate", "split"] = "truncate"
    """What becomes of documents longer than training.seq_len tokens, for dataset "sft"."""

    epochs: int = -1
    """How many times training passes over the data before it ends (a count), at training.steps at the latest. -1: no
    end. For datasets "sft" and "dpo", as the next two."""

    shuffle: bool = True
    """A new seeded order in every epoch. False: the order of the files, as far as packing allows."""

    bad_records: Literal["error", "skip"] = "error"
    """What becomes of malformed records. "error": the run stops, before the first step where that can be told. "skip":
    they are left out, counted, and the first of them logged with file and line."""

    template_date: str = ""
    """Date that the chat template prints if it prints one, such as "2024-07-26". "": that of the run's first start,
    which is kept in job.dump_folder."""

    token_cache: str = ""
    """Folder that keeps the tokens of your data, made once by all cores of the machine: all ranks and later runs read
    them there. Machines may share it. "": tokens/ in $TORCHTITAN_MAGI_CACHE, else ~/.cache/torchtitan_magi/tokens."""

    loss_per: Literal["token", "document"] = "token"
    """What the loss of dataset "sft" is a mean over. "token": all labels of a step. "document": its documents, each by
    the mean over its labels, so that short answers weigh as much as long ones."""

    verify_checkpoint: bool = True
    """Compare a checkpoint with the digests that were written beside it before it is loaded; the ranks together read
    each of its files once. False: only the sizes of its files are checked."""

    imports: list[str] = field(default_factory=list)
    """Modules of your own, imported before flavors, converters and datasets are looked up: they can add some."""

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
                raise ValueError(f"{prefix}.{option.name} is {value!r}; use one of {', '.join(map(repr, choices))}")
            if option.type is bool and type(value) is not bool:
                raise ValueError(f"{prefix}.{option.name} is {value!r}; use true or false")
            if option.type is float and type(value) not in (int, float):
                raise ValueError(f"{prefix}.{option.name} is {value!r}; use a number")
            if option.type is str and type(value) is not str:
                raise ValueError(f"{prefix}.{option.name} is {value!r}; use text in quotes")
    if type(magi.overlap_stages) is not int or not -1 <= magi.overlap_stages <= MAX_STAGES:
        raise ValueError(
            f"magi.overlap_stages is {magi.overlap_stages!r}; use 0 for no overlap, the number of stages (at most "
            f"{MAX_STAGES}), or -1 to have it chosen"
        )
    if type(magi.epochs) is not int or (magi.epochs < 1 and magi.epochs != -1):
        raise ValueError(f"magi.epochs is {magi.epochs!r}; use a number of passes over the data, or -1 for no end")
    if type(magi.lora.rank) is not int or magi.lora.rank < 0:
        raise ValueError(f"magi.lora.rank is {magi.lora.rank!r}; use a rank such as 16, or 0 for no adapters")
    _check_date(magi.template_date)
    if magi.cost_model:
        CostModel.load(magi.cost_model)


def _check_date(day: str) -> None:
    try:
        if day != "":
            date.fromisoformat(day)
    except (TypeError, ValueError):
        raise ValueError(f'magi.template_date is {day!r}; use a date such as "2024-07-26"') from None


def check_options_for_pairs(magi: Magi) -> None:
    """Checks what training on preference pairs asks of the options. Raises ValueError as ``check_options``."""
    dpo = magi.dpo
    if not 0 < dpo.beta < math.inf:
        raise ValueError(f"magi.dpo.beta is {dpo.beta}; use a positive number, such as 0.1")
    if not 0 <= dpo.label_smoothing < 0.5:
        raise ValueError(f"magi.dpo.label_smoothing is {dpo.label_smoothing}; use 0 or more and less than 0.5")
    if dpo.label_smoothing and dpo.loss != "sigmoid":
        raise ValueError(
            f"magi.dpo.label_smoothing is {dpo.label_smoothing} with magi.dpo.loss {dpo.loss!r}; "
            'use it with loss "sigmoid", or set it to 0'
        )
    if dpo.reference_path and dpo.reference != "file":
        raise ValueError(
            f"magi.dpo.reference_path is {dpo.reference_path!r} with magi.dpo.reference {dpo.reference!r}; "
            'use it with reference "file", or leave it out'
        )
    if dpo.reference_path and not Path(dpo.reference_path).name:
        raise ValueError(f"magi.dpo.reference_path is {dpo.reference_path!r}, a folder; add the name of a file")
    if magi.long_documents != "truncate":
        raise ValueError(
            f"magi.long_documents is {magi.long_documents!r}, but a preference pair cannot be split; "
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
        raise ValueError(f'magi.imports is {names!r}; use a list of module names, such as ["my_package.my_module"]')
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # a module that this one imports
            raise ValueError(
                f"magi.imports has {name!r}, but there is no module {error.name!r} in the folder where the run starts, "
                f"{os.getcwd()}, in PYTHONPATH, {os.environ.get('PYTHONPATH', '')!r}, or among the installed packages; "
                "install it, or add the folder that holds it to PYTHONPATH"
            ) from None


def _is_module_name(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))
