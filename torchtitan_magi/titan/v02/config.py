"""The ``[magi]`` section in torchtitan's configuration, and the checks of the whole configuration before a run.

torchtitan merges this ``JobConfig`` into its own when ``[job] custom_config_module`` names ``torchtitan_magi.titan``.
It needs real types here, so this file has no ``from __future__ import annotations``.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.model_converter import _registry_model_converter_cls

from torchtitan_magi.models.model_config import Experts
from torchtitan_magi.training.process.all_ranks import rank_and_size
from torchtitan_magi.training.process.launcher import NO_FILE
from torchtitan_magi.training.settings import degrees
from torchtitan_magi.training.settings.checks import check_settings
from torchtitan_magi.training.settings.options import Magi
from torchtitan_magi.wording import quoted

HOOK = "torchtitan_magi.titan"
# torchtitan's converters, and the sections that they read
QUANTIZERS = tuple(f"quantize.{what}.{how}" for what in ("linear", "grouped_mm") for how in ("float8", "mx"))


@dataclass
class ActivationCheckpoint:
    """What is merged into torchtitan's [activation_checkpoint]."""

    mode: Literal["auto", "selective", "full", "memory_budget", "none"] = "selective"
    """Type of activation checkpointing; "auto": what each layer keeps is decided before the first step, by magi.keep"""


@dataclass
class JobConfig:
    """What is merged into torchtitan's JobConfig."""

    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    magi: Magi = field(default_factory=Magi)


def without_context_parallel(job_config: Any) -> Any:
    """The same configuration with a context-parallel degree of 1, for torchtitan's guards against varlen with CP."""
    return replace(job_config, parallelism=replace(job_config.parallelism, context_parallel_degree=1))


def check_job_config(job_config: Any, attn_types: dict[str, str], has_objectives: bool) -> None:
    """Checks all settings, see ``check_settings``. attn_types: attention type of each flavor of the model."""
    _check_hooks(job_config)
    _check_is_heard(job_config)
    check_settings(job_config, DATASETS, has_objectives, partial(_check_model, attn_types))


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


def _check_is_heard(job_config: Any) -> None:
    """Raises ValueError for options of other programs than torchtitan's Trainer, of converters that do not run, and one
    that its clipping undoes."""
    for section, option, why in (
        ("fault_tolerance", "enable", "this Trainer does without torchft; leave it out"),
        ("memory_estimation", "enable", "this command trains; leave it out, and ask torchtitan-magi size"),
        ("optimizer", "early_step_in_backward", "weights would change before gradients are clipped; leave it out"),
    ):
        if getattr(getattr(job_config, section), option):
            raise ValueError(f"{section}.{option} is true, but {why}")
    _check_quantizers(job_config)


def _check_quantizers(job_config: Any) -> None:
    """Raises ValueError for options of converters that do not run, and for one without modules to convert."""
    converters = job_config.model.converters
    are_known = set(converters) <= set(QUANTIZERS)  # others may read what they like
    for name in QUANTIZERS:
        section = attrgetter(name)(job_config)
        if name in converters and not getattr(section, "fqns", True):
            raise ValueError(
                f"{name}.fqns is [], so that this converter quantizes nothing; name modules, such as "
                '"experts", or take it out of model.converters'
            )
        if name not in converters and are_known and section != type(section)():
            raise ValueError(
                f'[{name}] is set, but nothing is quantized: model.converters is {converters}; add "{name}", or leave '
                "the section out"
            )


def _check_model(attn_types: dict[str, str], job_config: Any) -> None:
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


def check_expert_tensor_degree(dims: Any) -> None:
    """Raises ValueError for an expert_tensor_parallel_degree that torchtitan asserts not to have."""
    if dims.etp not in (1, dims.tp):
        raise ValueError(
            f"parallelism.expert_tensor_parallel_degree is {dims.etp}; use 1 or tensor_parallel_degree, which is "
            f"{dims.tp}"
        )


def check_expert_degrees(dims: Any) -> None:
    """Checks the degrees of torchtitan's ``ParallelDims`` before meshes are built of them.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    ep, etp = dims.ep, dims.etp
    if ep == 1 < etp:
        raise ValueError(
            f"parallelism.expert_tensor_parallel_degree is {etp}, which has no effect while expert_parallel_degree is "
            "1; set it to 1: tensor parallelism shards the experts as well"
        )
    ranks = dims.dp_shard * dims.cp * dims.tp // etp
    lenders = "data_parallel_shard_degree, context_parallel_degree" + " and tensor_parallel_degree" * (etp == 1)
    degrees.check_expert_ranks(ep, ranks, lenders)
    copies = ranks // ep * dims.dp_replicate
    if ep > 1 and copies > 1 and not dims.fsdp_enabled:  # nothing would add up the gradients of the copies
        raise ValueError(
            f"parallelism.expert_parallel_degree is {ep} and each expert on {copies} ranks, but FSDP is off; use "
            f"data_parallel_shard_degree or context_parallel_degree, or an expert_parallel_degree of {ep * copies}"
        )


def check_copies(dims: Any) -> None:
    """Raises ValueError for copies that tensor parallelism shards, without FSDP: DDP gives them no gradients."""
    if dims.dp_replicate > 1 < dims.tp and not dims.fsdp_enabled:
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree is {dims.dp_replicate} and tensor_parallel_degree {dims.tp}, "
            "which DDP does not go with; use data_parallel_shard_degree or context_parallel_degree"
        )


def check_experts(job_config: Any, experts: Experts | None) -> None:
    """Checks whether the model's experts can be spread as the configuration says.

    Args:
        experts: None for a dense model.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    backend = job_config.parallelism.expert_parallel_comm_backend
    if backend != "standard":
        raise ValueError(
            f"parallelism.expert_parallel_comm_backend is {quoted(backend)}, which torchtitan 0.2.2 does not have "
            'for these models; set it to "standard"'
        )
    parallelism = job_config.parallelism
    degree = parallelism.expert_parallel_degree
    not_sharding = parallelism.expert_tensor_parallel_degree if degree > 1 else parallelism.tensor_parallel_degree
    world = rank_and_size()[1]
    ranks = world // (parallelism.data_parallel_replicate_degree * not_sharding)
    is_shared = experts is not None and (degree == 1 or ranks <= experts.num_experts)
    degrees.check_experts(job_config, experts, ranks if is_shared else None)
