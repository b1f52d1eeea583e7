"""The document-aware greedy: documents too large for a rank are cut tail first, everything else stays whole.

Vocabulary:
    document   a stretch of tokens that attends to nothing outside itself
    piece      a stretch [start, end) of one document that no rank owns yet
    work       (query, key) pairs
    fill       what a rank owns besides its heaviest piece
"""

import bisect
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchtitan_magi.ranges import joined, union
from torchtitan_magi.slices import AttnSlices, IntArray, upper_bound

Int64Array = npt.NDArray[np.int64]
Range = tuple[int, int]

START, END, TOKENS, WORK, TAIL = range(5)  # columns of the pool's table
PAIR_CANDIDATES = 96


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


class WorkProfile:
    """Work of any stretch of rows, exactly: piecewise quadratic in the row."""

    def __init__(self, slices: AttnSlices, num_tokens: int) -> None:
        table = slices.canonical().table.astype(np.int64)
        q_start, q_end, k_start, _, mask_type = table.T
        slope = (mask_type & 1) - (mask_type >> 1)
        keys = upper_bound(table, q_start) - k_start - slope * q_start  # of row 0 if the slice reached it
        edges = np.unique(np.concatenate([q_start, q_end, [0, num_tokens]]))
        constant, linear = np.zeros((2, len(edges)), np.int64)
        for rows, sign in ((q_start, 1), (q_end, -1)):
            at = np.searchsorted(edges, rows)
            np.add.at(constant, at, sign * keys)
            np.add.at(linear, at, sign * slope)
        self.slope = linear.cumsum()
        self.keys = constant.cumsum() + self.slope * edges  # of the first row of each stretch
        rows = np.diff(edges)
        work = rows * self.keys[:-1] + self.slope[:-1] * (rows * (rows - 1) // 2)
        self.edges = edges
        self.work = np.append(0, work.cumsum())
        self._lists = [array.tolist() for array in (self.edges, self.work, self.keys, self.slope)]

    def below(self, row: int) -> int:
        """Work of the rows [0, row)."""
        edges, work, keys, slope = self._lists
        i = bisect.bisect_right(edges, row) - 1
        rows = row - edges[i]
        return work[i] + rows * keys[i] + slope[i] * (rows * (rows - 1) // 2)

    def below_each(self, row: Int64Array) -> Int64Array:
        """The same for an array of rows."""
        i = np.searchsorted(self.edges, row, side="right") - 1
        rows = row - self.edges[i]
        return self.work[i] + rows * self.keys[i] + self.slope[i] * (rows * (rows - 1) // 2)


def documents(slices: AttnSlices, num_tokens: int, longest_gap: int) -> Int64Array:
    """Cuts the pack into stretches that attend to nothing outside themselves, int64 [n, 2], ascending.

    Tokens that take part in nothing (padding) make stretches of at most `longest_gap`.
    """
    table = slices.canonical().table.astype(np.int64)
    start, end = np.minimum(table[:, 0], table[:, 2]), np.maximum(table[:, 1], table[:, 3])
    start, end = union(np.zeros(len(table), np.int64), start, end, num_tokens, join=False)[:, 1:].T
    gap_start, gap_end = np.append(0, end), np.append(start, num_tokens)
    steps = -(-(gap_end - gap_start) // longest_gap)
    which = np.repeat(np.arange(len(steps)), steps)
    begin = gap_start[which] + longest_gap * (np.arange(len(which)) - np.repeat(steps.cumsum() - steps, steps))
    gaps = np.stack([begin, np.minimum(begin + longest_gap, gap_end[which])], 1)
    all_stretches = np.concatenate([np.stack([start, end], 1), gaps])
    return all_stretches[np.argsort(all_stretches[:, 0], kind="stable")]


class Pool:
    """The pieces that no rank owns yet, lightest (work per token) first."""

    def __init__(self, profile: WorkProfile, stretches: Int64Array) -> None:
        self.profile = profile
        self.document_starts = stretches[:, 0]
        self.table = self._rows(stretches[:, 0], stretches[:, 1])
        self._set(self.table[np.argsort(self.table[:, WORK] / self.table[:, TOKENS], kind="stable")])

    def _rows(self, start: Int64Array, end: Int64Array) -> Int64Array:
        below = self.profile.below_each
        work, tail = below(end) - below(start), below(end) - below(end - 1)
        return np.stack([start, end, end - start, work, tail], 1)

    def _set(self, table: Int64Array) -> None:
        self.table = table
        self.tokens = np.append(0, table[:, TOKENS].cumsum())  # of the i lightest pieces
        self.work = np.append(0, table[:, WORK].cumsum())

    def __len__(self) -> int:
        return len(self.table)

    def heaviest(self) -> int:
        """Index of the piece whose last row sees the most keys."""
        return int(self.table[:, TAIL].argmax())

    def document_start(self, token: Int64Array) -> Int64Array:
        """First tokens of the documents that these tokens belong to."""
        return self.document_starts[np.searchsorted(self.document_starts, token, side="right") - 1]

    def take(self, which: IntArray) -> list[Range]:
        """Removes these pieces of the table."""
        taken = self.table[which, :2].tolist()
        self._set(np.delete(self.table, which, 0))
        return [(start, end) for start, end in taken]

    def put(self, start: int, end: int) -> None:
        """Adds a piece."""
        if start < end:
            row = self._rows(np.array([start]), np.array([end]))
            at = int(np.searchsorted(self.table[:, WORK] / self.table[:, TOKENS], row[0, WORK] / row[0, TOKENS]))
            self._set(np.concatenate([self.table[:at], row, self.table[at:]]))

    def lightest_work(self, tokens: int) -> int:
        """Work of the lightest pieces that hold so many tokens, the last one cut."""
        i = int(np.searchsorted(self.tokens, tokens, side="right")) - 1
        work, rest = int(self.work[i]), tokens - int(self.tokens[i])
        if rest:
            work += int(self.table[i, WORK]) * rest // int(self.table[i, TOKENS])
        return work


def place_documents(
    profile: WorkProfile, stretches: Int64Array, num_tokens: int, cp_size: int, recipe: Recipe
) -> tuple[Int64Array, ...]:
    """Runs the greedy once, then evens out what the last ranks were left with.

    Args:
        profile: work of the rows. stretches: [n, 2] documents that cover the pack.
        num_tokens: a multiple of cp_size, cp_size at most num_tokens.

    Returns:
        per rank int64 [n, 2] ascending ranges; every rank owns num_tokens / cp_size tokens.
    """
    pool = Pool(profile, stretches)
    tokens = num_tokens // cp_size
    total = profile.below(num_tokens)
    limit = int(total / cp_size * (1 + recipe.slack))
    owned: list[Int64Array] = []
    work: list[int] = []
    for rank in range(cp_size):
        if rank < cp_size - 1:
            ranges = _one_rank(
                pool, tokens, max(limit, int(pool.work[-1]) // (cp_size - rank)), recipe, total / num_tokens
            )
        else:
            ranges = pool.take(np.arange(len(pool)))
        owned.append(joined(*np.array(sorted(ranges), np.int64).T))
        work.append(int(np.diff(profile.below_each(owned[-1])).sum()))
    _even_out(profile, stretches[:, 0], owned, np.array(work), limit)
    return tuple(owned)


def _even_out(
    profile: WorkProfile, document_starts: Int64Array, owned: list[Int64Array], work: Int64Array, limit: int
) -> None:
    """While a rank exceeds the limit, it swaps equal numbers of tokens with the rank of least work. In place."""
    for _ in range(4 * len(owned)):
        a, b = int(work.argmax()), int(work.argmin())
        if work[a] <= limit:
            return
        least, most = int(work[a]) - limit, limit - int(work[b])
        swap = _best_swap(profile, document_starts, owned[a], owned[b], min(least, most), most)
        if swap is None:
            return
        (give, get), moved = swap
        owned[a], owned[b] = _exchange(owned[a], give, get), _exchange(owned[b], get, give)
        work[a] -= moved
        work[b] += moved


def _best_swap(
    profile: WorkProfile, document_starts: Int64Array, mine: Int64Array, theirs: Int64Array, least: int, most: int
) -> tuple[tuple[Range, Range], int] | None:
    """The stretch to give away and the equally long one to get for it, and the work that this moves.

    Of the swaps that move between `least` and `most` work the one that should add the fewest received rows; else the
    one that moves the most below `least`.
    """
    # Step 1: candidates: front or tail of each of the heaviest ranges on both sides, in quarters of the shorter one.
    mine, theirs = (_heaviest_ranges(profile, ranges) for ranges in (mine, theirs))
    i, j, quarters, give_tail, get_tail = (
        x.ravel() for x in np.meshgrid(range(len(mine)), range(len(theirs)), range(1, 5), (0, 1), (0, 1), indexing="ij")
    )
    (give_lo, give_hi), (get_lo, get_hi) = mine[i].T, theirs[j].T
    tokens = np.minimum(give_hi - give_lo, get_hi - get_lo) * quarters // 4
    give = np.where(give_tail, give_hi - tokens, give_lo)
    get = np.where(get_tail, get_hi - tokens, get_lo)
    below = profile.below_each
    moved = below(give + tokens) - below(give) - below(get + tokens) + below(get)

    # Step 2: rows that a cut adds: who owns the rest of the range needs the front, who gets a tail all before it.
    added = np.zeros(len(moved), np.int64)
    for start, lo, hi in ((give, give_lo, give_hi), (get, get_lo, get_hi)):
        document = document_starts[np.searchsorted(document_starts, lo, side="right") - 1]
        is_cut = tokens < hi - lo
        added += np.where(is_cut, np.where(start > lo, start - document, tokens + lo - document), 0)

    # Step 3: choose.
    good = (moved >= max(1, least)) & (moved <= most)
    if good.any():
        best = int(np.where(good, added, np.iinfo(np.int64).max).argmin())
    else:
        best = int(np.where(moved <= most, moved, -1).argmax())
        if moved[best] <= 0 or moved[best] > most:
            return None
    n = int(tokens[best])
    give_start, get_start = int(give[best]), int(get[best])
    return ((give_start, give_start + n), (get_start, get_start + n)), int(moved[best])


def _heaviest_ranges(profile: WorkProfile, ranges: Int64Array, count: int = 24) -> Int64Array:
    work = profile.below_each(ranges[:, 1]) - profile.below_each(ranges[:, 0])
    return ranges[np.argsort(-work, kind="stable")[:count]]


def _exchange(ranges: Int64Array, out: Range, into: Range) -> Int64Array:
    """The ranges without `out`, the front or the tail of one of them, and with `into`."""
    i = int(np.searchsorted(ranges[:, 0], out[0], side="right")) - 1
    start, end = ranges[i].tolist()
    rest = [row for row in ((start, out[0]), (out[1], end)) if row[0] < row[1]]
    changed = np.concatenate([np.delete(ranges, i, 0), np.array([*rest, into], np.int64)])
    return joined(*changed[np.argsort(changed[:, 0], kind="stable")].T)


def _one_rank(pool: Pool, tokens: int, budget: int, recipe: Recipe, mean_keys: float) -> list[Range]:
    """Takes one rank's tokens out of the pool."""
    heaviest = pool.heaviest()
    start, end, length, work, _ = pool.table[heaviest].tolist()
    pool.take(np.array([heaviest]))
    if length <= tokens and work + pool.lightest_work(tokens - length) <= budget:
        return [(start, end), *_window(pool, tokens - length, budget - work, budget, tokens)]
    return _split(pool, start, end, tokens, budget, recipe, mean_keys)


def _split(pool: Pool, start: int, end: int, tokens: int, budget: int, recipe: Recipe, mean_keys: float) -> list[Range]:
    """A tail of the piece [start, end) and a prefix of it, filled with the lightest pieces."""
    below = pool.profile.below
    below_start, below_end, length = below(start), below(end), end - start
    others = int(pool.tokens[-1])
    front_keys = below(start + 1) - below_start
    share = recipe.prefix if front_keys < recipe.reach * mean_keys else 0.0

    # Step 1: the longest tail that the budget allows, with its share of prefix and the lightest fill.
    def prefix_of(tail: int) -> int:
        prefix = min(int(share * tail), tokens - tail, length - tail)
        return max(prefix, tokens - tail - others)

    def is_within(tail: int) -> bool:
        prefix = prefix_of(tail)
        own = below_end - below(end - tail) + below(start + prefix) - below_start
        return own + pool.lightest_work(tokens - tail - prefix) <= budget

    tail = _last_true(is_within, 0, min(tokens, length))
    prefix = prefix_of(tail)

    # Step 2: whole pieces for the fill, the lightest, up to the last one that fits.
    fill = tokens - tail - prefix
    count = int(np.searchsorted(pool.tokens, fill, side="right")) - 1
    next_keys = pool.table[count, WORK] // pool.table[count, TOKENS] if count < len(pool) else 1 << 62
    rest = tokens - int(pool.tokens[count])

    # Step 3: the last tokens: prefix if it is light, so that tail and prefix are cut again to fit tokens and work;
    # else whole pieces for which the tail can make up; else the front of the next piece.
    if rest <= length and front_keys <= next_keys:
        work_left = budget - int(pool.work[count])
        ranges = pool.take(np.arange(count))
        tail = _last_true(
            lambda tail: below_end - below(end - tail) + below(start + rest - tail) - below_start <= work_left, 0, rest
        )
        prefix = rest - tail
    else:
        work_left = budget - (below(start + prefix) - below_start)
        tail, ranges = _fill_beside_tail(pool, tokens - prefix, work_left, start + prefix, end, count)
    pool.put(start + prefix, end - tail)
    return ranges + [(a, b) for a, b in ((start, start + prefix), (end - tail, end)) if a < b]


def _fill_beside_tail(
    pool: Pool, tokens: int, budget: int, start: int, end: int, count: int
) -> tuple[int, list[Range]]:
    """Chooses a tail of [start, end) and pieces beside it: so many tokens, at most so much work.

    Args:
        count: about so many of the lightest pieces belong to it.

    Returns:
        the length of the tail, and the other ranges.
    """
    below, below_each, below_end = pool.profile.below, pool.profile.below_each, pool.profile.below(end)
    # Step 1: two pieces of any length in place of the last one, so that the tail needs no cut piece beside it.
    kept = max(0, count - 1)
    candidates = np.arange(kept, min(len(pool), kept + PAIR_CANDIDATES))
    i, j = _pairs(len(candidates))
    pair_tokens, pair_work = (np.append(pool.table[candidates, c], [0, 0]) for c in (TOKENS, WORK))
    tail = tokens - int(pool.tokens[kept]) - pair_tokens[i] - pair_tokens[j]
    work = int(pool.work[kept]) + pair_work[i] + pair_work[j]
    is_possible = (tail >= 0) & (tail <= end - start)
    tail = np.where(is_possible, tail, 0)
    work_left = budget - work - (below_end - below_each(end - tail))
    off = np.where(is_possible & (work_left >= 0), work_left, np.iinfo(np.int64).max)
    best = int(off.argmin())
    if off[best] <= budget // 128:
        chosen = [k for k in (int(i[best]), int(j[best])) if k < len(candidates)]
        return int(tail[best]), pool.take(np.append(np.arange(kept), candidates[chosen]).astype(np.int64))

    # Step 2: or else the front of the next piece.
    budget -= int(pool.work[count])
    tokens -= int(pool.tokens[count])
    ranges = pool.take(np.arange(count))
    if len(pool) == 0:
        return tokens, ranges
    next_start, next_end = pool.table[0, :2].tolist()
    below_next = below(next_start)
    cut_tail = _last_true(
        lambda tail: below_end - below(end - tail) + below(next_start + tokens - tail) - below_next <= budget,
        max(0, tokens - (next_end - next_start)),
        min(tokens, end - start),
    )
    return cut_tail, ranges + _cut(pool, 0, tokens - cut_tail)


def _window(pool: Pool, tokens: int, budget: int, mean_work: int, rank_tokens: int) -> list[Range]:
    """Neighbours in the order of work per token that hold so many tokens and about so much work."""
    if tokens == 0:
        return []
    # Step 1: for every first piece the last one that still fits, and the work, the rest cut from the next piece.
    ends = np.searchsorted(pool.tokens, pool.tokens[:-1] + tokens, side="right") - 1
    possible = pool.tokens[-1] - pool.tokens[:-1] >= tokens
    rest = tokens - (pool.tokens[ends] - pool.tokens[:-1])
    following = np.minimum(ends, len(pool) - 1)
    work = pool.work[ends] - pool.work[:-1] + rest * pool.table[following, WORK] // pool.table[following, TOKENS]
    # Step 2: the window whose work is nearest, less its last two pieces.
    first = int(np.where(possible, np.abs(work - budget), np.iinfo(np.int64).max).argmin())
    end = max(first, int(ends[first]) - 2)
    gap = tokens - int(pool.tokens[end] - pool.tokens[first])
    budget -= int(pool.work[end] - pool.work[first])
    ranges = pool.take(np.arange(first, end))
    # Step 3: two pieces that close the gap nearly; then a cut.
    lengths = pool.table[:, TOKENS]
    candidates = np.flatnonzero(lengths <= gap)
    candidates = candidates[:: -(-len(candidates) // PAIR_CANDIDATES) or 1]
    i, j = _pairs(len(candidates))
    pair_tokens, pair_work = (np.append(pool.table[candidates, c], [0, 0]) for c in (TOKENS, WORK))
    gaps = gap - pair_tokens[i] - pair_tokens[j]
    off = np.abs(budget - pair_work[i] - pair_work[j] - gaps * int(pool.table[0, WORK]) // int(pool.table[0, TOKENS]))
    score = np.where(gaps >= 0, 2 * gaps + _as_rows(off, mean_work, rank_tokens), np.iinfo(np.int64).max)
    best = int(score.argmin())
    chosen = candidates[[k for k in (int(i[best]), int(j[best])) if k < len(candidates)]]
    budget -= int(pool.table[chosen, WORK].sum())
    return ranges + pool.take(chosen) + _close(pool, int(gaps[best]), budget, mean_work, rank_tokens)


def _close(pool: Pool, gap: int, budget: int, mean_work: int, rank_tokens: int) -> list[Range]:
    """Exactly `gap` tokens of about so much work: the front of a piece, after whole ones if there is none so long."""
    ranges: list[Range] = []
    while gap:
        start, _, lengths, work, _ = pool.table.T
        longer = np.flatnonzero(lengths >= gap)
        if len(longer) == 0:
            i = int(lengths.argmax())
            gap -= int(lengths[i])
            budget -= int(work[i])
            ranges += pool.take(np.array([i]))
            continue
        below = pool.profile.below_each
        front = below(start[longer] + gap) - below(start[longer])
        added = start[longer] - pool.document_start(start[longer]) + np.where(lengths[longer] > gap, gap, 0)
        score = added + _as_rows(np.abs(front - budget), mean_work, rank_tokens)
        return ranges + _cut(pool, int(longer[score.argmin()]), gap)
    return ranges


def _as_rows(off: Int64Array, mean_work: int, rank_tokens: int) -> Int64Array:
    """What a rank's distance from its work is worth in received rows: beyond 0.4%, a tenth of its tokens per 1%."""
    return np.maximum(0, off - mean_work // 256) * 10 // max(1, mean_work // rank_tokens)


@functools.lru_cache(maxsize=256)
def _pairs(count: int) -> tuple[Int64Array, Int64Array]:
    """All pairs i < j of count + 2 items; the last two stand for nothing."""
    i, j = np.triu_indices(count + 2, 1)
    return i, j


def _cut(pool: Pool, i: int, tokens: int) -> list[Range]:
    """Takes the first tokens of a piece."""
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
