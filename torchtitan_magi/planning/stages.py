"""Into how many stages remote K/V are cut, by a model of what a stage costs and what it hides.

The model predicts when each rank's stages arrive, run and return in one layer, and the cut with the shortest prediction
is chosen, for the forward and for the backward. All ranks run the same stages, as each begins with a collective.
Its constants were fitted to measurements; `torchtitan_magi.calibrate` measures them on other machines.
"""

import itertools
import json
import math
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import intersecting, union
from torchtitan_magi.masks.slices import IntArray, clip_keys, slice_areas
from torchtitan_magi.tiles import ROWS, forward_heads_per_tile

FloatArray = npt.NDArray[np.float64]
Share = tuple[Fraction, Fraction]  # from which to which part of the remote K/V
Shares = tuple[Share, ...]  # of each stage; the first one also holds the rank's own K/V

NONE, ALL = Fraction(0), Fraction(1)
RESIDENT: Shares = ((NONE, NONE),)  # nothing travels
# What has a stage more must be predicted to take less than this of the time, and so much less for each further one: a
# stage takes the host 60 us forward and 150 backward, and measured, backwards with some took longer than predicted. As
# many stages cut in another way must, too, as they have index data of their own.
SIMPLER = 0.98


@dataclass(frozen=True)
class Heads:
    """Shape of the attention layers on one rank."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_heads_kv < 1 or self.num_heads_q < 1 or self.num_heads_q % self.num_heads_kv or self.head_dim < 1:
            raise ValueError(
                f"{self.num_heads_q} query heads, {self.num_heads_kv} K/V heads, head_dim {self.head_dim}; "
                "the query heads must be a multiple of the K/V heads"
            )

    @property
    def tile_rows(self) -> int:
        """Tokens of a tile of the kernel's forward."""
        return ROWS // forward_heads_per_tile(self.num_heads_q // self.num_heads_kv)

    def tile_filling(self, rows: npt.NDArray[Any]) -> FloatArray:
        """Pairs that the tiles over a stretch of so many rows compute, over pairs of the mask; at any offset, mean."""
        return 1 + (self.tile_rows - 1) / np.maximum(rows, 1)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K and V in 16 bits."""
        return 4 * self.num_heads_kv * self.head_dim

    @property
    def out_elements(self) -> int:
        """Elements of one token's attention output."""
        return self.num_heads_q * self.head_dim


LLAMA_HEADS = Heads(num_heads_q=64, num_heads_kv=8, head_dim=128)  # of Llama 3.1 70B


@dataclass(frozen=True)
class KernelCost:
    """Seconds of a kernel call: `launch`, and per query head what its pairs and its rows cost.

    A pair of a query and a key costs pair + pair_dim * head_dim, a row (a query token with any key) row + row_dim *
    head_dim: rows pay for blocks that are filled only in part, for prologue and epilogue. So short documents run slow.
    """

    launch: float  # s
    pair: float  # s
    pair_dim: float  # s per element
    row: float  # s
    row_dim: float  # s per element

    def seconds(self, pairs: FloatArray, rows: FloatArray, heads: Heads) -> FloatArray:
        dim = heads.head_dim
        work = pairs * (self.pair + self.pair_dim * dim) + rows * (self.row + self.row_dim * dim)
        return self.launch + heads.num_heads_q * work


@dataclass(frozen=True)
class Link:
    """An all-to-all: every GPU sends and receives at once."""

    latency: float  # s
    bandwidth: float  # bytes/s that a GPU sends, and receives

    def seconds(self, num_bytes: FloatArray) -> FloatArray:
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True)
class CostModel:
    """What one layer's attention and communication cost on a kind of machine."""

    forward: KernelCost
    backward: KernelCost
    merge: float  # s per element of out: what a forward takes longer as one of several, on average of first and last
    stage: float  # s of a stage that communicates: packing its rows, starting its exchange
    memory: float  # bytes/s of element-wise passes
    slowdown: float  # part of the kernel's speed that communication takes while both run
    inside: Link  # a node
    across: Link  # nodes

    @classmethod
    def load(cls, path: str | Path) -> "CostModel":
        """From the JSON file that `save` or torchtitan_magi.calibrate wrote.

        Raises:
            ValueError: there is none, or it says something else.
        """
        try:
            values = json.loads(Path(path).read_text())["cost_model"]
            parts = {f.name: f.type(**values[f.name]) if f.type in _PARTS else values[f.name] for f in fields(cls)}
            if any(not 0 <= value < math.inf for value in _figures(parts)):
                raise ValueError("its figures must be numbers of at least 0")
            if not min(parts["memory"], parts["inside"].bandwidth, parts["across"].bandwidth) > 0:
                raise ValueError("bandwidths must be above 0")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no cost model ({error!r}); make one by torchrun -m torchtitan_magi.calibrate"
            ) from None
        return cls(**parts)

    def save(self, path: Path, **notes: Any) -> None:
        """As JSON, with notes on where the values come from."""
        path.write_text(json.dumps({**notes, "cost_model": asdict(self)}, indent=1) + "\n")


_PARTS = (KernelCost, Link)


def _figures(parts: dict[str, Any]) -> list[float]:
    return [value for part in parts.values() for value in (vars(part).values() if type(part) in _PARTS else (part,))]


# Kernel: `calibrate --fit benchmarks/results/kernel_h200.json` at commit 16ed43a; they predict the cases of that file
# to -15% (a pack of 256k tokens; -11% else) and +9% forward, -8% and +9% backward.
# The rest: calibrate.py on four at 27e378a, rows fetched through peer memory; slowdown is of a backward, the forward
# showed 0.03. cost_h200x4.json, of a later run, has 81 us and 353 GB/s and predicts layers no better. `across` nobody
# has measured yet: one 400 Gb/s adapter per GPU.
H200 = CostModel(
    forward=KernelCost(launch=9.3e-6, pair=2.40e-13, pair_dim=3.80e-15, row=1.20e-10, row_dim=0.0),
    backward=KernelCost(launch=22.6e-6, pair=6.10e-13, pair_dim=1.09e-14, row=1.72e-10, row_dim=4.89e-12),
    merge=6.0e-13,
    stage=12e-6,
    memory=4.2e12,
    slowdown=0.1,
    inside=Link(latency=45e-6, bandwidth=3.8e11),
    across=Link(latency=60e-6, bandwidth=4.5e10),
)


# ------------------------------------------------------------------------------------------------------------- the work


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


# ------------------------------------------------------------------------------------------------------- the prediction


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


# ----------------------------------------------------------------------------------------------------------- the choice


def equal_stages(count: int) -> Shares:
    """Remote K/V in so many equal stages after the rank's own. 0: no overlap, one stage with everything."""
    if count == 0:
        return ((NONE, ALL),)
    return (*RESIDENT, *((Fraction(i, count), Fraction(i + 1, count)) for i in range(count)))


def _growing_stages(*sizes: int) -> Shares:
    """Stages after the rank's own, of these sizes relative to each other."""
    edges = [Fraction(sum(sizes[:i]), sum(sizes)) for i in range(len(sizes) + 1)]
    return (*RESIDENT, *itertools.pairwise(edges))


# From few stages to many. Where little local work hides the first one, it is better small.
CANDIDATES = (
    equal_stages(0),
    equal_stages(1),
    equal_stages(2),
    _growing_stages(1, 2),
    _growing_stages(1, 3),
    equal_stages(3),
    _growing_stages(1, 2, 4),
    equal_stages(4),
)


def choose_stages(cost: CostModel, work: Workload, heads: Heads) -> tuple[Shares, Shares]:
    """Stages of the forward and of the backward.

    The backward has the forward's, with which it shares index data, unless others are clearly faster.
    """
    if not work.received.any():
        return RESIDENT, RESIDENT
    forward = _fastest(cost, work, heads, False, CANDIDATES)
    return forward, _fastest(cost, work, heads, True, (forward, *CANDIDATES))


def _fastest(cost: CostModel, work: Workload, heads: Heads, backward: bool, candidates: tuple[Shares, ...]) -> Shares:
    """The candidate of the shortest prediction; a later one only if it is clearly shorter than the ones before, for
    each stage that it has more."""
    best, shortest = candidates[0], math.inf
    for shares in candidates:
        seconds = predict(cost, work, heads, shares, backward).seconds
        if seconds < shortest * SIMPLER ** max(1, len(shares) - len(best)):
            best, shortest = shares, seconds
    return best
