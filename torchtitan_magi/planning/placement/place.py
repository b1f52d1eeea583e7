"""Which tokens each context-parallel rank owns: as many for every rank, nearly the same work, few K/V rows that travel.

Documents that fit a rank stay whole; larger ones are spread over few ranks, each with a part of the tail (heavy) and
one of the front (light, and needed by everyone, so its sending is shared). ``greedy`` places them, ``swaps`` evens out
the work, ``nodes`` says which rank gets which share. Where work is even in the order of the pack, as with windows or
documents of one length, shares in this order cut only the documents at their ends. The plan takes the placement that is
predicted fastest.
"""

from collections.abc import Iterator

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, frozen, joined
from torchtitan_magi.masks.slices import stacked
from torchtitan_magi.planning.placement.greedy import Recipe, place_documents
from torchtitan_magi.planning.placement.nodes import seat_in_nodes
from torchtitan_magi.planning.placement.profile import Layers, WorkProfile, bundle, documents
from torchtitan_magi.planning.placement.swaps import even_out
from torchtitan_magi.planning.topology import Nodes

UNEVEN = 1.5  # work of the heaviest rank over the mean up to which shares in the order of the pack are tried

ALL = float("inf")
# All of them are tried: subsets of 28 recipes that together did best on the packs of the first seeds in
# benchmarks/results/plan.json.
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


def placements(
    layers: Layers, num_tokens: int, cp_size: int, nodes: Nodes, tile_rows: int
) -> Iterator[tuple[Int64Array, ...]]:
    """Ways to split the tokens of a pack over the ranks. The same input gives the same ones everywhere.

    Args:
        layers: the masks over the whole pack, and how many layers have each: the work of all together is balanced.
        num_tokens: tokens of the pack, a multiple of cp_size.
        cp_size: number of ranks.
        nodes: which ranks sit in which node; ranks that share a document are put in one.
        tile_rows: query tokens per tile of the kernel, by which ranks are balanced.

    Yields:
        per rank int64 [n, 2]: the half-open token ranges it owns, ascending, adjacent ones joined. Every rank owns
        exactly ``num_tokens / cp_size`` tokens.
    """
    tokens_per_rank = num_tokens // cp_size
    in_order = tuple(frozen(np.array([[i, i + 1]]) * tokens_per_rank) for i in range(cp_size))
    if tokens_per_rank == 0 or cp_size == 1:
        yield tuple(ranges[:num_tokens] for ranges in in_order)
        return
    slices = stacked([each for each, _ in layers])  # what attends to what in any layer
    profile = WorkProfile(layers, num_tokens, tile_rows)
    gap = -(-tokens_per_rank // 16)
    readings = [documents(slices, num_tokens, gap)]
    is_long = np.diff(readings[0]).max() > tokens_per_rank
    if is_long:
        loose = documents(slices, num_tokens, gap, keep_links=False)
        readings += [loose] if len(loose) > len(readings[0]) else []
    recipes = RECIPES_FEW if cp_size <= FEW_RANKS else RECIPES_MANY if cp_size <= MANY_RANKS else RECIPES_MOST
    short = max(1, tokens_per_rank // 128)
    readings = [bundle(stretches, short) for stretches in readings]

    def seated(owned: tuple[Int64Array, ...], stretches: Int64Array) -> tuple[Int64Array, ...]:
        return owned if len(nodes) == 1 else seat_in_nodes(slices, stretches[:, 0], owned, nodes)

    mean_work = _expected_work(profile, readings[0], cp_size)
    for recipe in recipes[: -(-len(recipes) // len(readings))]:
        for stretches in readings:
            owned, work = place_documents(profile, stretches, num_tokens, cp_size, recipe, mean_work)
            mean_work = int(work.mean())
            yield seated(owned, stretches)
    work = profile.of_each(*np.concatenate(in_order).T)
    if work.max() <= UNEVEN * work.mean():
        yield in_order
        evened = list(in_order)
        even_out(profile, evened, int(mean_work * (1 + recipes[0].slack)))
        yield seated(tuple(joined(*ranges.T) for ranges in evened), readings[-1])


def _expected_work(profile: WorkProfile, stretches: Int64Array, cp_size: int) -> int:
    """An estimate of a rank's mean work once documents too large for one are cut, at rows of 0.7 of the most keys."""
    work = profile.of_each(*stretches.T)
    mean = max(1, int(work.sum()) // cp_size)
    keys = work // (stretches[:, 1] - stretches[:, 0])
    cuts = work // mean
    return mean + int((cuts * keys).sum()) * profile.rows_wasted * 7 // (5 * cp_size)
