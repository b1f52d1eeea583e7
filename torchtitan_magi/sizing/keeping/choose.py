"""Chooses what each layer keeps for its backward: the fastest mix that fits, by predicted memory and time."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torchtitan_magi.sizing.keeping.kinds import KEPT, Keeping, spread
from torchtitan_magi.sizing.run_setup import Setup

MARGIN = 0.91  # of a GPU's memory that a choice may fill: predictions are off by up to 6%, and allocators lose some
MARGIN_OF_EXPERTS = 0.8  # where they are shared out over ranks, of which the busiest takes more than is predicted
GAIN = 0.001  # a further kind of layer that saves less of a step is not worth a longer list
GAIN_OF_OFFLOADING = 0.01  # what saves less is not worth copies, of which the other GPUs of a node make as many
KINDS = tuple(Keeping(kept, offloaded) for offloaded in (False, True) for kept in KEPT)
Stage = tuple[Keeping, ...]  # what each layer of a rank of a pipeline keeps


@dataclass(frozen=True)
class Bound:
    """What a setup takes of some memory, and what there is, in bytes."""

    takes: Callable[[Setup], int]
    most: float


def choose(setup: Setup, gpu: Bound, host: Bound, seconds: Callable[[Setup], float]) -> Setup:
    """The setup with ``keeping`` chosen. Every rank of a pipeline keeps alike.

    Of two kinds each bound leaves a range of how many layers may have the one, and time is about linear in it, so the
    best is at an end of what both leave. Offloaded layers are spread among others, beside which their copies have time.

    Args:
        seconds: of a step.

    Returns:
        The fastest that fits both bounds, of two kinds or a few more; where none does, that which takes the least of
        the GPU.
    """
    size = max(map(len, setup.rank_layers))

    def mixed(stage: Stage) -> Setup:
        kept = {layer: keeping for own in setup.rank_layers for layer, keeping in zip(own, stage, strict=False)}
        return replace(setup, keeping=tuple(kept[layer] for layer in sorted(kept)))

    @functools.cache
    def fits(stage: Stage, bound: Bound) -> bool:
        return bound.takes(mixed(stage)) <= bound.most

    @functools.cache
    def cost(stage: Stage) -> float:
        """Seconds, infinite where it does not fit."""
        if not (fits(stage, host) and fits(stage, gpu)):
            return float("inf")
        return seconds(mixed(stage))

    def ends(stages: Sequence[Stage]) -> Iterator[Stage]:
        """The first and the last that fit, of stages that take more and more of each memory, or less and less."""
        ranges = [_where(stages, functools.partial(fits, bound=bound)) for bound in (gpu, host)]
        first, last = max(low for low, _ in ranges), min(high for _, high in ranges)
        if first <= last:
            yield from {stages[first], stages[last]}

    def best_of(families: Iterable[Sequence[Stage]]) -> Stage:
        return min((stage for stages in families for stage in ends(stages)), key=cost, default=(KINDS[0],) * size)

    def fastest(kinds: Sequence[Keeping]) -> Stage:
        best = best_of(_with((first,) * size, last) for first, last in itertools.permutations(kinds, 2))
        while cost(further := best_of(_with(best, kind) for kind in kinds)) < (1 - GAIN) * cost(best):
            best = further
        return best

    on_gpu, best = fastest([kind for kind in KINDS if not kind.offloaded]), fastest(KINDS)
    if cost(best) == float("inf"):
        alike = [(kind,) * size for kind in KINDS]
        return mixed(min((stage for stage in alike if fits(stage, host)), key=lambda stage: gpu.takes(mixed(stage))))
    return mixed(best if cost(best) < (1 - GAIN_OF_OFFLOADING) * cost(on_gpu) else on_gpu)


def _with(stage: Stage, kind: Keeping) -> list[Stage]:
    """The stage with none to all of its layers of another kind: its last ones, or some among the first that keep the
    same if these are offloaded; of layers that are spread already, none."""
    size = len(stage)
    if kind.offloaded:
        same = len(list(itertools.takewhile(stage[0].__eq__, stage)))
        most = same if same > 1 or size == 1 else 0
        return [spread(kind, count, stage[0], same - count) + stage[same:] for count in range(most + 1)]
    return [_evenly(stage[: size - count]) + (kind,) * count for count in range(size + 1)]


def _evenly(layers: Stage) -> Stage:
    """Layers of two kinds with those that offload spread among the others, as in what they were taken from."""
    kinds = [*dict.fromkeys(layers)]
    if len(kinds) != 2 or not kinds[0].offloaded:
        return layers
    one, other = kinds
    return spread(one, layers.count(one), other, layers.count(other))


def _where(stages: Sequence[Stage], fits: Callable[[Stage], bool]) -> tuple[int, int]:
    """First and last of the stages that fit, if those that do are the first or the last ones; else an empty range."""
    last = len(stages) - 1
    at_first, at_last = fits(stages[0]), fits(stages[last])
    if at_first == at_last:
        return (0, last) if at_first else (1, 0)
    low, high = 0, last  # of which one fits
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(stages[middle]) == at_first else (low, middle)
    return (0, low) if at_first else (high, last)
