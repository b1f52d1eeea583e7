"""Which tokens each context-parallel rank owns: as many for every rank, nearly the same work, few K/V rows that travel.

Documents that fit a rank stay whole; larger ones are spread over few ranks, each with a piece of the tail (heavy) and
one of the front (light, and needed by everyone, so its sending is shared). ``placement_documents`` has the greedy.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtitan_magi.placement_documents import Recipe, WorkProfile, documents, place_documents
from torchtitan_magi.slices import AttnSlices
from torchtitan_magi.traffic import traffic

Int64Array = npt.NDArray[np.int64]

ALL = float("inf")
# Tried in turn; the fewer ranks, the more of them (they are quick then).
RECIPES = (
    Recipe(0.01, 1.0, ALL),
    Recipe(0.01, 0.5, ALL),
    Recipe(0.01, 0.75, ALL),
    Recipe(0.003, 1.0, 4.0),
    Recipe(0.003, 0.5, ALL),
    Recipe(0.003, 0.0, 0.0),
    Recipe(0.003, 1.0, ALL),
    Recipe(0.01, 0.0, 0.0),
)


def place(slices: AttnSlices, num_tokens: int, cp_size: int) -> tuple[Int64Array, ...]:
    """Splits the tokens of a pack over the ranks. The same input gives the same placement everywhere.

    Args:
        slices: the mask over the whole pack.
        num_tokens: tokens of the pack, a multiple of cp_size.
        cp_size: number of ranks.

    Returns:
        per rank int64 [n, 2]: the half-open token ranges it owns, ascending, adjacent ones joined. Every rank owns
        exactly ``num_tokens / cp_size`` tokens.
    """
    tokens_per_rank = num_tokens // cp_size
    if tokens_per_rank == 0:
        return tuple(np.zeros((0, 2), np.int64) for _ in range(cp_size))
    if cp_size == 1:
        return (np.array([[0, num_tokens]]),)
    profile = WorkProfile(slices, num_tokens)
    stretches = documents(slices, num_tokens, longest_gap=-(-tokens_per_rank // 16))
    recipes = RECIPES[: 8 if cp_size <= 8 else 4]
    candidates = [place_documents(profile, stretches, num_tokens, cp_size, recipe) for recipe in recipes]
    return min(candidates, key=lambda owned: _score(slices, owned))


def _score(slices: AttnSlices, owned: Sequence[Int64Array]) -> tuple[float, float]:
    """Smaller is better: first the imbalance beyond what is allowed, then the rows that travel."""
    area, received, sent = traffic(slices, owned)
    excess = int(area.max()) * len(area) / max(1, int(area.sum())) - 1.016
    return max(0.0, excess), max(received.max(), sent.max()) + received.mean() / 2
