"""The ranks that this one works with, by the axes of torchtitan's meshes, and what they do together."""

from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | None  # None: this rank alone


def group_of(parallel_dims: Any, axis: str) -> Group:
    """The group of an axis of torchtitan's ParallelDims; None where it has a single rank."""
    mesh = parallel_dims.get_optional_mesh(axis)
    return None if mesh is None else mesh.get_group()


def rank_and_size_in(group: Group) -> tuple[int, int]:
    """Which rank of a group this one is, and the number of its ranks; (0, 1) for a rank alone."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def data_parallel_place(parallel_dims: Any) -> tuple[int, int]:
    """The number of batches that are loaded at a time, and which of them is this rank's, as data loaders take them."""
    rank, size = rank_and_size_in(group_of(parallel_dims, "batch"))
    return size, rank


def data_parallel_rank(parallel_dims: Any) -> int:
    """Which of the batches that are loaded at a time is this rank's."""
    return data_parallel_place(parallel_dims)[1]


def reduced(x: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """x, in which the values of all ranks of a group are added, or combined by another ``op``. A collective of these.

    It is changed in place, any dtype and shape that is the same on all of them.
    """
    if group is not None:
        dist.all_reduce(x, op, group=group)
    return x
