"""Divides what two ranks own anew, pair after pair, so that fewer rows travel: for packs of few documents per rank.

With few documents per rank there are few ways to divide those of two ranks, and all of them can be tried: every set of
whole pieces for one rank, the front of one more piece to make its tokens equal, the rest for the other rank.
"""

import functools

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import IntArray, intersecting, joined
from torchtitan_magi.planning.placement.profile import WorkProfile

Int64Array = npt.NDArray[np.int64]

MOST_PIECES = 9  # of a pair of ranks: at most 9 * 2**9 ways to divide them
ROUNDS = 6
SENT = 1.1  # that a rank may send, as a multiple of what the rank that receives most receives
# Senders of more are paired with those who send least: so many of each, so often.
COOL_ROUNDS, HOT, COLD = 3, 4, 8


def divide_pairs(
    profile: WorkProfile, stretches: Int64Array, owned: tuple[Int64Array, ...], imbalance: float, attempts: int
) -> tuple[tuple[Int64Array, ...], Int64Array]:
    """Divides the tokens of pairs of ranks that share a document anew while that saves rows.

    A rank needs as many rows of a document as its last row of it has keys. That is exact for causal and full
    documents, an upper bound for others.

    Args:
        stretches: [n, 2] documents that cover the pack.
        owned: per rank int64 [m, 2] ascending ranges, equally many tokens for all.
        imbalance: no pair may exceed the mean work by so much, unless it did before.
        attempts: pairs that are tried.

    Returns:
        per rank int64 [m, 2] ascending ranges, and the work of each rank, int64 [ranks].
    """
    shares = _Shares(profile, stretches, owned)
    limit = int(shares.work.mean() * imbalance)
    tried: dict[tuple[int, int], tuple[int, int]] = {}  # pair -> how often each had changed when it was tried
    changes = [0] * len(owned)
    for _ in range(ROUNDS):
        before = sum(changes)
        received = shares.reach.sum(1) - shares.tokens
        most_sent = int(received.max() * SENT)
        has = (shares.reach > 0).astype(np.int64)
        one, other = np.nonzero(np.triu(has @ has.T, 1))
        shared = np.minimum(shares.reach[one], shares.reach[other]).sum(1)  # rows that one rank would not need twice
        order = np.argsort(-shared, kind="stable")[: np.count_nonzero(shared >= shares.tokens // 256)]
        for a, b in zip(one[order].tolist(), other[order].tolist(), strict=True):
            if attempts == 0 or tried.get((a, b)) == (changes[a], changes[b]):
                continue
            attempts -= 1
            if shares.divide(a, b, limit, most_sent):
                changes[a] += 1
                changes[b] += 1
            tried[a, b] = changes[a], changes[b]
        if attempts == 0 or sum(changes) == before:
            break
    _cool(shares, limit)
    return tuple(joined(*pieces[np.argsort(pieces[:, 0])].T) for pieces in shares.pieces), shares.work


def _cool(shares: "_Shares", limit: int) -> None:
    """Divides the pieces of ranks that send too much anew with those that send least."""
    for _ in range(COOL_ROUNDS):
        received = shares.reach.sum(1) - shares.tokens
        most_sent = int(received.max() * SENT)
        sent = np.array([shares.sent(rank) for rank in range(len(received))])
        order = np.argsort(sent, kind="stable").tolist()
        hot = [rank for rank in reversed(order) if sent[rank] > most_sent][:HOT]
        changed = False
        for a in hot:
            room = MOST_PIECES - len(shares.pieces[a])
            cold = [rank for rank in order if rank != a and len(shares.pieces[rank]) <= room][:COLD]
            changed |= any(shares.divide(a, b, limit, most_sent) for b in cold)
        if not changed:
            break


class _Shares:
    """The pieces of each rank, none across documents.

    Attributes:
        reach: int64 [ranks, documents], keys of the rank's last row of each document, 0 if it has none.
        work: int64 [ranks].
    """

    def __init__(self, profile: WorkProfile, stretches: Int64Array, owned: tuple[Int64Array, ...]) -> None:
        self.profile, self.starts = profile, stretches[:, 0]
        self.tokens = int((owned[0][:, 1] - owned[0][:, 0]).sum())
        self.reach = np.zeros((len(owned), len(stretches)), np.int64)
        self.work = np.zeros(len(owned), np.int64)
        self.pieces = list(owned)
        for rank, ranges in enumerate(owned):
            which, document = intersecting(*ranges.T, *stretches.T)
            start = np.maximum(ranges[which, 0], stretches[document, 0])
            self._set(rank, np.stack([start, np.minimum(ranges[which, 1], stretches[document, 1])], 1))

    def _set(self, rank: int, pieces: Int64Array) -> None:
        self.pieces[rank] = pieces
        self.reach[rank] = 0
        np.maximum.at(self.reach[rank], self._documents(pieces), self._keys(pieces[:, 1]))
        self.work[rank] = self.profile.of_each(*pieces.T).sum()

    def _documents(self, pieces: Int64Array) -> Int64Array:
        return self.starts.searchsorted(pieces[:, 0], side="right") - 1

    def _keys(self, end: Int64Array) -> Int64Array:
        """Of the last row before each end."""
        return self.profile.below_each(end) - self.profile.below_each(end - 1)

    def sent(self, rank: int) -> int:
        """Rows that a rank sends: each piece goes to all ranks that reach farther into its document."""
        pieces = self.pieces[rank]
        receivers = (self.reach[:, self._documents(pieces)] > self._keys(pieces[:, 1])).sum(0)
        return int(receivers @ (pieces[:, 1] - pieces[:, 0]))

    def _pieces_of(self, a: int, b: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Start, end and document of the pieces of two ranks, ascending, adjacent ones joined."""
        pieces = np.concatenate([self.pieces[a], self.pieces[b]])
        pieces = pieces[np.argsort(pieces[:, 0])]
        document = self._documents(pieces)
        is_first = np.append(True, (pieces[1:, 0] != pieces[:-1, 1]) | (document[1:] != document[:-1]))
        first = np.flatnonzero(is_first)
        return pieces[first, 0], pieces[np.append(first[1:], len(pieces)) - 1, 1], document[first]

    def divide(self, a: int, b: int, limit: int, most_sent: int) -> bool:
        """Divides the pieces of two ranks in the best way; whether that is better than before.

        Args:
            limit: of the work of a rank. most_sent: rows that a rank may send.
        """
        # Step 1: tokens, work, rows sent and reach of every set of pieces.
        start, end, document = self._pieces_of(a, b)
        count = len(start)
        if count > MOST_PIECES:
            return False
        length, keys, members = end - start, self._keys(end), _subsets(count)
        is_farther = self.reach[:, document] > keys
        receivers = is_farther.sum(0) - is_farther[a] - is_farther[b]  # outside the pair
        each = np.stack([length, self.profile.of_each(start, end), receivers * length])
        set_tokens, set_work, set_sent = each @ members
        reach, set_reach = _reach_of_sets(document, keys, members)

        # Step 2: every set with a front of one more piece, so that tokens are equal; the rest is the other rank's.
        sent = np.array(max(self.sent(a), self.sent(b)))
        now = int(_cost(self.reach[a].sum(), self.reach[b].sum(), sent, most_sent))
        missing = self.tokens - set_tokens
        cut, chosen = np.nonzero((members == 0) & (missing >= 0) & (missing < length[:, None]))
        rest = members.shape[1] - 1 - chosen - (1 << cut)
        reach_one = set_reach[chosen]  # at least
        reach_other = set_reach[rest] + np.maximum(0, keys[cut] - reach[cut, rest])
        is_possible = np.flatnonzero(_cost(reach_one, reach_other, np.array(0), most_sent) < now)
        if len(is_possible) == 0:
            return False
        cut, chosen, rest, reach_one, reach_other = (
            x[is_possible] for x in (cut, chosen, rest, reach_one, reach_other)
        )
        front, back = missing[chosen], length[cut] - missing[chosen]
        middle = start[cut] + front
        below = self.profile.below_each(np.concatenate([start, end, middle, middle - 1]))
        at_start, at_end, at_middle, before_middle = np.split(below, np.cumsum([count, count, len(middle)]))
        reach_one += np.maximum(0, np.where(front > 0, at_middle - before_middle, 0) - reach[cut, chosen])
        sent = np.maximum(set_sent[chosen] + (receivers[cut] + 1) * front, set_sent[rest] + receivers[cut] * back)
        front_pairs, rest_pairs, wasted = at_middle - at_start[cut], at_end[cut] - at_middle, self.profile.rows_wasted
        work = np.maximum(
            set_work[chosen] + front_pairs + front_pairs * wasted // np.maximum(front, 1),
            set_work[rest] + rest_pairs + rest_pairs * wasted // back,
        )
        cost = _cost(reach_one, reach_other, sent, most_sent)
        cost[work > max(limit, int(self.work[a]), int(self.work[b]))] = now

        # Step 3: the best one, if it is better.
        best = int(cost.argmin())
        if cost[best] >= now:
            return False
        i, m = int(cut[best]), int(middle[best])
        whole = np.stack([start, end], 1)
        for rank, group, piece in ((a, chosen, (start[i], m)), (b, rest, (m, end[i]))):
            mine = np.append(whole[members[:, group[best]] == 1], [piece], 0)
            self._set(rank, mine[mine[:, 0] < mine[:, 1]])
        return True


def _reach_of_sets(document: Int64Array, keys: Int64Array, members: Int64Array) -> tuple[Int64Array, Int64Array]:
    """How far sets of pieces reach into the document of each piece, [pieces, sets], and over all documents, [sets]."""
    reach = keys[:, None] * members
    total = reach.sum(0)
    for i in np.flatnonzero(document[1:] == document[:-1]) + 1:  # of pieces of one document the last one counts
        nearer = np.flatnonzero(document[:i] == document[i])
        total -= np.where(members[i], reach[nearer[0]], 0)
        reach[[*nearer, i]] = np.where(members[i], keys[i], reach[nearer[0]])
    return reach, total


def _cost(reach_one: IntArray, reach_other: IntArray, sent: IntArray, most_sent: int) -> IntArray:
    """Rows received, the larger share a little more, and what is sent beyond its limit eightfold."""
    return reach_one + reach_other + np.maximum(reach_one, reach_other) // 8 + 8 * np.maximum(0, sent - most_sent)


@functools.cache
def _subsets(count: int) -> Int64Array:
    """int64 [count, 2**count]: 1 where the set has the member."""
    return (np.arange(1 << count) >> np.arange(count)[:, None]) & 1
