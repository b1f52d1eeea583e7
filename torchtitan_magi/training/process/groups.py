"""The ranks that this one works with, by the axes of torchtitan's meshes."""

from typing import Any

import torch.distributed as dist


def group_of(parallel_dims: Any, axis: str) -> dist.ProcessGroup | None:
    """The group of an axis of torchtitan's ParallelDims; None where it has a single rank."""
    mesh = parallel_dims.get_optional_mesh(axis)
    return None if mesh is None else mesh.get_group()


def data_parallel_rank(parallel_dims: Any) -> int:
    """Which of the batches that are loaded at a time is this rank's."""
    group = group_of(parallel_dims, "batch")
    return 0 if group is None else dist.get_rank(group)


def data_parallel_place(parallel_dims: Any) -> tuple[int, int]:
    """The number of batches that are loaded at a time, and which of them is this rank's."""
    group = group_of(parallel_dims, "batch")
    return (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
