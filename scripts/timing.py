"""Times of GPU work in turns: single calls with a cold L2 cache, or sustained ones with clock and power."""

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from torchtitan_magi.calibrate import gpu_ms

Runs = Mapping[str, Callable[[], object]]


def take_turns(runs: Runs, wanted: float) -> dict[str, float]:
    """Median GPU times, ms. Each run is timed for about `wanted` ms; an untimed call of it precedes each timed one."""
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def once(run: Callable[[], object]) -> float:
        return gpu_ms(run, 2_000_000, lambda: (run(), cache.zero_()))

    first = [once(run) for _ in range(2) for run in runs.values()]
    rounds = max(5, round(wanted * len(first) / sum(first)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(once(runs[name]))
    return {name: statistics.median(x) for name, x in times.items()}


@dataclass
class Sustained:
    """Medians over turns. Of a call: ms. Of the turns: SM clock in MHz, power of the GPU in W."""

    ms: float
    clock: float
    power: float


class Gpu:
    """The first GPU's clock and energy by the driver's management library."""

    @cached_property
    def _library(self) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
        library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        assert library.nvmlInit_v2() == 0
        assert library.nvmlDeviceGetHandleByIndex_v2(torch.cuda.current_device(), ctypes.byref(device)) == 0
        return library, device

    def clock(self) -> int:
        """Of the SMs, MHz."""
        library, device = self._library
        found = ctypes.c_uint()
        assert library.nvmlDeviceGetClockInfo(device, 1, ctypes.byref(found)) == 0
        return found.value

    def energy(self) -> float:
        """J since the driver was loaded."""
        library, device = self._library
        found = ctypes.c_ulonglong()
        assert library.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(found)) == 0
        return found.value / 1e3


def sustained(runs: Runs, wanted: float, rounds: int = 3) -> dict[str, Sustained]:
    """Each run without a pause for about `wanted` ms, in turns, in a new order every round. Power is that of the later
    half of a turn, as the clock settles in the first."""
    gpu = Gpu()
    first, middle, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def of(run: Callable[[], object], count: int) -> tuple[float, list[int], float]:
        """ms of a call, clocks and power, after as many calls that are not timed."""
        first.record()
        for _ in range(count):
            run()
        middle.record()
        for _ in range(count):
            run()
        last.record()
        middle.synchronize()
        energy, start, clocks = gpu.energy(), time.perf_counter(), []
        while not last.query():
            clocks.append(gpu.clock())
            time.sleep(2e-3)
        seconds = time.perf_counter() - start
        return middle.elapsed_time(last) / count, clocks or [gpu.clock()], (gpu.energy() - energy) / seconds

    counts = {}
    for name, run in runs.items():
        run()
        counts[name] = max(2, round(wanted / 2 / of(run, 3)[0]))
    seen: dict[str, list[Sustained]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            ms, clocks, power = of(runs[name], counts[name])
            seen[name].append(Sustained(ms, statistics.mean(clocks), power))
    return {
        name: Sustained(*(statistics.median(getattr(x, field) for x in turns) for field in ("ms", "clock", "power")))
        for name, turns in seen.items()
    }
