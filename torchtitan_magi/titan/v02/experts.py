"""Mixture-of-experts layers: the layouts that torchtitan runs wrongly."""

from typing import Any

import torch.distributed as dist

from torchtitan_magi.models.model_config import Experts
from torchtitan_magi.training.experts import check_expert_degree, check_expert_ranks, check_files_of_experts
from torchtitan_magi.wording import quoted


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
    check_expert_ranks(ep, ranks, lenders)
    copies = ranks // ep * dims.dp_replicate
    if ep > 1 and copies > 1 and not dims.fsdp_enabled:  # nothing would add up the gradients of the copies
        raise ValueError(
            f"parallelism.expert_parallel_degree is {ep} and each expert on {copies} ranks, but FSDP is off; use "
            f"data_parallel_shard_degree or context_parallel_degree, or an expert_parallel_degree of {ep * copies}"
        )


def check_experts(job_config: Any, experts: Experts | None) -> None:
    """Checks whether the model's experts can be spread as the configuration says.

    Args:
        experts: None for a dense model.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    check_expert_degree(job_config.parallelism.expert_parallel_degree, experts, job_config.model.flavor)
    backend = job_config.parallelism.expert_parallel_comm_backend
    if backend != "standard":
        raise ValueError(
            f"parallelism.expert_parallel_comm_backend is {quoted(backend)}, which torchtitan 0.2.2 does not have "
            'for these models; set it to "standard"'
        )
    if experts is not None:
        _check_files_of_experts(job_config, experts.num_experts)


def _check_files_of_experts(job_config: Any, num_experts: int) -> None:
    """torchtitan 0.2.2 reads and writes whole experts, as many on each rank, where FSDP shards them by number."""
    parallelism, checkpoint = job_config.parallelism, job_config.checkpoint
    degree = parallelism.expert_parallel_degree
    not_sharding = parallelism.expert_tensor_parallel_degree if degree > 1 else parallelism.tensor_parallel_degree
    world = dist.get_world_size() if dist.is_initialized() else 1
    ranks = world // (parallelism.data_parallel_replicate_degree * not_sharding)
    if degree == 1 or ranks <= num_experts:  # else FSDP shards each expert's rows
        check_files_of_experts(checkpoint, num_experts, ranks)
