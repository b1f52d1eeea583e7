"""torchtitan 0.3 on a machine without an accelerator: gloo instead of NCCL, process memory instead of GPU memory."""

import atexit
import gc
import resource
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import profiler, utils


def run_on_cpu() -> None:
    """Makes torchtitan use the CPU. Call it before the Trainer is built."""
    for module in (utils, dist_utils, parallel_dims, metrics, profiler):  # they keep the device of their import
        vars(module).update(device_type="cpu", device_module=torch.cpu)
    metrics.build_device_memory_monitor = _ProcessMemory
    dist_utils.set_pg_timeouts = _set_pg_timeouts
    # torchtitan turns the garbage collector off, and gloo's threads in groups that only cycles hold can end a process
    # that has done all its work with "terminate called without an active exception".
    atexit.register(gc.collect)


def prepare_model(model: nn.Module) -> None:
    """Leaves out of a parallelized model what a CPU does not have."""
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gloo does not know the pre-multiplied sum that FSDP2 would use
            module.set_force_sum_reduction_for_comms(True)


class _ProcessMemory:
    """Stands in for torchtitan's monitor of GPU memory."""

    device_name = "CPU"

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
        with open("/proc/meminfo") as file:
            total_gib = int(file.readline().split()[1]) / 2**20
        percent = 100 * peak_gib / total_gib
        return metrics.DeviceMemStats(peak_gib, percent, peak_gib, percent, 0, 0)

    def reset_peak_stats(self) -> None:
        """The operating system's peak cannot be reset."""


def _set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """torchtitan's own, without the device ids that gloo's barrier refuses."""
    dist.barrier()
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, None]:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
