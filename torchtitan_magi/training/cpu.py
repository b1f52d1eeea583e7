"""Training on a machine without an accelerator: gloo instead of NCCL, process memory instead of GPU memory.

torchtitan's modules come as arguments: they are named alike in its versions, but lie in different places.
"""

import resource
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchtitan_magi.exchange.gloo_exit import let_gloo_finish_at_exit


def use_cpu(with_device: Iterable[Any], metrics: Any) -> None:
    """Makes torchtitan use the CPU. Call it before the Trainer is built.

    Args:
        with_device: modules that keep the device of their import.
        metrics: torchtitan.components.metrics.
    """
    for module in with_device:
        vars(module).update(device_type="cpu", device_module=torch.cpu)
    metrics.build_device_memory_monitor = partial(_ProcessMemory, metrics.DeviceMemStats)
    let_gloo_finish_at_exit()  # also in groups that only cycles hold: torchtitan turns the garbage collector off


def reduce_by_plain_sums(model: nn.Module) -> None:
    """For a parallelized model: gloo does not know the pre-multiplied sum that FSDP2 would use."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


class _ProcessMemory:
    """Stands in for torchtitan's monitor of GPU memory. stats: torchtitan's DeviceMemStats."""

    device_name = "CPU"

    def __init__(self, stats: Callable[..., Any]) -> None:
        self.stats = stats

    def get_peak_stats(self) -> Any:
        peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
        with open("/proc/meminfo") as file:
            total_gib = int(file.readline().split()[1]) / 2**20
        percent = 100 * peak_gib / total_gib
        return self.stats(peak_gib, percent, peak_gib, percent, 0, 0)

    def reset_peak_stats(self) -> None:
        """The operating system's peak cannot be reset."""
