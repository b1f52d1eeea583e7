"""Ways to spread one layer's attention over ranks and what comes of each: balance, bytes, predicted time.

Ours is a plan as it is. The strategies it replaces are here for comparison only. Each gets our kernel, our cost model
and the benefit of the doubt: collectives at full bandwidth on all links at once, documents that need no padding, dK and
dV in 16 bits.
"""

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, IntArray, clip_rows, expand, intersecting, slice_areas
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.choose_stages import choose_stages, equal_stages
from torchtitan_magi.planning.cost_model import CostModel, FloatArray, Heads, Link
from torchtitan_magi.planning.needs import parts_of
from torchtitan_magi.planning.plan import AttnPlan, PlanSpec, plan_afresh, plan_ownership
from torchtitan_magi.planning.relays import Spans
from torchtitan_magi.planning.timeline import Workload, predict
from torchtitan_magi.planning.topology import Nodes
from torchtitan_magi.sizing.strategies.pack_masks import mask_of, tokens_and_parents
from torchtitan_magi.tiles import KEYS, tile_cost

Owned = tuple[Int64Array, ...]  # of each rank, ranges of its tokens, [n, 2]

FREE = Link(latency=0.0, bandwidth=inf)  # communication takes no time


@dataclass(frozen=True, eq=False)
class Case:
    """A pack, and the machine and layers that it is for.

    Attributes:
        lengths: tokens of its documents, see ``tokens_and_parents``.
        total: tokens of the pack; the last ones may be padding.
        gpus_per_node: at most cp_size.
    """

    lengths: Int64Array
    total: int
    cp_size: int
    gpus_per_node: int
    heads: Heads
    cost: CostModel

    @property
    def nodes(self) -> Nodes:
        """Which ranks sit in which node."""
        return Nodes.of(self.gpus_per_node, self.cp_size)

    @property
    def documents(self) -> Int64Array:
        """Tokens of each document, pair or tree, [n]."""
        sizes, parents = tokens_and_parents(self.lengths)
        return np.diff(np.append(0, sizes.cumsum())[np.append(np.flatnonzero(parents < 0), len(sizes))])

    @property
    def is_flat(self) -> bool:
        """Whether its documents are causal ones."""
        return self.lengths.ndim == 1

    @property
    def kind(self) -> str:
        """What its documents are."""
        return "causal document" if self.is_flat else {3: "preference pair", 2: "tree"}[self.lengths.shape[1]]

    @functools.cached_property
    def slices(self) -> AttnSlices:
        """The mask of the pack, canonical."""
        return mask_of(self.lengths)

    def plan(self) -> AttnPlan:
        """Our plan of it, made anew."""
        return plan_afresh(self.slices, PlanSpec(self.total, self.cp_size, -1, self.heads, self.nodes, self.cost))

    @property
    def tokens(self) -> int:
        """Tokens of a rank, padding included."""
        return -(-self.total // self.cp_size)

    @property
    def ideal_seconds(self) -> FloatArray:
        """Our kernel on the whole pack on one GPU, time over the number of ranks: forward and backward, [2]."""
        table = self.slices.table.astype(np.int64)
        pairs = np.array((slice_areas(table) * self.heads.tile_filling(table[:, 1] - table[:, 0])).sum())
        rows = np.array(float(self.documents.sum()))
        kernels = self.cost.forward, self.cost.backward
        return np.array([kernel.seconds(pairs, rows, self.heads) for kernel in kernels]) / self.cp_size


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one strategy makes of one pack.

    Attributes:
        balance_area: (query, key) pairs of the heaviest rank over the mean.
        balance_tile: run time of the kernel's tiles on the heaviest rank over the mean.
        received, sent: bytes of each rank in a layer's forward, float64 [ranks].
        across: those bytes that each rank exchanges with other nodes, the larger of both directions.
        stages: number of stages in forward and backward.
        seconds: predicted time of a layer's forward and backward, [2].
        exposed: the time saved if links were infinitely fast, forward and backward, [2].
    """

    balance_area: float
    balance_tile: float
    received: FloatArray
    sent: FloatArray
    across: FloatArray
    stages: tuple[int, int]
    seconds: FloatArray
    exposed: FloatArray


def outcome_of(
    case: Case,
    work: Workload,
    spans: tuple[Spans, Spans],
    balance: tuple[float, float],
    rows: tuple[FloatArray, FloatArray],
) -> Outcome:
    """The outcome of a strategy that moves K/V rows in stages.

    Args:
        spans: stages of forward and backward.
        balance: balance_area and balance_tile.
        rows: K/V rows that each rank receives and sends, [ranks] each.
    """

    def seconds_by(cost: CostModel) -> FloatArray:
        directions = zip(spans, (False, True), strict=True)
        return np.array([predict(cost, work, case.heads, *direction).seconds for direction in directions])

    seconds = seconds_by(case.cost)
    exposed = seconds - seconds_by(replace(case.cost, inside=FREE, across=FREE))
    received, sent, across = (x * float(case.heads.row_bytes) for x in (*rows, work.across))
    return Outcome(*balance, received, sent, across, (len(spans[0]), len(spans[1])), seconds, exposed)


def plan_outcome(case: Case, plan: AttnPlan) -> Outcome:
    """The outcome of a plan as it is."""
    rows = plan.received_rows.astype(np.float64), plan.work.sent
    return outcome_of(case, plan.work, (plan.forward, plan.backward), balance_of(plan), rows)


def balance_of(plan: AttnPlan) -> tuple[float, float]:
    """Heaviest rank over the mean, of areas and of tiles; 1 when there is nothing to do."""
    tiles = tile_work(plan.slices, [share.ranges for share in plan.ranks], plan.heads.tile_rows)
    area, tile = (float(x.max() / x.mean()) if x.any() else 1.0 for x in (plan.areas, tiles))
    return area, tile


def tile_work(slices: AttnSlices, owned: Sequence[IntArray], tile_rows: int) -> FloatArray:
    """Run time of the forward kernel's tiles on each rank in units of one block: `tile_rows` local tokens by 128 keys.

    All of a rank's keys count as one buffer in token order (no overlap stages).
    """
    table = slices.canonical().table.astype(np.int64)
    parts, owner = parts_of(owned)
    lengths = parts[:, 1] - parts[:, 0]
    tiles_per_rank = -(-lengths.sum() // len(owned) // tile_rows)
    local = np.empty(len(parts), np.int64)  # local row of each part's first token; a rank's rows begin at a tile
    for rank in range(len(owned)):
        mine = owner == rank
        local[mine] = rank * tiles_per_rank * tile_rows + lengths[mine].cumsum() - lengths[mine]

    # Step 1: the slices' rows in local numbers, cut at tiles.
    which, part = intersecting(table[:, 0], table[:, 1], parts[:, 0], parts[:, 1])
    pieces = clip_rows(table[which], parts[part, 0], parts[part, 1])
    shift = local[part] - parts[part, 0]
    first_tile, end_tile = (pieces[:, 0] + shift) // tile_rows, -(-(pieces[:, 1] + shift) // tile_rows)
    piece = np.repeat(np.arange(len(pieces)), end_tile - first_tile)
    tile = expand(first_tile, end_tile)
    cut = clip_rows(pieces[piece], tile * tile_rows - shift[piece], (tile + 1) * tile_rows - shift[piece])

    # Step 2: blocks per tile, cost per tile, cost per rank.
    blocks = np.bincount(tile, -(-(cut[:, 3] - cut[:, 2]) // KEYS), tiles_per_rank * len(owned))
    return tile_cost(blocks.astype(np.int64)).reshape(len(owned), -1).sum(1)


# --------------------------------------------------------------------------------------- the strategies ours replaces

DESCRIPTIONS = {
    "all-gather": "contiguous shares; every rank gathers all K/V, then attends",
    "all-gather zigzag": "the same with every document cut into 2 cp parts, two for each rank (Megatron-style)",
    "ring": "the zigzag parts; K/V and their gradients go round in cp - 1 steps beside attention",
    "Ulysses": "all-to-all from tokens to heads and back; every rank attends to the whole pack with some heads",
    "min-heap": "equal chunks, heaviest first, to the rank with least work; needed rows go straight to each rank",
}

# ------------------------------------------------------------------------------------------------ who owns which tokens


def contiguous(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    """Rank r owns the r-th stretch of the pack."""
    tokens = num_tokens // cp_size
    return tuple(np.array([[r * tokens, (r + 1) * tokens]]) for r in range(cp_size))


def min_heap(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    """Equal chunks, heaviest first, each to the rank with the least area so far: MagiAttention's default idea."""
    per_rank = chunks_per_rank(num_tokens, cp_size)
    edges = np.arange(per_rank * cp_size + 1) * num_tokens // (per_rank * cp_size)
    work = np.add.reduceat(slices.row_cost(num_tokens), edges[:-1])
    owned: list[list[int]] = [[] for _ in range(cp_size)]
    heap = [(0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        owned[rank].append(chunk)
        if len(owned[rank]) < per_rank:
            heapq.heappush(heap, (load + int(work[chunk]), rank))
    return tuple(np.stack([edges[sorted(c)], edges[1:][sorted(c)]], 1) for c in owned)


def chunks_per_rank(num_tokens: int, cp_size: int) -> int:
    """Chunks of the min-heap: of 1024 tokens, at least 8 and at most 32."""
    return min(32, max(8, num_tokens // cp_size // 1024))


# ---------------------------------------------------------------------------------------------------- what comes of it


def compare(case: Case) -> dict[str, Outcome | None]:
    """The outcomes of all baselines on one pack; None where `why_not` says why one cannot run. Empty for one rank."""
    if case.cp_size == 1:
        return {}
    return {
        "all-gather": _all_gather(case),
        "all-gather zigzag": _all_gather_zigzag(case) if case.is_flat else None,
        "ring": _ring(case) if case.is_flat else None,
        "Ulysses": _ulysses(case),
        "min-heap": _min_heap(case),
    }


def why_not(name: str, case: Case) -> str:
    """Why the strategy of this name cannot run on a pack."""
    if name == "Ulysses":
        return f"cannot spread {case.heads.num_heads_q}:{case.heads.num_heads_kv} heads over {case.cp_size} GPUs"
    return f"cuts causal documents; a {case.kind} is none"


def _all_gather(case: Case) -> Outcome:
    plan = _plan(contiguous, case, chunks=1)
    return _everything(case, _gathered(case, plan.work), 0, balance_of(plan))


def _all_gather_zigzag(case: Case) -> Outcome:
    return _everything(case, _gathered(case, zigzag_work(case)), 0)


def _ring(case: Case) -> Outcome:
    # In each step a rank passes T rows on, over one adapter where its neighbour is in another node.
    rows = np.full(case.cp_size, float(case.tokens * (case.cp_size - 1)))
    across = rows if case.gpus_per_node < case.cp_size else 0 * rows
    return _everything(case, replace(zigzag_work(case), inside=rows, across=across), case.cp_size - 1)


def _min_heap(case: Case) -> Outcome:
    plan = _plan(min_heap, case, chunks_per_rank(case.total, case.cp_size))
    # Rows travel straight to each rank that needs them.
    rows, node = transfer_matrix(plan), np.arange(case.cp_size) // case.gpus_per_node
    near = node[:, None] == node
    inside, across = (np.maximum(x.sum(0), x.sum(1)).astype(np.float64) for x in (rows * near, rows * ~near))
    work = replace(plan.work, inside=inside, across=across, passed_on=np.zeros(case.cp_size))
    forward, backward = choose_stages(case.cost, work, case.heads)
    return plan_outcome(case, replace(plan, work=work, forward=forward, backward=backward))


def transfer_matrix(plan: AttnPlan) -> Int64Array:
    """K/V rows that each rank needs of each other, int64 [receiver, sender]."""
    receiver, sender, start, end = plan.transfers.T
    rows = np.zeros((plan.cp_size, plan.cp_size), np.int64)
    np.add.at(rows, (receiver, sender), end - start)
    return rows


def _plan(owners: Callable[[AttnSlices, int, int], Owned], case: Case, chunks: int) -> AttnPlan:
    """The plan of an ownership. The pack is padded to equal chunks, so many per rank."""
    padded = -(-case.total // (chunks * case.cp_size)) * chunks * case.cp_size
    owned = owners(case.slices, padded, case.cp_size)
    return plan_ownership(case.slices, case.total, owned, 0, case.heads, case.nodes, case.cost)


def _gathered(case: Case, work: Workload) -> Workload:
    """The work with what an all-gather moves: each row enters each node once, spread evenly over its adapters."""
    far = (case.cp_size - case.gpus_per_node) * case.tokens / case.gpus_per_node
    near = (case.cp_size - 1) * case.tokens - far
    inside, across, none = (np.full(case.cp_size, float(rows)) for rows in (near, far, 0))
    # `sent` is 0: the reduce-scatter adds up the gradients.
    work = replace(work, inside_peers=none, across_peers=none)  # a ring has one each way
    return replace(work, inside=inside, across=across, passed_on=none, sent=none)


def _everything(case: Case, work: Workload, stages: int, balance: tuple[float, float] = (1.0, 1.0)) -> Outcome:
    """The outcome when every rank receives the K/V of all others, in `stages` stages (0: before attention)."""
    rows, spans = np.full(case.cp_size, float(case.tokens * (case.cp_size - 1))), equal_stages(stages)
    return outcome_of(case, work, (spans, spans), balance, (rows, rows))


def zigzag_work(case: Case) -> Workload:
    """Work of each rank when rank r owns part r and part 2 cp - 1 - r of the 2 cp equal parts of every document.

    Parts may have a fractional length, so that all ranks have the same pairs. `inside`, `across` and `sent` are 0.
    """
    cp_size, part = case.cp_size, case.lengths / (2 * case.cp_size)
    filling = case.heads.tile_filling(part)
    rows = float(case.lengths.sum()) / cp_size
    rank, each, none = np.arange(cp_size), np.ones(cp_size), np.zeros(cp_size)
    # Of each other rank's two parts: both own parts see the earlier one, or the later own part sees both.
    squares, own = float((part**2 * filling).sum()), float((part * filling).sum())
    return Workload(
        tokens=case.tokens,
        local_pairs=each * (2 * squares + own),
        local_rows=each * rows,
        remote_pairs=each * (cp_size - 1) * 2 * squares,
        remote_rows=rows * (1 + rank / (cp_size - 1)) / 2,  # mean over steps: both parts see keys, or one
        received=rows * (cp_size - 1 - rank / 2),  # the keys before its later part
        sent=none,
        inside=none,
        across=none,
        passed_on=none,
        inside_peers=none,
        across_peers=none,
        num_nodes=-(-cp_size // case.gpus_per_node),
    )


def _ulysses(case: Case) -> Outcome | None:
    """None unless the ranks divide the query heads, and the K/V heads divide them or are divided by them."""
    cp_size, heads, cost = case.cp_size, case.heads, case.cost
    if heads.num_heads_q % cp_size or (heads.num_heads_kv % cp_size and cp_size % heads.num_heads_kv):
        return None
    own = Heads(heads.num_heads_q // cp_size, max(1, heads.num_heads_kv // cp_size), *heads.dims)
    head_bytes = 2.0 * case.tokens * heads.mean_dim
    queries, keys = head_bytes * own.num_heads_q, 2 * head_bytes * own.num_heads_kv  # what two ranks exchange
    near, far = case.gpus_per_node - 1, cp_size - case.gpus_per_node

    def all_to_all(size: float) -> float:
        times = cost.inside.seconds(np.array(near * size)), cost.across.seconds(np.array(far * size))
        return cost.stage + float(max(times) if far else times[0])

    exchanges = all_to_all(queries + keys) + all_to_all(queries)  # Q, K, V, then out; dout, then dQ, dK, dV
    # A rank does what one GPU would do with its heads.
    seconds = replace(case, cp_size=1, heads=own).ideal_seconds + exchanges
    moved, across = (np.full(cp_size, ranks * (2 * queries + keys)) for ranks in (cp_size - 1, far))
    return Outcome(1.0, 1.0, moved, moved, across, (1, 1), seconds, np.full(2, exchanges))
