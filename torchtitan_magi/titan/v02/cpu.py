"""torchtitan on a machine without an accelerator: gloo instead of NCCL, process memory instead of GPU memory."""

import atexit
import gc
import importlib
import resource
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

# modules of torchtitan that keep the type of device from their import on
_USE_DEVICE = ("tools.utils", "distributed.utils", "distributed.parallel_dims", "components.metrics", "tools.profiling")


def on_cpu() -> bool:
    """Whether this machine has no accelerator that torch can use."""
    return not torch.accelerator.is_available()


def run_on_cpu() -> None:
    """Makes torchtitan use the CPU. Call it before the Trainer is built."""
    modules = {name: importlib.import_module(f"torchtitan.{name}") for name in _USE_DEVICE}
    for module in modules.values():
        for name, value in (("device_type", "cpu"), ("device_module", torch.cpu)):
            if hasattr(module, name):
                setattr(module, name, value)
    modules["components.metrics"].build_device_memory_monitor = _ProcessMemory  # type: ignore[attr-defined]
    modules["distributed.utils"].set_pg_timeouts = _set_pg_timeouts  # type: ignore[attr-defined]
    # torchtitan turns the garbage collector off, and gloo's threads in groups that only cycles hold can end a process
    # that has done all its work with "terminate called without an active exception".
    atexit.register(gc.collect)


def allow_gloo_gradients(model: nn.Module) -> None:
    """Lets FSDP2 reduce gradients by plain sums: gloo does not know the pre-multiplied sum it would use."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class _ProcessMemory:
    """Stands in for torchtitan's monitor of GPU memory."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
        with open("/proc/meminfo") as file:
            total_gib = int(file.readline().split()[1]) / 2**20
        percent = 100 * peak_gib / total_gib
        return DeviceMemStats(peak_gib, percent, peak_gib, percent, 0, 0)

    def reset_peak_stats(self) -> None:
        """The operating system's peak cannot be reset."""


def _set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """torchtitan's own, without the device ids that gloo's barrier refuses."""
    dist.barrier()
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, None]:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
