"""Checks of parallel degrees: the section [parallelism], and whether a model can be spread by it."""

import inspect
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

from torchtitan_magi.models.model_config import Experts, ModelConfig
from torchtitan_magi.models.pipeline_stages import check_adapters, check_microbatches, layers_of_parts, layers_of_stages
from torchtitan_magi.training.settings.options import DPO_DATASET, EXPERTS, LoRA
from torchtitan_magi.wording import quoted

SPMD_BACKEND = "partial_dtensor"  # of torchtitan 0.3; spmd_types needs a torch newer than those of this package
SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe")


def check_degrees(dims: Any) -> None:
    """Checks that the degrees of torchtitan's ``ParallelDims`` multiply to its ``world_size``.

    Raises:
        ValueError: one line that names them and the remedy.
    """
    others = dims.dp_replicate * dims.cp * dims.tp * dims.pp
    if dims.world_size % others or dims.dp_shard not in (-1, dims.world_size // others):
        raise ValueError(
            f"the parallel degrees are data_parallel_replicate {dims.dp_replicate}, data_parallel_shard "
            f"{dims.dp_shard}, context {dims.cp}, tensor {dims.tp}, pipeline {dims.pp}, but torchrun started "
            f"{dims.world_size} processes; start as many as they multiply to, or change them: "
            "data_parallel_shard_degree = -1 takes the processes that are left"
        )


def check_parallelism(parallelism: Any, world_size: int) -> None:
    """Checks the section [parallelism] of torchtitan 0.3 before meshes are built of it.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    if parallelism.spmd_backend != SPMD_BACKEND:
        raise ValueError(
            f"parallelism.spmd_backend is {quoted(parallelism.spmd_backend)}, which is not for the torch and the "
            f"layers of this package; use {quoted(SPMD_BACKEND)}"
        )
    names = {"dp_replicate": "data_parallel_replicate", "dp_shard": "data_parallel_shard", "cp": "context_parallel"}
    names |= {"tp": "tensor_parallel", "pp": "pipeline_parallel"}
    degrees = {axis: getattr(parallelism, f"{name}_degree") for axis, name in names.items()}
    check_degrees(SimpleNamespace(world_size=world_size, **degrees))
    ranks = world_size // (parallelism.data_parallel_replicate_degree * parallelism.pipeline_parallel_degree)
    lenders = "data_parallel_shard_degree, context_parallel_degree and tensor_parallel_degree"
    check_expert_ranks(parallelism.expert_parallel_degree, ranks, lenders)


def check_experts(job_config: Any, experts: Experts | None, ranks: int | None) -> None:
    """Checks whether the model's experts can be spread as the configuration says.

    Args:
        experts: None for a dense model.
        ranks: how many share the experts of a layer, each some of them; None: FSDP shards each expert's rows.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    parallelism, flavor = job_config.parallelism, job_config.model.flavor
    degree, tp = parallelism.expert_parallel_degree, parallelism.tensor_parallel_degree
    if degree > 1 and experts is None:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {degree}, but model.flavor {quoted(flavor)} has no experts; set "
            "it to 1, or use a mixture of experts"
        )
    if experts is None and job_config.debug.moe_force_load_balance:
        raise ValueError(
            f"debug.moe_force_load_balance is true, but model.flavor {quoted(flavor)} has no experts; set it to false"
        )
    if experts is not None and experts.num_experts % degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {degree}, which does not divide the {experts.num_experts} experts "
            f"of model.flavor {quoted(flavor)}; use a degree that does"
        )
    are_split = degree == 1 or getattr(parallelism, "expert_tensor_parallel_degree", 1) > 1
    if experts is not None and are_split and experts.hidden_dim % tp:
        raise ValueError(
            f"parallelism.tensor_parallel_degree is {tp}, which does not divide the width of the experts, "
            f"{experts.hidden_dim}; use a degree that does, or an expert_parallel_degree above 1"
        )
    if experts is not None and ranks is not None:
        _check_files_of_experts(job_config.checkpoint, experts.num_experts, ranks)


def check_adapters_of_experts(lora: LoRA, experts: Experts | None, ranks: int) -> None:
    """Raises ValueError, one line, where FSDP has more ranks than experts, and would cut the adapters' own ranks.

    Args:
        ranks: how many share the experts of a layer.
    """
    if lora.rank and EXPERTS in lora.target_modules and experts is not None and ranks > experts.num_experts:
        raise ValueError(
            f"magi.lora.target_modules has {EXPERTS}, but {ranks} ranks share {experts.num_experts} experts; leave it "
            "out, or use a data_parallel_replicate_degree, so that fewer ranks share them"
        )


def check_expert_ranks(degree: int, ranks: int, lenders: str) -> None:
    """Checks whether experts can be spread over `degree` of the ranks that lend themselves to them.

    Args:
        ranks: the product of the degrees that `lenders` names.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    if ranks % degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {degree}, which does not divide the product of {lenders}, {ranks}; "
            "use a degree that does"
        )


def _check_files_of_experts(checkpoint: Any, num_experts: int, ranks: int) -> None:
    """Raises ValueError for ranks that do not have as many experts each: torchtitan reads and writes whole experts."""
    for option in ("initial_load_in_hf", "last_save_in_hf"):
        if checkpoint.enable and getattr(checkpoint, option) and num_experts % ranks:
            remedy = "an expert_parallel_degree above 1" if ranks > num_experts else "a number of ranks that divides it"
            raise ValueError(
                f"checkpoint.{option} is true, but {ranks} ranks share {num_experts} experts, not as many each; use "
                f"{remedy}"
            )


def check_pipeline(job: Any, model: ModelConfig) -> None:
    """Raises ValueError, one line that names the value and the remedy, for what the pipeline does not go with."""
    parallelism = job.parallelism
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if degree == 1:
        return
    if "get_mesh" not in inspect.signature(PipelineStage).parameters:  # which torchtitan gives it
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {degree}, but torch {torch.__version__} is too old for "
            "torchtitan's pipelines; install torch 2.13, or set it to 1"
        )
    if schedule not in SCHEDULES or parallelism.pipeline_parallel_schedule_csv:
        given = quoted(parallelism.pipeline_parallel_schedule_csv or schedule)
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule is {given}; "
            f"use one of {', '.join(SCHEDULES)}: others split the backward, which this attention does not"
        )
    if parts := parallelism.module_fqns_per_model_part:
        stages = layers_of_parts(parts, model.num_layers, degree, schedule)
    else:
        stages = layers_of_stages(
            model.num_layers,
            degree,
            schedule,
            parallelism.pipeline_parallel_first_stage_less_layers,
            parallelism.pipeline_parallel_last_stage_less_layers,
            parallelism.pipeline_parallel_layers_per_stage,
        )
    if (lora := job.magi.lora).rank:
        check_adapters(model, stages, lora.target_modules)
    size = parallelism.pipeline_parallel_microbatch_size
    check_microbatches(job.training.local_batch_size, size, degree, schedule)
    if model.tied:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {degree}, but tie_word_embeddings does not go with it: the first "
            "and the last stage cannot share a weight; set it to 1, and use context, tensor or data parallelism"
        )
    if job.training.dataset == DPO_DATASET and job.magi.dpo.reference == "file":
        raise ValueError(
            f'magi.dpo.reference is "file", but a pipeline (parallelism.pipeline_parallel_degree {degree}) computes no '
            'such file; set it to "model"'
        )


def check_offload(enabled: bool, fsdp_enabled: bool) -> None:
    """Checks training.enable_cpu_offload, which torchtitan leaves to FSDP2.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    if enabled and not fsdp_enabled:
        raise ValueError(
            "training.enable_cpu_offload is true, but FSDP is off, which does it; use a data_parallel_shard_degree or "
            "context_parallel_degree above 1, or set it to false"
        )
