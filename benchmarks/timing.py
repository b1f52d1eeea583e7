"""Times of GPU work in turns: in bursts, or single calls where the host takes longer for a call than the GPU."""

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchtitan_magi.calibrate import gpu_ms

Runs = Mapping[str, Callable[[], object]]

BURST_MS = 25.0  # of one implementation, then it is another's turn
SHORT_MS, REPLAYED = 0.1, 50  # calls shorter than this may tell the speed of the host; calls in a graph


@dataclass(frozen=True)
class Time:
    """A call's median ms, and its time over that of the first's calls just before and after: the median of all bursts,
    and half of the distance between their quartiles."""

    ms: float
    ratio: float
    spread: float


def in_bursts(runs: Runs, wanted: float, can_replay: bool = False) -> dict[str, Time]:
    """Each run without a pause for BURST_MS, then the first one again, then the next; see `compared`.

    Args:
        wanted: ms of each run.
        can_replay: where a call is short, all runs are replayed as CUDA graphs, without what the host does for a call.
    """
    of_call, calls = {name: first_ms(run) for name, run in runs.items()}, 1
    if can_replay and min(of_call.values()) < SHORT_MS:
        runs, calls = {name: as_graph(run) for name, run in runs.items()}, REPLAYED
        of_call = {name: first_ms(run) for name, run in runs.items()}
    found = compared(of_call, wanted, partial(burst_times, runs))
    return {name: replace(time, ms=time.ms / calls) for name, time in found.items()}


def compared(
    of_call: Mapping[str, float], wanted: float, times_of: Callable[[Mapping[str, int], list[str]], list[float]]
) -> dict[str, Time]:
    """Times by turns. The first has its turn before and after each other one, these in a new order every round: what is
    neighbouring sees the same clock and the same heat, so that ratios repeat to 1% where times do not.

    Args:
        of_call: about how many ms a call of each takes.
        wanted: ms of each, in three bursts at least; those of the first round do not count.
        times_of: for how many calls a burst of each has, and the turns in order, the ms of a call in each burst.
    """
    first, *others = of_call
    rounds = max(3, round(wanted / max(BURST_MS, *of_call.values())))
    turns = [first]
    for _ in range(rounds + 1):
        for other in random.sample(others, len(others)):
            turns += [other, first]
    if not others:
        turns *= rounds + 1
    times = times_of({name: max(1, round(BURST_MS / ms)) for name, ms in of_call.items()}, turns)
    counted = range(max(1, 2 * len(others)), len(turns))
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for i in counted:
        if turns[i] != first:
            ratios[turns[i]].append(2 * times[i] / (times[i - 1] + times[i + 1]))
    medians = {name: statistics.median(times[i] for i in counted if turns[i] == name) for name in of_call}
    return {name: Time(ms, *middle(ratios.get(name, [1.0, 1.0]))) for name, ms in medians.items()}


def burst_times(runs: Runs, counts: Mapping[str, int], turns: list[str]) -> list[float]:
    """ms of a call in each burst, one after the other without a pause between them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(turns) + 1)]
    events[0].record()
    for name, event in zip(turns, events[1:], strict=True):
        for _ in range(counts[name]):
            runs[name]()
        event.record()
    events[-1].synchronize()
    return [begin.elapsed_time(end) / counts[name] for name, begin, end in zip(turns, events, events[1:], strict=False)]


def middle(values: list[float]) -> tuple[float, float]:
    """The median, and half of the distance between the quartiles."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return median, (high - low) / 2


def first_ms(run: Callable[[], object]) -> float:
    """ms of a call, after one that does not count."""
    run()
    return burst_times({"": run}, {"": 3}, [""])[0]


def as_graph(run: Callable[[], object]) -> Callable[[], object]:
    """REPLAYED calls of it in one launch."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPLAYED):
            run()
    return graph.replay


def take_turns(runs: Runs, wanted: float, queued: int) -> dict[str, float]:
    """Median GPU times, ms. Each run is timed for about `wanted` ms, a call at a time with a cold L2 cache; an untimed
    call of it precedes each timed one.

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
