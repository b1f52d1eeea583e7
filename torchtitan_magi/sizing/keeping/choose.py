"""Chooses what each layer keeps for its backward: the fastest mix that fits, by predicted memory and time."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from torchtitan_magi.sizing.keeping.kinds import INPUTS, KEPT, Keeping
from torchtitan_magi.sizing.run_setup import Setup

MARGIN = 0.91  # of a GPU's memory that a choice may fill: predictions are off by up to 6%, and allocators lose some
OFFLOAD_COST = 0.02  # of a layer's time that its offloading is taken to cost where its copies hide
GAIN = 0.001  # a further kind of layer that saves less of a step is not worth a longer list
KINDS = tuple(Keeping(kept, offloaded) for offloaded in (False, True) for kept in KEPT)


def choose(setup: Setup, fits: Callable[[Setup], bool], seconds: Callable[[Setup], float]) -> Setup:
    """The setup with ``keeping`` chosen. Every stage of a pipeline keeps alike.

    Offloaded layers come first, as they are needed last; of the others those that keep the most come last, so that what
    is computed again in a backward finds the room that later layers have left.

    Args:
        fits: whether a setup has room on GPU and host.
        seconds: of a step.

    Returns:
        The fastest that fits; where none does, that which keeps the least.
    """
    size = -(-setup.model.num_layers // setup.pp)  # layers of a stage
    found: dict[tuple[Keeping, ...], tuple[float, Setup]] = {}

    def evaluate(stage: tuple[Keeping, ...]) -> float:
        """Seconds, infinite if it does not fit."""
        if stage not in found:
            mixed = replace(setup, keeping=(stage * setup.pp)[: setup.model.num_layers])
            offloaded = sum(keeping.offloaded for keeping in stage) / size
            time = seconds(mixed) * (1 + OFFLOAD_COST * offloaded) if fits(mixed) else float("inf")
            found[stage] = time, mixed
        return found[stage][0]

    best = min(((kind,) * size for kind in KINDS), key=evaluate)
    for low in (kind for kind in KINDS if evaluate((kind,) * size) < float("inf")):
        best = min([best, *_mixes((low,) * size, evaluate)], key=evaluate)
    if evaluate(best) == float("inf"):
        return replace(setup, keeping=(Keeping(INPUTS),) * setup.model.num_layers)
    while (further := min([best, *_mixes(best, evaluate)], key=evaluate)) != best:
        if evaluate(further) > (1 - GAIN) * evaluate(best):
            break
        best = further
    return found[best][1]


def _mixes(
    stage: tuple[Keeping, ...], evaluate: Callable[[tuple[Keeping, ...]], float]
) -> Iterator[tuple[Keeping, ...]]:
    """The stage with as many layers of another kind as fit: its last ones, or its first if these are offloaded."""
    for kind in KINDS:
        few, many = 0, len(stage) + 1
        while many - few > 1:
            count = (few + many) // 2
            if evaluate(_changed(stage, kind, count)) < float("inf"):
                few = count
            else:
                many = count
        if few:
            yield _changed(stage, kind, few)


def _changed(stage: tuple[Keeping, ...], kind: Keeping, count: int) -> tuple[Keeping, ...]:
    if kind.offloaded:
        return (kind,) * count + stage[count:]
    return stage[: len(stage) - count] + (kind,) * count
