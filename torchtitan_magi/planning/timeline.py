"""The work of each rank in one layer, and when it is done: a prediction by the cost model."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import Int64Array, IntArray, clip_keys, frozen, intersecting, slice_areas, union
from torchtitan_magi.planning.cost_model import CostModel, FloatArray, Heads
from torchtitan_magi.planning.needs import CutMask, Parts
from torchtitan_magi.planning.relays import ALL, NONE, Routes, Spans
from torchtitan_magi.planning.stage import sent_before
from torchtitan_magi.tiles import KEYS, stay_whole


@dataclass(frozen=True, eq=False)
class Workload:
    """What each rank does in one layer: float64 [ranks] each, but for `tokens` and `num_nodes`.

    Pairs are (query, key) pairs, and what tiles that are filled in part add to them.
    """

    tokens: int  # of each rank
    local_pairs: FloatArray  # with the rank's own keys
    local_rows: FloatArray  # queries with any own key
    remote_pairs: FloatArray
    remote_rows: FloatArray
    received: FloatArray  # K/V rows that it gets from others
    sent: FloatArray  # rows that others add up into its gradients
    inside: FloatArray  # rows sent or received in its node, the larger, in the first exchange
    across: FloatArray  # the same to and from other nodes
    passed_on: FloatArray  # rows that it gets from relays in its node, or relays itself; 0 without a second exchange
    inside_peers: FloatArray  # ranks of its node with which it exchanges these rows, the more of both ways
    across_peers: FloatArray  # ranks of other nodes
    num_nodes: int = 1

    @property
    def is_inside_a_node(self) -> bool:
        """Whether the kernel can await K/V while it runs: in one node, where peer memory reaches all ranks."""
        return self.num_nodes == 1 and not self.across.any()

    @property
    def is_relayed(self) -> bool:
        """Whether rows pass through relays."""
        return bool(self.passed_on.any())

    @property
    def arriving(self) -> FloatArray:
        """Rows that it gets in all exchanges, also those that it only passes on; with relays at most so many."""
        return self._relayed if self.is_relayed else self.received

    @property
    def leaving(self) -> FloatArray:
        """Rows that it sends in all exchanges; with relays at most so many."""
        return self._relayed if self.is_relayed else self.sent

    @property
    def _relayed(self) -> FloatArray:
        return self.inside + self.across + self.passed_on


def workloads(parts: Parts, mask: CutMask, ways: Sequence[Routes], heads: Heads) -> list[Workload]:
    """Sums up a plan, for each way in which the same rows may travel. The arrays are read-only.

    Args:
        parts: those of the ranks. mask: cut at them.
    """
    cp_size, nodes, transfers = ways[0].cp_size, ways[0].nodes, ways[0].transfers
    rows, pairs = mask.table[:, 1] - mask.table[:, 0], slice_areas(mask.table)
    own, which = _own_keys(parts, mask)
    remote = pairs - np.bincount(which, slice_areas(own), len(pairs)).astype(np.int64)
    tiles = heads.tile_filling(rows)

    def per_rank(which: IntArray, values: npt.NDArray[np.number]) -> FloatArray:
        return frozen(np.bincount(which, values, cp_size).astype(np.float64))

    def rows_of(which: IntArray, table: IntArray) -> FloatArray:
        """Query rows of slices of the ranks; one that is in several counts once."""
        found = union(which, table[:, 0], table[:, 1], int(parts.ranges[:, 1].max(initial=0)))
        return per_rank(found[:, 0], found[:, 2] - found[:, 1])

    def busier_way(hops: Int64Array) -> FloatArray:
        receiver, source, start, end = hops[:, :4].T
        return frozen(np.maximum(per_rank(receiver, end - start), per_rank(source, end - start)))

    def peers(hops: Int64Array) -> FloatArray:
        receiver, source = np.divmod(np.unique(hops[:, 0] * cp_size + hops[:, 1]), cp_size)
        ones = np.ones(len(receiver))
        return frozen(np.maximum(per_rank(receiver, ones), per_rank(source, ones)))

    destination, source, start, end = transfers.T
    from_node = nodes.node[destination] != nodes.node[source]
    of_any_way = functools.partial(
        Workload,
        tokens=int((parts.ranges[:, 1] - parts.ranges[:, 0]).sum()) // cp_size,
        local_pairs=per_rank(mask.owner, (pairs - remote) * tiles),
        local_rows=rows_of(mask.owner[which], own),
        remote_pairs=per_rank(mask.owner, remote * tiles),
        remote_rows=rows_of(mask.owner[remote > 0], mask.table[remote > 0]),
        received=per_rank(destination, end - start),
        sent=per_rank(source, end - start),
        num_nodes=len(nodes),
    )

    def by(routes: Routes) -> Workload:
        crosses = nodes.node[routes.hops[:, 0]] != nodes.node[routes.hops[:, 1]]
        return of_any_way(
            inside=busier_way(routes.hops[~crosses]),
            across=busier_way(routes.hops[crosses]),
            passed_on=per_rank(destination, (end - start) * from_node * routes.has_relays),
            inside_peers=peers(routes.hops[~crosses]),
            across_peers=peers(routes.hops[crosses]),
        )

    return [by(routes) for routes in ways]


def _own_keys(parts: Parts, mask: CutMask) -> tuple[IntArray, IntArray]:
    """The mask restricted to keys that the queries' owners hold: table [m, 5], and the slice of each row of it, [m]."""
    limit = int(parts.ranges[:, 1].max(initial=0)) + 1  # the ranks' tokens one after another on one axis
    order = np.argsort(parts.owner, kind="stable")
    own, shift = parts.ranges[order], limit * parts.owner[order, None]
    first, end = (mask.table[:, 2:4] + limit * mask.owner[:, None]).T
    which, part = intersecting(first, end, *(own + shift).T)
    table, origin = clip_keys(mask.table[which], *own[part].T)
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

    @property
    def link_seconds(self) -> float:
        """How long rows are under way, in all exchanges."""
        return float(sum((times[:, 1] - times[:, 0]).max(1).sum() for times in (self.casts, self.reduces)))


def predict(cost: CostModel, work: Workload, heads: Heads, spans: Spans, backward: bool) -> Timeline:
    """The timeline of one layer: K/V of two stages are under way or in use, dK/dV of a stage return when it has run."""
    steps, num_ranks = _Steps(cost, work, heads, spans, backward), len(work.received)
    casts, attends, reduces = np.zeros((3, len(spans), 2, num_ranks))
    link_free = 0.0  # a collective begins when all ranks have come to it and the one before has ended

    def exchange(times: FloatArray, seconds: FloatArray | None, issued: FloatArray) -> None:
        nonlocal link_free
        if seconds is not None:
            times[0] = max(link_free, float(issued.max()))
            times[1] = times[0] + seconds
            link_free = float(times[1].max())

    now = np.zeros(num_ranks)
    sent = 0
    for i in range(len(spans)):
        start = np.maximum(now, casts[i, 1]) if i < sent else now
        for j in range(sent, sent_before(i, steps.travels(i), len(spans))):
            exchange(casts[j], steps.cast(j), start)
            sent += 1
        seconds = steps.attend(i)
        start = np.maximum(start, casts[i, 1] - seconds * steps.early_fraction(i))
        beside = np.concatenate([casts, reduces])
        shared = np.minimum(beside[:, 1], start + seconds) - np.maximum(beside[:, 0], start)
        now = start + seconds + cost.slowdown * np.maximum(shared, 0).sum(0)
        attends[i] = start, now
        if backward:
            exchange(reduces[i], steps.reduce(i), now)
    if backward:
        now = np.maximum(now, reduces[-1, 1]) + steps.sum_gradients()
    return Timeline(casts, attends, reduces, now)


def rounds_at_once(work: Workload, heads: Heads, spans: Spans) -> bool:
    """Whether a backward has each row's gradients in one piece, and so needs no sums of them in float32."""
    return len(spans) == 1 and stay_whole(work.tokens // KEYS, *heads.counts)


@dataclass(frozen=True, eq=False)
class _Steps:
    """How long the steps of one layer take, in seconds: float64 [ranks] each."""

    cost: CostModel
    work: Workload
    heads: Heads
    spans: Spans
    backward: bool

    def fraction(self, i: int) -> float:
        """The fraction of the remote K/V that stage i brings."""
        return float(self.spans[i][1] - self.spans[i][0])

    def travels(self, i: int) -> bool:
        """Whether stage i brings any remote K/V."""
        return self.spans[i][0] < self.spans[i][1]

    def cast(self, i: int) -> FloatArray | None:
        """The exchanges of stage i's K/V; None if nothing travels."""
        if not self.travels(i):
            return None
        cost, work, size = self.cost, self.work, self.fraction(i) * self.heads.row_bytes
        seconds = cost.inside.seconds(work.inside * size, work.inside_peers)
        if work.across.any():
            seconds = np.maximum(seconds, cost.across.seconds(work.across * size, work.across_peers))
        if work.is_relayed:
            peers = -(-len(work.received) // work.num_nodes) - 1  # a relay passes on to all of its node
            seconds = seconds + cost.inside.seconds(work.passed_on * size, peers)
        return seconds

    def reduce(self, i: int) -> FloatArray | None:
        """The exchanges of stage i's dK/dV."""
        if i == len(self.spans) - 1 and self.spans[i] == (NONE, ALL) and self.work.is_inside_a_node:
            # The kernel that ends the backward writes them to where they are added.
            return self.work.inside * self.heads.row_bytes / self.cost.inside.bandwidth
        return self.cast(i)

    def attend(self, i: int) -> FloatArray:
        """The time that stage i keeps the GPU busy."""
        cost, work, fraction = self.cost, self.work, self.fraction(i)
        pairs, keys = fraction * work.remote_pairs, fraction * work.received
        rows = work.remote_rows if fraction else np.zeros_like(pairs)
        if i == 0:
            pairs, keys, rows = pairs + work.local_pairs, keys + work.tokens, np.maximum(rows, work.local_rows)
        if self.backward:
            seconds = cost.backward.seconds(pairs, (rows + keys) / 2, self.heads)
        else:
            seconds = cost.forward.seconds(pairs, rows, self.heads)
            if len(self.spans) > 1:  # the last one rounds all rows
                merged = rows if i + 1 < len(self.spans) else np.full_like(rows, work.tokens)
                seconds = seconds + cost.merge * merged * self.heads.out_elements
        if not fraction:
            return seconds
        products = 3 if self.backward else 1  # the backward also has those of two gradients
        arrived = fraction * work.received
        return seconds + cost.stage + products * arrived * cost.forward.expansion_seconds(self.heads)

    def early_fraction(self, i: int) -> FloatArray:
        """The fraction of stage i that a rank can do before the stage's K/V are there."""
        work = self.work
        if i > 0 or not work.is_inside_a_node:
            return np.zeros_like(work.received)
        return work.local_pairs / np.maximum(work.local_pairs + self.fraction(i) * work.remote_pairs, 1)

    def sum_gradients(self) -> FloatArray:
        """What dK/dV take because they are sums, unlike those of one device alone.

        Counted in 2 bytes per element. In float32 the rank's own are 2 written instead of 1, 2 read, 1 written; of
        others' rows 2 are written instead of 1, 2 read; what returns is 1 read, and before the last stage its sum is
        read and written besides. Where tiles stay whole, one stage rounds at once: others' rows are read once more, and
        the own rows to which something returns are read with it and written.
        """
        work = self.work
        if not work.received.any():
            return np.zeros_like(work.received)
        if rounds_at_once(work, self.heads, self.spans):
            passes = work.received + 3 * work.sent
        else:
            summed = float(self.spans[-1][0])  # returns before the last stage
            passes = 4 * work.tokens + 3 * work.received + (1 + 4 * summed) * work.sent
        return passes * self.heads.row_bytes / self.cost.memory
