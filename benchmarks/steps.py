"""The steps of a run that this process is a rank of: when each ended, its loss, and the memory that was taken."""

import itertools
import resource
import time
from pathlib import Path
from typing import Any

import torch

from torchtitan_magi.sizing.memory import GIB


class Steps:
    """Of all steps from now on, as the metrics of one kind log them.

    Args:
        metrics: torchtitan's MetricsProcessor, or a class of ours like it; logs every step.

    Attributes:
        times: of the ends of steps, in seconds.
        losses: as logged.
        waits: seconds for a batch and its plan.
        memory: GiB of each step: of the GPU allocated at most, reserved at most, and outside of PyTorch's allocator;
            and of the host.
        retries: how often the allocator had freed its cache until then, for lack of memory.
        seen: the metrics.
    """

    def __init__(self, metrics: Any) -> None:
        self.times: list[float] = []
        self.losses: list[float] = []
        self.waits: list[float] = []
        self.retries: list[int] = []
        self.memory: dict[str, list[float]] = {f"{name}_gib": [] for name in ("peak", "reserved", "outside", "host")}
        self.seen: Any = None
        log = metrics.log

        def record_and_log(self_: Any, step: int, loss: float, *arguments: Any, **options: Any) -> None:
            self._record(self_, loss)
            log(self_, step, loss, *arguments, **options)  # empties the times of loading, and resets peaks

        metrics.log = record_and_log

    @property
    def seconds(self) -> list[float]:
        """From each step's end to that of the next."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def peaks(self) -> dict[str, float]:
        """The most of each kind of memory."""
        return {name: max(values) for name, values in self.memory.items()}

    def _record(self, metrics: Any, loss: float) -> None:
        self.seen = metrics
        self.times.append(time.perf_counter())
        self.losses.append(float(loss))
        self.waits.append(sum(metrics.data_loading_times))
        now = 0, 0, 0
        if torch.cuda.is_available():
            self.retries.append(torch.cuda.memory_stats()["num_alloc_retries"])
            (free, total), reserved = torch.cuda.mem_get_info(), torch.cuda.memory_reserved()
            now = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), total - free - reserved
        for values, gib in zip(self.memory.values(), (*(x / GIB for x in now), host_gib()), strict=True):
            values.append(gib)


def host_gib() -> float:
    """GiB of the host's memory that this process has now, pinned or not."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / GIB
