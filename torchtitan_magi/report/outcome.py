"""What a way to spread one layer's attention over ranks costs: balance, bytes, and its predicted time."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.builders import shared_prompt, varlen_causal
from torchtitan_magi.masks.geometry import IntArray, clip_rows, expand, intersecting, slice_areas
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import CostModel, Heads, Link
from torchtitan_magi.planning.needs import parts_of
from torchtitan_magi.planning.plan import AttnPlan
from torchtitan_magi.planning.timeline import Shares, Workload, predict
from torchtitan_magi.tiles import KEYS, tile_cost

FloatArray = npt.NDArray[np.float64]

FREE = Link(latency=0.0, bandwidth=inf)  # of a machine on which communication takes no time


@dataclass(frozen=True, eq=False)
class Case:
    """A pack, and the machine and layers that it is for.

    lengths: int64, tokens: [n] of causal documents, or [n, 3] of preference pairs: prompt, chosen, rejected; total:
    tokens of the pack, of which the last may be padding; gpus_per_node: at most cp_size.
    """

    lengths: npt.NDArray[np.int64]
    total: int
    cp_size: int
    gpus_per_node: int
    heads: Heads
    cost: CostModel

    @property
    def has_pairs(self) -> bool:
        return self.lengths.ndim == 2

    @property
    def documents(self) -> npt.NDArray[np.int64]:
        """Tokens of each document, or pair, [n]."""
        return self.lengths.sum(1) if self.has_pairs else self.lengths

    @functools.cached_property
    def slices(self) -> AttnSlices:
        if self.has_pairs:
            return shared_prompt(self.lengths).canonical()
        return varlen_causal(np.append(0, self.lengths.cumsum())).canonical()

    @property
    def tokens(self) -> int:
        """Of a rank, padding included."""
        return -(-self.total // self.cp_size)

    @property
    def ideal_seconds(self) -> tuple[float, float]:
        """Our kernel on the whole pack on one GPU, time over the number of ranks; forward and backward."""
        table = self.slices.table.astype(np.int64)
        pairs = np.array((slice_areas(table) * self.heads.tile_filling(table[:, 1] - table[:, 0])).sum())
        rows = np.array(float(self.lengths.sum()))
        kernels = self.cost.forward, self.cost.backward
        forward, backward = (float(kernel.seconds(pairs, rows, self.heads)) / self.cp_size for kernel in kernels)
        return forward, backward


@dataclass(frozen=True, eq=False)
class Outcome:
    """One strategy on one pack.

    Attributes:
        name: of the strategy.
        balance_area: (query, key) pairs of the heaviest rank over the mean.
        balance_tile: the same of the run time of the kernel's tiles.
        received, sent: bytes of each rank in a layer's forward, float64 [ranks].
        across: of these, bytes that each rank exchanges with other nodes, the larger of both ways.
        stages: how many, in forward and backward.
        seconds: predicted, of a layer's forward and backward.
        exposed: the part of them that the same work would not take on a machine whose links were infinitely fast.
    """

    name: str
    balance_area: float
    balance_tile: float
    received: FloatArray
    sent: FloatArray
    across: FloatArray
    stages: tuple[int, int]
    seconds: tuple[float, float]
    exposed: tuple[float, float]


def outcome_of(
    name: str,
    case: Case,
    work: Workload,
    shares: tuple[Shares, Shares],
    balance: tuple[float, float],
    rows: tuple[FloatArray, FloatArray],
) -> Outcome:
    """The outcome of a strategy that moves K/V rows in stages.

    Args:
        shares: stages of forward and backward.
        balance: of area and of tiles.
        rows: K/V rows that each rank receives and sends, [ranks] each.
    """
    cost, heads = case.cost, case.heads
    free = replace(cost, inside=FREE, across=FREE)
    directions = list(zip(shares, (False, True), strict=True))
    forward, backward = (predict(cost, work, heads, *direction).seconds for direction in directions)
    without = [predict(free, work, heads, *direction).seconds for direction in directions]
    received, sent, across = (x * float(heads.row_bytes) for x in (*rows, work.across))
    return Outcome(
        name, *balance, received, sent, across,
        stages=(len(shares[0]), len(shares[1])),
        seconds=(forward, backward),
        exposed=(forward - without[0], backward - without[1]),
    )  # fmt: skip


def plan_outcome(name: str, case: Case, plan: AttnPlan) -> Outcome:
    """The outcome of a plan as it is."""
    rows = plan.received_rows.astype(np.float64), plan.work.sent
    return outcome_of(name, case, plan.work, (plan.forward, plan.backward), balance_of(plan), rows)


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
    rank_start = np.arange(len(owned)) * -(-(parts[:, 1] - parts[:, 0]).sum() // len(owned) // tile_rows) * tile_rows
    by_rank = np.lexsort((parts[:, 0], owner))
    lengths = (parts[:, 1] - parts[:, 0])[by_rank]
    local = np.empty(len(parts), np.int64)  # local row of each part's first token
    first = np.searchsorted(owner[by_rank], np.arange(len(owned)))
    before = lengths.cumsum() - lengths
    local[by_rank] = before - before[first][owner[by_rank]]
    local += rank_start[owner]

    # Step 1: the slices' rows in local numbers, cut at tiles.
    which, part = intersecting(table[:, 0], table[:, 1], parts[:, 0], parts[:, 1])
    pieces = clip_rows(table[which], parts[part, 0], parts[part, 1])
    shift = local[part] - parts[part, 0]
    first_tile, end_tile = (pieces[:, 0] + shift) // tile_rows, -(-(pieces[:, 1] + shift) // tile_rows)
    piece = np.repeat(np.arange(len(pieces)), end_tile - first_tile)
    tile = expand(first_tile, end_tile)
    cut = clip_rows(pieces[piece], tile * tile_rows - shift[piece], (tile + 1) * tile_rows - shift[piece])

    # Step 2: blocks per tile, cost per tile, cost per rank.
    tiles_per_rank = rank_start[1] // tile_rows if len(owned) > 1 else tile.max(initial=0) + 1
    blocks = np.bincount(tile, -(-(cut[:, 3] - cut[:, 2]) // KEYS), tiles_per_rank * len(owned))
    return tile_cost(blocks.astype(np.int64)).reshape(len(owned), -1).sum(1)
