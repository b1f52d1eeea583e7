"""Parallel degrees by short names, as arguments of a run and as a number of processes."""

import math

AXES = {
    "dp": "data_parallel_shard", "ddp": "data_parallel_replicate", "cp": "context_parallel", "tp": "tensor_parallel",
    "pp": "pipeline_parallel", "ep": "expert_parallel", "etp": "expert_tensor_parallel",
}  # fmt: skip


def degree_arguments(degrees: dict[str, int]) -> list[str]:
    return [f"--parallelism.{AXES[axis]}_degree={degree}" for axis, degree in degrees.items()]


def num_processes(degrees: dict[str, int]) -> int:
    """Experts are spread over the ranks of the other axes."""
    return math.prod(degree for axis, degree in degrees.items() if axis not in ("ep", "etp"))
