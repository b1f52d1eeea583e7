"""Evens out the work of a placement by swapping stretches of tokens between ranks."""

import functools

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.planning.placement.pool import Range
from torchtitan_magi.planning.placement.profile import WorkProfile

SWAP_RANGES = 8  # heaviest ranges of each side that are tried
FRACTIONS = (64, 48, 32, 16, 8, 4, 2, 1)  # how much of a range to swap, in 64ths


def even_out(profile: WorkProfile, owned: list[Int64Array], limit: int) -> Int64Array:
    """While a rank has too much work, it swaps equal numbers of tokens with the rank of least work.

    Args:
        owned: per rank its ranges, int64 [n, 2]; changed in place.
        limit: most work of a rank; 1.01 times the mean if the mean exceeds it.

    Returns:
        the work of each rank, int64 [ranks].
    """
    work = np.array([int(profile.of_each(*ranges.T).sum()) for ranges in owned])
    if work.mean() > limit:
        limit = int(work.mean() * 1.01)
    for _ in range(len(owned) + 16):
        a, b = int(work.argmax()), int(work.argmin())
        if work[a] <= limit:
            break
        least, most = int(work[a]) - limit, limit - int(work[b])
        swap = _best_swap(profile, owned[a], owned[b], min(least, most), most)
        if swap is None:
            break
        give, get = swap
        owned[a], owned[b] = _exchange(owned[a], give, get), _exchange(owned[b], get, give)
        for rank in (a, b):
            work[rank] = profile.of_each(*owned[rank].T).sum()
    return work


def _best_swap(
    profile: WorkProfile, mine: Int64Array, theirs: Int64Array, least: int, most: int
) -> tuple[Range, Range] | None:
    """The stretch to give away and the equally long one to get for it.

    Among swaps that move between `least` and `most` work this is the one that should add the fewest received rows; if
    there is none, the one that moves the most below `least`.
    """
    # Step 1: candidates: front or tail of the heaviest ranges on both sides, as long as the shorter one or less.
    mine, theirs = (_heaviest_ranges(profile, ranges) for ranges in (mine, theirs))
    i, j, fraction, give_tail, get_tail = _candidates(len(mine), len(theirs))
    (give_lo, give_hi), (get_lo, get_hi) = mine[i].T, theirs[j].T
    tokens = np.minimum(give_hi - give_lo, get_hi - get_lo) * fraction // 64
    give = np.where(give_tail, give_hi - tokens, give_lo)
    get = np.where(get_tail, get_hi - tokens, get_lo)
    below = profile.below_each
    moved = below(give + tokens) - below(give) - below(get + tokens) + below(get)

    # Step 2: of those that move enough work the one whose cuts add the fewest rows. Who gets a front or a tail needs
    # the keys of its last row; when it was a front, who keeps the rest needs that front too.
    good = np.flatnonzero((moved >= max(1, least)) & (moved <= most))
    if len(good):
        added = np.zeros(len(good), np.int64)
        length = tokens[good]
        for start, lo, hi in ((give, give_lo, give_hi), (get, get_lo, get_hi)):
            start, lo, hi = start[good], lo[good], hi[good]
            keys = below(start + length) - below(start + length - 1)
            added += np.where(length < hi - lo, keys - np.where(start > lo, length, 0), 0)
        best = int(good[added.argmin()])
    else:
        best = int(np.where(moved <= most, moved, -1).argmax())
        if moved[best] <= 0 or moved[best] > most:
            return None
    n, give_start, get_start = int(tokens[best]), int(give[best]), int(get[best])
    return (give_start, give_start + n), (get_start, get_start + n)


@functools.lru_cache
def _candidates(num_mine: int, num_theirs: int) -> tuple[Int64Array, ...]:
    """All swaps of one of my ranges with one of theirs: both numbers, the fraction, and whether each gives its tail."""
    axes = range(num_mine), range(num_theirs), FRACTIONS, (0, 1), (0, 1)
    return tuple(x.ravel() for x in np.meshgrid(*axes, indexing="ij"))


def _heaviest_ranges(profile: WorkProfile, ranges: Int64Array) -> Int64Array:
    work = profile.of_each(*ranges.T)
    return ranges[np.argsort(-work, kind="stable")[:SWAP_RANGES]]


def _exchange(ranges: Int64Array, out: Range, into: Range) -> Int64Array:
    """The ranges without `out`, the front or the tail of one of them, and with `into`."""
    i = int(np.searchsorted(ranges[:, 0], out[0], side="right")) - 1
    start, end = ranges[i].tolist()
    rest = [row for row in ((start, out[0]), (out[1], end)) if row[0] < row[1]]
    changed = np.concatenate([np.delete(ranges, i, 0), np.array([*rest, into], np.int64)])
    return changed[np.argsort(changed[:, 0], kind="stable")]
