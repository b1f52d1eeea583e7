"""Times of GPU work in turns: single calls with a cold L2 cache, or sustained ones with clock and power."""

import ctypes
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cached_property

import torch

from torchtitan_magi.calibrate import gpu_ms

Runs = Mapping[str, Callable[[], object]]


def take_turns(runs: Runs, wanted: float, queued: int = 2_000_000) -> dict[str, float]:
    """Median GPU times, ms. Each run is timed for about `wanted` ms; an untimed call of it precedes each timed one.

    Args:
        queued: cycles of work queued ahead, in which a call is issued.
    """
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def once(run: Callable[[], object]) -> float:
        return gpu_ms(run, queued, lambda: (run(), cache.zero_()))

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


class _Field(ctypes.Structure):
    """nvmlFieldValue_t, its value as an unsigned number."""

    _fields_ = (
        ("number", ctypes.c_uint), ("scope", ctypes.c_uint), ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong), ("type", ctypes.c_uint), ("status", ctypes.c_uint), ("value", ctypes.c_uint64),
    )  # fmt: skip


class Gpu:
    """The current GPU's clock and power by the driver's management library."""

    SM_CLOCK, POWER_NOW = 1, 186  # NVML_CLOCK_SM, NVML_FI_DEV_POWER_INSTANT

    @cached_property
    def _library(self) -> tuple[ctypes.CDLL, ctypes.c_void_p]:
        library, device = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()
        assert library.nvmlInit_v2() == 0
        assert library.nvmlDeviceGetHandleByIndex_v2(torch.cuda.current_device(), ctypes.byref(device)) == 0
        return library, device

    def clock(self) -> int:
        """The clock of the SMs, MHz."""
        library, device = self._library
        found = ctypes.c_uint()
        assert library.nvmlDeviceGetClockInfo(device, self.SM_CLOCK, ctypes.byref(found)) == 0
        return found.value

    def power(self) -> float:
        """W, at this moment: the driver's other figures are means over 0.1 to 1 s."""
        library, device = self._library
        field = _Field(number=self.POWER_NOW)
        assert library.nvmlDeviceGetFieldValues(device, 1, ctypes.byref(field)) == 0
        assert field.status == 0
        return (field.value & 0xFFFFFFFF) / 1e3


SHORT_MS, REPLAYED = 0.1, 50  # calls shorter than this may tell the speed of the host; calls in a graph


def sustained(runs: Runs, wanted: float, rounds: int = 3, can_replay: bool = False) -> dict[str, Sustained]:
    """Each run without a pause for about `wanted` ms, in turns, in a new order every round. Times, clocks and power are
    those of the later half of a turn, as the clock settles in the first.

    Args:
        can_replay: where a call is short, all runs are replayed as CUDA graphs, without what the host does for a call.
    """
    gpu = Gpu()
    first, middle, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))

    def turn(run: Callable[[], object], count: int) -> Sustained:
        first.record()
        for _ in range(count):
            run()
        middle.record()
        for _ in range(count):
            run()
        last.record()
        middle.synchronize()
        seen = [(gpu.clock(), gpu.power())]
        while not last.query():
            seen.append((gpu.clock(), gpu.power()))
            time.sleep(2e-3)
        clocks, powers = zip(*seen, strict=True)
        return Sustained(middle.elapsed_time(last) / count, statistics.mean(clocks), statistics.mean(powers))

    def first_ms(run: Callable[[], object]) -> float:
        run()
        return turn(run, 3).ms

    of_call, calls = {name: first_ms(run) for name, run in runs.items()}, 1
    if can_replay and min(of_call.values()) < SHORT_MS:
        runs, calls = {name: as_graph(run) for name, run in runs.items()}, REPLAYED
        of_call = {name: first_ms(run) for name, run in runs.items()}
    counts = {name: max(2, round(wanted / 2 / ms)) for name, ms in of_call.items()}
    turns: dict[str, list[Sustained]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            turns[name].append(turn(runs[name], counts[name]))
    median = {
        name: [statistics.median(values) for values in zip(*map(astuple, of_run), strict=True)]
        for name, of_run in turns.items()
    }
    return {name: Sustained(ms / calls, clock, power) for name, (ms, clock, power) in median.items()}


def as_graph(run: Callable[[], object]) -> Callable[[], object]:
    """REPLAYED calls of it in one launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            run()
    return graph.replay
