"""Training on a machine without an accelerator: gloo instead of NCCL, process memory instead of GPU memory.

torchtitan's modules come as arguments: they are named alike in its versions, but lie in different places.
"""

import resource
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, _random

from torchtitan_magi.exchange.gloo_exit import let_gloo_finish_at_exit
from torchtitan_magi.models.names import plain_name

aten: Any = torch.ops.aten
DRAWS = (aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float)


def use_cpu(with_device: Iterable[Any], metrics: Any) -> None:
    """Makes torchtitan use the CPU. Call it before the Trainer is built.

    Args:
        with_device: modules that keep the device of their import.
        metrics: torchtitan.components.metrics.
    """
    for module in with_device:
        vars(module).update(device_type="cpu", device_module=torch.cpu)
    draw_whole_tensors()
    metrics.build_device_memory_monitor = partial(_ProcessMemory, metrics.DeviceMemStats)
    let_gloo_finish_at_exit()  # also in groups that only cycles hold: torchtitan turns the garbage collector off


def draw_whole_tensors() -> None:
    """Makes random numbers of a DTensor those of one process: every rank draws the whole tensor and keeps its shard.

    torch's generator for DTensors is on accelerators only: on a CPU all shards would get the same numbers.
    """
    DTensor._op_dispatcher._custom_op_handlers.update(dict.fromkeys(DRAWS, _draw_whole))  # type: ignore[attr-defined]
    _random.manual_seed = lambda seed, device_mesh: torch.manual_seed(seed)


def _draw_whole(draw: Callable[..., Tensor], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """draw(*arguments, **options), in place of the first of them. The ranks' generators must be in one state."""
    out, *others = arguments
    if not out.is_meta:
        _keep_shard(out, draw(torch.empty(out.shape, dtype=out.dtype), *others, **options))
    return out


def _keep_shard(out: DTensor, whole: Tensor) -> None:
    """Copies this rank's shard of a tensor that all ranks have."""
    replicated = DTensor.from_local(whole, out.device_mesh, [Replicate()] * out.device_mesh.ndim, run_check=False)
    out.to_local().copy_(replicated.redistribute(placements=out.placements).to_local())


def draw_whole_model(part: Any, build: Callable[[], Any], stage: int, default_dtype: Any) -> None:
    """Makes the random weights of a pipeline's part those that one process would draw: it draws the whole model.

    Args:
        part: a parallelized model, whose parameters are DTensors.
        build: makes the whole model.
        stage: this rank's number in the pipeline, which torchtitan has added to the seed.
        default_dtype: torchtitan's ``set_default_dtype``.
    """
    init_weights = part.init_weights

    def init_with_whole(**options: Any) -> None:
        init_weights(**options)
        parameters = dict(part.named_parameters())
        with torch.device("meta"), default_dtype(next(iter(parameters.values())).dtype):
            whole = build().to_empty(device="cpu")
        with torch.random.fork_rng([]):
            torch.manual_seed((torch.initial_seed() - stage) % 2**64)
            whole.init_weights()
        weights = dict(whole.named_parameters())
        for name, parameter in parameters.items():
            _keep_shard(parameter, weights[plain_name(name)].detach())

    part.init_weights = init_with_whole


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
