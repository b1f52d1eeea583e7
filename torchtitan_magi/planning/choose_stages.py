"""Into how many stages remote K/V are cut.

Communication hides behind attention in two ways:

- Inside a node, K/V arrive while one kernel runs. All remote K/V travel in one exchange; the kernel attends to the
  rank's own keys first, then to the others, whose flags it awaits (exchange/peer_memory.py). Nothing is merged.
- Across nodes an exchange arrives as a whole. The remote K/V are cut into stages; a rank attends to one stage while the
  next is under way, and the results are merged in float32.

So a plan for one node has one stage, unless the user asks for more: with as many K/V heads as query heads the model
promises up to 1.5% from several, but measured they took longer. Across nodes the cut with the shortest prediction is
taken, for the forward and for the backward. All ranks run the same stages, as each begins with a collective.

Both hold where the rows find room. One stage takes memory for all rows at once, and in a backward twice as much for
float32 sums of their gradients; with several only two stages of rows are there at a time, and the sums are those of the
rank's own rows. So where one document fills a long pack there are as many stages as it takes to fit into MOST_BYTES.
"""

import math
from fractions import Fraction

from torchtitan_magi.planning.cost_model import CostModel, Heads
from torchtitan_magi.planning.relays import ALL, NONE, RESIDENT, Spans
from torchtitan_magi.planning.row_memory import memory_of_rows
from torchtitan_magi.planning.timeline import Workload, predict

# Each further stage must be predicted to save at least 2%: a stage takes the host 60 us forward and 150 backward, and
# measured, backwards with some took longer than predicted.
SIMPLER = 0.98

# A fifth of the 80 GiB of an H100, for what memory_of_rows counts. The rest is for states and activations, which at the
# lengths where this decides take most of a GPU: 128k tokens on a rank have 32 GiB of block inputs in 32 layers of 8B.
MOST_BYTES = 16 << 30


def equal_stages(count: int) -> Spans:
    """Remote K/V in so many equal stages after the rank's own. 0: no overlap, one stage with everything."""
    if count == 0:
        return ((NONE, ALL),)
    return (*RESIDENT, *((Fraction(i, count), Fraction(i + 1, count)) for i in range(count)))


CANDIDATES = tuple(equal_stages(count) for count in range(5))
MANY = tuple(equal_stages(count) for count in (8, 16, 32, 64))  # tried only where none of the others fits


def choose_stages(cost: CostModel, work: Workload, heads: Heads) -> tuple[Spans, Spans]:
    """Stages of the forward and of the backward.

    The backward has the forward's, with which it shares index data, unless others are clearly faster or fit alone.
    """
    if not work.received.any():
        return RESIDENT, RESIDENT
    cuts = [spans for spans in CANDIDATES if not heads.latent or spans[0] == RESIDENT[0]]
    usual = cuts[:1] if work.is_inside_a_node else cuts
    forward = _fastest_that_fits(cost, work, heads, False, usual)
    return forward, _fastest_that_fits(cost, work, heads, True, list(dict.fromkeys([forward, *usual])))


def choose_rows(cost: CostModel, work: Workload, heads: Heads, overlap_stages: int) -> tuple[Heads, Spans, Spans]:
    """Whether rows travel as latent vectors, and the stages of the forward and of the backward.

    Latent vectors travel between nodes where that is faster. They become K and V in stages after the first, so they
    need one at least.

    Returns:
        heads, without ``latent`` if K and V travel.
    """
    ways = []
    for way in (heads, heads.with_whole_rows) if heads.latent else (heads,):
        if way.latent and (work.is_inside_a_node or overlap_stages == 0 or not work.received.any()):
            continue
        if overlap_stages == -1 or not work.received.any():
            spans = choose_stages(cost, work, way)
        else:
            spans = equal_stages(overlap_stages), equal_stages(overlap_stages)
        ways.append((way, *spans))
    if len(ways) == 1:
        return ways[0]

    def seconds(way: tuple[Heads, Spans, Spans]) -> float:
        heads, forward, backward = way
        return sum(predict(cost, work, heads, *of).seconds for of in ((forward, False), (backward, True)))

    return min(ways, key=seconds)


def _fastest_that_fits(cost: CostModel, work: Workload, heads: Heads, backward: bool, usual: list[Spans]) -> Spans:
    """The fastest of the usual candidates that fit on the fullest rank; else of all; else the one that needs least."""

    def most_bytes(spans: Spans) -> float:
        return float(memory_of_rows(work, heads, spans, backward).max())

    everything = [*usual, *(spans for spans in CANDIDATES if not heads.latent), *MANY]
    for candidates in (usual, everything):
        fitting = [spans for spans in candidates if most_bytes(spans) <= MOST_BYTES]
        if fitting:
            return _fastest(cost, work, heads, backward, fitting)
    return min(everything, key=most_bytes)


def _fastest(cost: CostModel, work: Workload, heads: Heads, backward: bool, candidates: list[Spans]) -> Spans:
    """The candidate of the shortest prediction; a later one only if it saves enough for each stage that it has more."""
    if len(candidates) == 1:
        return candidates[0]
    best, shortest = candidates[0], math.inf
    for spans in candidates:
        seconds = predict(cost, work, heads, spans, backward).seconds
        if seconds < shortest * SIMPLER ** max(1, len(spans) - len(best)):
            best, shortest = spans, seconds
    return best
