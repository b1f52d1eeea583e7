"""Checks of the section [magi]: each option by itself, and what preference pairs ask of them."""

import importlib
import math
import os
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Literal, get_origin

from torchtitan_magi.planning.cost_model import CostModel
from torchtitan_magi.planning.plan import MAX_STAGES
from torchtitan_magi.training.settings.options import DPO_DATASET, EXPERTS, OUR_DATASETS, ROLLOUTS_DATASET, LoRA, Magi
from torchtitan_magi.training.settings.values import is_of, words_for
from torchtitan_magi.wording import quoted, quoted_path

OF_OUR_DATASETS = ("long_documents", "shuffle", "bad_records", "findings", "template_date", "token_cache")


def check_options(magi: Magi) -> None:
    """Checks each option by itself.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    for options, prefix in (
        (magi, "magi"),
        (magi.dpo, "magi.dpo"),
        (magi.rollouts, "magi.rollouts"),
        (magi.lora, "magi.lora"),
    ):
        for option in fields(options):
            value, kind = getattr(options, option.name), option.type
            if (get_origin(kind) is Literal or kind in (bool, float, str)) and not is_of(value, kind):
                words = "text in quotes" if kind is str else words_for(kind)
                raise ValueError(f"{prefix}.{option.name} is {quoted(value)}; use {words}")
    if type(magi.overlap_stages) is not int or not -1 <= magi.overlap_stages <= MAX_STAGES:
        raise ValueError(
            f"magi.overlap_stages is {quoted(magi.overlap_stages)}; use 0 for no overlap, the number of stages (at "
            f"most {MAX_STAGES}), or -1 to have it chosen"
        )
    if type(magi.epochs) is not int or (magi.epochs < 1 and magi.epochs != -1):
        raise ValueError(
            f"magi.epochs is {quoted(magi.epochs)}; use a number of passes over the data, or -1 for no end"
        )
    if magi.share_prefixes and magi.positions == "pack":
        raise ValueError(
            'magi.share_prefixes is true and magi.positions "pack", but records that share their beginning share its '
            'positions, too; use "auto"'
        )
    check_rank(magi.lora)
    _check_date(magi.template_date)
    if magi.cost_model:
        CostModel.load(magi.cost_model)


def _check_date(day: str) -> None:
    try:
        if day != "":
            date.fromisoformat(day)
    except (TypeError, ValueError):
        raise ValueError(f'magi.template_date is {quoted(day)}; use a date such as "2024-07-26"') from None


def check_options_are_used(magi: Magi, dataset: str, other_dataset: str) -> None:
    """Checks that no option asks in vain for something that this run does not do. Raises ValueError as
    ``check_options``.

    Args:
        dataset: of [training].
        other_dataset: of [validation], or the same.
    """
    for name in OF_OUR_DATASETS if not {dataset, other_dataset} & set(OUR_DATASETS) else ():
        if (value := getattr(magi, name)) != getattr(Magi(), name):
            raise ValueError(
                f"magi.{name} is {quoted(value)}, but training.dataset is {quoted(dataset)}, which torchtitan reads; "
                f"leave it out, or use one of {', '.join(map(quoted, OUR_DATASETS))}"
            )
    other = f"training.dataset is {quoted(dataset)}"
    for name, is_used, why, remedy in (
        ("dpo", dataset == DPO_DATASET, other, f"set that to {quoted(DPO_DATASET)}"),
        ("rollouts", dataset == ROLLOUTS_DATASET, other, f"set that to {quoted(ROLLOUTS_DATASET)}"),
        ("lora", bool(magi.lora.rank), "magi.lora.rank is 0", "give a rank such as 16"),
    ):
        options = getattr(magi, name)
        for option in fields(options):
            value = getattr(options, option.name)
            if not is_used and value != getattr(type(options)(), option.name):
                raise ValueError(f"magi.{name}.{option.name} is {quoted(value)}, but {why}; {remedy}, or leave it out")


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
    _check_options_for_answers(magi, "dpo")


def check_options_for_rollouts(magi: Magi) -> None:
    """Checks what training on rollouts asks of the options. Raises ValueError as ``check_options``."""
    rollouts = magi.rollouts
    for name, most in (("clip_low", 1.0), ("clip_high", math.inf)):
        if not 0 < (value := getattr(rollouts, name)) < most:
            raise ValueError(f"magi.rollouts.{name} is {quoted(value)}; use a number above 0, such as 0.2")
    if not 0 <= rollouts.beta < math.inf:
        raise ValueError(f"magi.rollouts.beta is {quoted(rollouts.beta)}; use a number of at least 0, such as 0.04")
    if type(rollouts.max_length) is not int or rollouts.max_length < 0:
        raise ValueError(f"magi.rollouts.max_length is {quoted(rollouts.max_length)}; use a number of tokens")
    if (rollouts.normalization == "dr_grpo") != (rollouts.max_length > 0):
        raise ValueError(
            f"magi.rollouts.max_length is {rollouts.max_length} with normalization {quoted(rollouts.normalization)}; "
            'give the tokens that an answer could have with "dr_grpo", and 0 with the others'
        )
    _check_options_for_answers(magi, "rollouts")


def _check_options_for_answers(magi: Magi, dataset: str) -> None:
    if magi.long_documents != "truncate":
        raise ValueError(
            f"magi.long_documents is {quoted(magi.long_documents)}, but answers cannot be split; "
            f'use "truncate" with dataset "{dataset}"'
        )
    if magi.positions == "pack":
        raise ValueError(
            f'magi.positions is "pack", but the answers to a prompt continue its positions; use "auto" with dataset '
            f'"{dataset}"'
        )


def import_modules(names: list[str]) -> None:
    """Imports the modules of ``magi.imports``, in their order. What a module raises passes through.

    Raises:
        ValueError: one line that names the value and the remedy: it is no list of module names, or a module is missing.
    """
    is_list = type(names) is list and all(type(name) is str for name in names)
    if not is_list or not all(part.isidentifier() for name in names for part in name.split(".")):
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


def check_rank(lora: LoRA) -> None:
    """Raises ValueError, one line, for what is no rank of adapters."""
    if type(lora.rank) is not int or lora.rank < 0:
        raise ValueError(f"magi.lora.rank is {quoted(lora.rank)}; use a rank such as 16, or 0 for no adapters")


def check_width(lora: LoRA, width: int) -> None:
    """Raises ValueError, one line, for adapters that are larger than the weights beside them. width: of the model."""
    if lora.rank > width:
        raise ValueError(f"magi.lora.rank is {lora.rank}; use at most {width}, the model's width, such as 16")


def check_targets(lora: LoRA) -> None:
    """Raises ValueError, one line, for layers that get no adapters here."""
    known = [*LoRA().target_modules, EXPERTS]
    if not lora.target_modules or not set(lora.target_modules) <= set(known):
        raise ValueError(f"magi.lora.target_modules is {quoted(lora.target_modules)}; use some of {', '.join(known)}")
