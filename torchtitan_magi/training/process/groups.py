"""The ranks that this one works with, by the axes of torchtitan's meshes, and what they do together."""

from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch import Tensor

Group: TypeAlias = dist.ProcessGroup | None  # None: this rank alone
T = TypeVar("T")


def group_of(parallel_dims: Any, axis: str) -> Group:
    """The group of an axis of torchtitan's ParallelDims; None where it has a single rank."""
    mesh = parallel_dims.get_optional_mesh(axis)
    return None if mesh is None else mesh.get_group()


def size_and_rank(group: Group) -> tuple[int, int]:
    """The number of ranks of a group, and which of them this one is; (1, 0) for a rank alone."""
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))


def data_parallel_place(parallel_dims: Any) -> tuple[int, int]:
    """The number of batches that are loaded at a time, and which of them is this rank's."""
    return size_and_rank(group_of(parallel_dims, "batch"))


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


def gathered_in(group: Group, mine: T) -> list[T]:
    """The value of every rank of a group, by rank. A collective of these."""
    found: list[Any] = [mine] * size_and_rank(group)[0]
    if len(found) > 1:
        dist.all_gather_object(found, mine, group)
    return found
