"""Which tokens each context-parallel rank owns: as many for every rank, nearly the same work, few K/V rows that travel.

Documents that fit a rank stay whole; larger ones are spread over few ranks, each with a part of the tail (heavy) and
one of the front (light, and needed by everyone, so its sending is shared). ``greedy`` places them, ``swaps`` evens out
the work, ``nodes`` says which rank gets which share.
"""

from collections.abc import Sequence
from operator import itemgetter

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.masks.slices import AttnSlices, stacked
from torchtitan_magi.planning.cost_model import H200, LLAMA_HEADS, CostModel, Heads
from torchtitan_magi.planning.needs import traffic
from torchtitan_magi.planning.placement.greedy import Recipe, place_documents
from torchtitan_magi.planning.placement.nodes import seat_in_nodes
from torchtitan_magi.planning.placement.profile import Layers, WorkProfile, bundle, documents
from torchtitan_magi.planning.topology import Nodes

SEATED = 3  # placements, the best before their ranks are seated in nodes, that are compared once they are
IMBALANCE = 1.016  # work of the heaviest rank over the mean that a placement may have for the sake of fewer rows

ALL = float("inf")
# All of them are tried and the best placement is kept: subsets of 28 recipes that together did best on the packs of
# the first seeds in benchmarks/results/plan.json.
FEW_RANKS, MANY_RANKS = 16, 256
RECIPES_FEW = (
    Recipe(slack=0.01, prefix=1.0, reach=ALL),
    Recipe(slack=0.013, prefix=0.5, reach=ALL),
    Recipe(slack=0.013, prefix=0.0, reach=0.0),
    Recipe(slack=0.013, prefix=0.25, reach=ALL),
)
RECIPES_MANY = (
    Recipe(slack=0.013, prefix=0.5, reach=ALL),
    Recipe(slack=0.013, prefix=0.25, reach=ALL),
    Recipe(slack=0.01, prefix=1.0, reach=ALL),
    Recipe(slack=0.013, prefix=0.75, reach=ALL),
    Recipe(slack=0.01, prefix=1.0, reach=4.0),
)
# With more than many ranks a recipe takes 0.3 s and more, and the others' placements are rarely 1% faster: on packs of
# 16M tokens over 512 and 1,024 ranks this one was within 1% of the best of four, but for one of twelve packs.
RECIPES_MOST = (Recipe(slack=0.013, prefix=0.75, reach=ALL),)


def place(
    layers: AttnSlices | Layers,
    num_tokens: int,
    cp_size: int,
    nodes: Nodes | None = None,
    heads: Heads = LLAMA_HEADS,
    cost: CostModel = H200,
) -> tuple[Int64Array, ...]:
    """Splits the tokens of a pack over the ranks. The same input gives the same placement everywhere.

    Args:
        layers: the mask over the whole pack; or several, and how many layers have each: then the work of all layers
            together is balanced, and the rows that travel are those of all layers.
        num_tokens: tokens of the pack, a multiple of cp_size.
        cp_size: number of ranks.
        nodes: which ranks sit in which node; ranks that share a document are put in one. None: all are in one.
        heads, cost: what work and rows that travel cost. Ranks are balanced by tiles of the kernel.

    Returns:
        per rank int64 [n, 2]: the half-open token ranges it owns, ascending, adjacent ones joined. Every rank owns
        exactly ``num_tokens / cp_size`` tokens.
    """
    tokens_per_rank = num_tokens // cp_size
    if tokens_per_rank == 0:
        return tuple(np.zeros((0, 2), np.int64) for _ in range(cp_size))
    if cp_size == 1:
        return (np.array([[0, num_tokens]]),)
    if isinstance(layers, AttnSlices):
        layers = ((layers, 1),)
    slices = stacked([each for each, _ in layers])  # what attends to what in any layer
    profile = WorkProfile(layers, num_tokens, heads.tile_rows)
    gap = -(-tokens_per_rank // 16)
    readings = [documents(slices, num_tokens, gap)]
    is_long = np.diff(readings[0]).max() > tokens_per_rank
    if is_long:
        loose = documents(slices, num_tokens, gap, keep_links=False)
        readings += [loose] if len(loose) > len(readings[0]) else []
    recipes = RECIPES_FEW if cp_size <= FEW_RANKS else RECIPES_MANY if cp_size <= MANY_RANKS else RECIPES_MOST
    short = max(1, tokens_per_rank // 128)
    readings = [bundle(stretches, short) for stretches in readings]
    candidates = []
    mean_work = _expected_work(profile, readings[0], cp_size)
    for recipe in recipes[: -(-len(recipes) // len(readings))]:
        for stretches in readings:
            owned, work = place_documents(profile, stretches, num_tokens, cp_size, recipe, mean_work)
            mean_work = int(work.mean())
            candidates.append((_seconds(layers, owned, work, heads, cost), owned, stretches))
    candidates.sort(key=itemgetter(0))
    if nodes is None or len(nodes) == 1:
        return candidates[0][1]
    row_seconds = sum(count for _, count in layers) * heads.row_bytes / cost.across.bandwidth
    seated = []
    for seconds, owned, stretches in candidates[:SEATED]:
        rows, owned = seat_in_nodes(slices, stretches[:, 0], owned, nodes)
        seated.append((seconds + rows * row_seconds, owned))
    return min(seated, key=itemgetter(0))[1]


def _expected_work(profile: WorkProfile, stretches: Int64Array, cp_size: int) -> int:
    """An estimate of a rank's mean work once documents too large for one are cut, at rows of 0.7 of the most keys."""
    work = profile.of_each(*stretches.T)
    mean = max(1, int(work.sum()) // cp_size)
    keys = work // (stretches[:, 1] - stretches[:, 0])
    cuts = work // mean
    return mean + int((cuts * keys).sum()) * profile.rows_wasted * 7 // (5 * cp_size)


def _seconds(layers: Layers, owned: Sequence[Int64Array], work: Int64Array, heads: Heads, cost: CostModel) -> float:
    """What a placement adds to the time of all layers: work beyond the imbalance allowed, rows that travel."""
    excess = max(0.0, float(work.max() - work.mean() * IMBALANCE))
    received, sent = np.sum([np.array(traffic(slices, owned)[1:]) * count for slices, count in layers], 0)
    rows = max(int(received.max()), int(sent.max())) + int(received.sum()) // len(owned)
    pair_seconds = cost.forward.pair_seconds(heads) + cost.backward.pair_seconds(heads)
    return excess * pair_seconds + rows * heads.row_bytes / cost.inside.bandwidth
