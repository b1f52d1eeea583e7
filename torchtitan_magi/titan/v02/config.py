"""The ``[magi]`` section in torchtitan's configuration, and the checks of the whole configuration before a run.

torchtitan merges this ``JobConfig`` into its own when ``[job] custom_config_module`` names ``torchtitan_magi.titan``.
It needs real types here, so this file has no ``from __future__ import annotations``.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.model_converter import _registry_model_converter_cls

from torchtitan_magi.training.process.launcher import NO_FILE
from torchtitan_magi.training.settings.first_weights import check_first_weights
from torchtitan_magi.training.settings.options import Magi, check_options
from torchtitan_magi.training.settings.resume import check_checkpoints
from torchtitan_magi.training.settings.sections import check_sections
from torchtitan_magi.wording import quoted

HOOK = "torchtitan_magi.titan"


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
    check_sections(job_config, DATASETS, has_objectives)
    check_checkpoints(job_config)
    check_first_weights(job_config)


def _check_hooks(job_config: Any) -> None:
    if not isinstance(getattr(job_config, "magi", None), Magi):
        if job_config.job.config_file is None:
            raise ValueError(NO_FILE)
        raise ValueError(
            f'job.custom_config_module is {quoted(job_config.job.custom_config_module)}; set it to "{HOOK}"'
        )
    if job_config.experimental.custom_import != HOOK:
        raise ValueError(
            f'experimental.custom_import is {quoted(job_config.experimental.custom_import)}; set it to "{HOOK}"'
        )


def _check_model(job_config: Any, attn_types: dict[str, str]) -> None:
    if job_config.magi.lora.rank:
        raise ValueError(
            f"magi.lora.rank is {job_config.magi.lora.rank}, but torchtitan 0.2.2 has no adapters; set it to 0, or "
            "install torchtitan 0.3"
        )
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
