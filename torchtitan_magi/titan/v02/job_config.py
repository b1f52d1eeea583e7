"""The ``[magi]`` section in torchtitan's configuration, and the checks of the whole configuration before a run.

torchtitan merges this ``JobConfig`` into its own when ``[job] custom_config_module`` names ``torchtitan_magi.titan``.
It needs real types here, so this file has no ``from __future__ import annotations``.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.model_converter import _registry_model_converter_cls

from torchtitan_magi.titan.v02.checkpoints import check_checkpoints
from torchtitan_magi.training.options import Magi, check_options, check_options_for_pairs
from torchtitan_magi.wording import quoted, quoted_path

HOOK = "torchtitan_magi.titan"
ENTRY = "torchrun -m torchtitan_magi.train"
SFT_DATASET = "sft"
DPO_DATASET = "dpo"
OUR_DATASETS = (SFT_DATASET, DPO_DATASET)


@dataclass
class JobConfig:
    magi: Magi = field(default_factory=Magi)


def without_context_parallel(job_config: Any) -> Any:
    """The same configuration with a context-parallel degree of 1, for torchtitan's guards against varlen with CP."""
    return replace(job_config, parallelism=replace(job_config.parallelism, context_parallel_degree=1))


def check_job_config(job_config: Any, attn_types: dict[str, str], has_objectives: bool) -> None:
    """Checks what a user can get wrong, before anything is built. A collective of all ranks.

    Args:
        attn_types: attention type of each flavor of the model.
        has_objectives: whether our Trainer runs, not torchtitan's own.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    _check_hooks(job_config)
    check_options(job_config.magi)
    _check_model(job_config, attn_types)
    _check_section(job_config, "training")
    if job_config.validation.enable:
        _check_section(job_config, "validation")
        _check_validation(job_config)
    _check_objective(job_config, has_objectives)
    check_checkpoints(job_config)


def _check_hooks(job_config: Any) -> None:
    if not isinstance(getattr(job_config, "magi", None), Magi):
        raise ValueError(
            f'job.custom_config_module is {quoted(job_config.job.custom_config_module)}; set it to "{HOOK}"'
        )
    if job_config.experimental.custom_import != HOOK:
        raise ValueError(
            f'experimental.custom_import is {quoted(job_config.experimental.custom_import)}; set it to "{HOOK}"'
        )


def _check_model(job_config: Any, attn_types: dict[str, str]) -> None:
    pipeline, flavor = job_config.parallelism.pipeline_parallel_degree, job_config.model.flavor
    if pipeline > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {pipeline}; varlen attention works without pipeline parallelism "
            "only: set it to 1 and use context, tensor or data parallelism"
        )
    if attn_types.get(flavor) != "varlen":
        varlen = ", ".join(name for name, attn_type in attn_types.items() if attn_type == "varlen")
        has = f"has {attn_types[flavor]} attention" if flavor in attn_types else "is unknown"
        raise ValueError(f"model.flavor {quoted(flavor)} {has}; use one with varlen attention: {varlen}")
    for name in job_config.model.converters:
        if name not in _registry_model_converter_cls:
            known = ", ".join(map(repr, _registry_model_converter_cls))
            raise ValueError(
                f"model.converters has {quoted(name)}; use some of {known}, or name the module that registers it in "
                "magi.imports"
            )


def _check_section(job_config: Any, name: str) -> None:
    """name: "training" or "validation"."""
    section = getattr(job_config, name)
    parallelism = job_config.parallelism
    divisor = 2 * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    if section.seq_len % divisor:
        raise ValueError(  # torchtitan has the same rule for training, as an assertion without words
            f"{name}.seq_len is {quoted(section.seq_len)}; use a multiple of {divisor}, twice "
            "context_parallel_degree times tensor_parallel_degree"
        )
    if section.dataset not in (*OUR_DATASETS, *DATASETS):
        known = ", ".join(map(repr, (*OUR_DATASETS, *DATASETS)))
        raise ValueError(f"{name}.dataset is {quoted(section.dataset)}; use one of {known}")
    if section.dataset in OUR_DATASETS and not section.dataset_path:
        raise ValueError(
            f"{name}.dataset_path is {quoted_path(section.dataset_path)}; give the JSONL file of dataset "
            f"{quoted(section.dataset)}, or all its sources in one string, separated by commas"
        )
    if job_config.magi.loss_per == "document" and section.dataset != SFT_DATASET:
        raise ValueError(
            f'magi.loss_per is "document" and {name}.dataset {quoted(section.dataset)}; it needs the documents of '
            f'dataset {SFT_DATASET!r}: use that, or "token"'
        )


def _check_validation(job_config: Any) -> None:
    training, validation = job_config.training, job_config.validation
    if (validation.dataset == DPO_DATASET) != (training.dataset == DPO_DATASET):
        raise ValueError(
            f"validation.dataset is {quoted(validation.dataset)} and training.dataset {quoted(training.dataset)}; "
            f"validate on what is trained, preference pairs ({DPO_DATASET!r}) or not"
        )
    if validation.seq_len > training.seq_len:
        raise ValueError(  # torchtitan makes as many rotary positions as training needs
            f"validation.seq_len is {validation.seq_len}; use at most training.seq_len, {training.seq_len}"
        )


def _check_objective(job_config: Any, has_objectives: bool) -> None:
    magi, training = job_config.magi, job_config.training
    if not has_objectives and (magi.loss_per == "document" or training.dataset == DPO_DATASET):
        what = f"training.dataset is {DPO_DATASET!r}" if magi.loss_per == "token" else 'magi.loss_per is "document"'
        raise ValueError(f"{what}, which torchtitan's own entry point does not know; start it with {ENTRY}")
    if training.dataset == DPO_DATASET:
        check_options_for_pairs(magi)
