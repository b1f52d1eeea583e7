"""The document-aware greedy: documents too large for a rank are cut tail first, everything else stays whole.

Vocabulary:
    document   tokens that attend to nothing outside it
    stretch    tokens [start, end) of one document that no rank owns yet
    work       (query, key) pairs, and the tiles of the kernel that are filled only in part
    fill       what a rank owns besides its heaviest stretch
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, joined
from torchtitan_magi.planning.placement.pool import TAIL, TOKENS, WORK, Pool, Range
from torchtitan_magi.planning.placement.profile import WorkProfile
from torchtitan_magi.planning.placement.swaps import even_out

PAIR_CANDIDATES = 96  # stretches whose pairs are tried to close a gap


@dataclass(frozen=True)
class Recipe:
    """One way to run the greedy.

    Attributes:
        slack: how far a rank may exceed the mean work while others remain, as a fraction.
        prefix: tokens taken from a document's front for each token taken from its tail.
        reach: take from the front only while its rows see fewer keys than `reach` times the mean row.
    """

    slack: float
    prefix: float
    reach: float


def place_documents(
    profile: WorkProfile, stretches: Int64Array, num_tokens: int, cp_size: int, recipe: Recipe, mean_work: int
) -> tuple[tuple[Int64Array, ...], Int64Array]:
    """Runs the greedy once, then evens out what the last ranks were left with.

    Args:
        profile: work of the rows.
        stretches: int64 [n, 2]: documents that cover the pack.
        num_tokens: a multiple of cp_size, cp_size at most num_tokens.
        mean_work: an estimate of the mean work of a rank; cuts add to the work of the whole documents.

    Returns:
        per rank int64 [n, 2] ascending ranges, and the work of each rank, int64 [cp_size]. Every rank owns
        num_tokens / cp_size tokens.
    """
    pool = Pool(profile, stretches)
    tokens = num_tokens // cp_size
    limit = int(mean_work * (1 + recipe.slack))
    mean_keys = profile.below(num_tokens) / num_tokens
    owned: list[Int64Array] = []
    for rank in range(cp_size - 1):
        budget = max(limit, int(pool.work[-1]) // (cp_size - rank))
        owned.append(np.array(sorted(_one_rank(pool, tokens, budget, recipe, mean_keys)), np.int64))
    owned.append(np.array(sorted(pool.take(np.arange(len(pool)))), np.int64))
    work = even_out(profile, owned, limit)
    return tuple(joined(*ranges.T) for ranges in owned), work


def _one_rank(pool: Pool, tokens: int, budget: int, recipe: Recipe, mean_keys: float) -> list[Range]:
    """Takes one rank's tokens out of the pool."""
    heaviest = pool.heaviest()
    start, end, length, work = pool.table[heaviest, :TAIL].tolist()
    pool.take(np.array([heaviest]))
    if length <= tokens and work + pool.lightest_work(tokens - length) <= budget:
        return [(start, end), *_window(pool, tokens - length, budget - work, budget, tokens)]
    return _split(pool, start, end, tokens, budget, recipe, mean_keys)


def _split(pool: Pool, start: int, end: int, tokens: int, budget: int, recipe: Recipe, mean_keys: float) -> list[Range]:
    """Takes a tail and a prefix of the stretch [start, end), and the lightest stretches to fill the rank."""
    work_of, length = pool.profile.of, end - start
    others = int(pool.tokens[-1])
    front_keys = pool.profile.below(start + 1) - pool.profile.below(start)
    ratio = recipe.prefix if front_keys < recipe.reach * mean_keys else 0.0

    # Step 1: the longest tail that the budget allows, with the prefix that goes with it and the lightest fill.
    def prefix_of(tail: int) -> int:
        prefix = min(int(ratio * tail), tokens - tail, length - tail)
        return max(prefix, tokens - tail - others)

    def is_within(tail: int) -> bool:
        prefix = prefix_of(tail)
        own = work_of(end - tail, end) + work_of(start, start + prefix)
        return own + pool.lightest_work(tokens - tail - prefix) <= budget

    tail = _last_true(is_within, 0, min(tokens, length))
    prefix = prefix_of(tail)

    # Step 2: whole stretches for the fill, the lightest, up to the last one that fits.
    fill = tokens - tail - prefix
    count = int(np.searchsorted(pool.tokens, fill, side="right")) - 1
    next_keys = pool.table[count, WORK] // pool.table[count, TOKENS] if count < len(pool) else 1 << 62
    rest = tokens - int(pool.tokens[count])

    # Step 3: the last tokens: prefix if it is light, so that tail and prefix are cut again to fit tokens and work;
    # else whole stretches for which the tail can make up; else the front of the next stretch.
    if rest <= length and front_keys <= next_keys:
        work_left = budget - int(pool.work[count])
        ranges = pool.take(np.arange(count))
        tail = _last_true(
            lambda tail: work_of(end - tail, end) + work_of(start, start + rest - tail) <= work_left, 0, rest
        )
        prefix = rest - tail
    else:
        work_left = budget - work_of(start, start + prefix)
        tail, ranges = _fill_beside_tail(pool, tokens - prefix, work_left, start + prefix, end, count)
    pool.put(start + prefix, end - tail)
    return ranges + [(a, b) for a, b in ((start, start + prefix), (end - tail, end)) if a < b]


def _fill_beside_tail(
    pool: Pool, tokens: int, budget: int, start: int, end: int, count: int
) -> tuple[int, list[Range]]:
    """Chooses a tail of [start, end) and stretches beside it.

    Args:
        tokens: of tail and stretches together.
        budget: their work, at most.
        count: lightest stretches that fill the rank beside a tail of estimated length.

    Returns:
        the length of the tail, and the ranges of the stretches.
    """
    work_of = pool.profile.of
    # Step 1: two stretches of any length in place of the last one, so that the tail needs no cut stretch beside it.
    kept = max(0, count - 1)
    candidates = np.arange(kept, min(len(pool), kept + PAIR_CANDIDATES))
    i, j = _pairs(len(candidates))
    pair_tokens, pair_work = (np.append(pool.table[candidates, c], [0, 0]) for c in (TOKENS, WORK))
    tail = tokens - int(pool.tokens[kept]) - pair_tokens[i] - pair_tokens[j]
    work = int(pool.work[kept]) + pair_work[i] + pair_work[j]
    possible = np.flatnonzero((tail >= 0) & (tail <= end - start) & (work <= budget))
    work_left = budget - work[possible] - pool.profile.of_each(end - tail[possible], end)
    off = np.where(work_left >= 0, work_left, np.iinfo(np.int64).max)
    if len(off) and off.min() <= budget // 128:
        best = possible[off.argmin()]
        chosen = [k for k in (int(i[best]), int(j[best])) if k < len(candidates)]
        return int(tail[best]), pool.take(np.append(np.arange(kept), candidates[chosen]).astype(np.int64))

    # Step 2: or else the front of the next stretch.
    budget -= int(pool.work[count])
    tokens -= int(pool.tokens[count])
    ranges = pool.take(np.arange(count))
    if len(pool) == 0:
        return tokens, ranges
    next_start, next_end = pool.table[0, :2].tolist()
    cut_tail = _last_true(
        lambda tail: work_of(end - tail, end) + work_of(next_start, next_start + tokens - tail) <= budget,
        max(0, tokens - (next_end - next_start)),
        min(tokens, end - start),
    )
    return cut_tail, ranges + _cut(pool, 0, tokens - cut_tail)


def _window(pool: Pool, tokens: int, budget: int, mean_work: int, rank_tokens: int) -> list[Range]:
    """Takes neighbours in the order of work per token: `tokens` tokens, about `budget` work."""
    if tokens == 0:
        return []
    # Step 1: for every first stretch the last one that still fits, and the work, the rest cut from the next stretch.
    ends = np.searchsorted(pool.tokens, pool.tokens[:-1] + tokens, side="right") - 1
    possible = pool.tokens[-1] - pool.tokens[:-1] >= tokens
    rest = tokens - (pool.tokens[ends] - pool.tokens[:-1])
    following = np.minimum(ends, len(pool) - 1)
    keys = pool.table[:, WORK] // pool.table[:, TOKENS]
    work = pool.work[ends] - pool.work[:-1] + rest * keys[following]
    # Step 2: the window whose work is nearest, less its last two stretches.
    first = int(np.where(possible, np.abs(work - budget), np.iinfo(np.int64).max).argmin())
    end = max(first, int(ends[first]) - 2)
    gap = tokens - int(pool.tokens[end] - pool.tokens[first])
    budget -= int(pool.work[end] - pool.work[first])
    ranges = pool.take(np.arange(first, end))
    # Step 3: two stretches that close the gap nearly; then a cut.
    lengths = pool.table[:, TOKENS]
    candidates = np.flatnonzero(lengths <= gap)
    candidates = candidates[:: -(-len(candidates) // PAIR_CANDIDATES) or 1]
    i, j = _pairs(len(candidates))
    pair_tokens, pair_work = (np.append(pool.table[candidates, c], [0, 0]) for c in (TOKENS, WORK))
    gaps = gap - pair_tokens[i] - pair_tokens[j]
    off = np.abs(budget - pair_work[i] - pair_work[j] - gaps * keys[0])
    score = np.where(gaps >= 0, 2 * gaps + _as_rows(off, mean_work, rank_tokens), np.iinfo(np.int64).max)
    best = int(score.argmin())
    chosen = candidates[[k for k in (int(i[best]), int(j[best])) if k < len(candidates)]]
    budget -= int(pool.table[chosen, WORK].sum())
    return ranges + pool.take(chosen) + _close(pool, int(gaps[best]), budget, mean_work, rank_tokens)


def _close(pool: Pool, gap: int, budget: int, mean_work: int, rank_tokens: int) -> list[Range]:
    """Takes `gap` tokens of about `budget` work: the front of one stretch, after whole ones if none is long enough."""
    ranges: list[Range] = []
    while gap:
        start, _, lengths, work, _, before, edge = pool.table.T
        longer = np.flatnonzero(lengths >= gap)
        if len(longer) == 0:
            i = int(lengths.argmax())
            gap -= int(lengths[i])
            budget -= int(work[i])
            ranges += pool.take(np.array([i]))
            continue
        until, keys = pool.profile.last_row(start[longer] + gap, edge[longer])
        front = pool.profile.with_tiles(until - before[longer], gap)
        added = keys - np.where(lengths[longer] > gap, 0, gap)
        score = added + _as_rows(np.abs(front - budget), mean_work, rank_tokens)
        return ranges + _cut(pool, int(longer[score.argmin()]), gap)
    return ranges


def _as_rows(off: Int64Array, mean_work: int, rank_tokens: int) -> Int64Array:
    """A rank's distance from its budget in units of received rows: beyond 0.4%, a tenth of its tokens per 1%."""
    return np.maximum(0, off - mean_work // 256) * 10 // max(1, mean_work // rank_tokens)


@functools.lru_cache(maxsize=256)
def _pairs(count: int) -> tuple[Int64Array, Int64Array]:
    """All pairs i < j of count + 2 items; the last two stand for nothing."""
    i, j = np.triu_indices(count + 2, 1)
    return i, j


def _cut(pool: Pool, i: int, tokens: int) -> list[Range]:
    """Takes the first tokens of a stretch."""
    ((start, end),) = pool.take(np.array([i]))
    pool.put(start + tokens, end)
    return [(start, start + tokens)] if tokens else []


def _last_true(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] for which holds(n), by bisection; low if there is none."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
