"""Mixture-of-experts layers: how evenly their tokens are, their computation one by one."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchtitan_magi.exchange.transport import gathered
from torchtitan_magi.training.process.groups import Group, reduced

EXPERT_LOAD_METRICS = ("moe/expert_imbalance", "moe/worst_expert_imbalance", "moe/idle_experts")
BIASES = ("expert_bias", "expert_bias_E")  # of a layer's router, which torchtitan moves beside its optimizers
COUNTS = ("tokens_per_expert", "tokens_per_expert_E")  # torchtitan's names of a layer's counts, 0.2 and 0.3


def own_experts(
    stock: Any, adapter: Any, dim: int, dim_size: int, dtensor_placements: Any, device_mesh: DeviceMesh
) -> tuple[int, int]:
    """The range of experts of this rank, by the axes of the mesh that shard; torchtitan takes every axis for one.

    Args:
        stock: torchtitan's own function of an adapter of weights.
    """
    names = device_mesh.mesh_dim_names or ()
    sharded = {name: axis for name, axis in zip(names, dtensor_placements, strict=True) if not axis.is_replicate()}
    if not sharded:
        return 0, dim_size
    found: tuple[int, int] = stock(adapter, dim, dim_size, tuple(sharded.values()), device_mesh[tuple(sharded)])
    return found


def expert_counts(models: Iterable[nn.Module]) -> list[Tensor]:
    """float [experts] of each layer, in their order: tokens that every forward adds; none in a dense model."""
    return _buffers(models, COUNTS)


def expert_biases(models: Iterable[nn.Module]) -> list[Tensor]:
    """float [experts] of each layer that has them, in their order."""
    return _buffers(models, BIASES)


def _buffers(models: Iterable[nn.Module], names: tuple[str, ...]) -> list[Tensor]:
    return [buffer for model in models for name, buffer in model.named_buffers() if name.split(".")[-1] in names]


@contextmanager
def expert_counts_kept(models: Iterable[nn.Module]) -> Iterator[None]:
    """Keeps the counts as they are in passes that are no training; also a decorator."""
    before = [(counts, counts.clone()) for counts in expert_counts(models)]
    try:
        yield
    finally:
        for counts, kept in before:
            counts.copy_(kept)


def note_expert_counts(models: Iterable[nn.Module]) -> None:
    """Keeps the tokens so far with each layer's counts, before something else than the log begins to count anew."""
    for counts in expert_counts(models):
        counts.noted = _with_noted(counts)  # type: ignore[attr-defined]


def _with_noted(counts: Tensor) -> Tensor:
    return counts + getattr(counts, "noted", 0)


@torch.no_grad()
def take_expert_load(models: Iterable[nn.Module], group: Group, stages: Group = None) -> dict[str, float]:
    """How evenly tokens went to experts since the last call; counting begins anew.

    A layer's imbalance is the load of its busiest expert over the mean load: 1 if all are alike, at most the number of
    experts over those that a token takes. Activation checkpointing counts every token twice, which changes no ratio.

    Args:
        group: the ranks that see different tokens, whose counts are added: a collective of these.
        stages: the ranks of a pipeline, which have different layers: a collective of these, too.

    Returns:
        "moe/expert_imbalance": the mean over layers. "moe/worst_expert_imbalance": of the worst layer.
        "moe/idle_experts": how many experts of all layers got no token. Empty for a dense model.
    """
    found = gathered(_load_of_layers(expert_counts(models), group), stages)
    imbalances = [imbalance for of_stage, _ in found for imbalance in of_stage]
    if not imbalances:
        return {}
    figures = sum(imbalances) / len(imbalances), max(imbalances), float(sum(idle for _, idle in found))
    return dict(zip(EXPERT_LOAD_METRICS, figures, strict=True))


def _load_of_layers(layers: list[Tensor], group: Group) -> tuple[list[float], int]:
    """The imbalance of each layer, and how many experts of all layers got no token."""
    if not layers:
        return [], 0
    counts = reduced(torch.stack([_taken(layer) for layer in layers]), group)  # [layers, experts]
    return (counts.amax(1) / counts.mean(1)).tolist(), int((counts == 0).sum())


def _taken(layer: Tensor) -> Tensor:
    """What a layer has counted, float [experts] of all tensor-parallel ranks; counting begins anew."""
    counts = whole(_with_noted(layer))
    layer.zero_()
    layer.noted = 0  # type: ignore[attr-defined]
    return counts


def local(*weights: Tensor) -> list[Tensor]:
    """This rank's part of each."""
    return [w.to_local() if isinstance(w, DTensor) else w for w in weights]


def whole(x: Tensor) -> Tensor:
    """All of a tensor, on each of the ranks that have parts of it; a collective of these."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def by_expert(x_RD: Tensor, counts_E: Tensor, weights: list[Tensor], run: Callable[..., Tensor]) -> Tensor:
    """run(rows of an expert, its slice of each of weights) for all of them, and 0 for rows without an expert."""
    counts = counts_E.tolist()
    *rows, others = x_RD.split([*counts, len(x_RD) - sum(counts)])
    outs = [run(x, *of_expert) for x, *of_expert in zip(rows, *weights, strict=True)]
    return torch.cat([*outs, torch.zeros_like(others)])
