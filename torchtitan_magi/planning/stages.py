"""Into how many stages remote K/V are cut, by a model of what a stage costs and what it hides.

The model predicts when each rank's stages arrive, run and return in one layer, and the cut with the shortest prediction
is chosen, for the forward and for the backward. All ranks run the same stages, as each begins with a collective.
Its constants were fitted to measurements; `scripts/calibrate.py` measures them on other machines.
"""

import itertools
import math
from fractions import Fraction

from torchtitan_magi.planning.cost_model import CostModel, Heads
from torchtitan_magi.planning.timeline import ALL, NONE, RESIDENT, Shares, Workload, predict

# What has a stage more must be predicted to take less than this of the time, and so much less for each further one: a
# stage takes the host 60 us forward and 150 backward, and measured, backwards with some took longer than predicted. As
# many stages cut in another way must, too, as they have index data of their own.
SIMPLER = 0.98


def equal_stages(count: int) -> Shares:
    """Remote K/V in so many equal stages after the rank's own. 0: no overlap, one stage with everything."""
    if count == 0:
        return ((NONE, ALL),)
    return (*RESIDENT, *((Fraction(i, count), Fraction(i + 1, count)) for i in range(count)))


def _growing_stages(*sizes: int) -> Shares:
    """Stages after the rank's own, of these sizes relative to each other."""
    edges = [Fraction(sum(sizes[:i]), sum(sizes)) for i in range(len(sizes) + 1)]
    return (*RESIDENT, *itertools.pairwise(edges))


# From few stages to many. Where little local work hides the first one, it is better small.
CANDIDATES = (
    equal_stages(0),
    equal_stages(1),
    equal_stages(2),
    _growing_stages(1, 2),
    _growing_stages(1, 3),
    equal_stages(3),
    _growing_stages(1, 2, 4),
    equal_stages(4),
)


def choose_stages(cost: CostModel, work: Workload, heads: Heads) -> tuple[Shares, Shares]:
    """Stages of the forward and of the backward.

    The backward has the forward's, with which it shares index data, unless others are clearly faster.
    """
    if not work.received.any():
        return RESIDENT, RESIDENT
    forward = _fastest(cost, work, heads, False, CANDIDATES)
    return forward, _fastest(cost, work, heads, True, (forward, *CANDIDATES))


def _fastest(cost: CostModel, work: Workload, heads: Heads, backward: bool, candidates: tuple[Shares, ...]) -> Shares:
    """The candidate of the shortest prediction; a later one only if it is clearly shorter than the ones before, for
    each stage that it has more."""
    best, shortest = candidates[0], math.inf
    for shares in candidates:
        seconds = predict(cost, work, heads, shares, backward).seconds
        if seconds < shortest * SIMPLER ** max(1, len(shares) - len(best)):
            best, shortest = shares, seconds
    return best
