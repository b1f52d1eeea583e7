"""The work of each rank in one layer, and when it is done: a prediction by the cost model."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import IntArray, clip_keys, intersecting, slice_areas, union
from torchtitan_magi.planning.cost_model import CostModel, FloatArray, Heads

Share = tuple[Fraction, Fraction]  # from which to which part of the remote K/V
Shares = tuple[Share, ...]  # of each stage; the first one also holds the rank's own K/V

NONE, ALL = Fraction(0), Fraction(1)
RESIDENT: Shares = ((NONE, NONE),)  # nothing travels


@dataclass(frozen=True, eq=False)
class Workload:
    """What each rank does in one layer; float64 [ranks] each, but for `tokens`."""

    tokens: int  # of a rank
    local_pairs: FloatArray  # with its own keys, and what tiles that are filled in part add to them
    local_rows: FloatArray  # queries with any own key
    remote_pairs: FloatArray
    remote_rows: FloatArray
    received: FloatArray  # K/V rows that it gets from others
    sent: FloatArray  # rows that others add up into its gradients
    inside: FloatArray  # rows sent or received in its node, the larger, in the first exchange
    across: FloatArray  # the same to and from other nodes
    passed_on: FloatArray  # rows that it gets from relays in its node, or relays itself; 0 without a second exchange


def workload(
    rank: IntArray,
    pieces: IntArray,
    parts: IntArray,
    owner: IntArray,
    transfers: IntArray,
    hops: IntArray,
    cp_size: int,
    tokens_per_rank: int,
    gpus_per_node: int,
    heads: Heads,
) -> Workload:
    """Sums up a plan.

    Args:
        rank, pieces: int64 [n], [n, 5]: the slices cut at the ranks' token ranges, and whose each is.
        parts: int64 [p, 2]: the ranks' token ranges, ascending; owner: int64 [p], whose each is.
        transfers: int64 [m, 4]: destination, source, first token, end token.
        hops: from `routes.first_hops`.
    """
    rows, pairs = pieces[:, 1] - pieces[:, 0], slice_areas(pieces)
    own, piece = _own_keys(rank, pieces, parts, owner)
    remote = pairs - np.bincount(piece, slice_areas(own), len(pieces)).astype(np.int64)
    tiles = heads.tile_filling(rows)

    def per_rank(which: IntArray, values: npt.NDArray[Any]) -> FloatArray:
        return np.bincount(which, values, cp_size).astype(np.float64)

    def rows_of(which: IntArray, table: IntArray) -> FloatArray:
        """Query rows of slices of the ranks; one that is in several counts once."""
        found = union(which, table[:, 0], table[:, 1], int(parts[:, 1].max(initial=0)))
        return per_rank(found[:, 0], found[:, 2] - found[:, 1])

    def both_ways(some: npt.NDArray[np.bool_]) -> FloatArray:
        receiver, source, start, end = hops[some, :4].T
        return np.maximum(per_rank(receiver, end - start), per_rank(source, end - start))

    destination, source, start, end = transfers.T
    crosses = hops[:, 0] // gpus_per_node != hops[:, 1] // gpus_per_node
    is_far = destination // gpus_per_node != source // gpus_per_node
    return Workload(
        tokens=tokens_per_rank,
        local_pairs=per_rank(rank, (pairs - remote) * tiles),
        local_rows=rows_of(rank[piece], own),
        remote_pairs=per_rank(rank, remote * tiles),
        remote_rows=rows_of(rank[remote > 0], pieces[remote > 0]),
        received=per_rank(destination, end - start),
        sent=per_rank(source, end - start),
        inside=both_ways(~crosses),
        across=both_ways(crosses),
        passed_on=per_rank(destination, (end - start) * is_far) if gpus_per_node > 1 else np.zeros(cp_size),
    )


def _own_keys(rank: IntArray, pieces: IntArray, parts: IntArray, owner: IntArray) -> tuple[IntArray, IntArray]:
    """The pieces restricted to the keys that their ranks own: [m, 5], and of which piece each is, [m]."""
    limit = int(parts[:, 1].max(initial=0)) + 1  # the ranks' tokens one after another on one axis
    order = np.argsort(owner, kind="stable")
    own, shift = parts[order], limit * owner[order, None]
    which, part = intersecting(pieces[:, 2] + rank * limit, pieces[:, 3] + rank * limit, *(own + shift).T)
    table, origin = clip_keys(pieces[which], *own[part].T)
    return table, which[origin]


@dataclass(frozen=True, eq=False)
class Timeline:
    """When what happens in one layer's forward or backward, in seconds since its start.

    float64 [stages, 2, ranks] each: start and end; what does not happen ends when it starts.
    """

    casts: FloatArray  # K/V arrive
    attends: FloatArray
    reduces: FloatArray  # dK/dV return; backward only
    end: FloatArray  # [ranks]

    @property
    def seconds(self) -> float:
        """Until the last rank is done."""
        return float(self.end.max())


def predict(cost: CostModel, work: Workload, heads: Heads, shares: Shares, backward: bool) -> Timeline:
    """The timeline of one layer: K/V of two stages are under way or in use, dK/dV of a stage return when it has run."""
    num_ranks = len(work.received)
    casts, attends, reduces = np.zeros((3, len(shares), 2, num_ranks))
    link = 0.0  # since when it is free; a collective begins when all ranks have come to it
    travel = [_exchange_seconds(cost, work, heads, share) if share[0] < share[1] else None for share in shares]
    # The kernel that ends the backward writes the gradients of an only exchange inside a node to where they are added.
    written = shares[-1] == (NONE, ALL) and not work.across.any()
    returns = [*travel[:-1], work.inside * heads.row_bytes / cost.inside.bandwidth if written else travel[-1]]
    now = np.zeros(num_ranks)

    def exchange(times: FloatArray, seconds: FloatArray | None, issued: FloatArray) -> None:
        nonlocal link
        if seconds is not None:
            times[0] = max(link, float(issued.max()))
            times[1] = times[0] + seconds
            link = float(times[1].max())

    sent = 0
    for i in range(len(shares)):
        start = np.maximum(now, casts[i, 1]) if i < sent else now
        for j in range(sent, sent_before(i, travel[i] is not None, len(shares))):
            exchange(casts[j], travel[j], start)
            sent += 1
        seconds = _stage_seconds(cost, work, heads, shares, i, backward)
        early = np.zeros(num_ranks)  # what the stage can do before its K/V are there
        if i == 0 and not work.across.any():  # the kernel itself waits for what comes late
            part = float(shares[0][1] - shares[0][0])
            early = seconds * work.local_pairs / np.maximum(work.local_pairs + part * work.remote_pairs, 1)
        start = np.maximum(start, casts[i, 1] - early)
        beside = np.concatenate([casts, reduces])
        shared = np.minimum(beside[:, 1], start + seconds) - np.maximum(beside[:, 0], start)
        now = start + seconds + cost.slowdown * np.maximum(shared, 0).sum(0)
        attends[i] = start, now
        if backward:
            exchange(reduces[i], returns[i], now)
    if backward:
        now = np.maximum(now, reduces[-1, 1]) + _gradient_seconds(cost, work, heads, shares)
    return Timeline(casts, attends, reduces, now)


def sent_before(i: int, travels: bool, num_stages: int) -> int:
    """How many stages' K/V are sent before stage i runs, so that at most two stages of them take memory.

    As many as possible: an exchange begins when the last rank has come to it, and ranks come to their later stages at
    different times, as some have more work with their own K/V than others.

    Args:
        travels: whether any of stage i's own K/V do; the others' all travel.
    """
    return min(i + (2 if travels else 3), num_stages)


def _exchange_seconds(cost: CostModel, work: Workload, heads: Heads, share: Share) -> FloatArray:
    """Time of a stage's exchanges, [ranks]."""
    size = float(share[1] - share[0]) * heads.row_bytes
    seconds = cost.inside.seconds(work.inside * size)
    if work.across.any():
        seconds = np.maximum(seconds, cost.across.seconds(work.across * size))
    if work.passed_on.any():
        seconds = seconds + cost.inside.seconds(work.passed_on * size)
    return seconds


def _stage_seconds(cost: CostModel, work: Workload, heads: Heads, shares: Shares, i: int, backward: bool) -> FloatArray:
    """Time that a stage keeps the GPU busy, [ranks]."""
    part = float(shares[i][1] - shares[i][0])
    pairs, keys = part * work.remote_pairs, part * work.received
    rows = work.remote_rows if part else np.zeros_like(pairs)
    if i == 0:
        pairs, keys, rows = pairs + work.local_pairs, keys + work.tokens, np.maximum(rows, work.local_rows)
    if backward:
        seconds = cost.backward.seconds(pairs, (rows + keys) / 2, heads)
    else:
        seconds = cost.forward.seconds(pairs, rows, heads)
        if len(shares) > 1:  # the last one rounds all rows
            merged = rows if i + 1 < len(shares) else np.full_like(rows, work.tokens)
            seconds = seconds + cost.merge * merged * heads.out_elements
    if part:
        seconds = seconds + cost.stage
    return seconds


def _gradient_seconds(cost: CostModel, work: Workload, heads: Heads, shares: Shares) -> FloatArray:
    """Time that dK/dV take because they are sums, in float32, unlike those of one device alone, [ranks].

    Counted in 2 bytes per element. The rank's own: 2 written instead of 1, 2 read, 1 written. Of others' rows: 2
    written instead of 1, 2 read. What returns: 1 read; before the last stage its sum is read and written besides.
    """
    if not work.received.any():
        return np.zeros_like(work.received)
    summed = float(shares[-1][0])  # returns before the last stage
    passes = 4 * work.tokens + 3 * work.received + (1 + 4 * summed) * work.sent
    return passes * heads.row_bytes / cost.memory
