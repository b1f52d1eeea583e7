"""Mixture-of-experts layers: how evenly their tokens spread, and the layouts that torchtitan runs wrongly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.models.moe import MoE

from torchtitan_magi.training.model_config import Experts
from torchtitan_magi.wording import quoted

EXPERT_LOAD_METRICS = ("moe/expert_imbalance", "moe/worst_expert_imbalance", "moe/idle_experts")


def moe_layers(model: nn.Module) -> list[MoE]:
    """In the order of the layers; none in a dense model."""
    return [module for module in model.modules() if isinstance(module, MoE)]


@contextmanager
def expert_counts_kept(model: nn.Module) -> Iterator[None]:
    """For passes that are no training: ``tokens_per_expert``, to which every forward adds, stays as it is."""
    before = [(moe, moe.tokens_per_expert.clone()) for moe in moe_layers(model)]
    try:
        yield
    finally:
        for moe, counts in before:
            moe.tokens_per_expert.copy_(counts)


@torch.no_grad()
def take_expert_load(model: nn.Module, group: dist.ProcessGroup | None) -> dict[str, float]:
    """How evenly tokens went to experts since the last call; counting begins anew.

    A layer's imbalance is the load of its busiest expert over the mean load: 1 if all are alike, at most the number of
    experts over those that a token takes. Activation checkpointing counts every token twice, which changes no ratio.

    Args:
        group: the ranks that see different tokens, whose counts are added: a collective of these.

    Returns:
        "moe/expert_imbalance": the mean over layers. "moe/worst_expert_imbalance": of the worst layer.
        "moe/idle_experts": how many experts of all layers got no token. Empty for a dense model.
    """
    layers = moe_layers(model)
    if not layers:
        return {}
    counts = torch.stack([moe.tokens_per_expert for moe in layers])  # [layers, experts]
    for moe in layers:
        moe.tokens_per_expert.zero_()
    if group is not None:
        dist.all_reduce(counts, group=group)
    imbalance = counts.amax(1) / counts.mean(1)
    figures = torch.stack([imbalance.mean(), imbalance.max(), (counts == 0).sum()]).tolist()
    return dict(zip(EXPERT_LOAD_METRICS, figures, strict=True))


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
    if ranks % ep:
        lenders = "data_parallel_shard_degree, context_parallel_degree" + " and tensor_parallel_degree" * (etp == 1)
        raise ValueError(
            f"parallelism.expert_parallel_degree is {ep}, which does not divide the product of {lenders}, {ranks}; "
            "use a degree that does"
        )
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
    parallelism, flavor = job_config.parallelism, job_config.model.flavor
    degree, backend = parallelism.expert_parallel_degree, parallelism.expert_parallel_comm_backend
    if degree > 1 and experts is None:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {degree}, but model.flavor {quoted(flavor)} has no experts; set "
            "it to 1, or use a mixture of experts"
        )
    if experts is not None and experts.num_experts % degree:
        raise ValueError(
            f"parallelism.expert_parallel_degree is {degree}, which does not divide the {experts.num_experts} experts "
            f"of model.flavor {quoted(flavor)}; use a degree that does"
        )
    if backend != "standard":
        raise ValueError(
            f"parallelism.expert_parallel_comm_backend is {quoted(backend)}, which torchtitan 0.2.2 does not have "
            "for these "
            'models; set it to "standard"'
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
    by_number = degree == 1 or ranks <= num_experts  # else FSDP shards each expert's rows
    for option in ("initial_load_in_hf", "last_save_in_hf"):
        if checkpoint.enable and getattr(checkpoint, option) and by_number and num_experts % ranks:
            remedy = "an expert_parallel_degree above 1" if ranks > num_experts else "a number of ranks that divides it"
            raise ValueError(
                f"checkpoint.{option} is true, but {ranks} ranks share {num_experts} experts, not as many each; use "
                f"{remedy}"
            )
