"""The strategies that ours replaces, for comparison only: who owns which tokens, what travels, how long a layer takes.

Each gets our kernel, our cost model and the benefit of the doubt: collectives at full bandwidth on all links at once,
documents that need no padding, dK and dV in 16 bits.
"""

import heapq
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import Heads
from torchtitan_magi.planning.plan import AttnPlan, plan_ownership
from torchtitan_magi.planning.stages import choose_stages, equal_stages
from torchtitan_magi.planning.timeline import Workload
from torchtitan_magi.report.outcome import Case, FloatArray, Outcome, balance_of, outcome_of

Int64Array = npt.NDArray[np.int64]
Owned = tuple[Int64Array, ...]

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


def zigzag(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    """Rank r owns the r-th stretch from the front and the r-th from the back, of 2 cp_size stretches of the pack."""
    edges = np.arange(2 * cp_size + 1) * num_tokens // (2 * cp_size)
    return tuple(np.array([edges[r : r + 2], edges[2 * cp_size - r - 1 :][:2]]) for r in range(cp_size))


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
    """Of the min-heap: chunks of 1024 tokens, at least 8 and at most 32."""
    return min(32, max(8, num_tokens // cp_size // 1024))


# ---------------------------------------------------------------------------------------------------- what comes of it


def compare(case: Case) -> dict[str, Outcome | None]:
    """All baselines on one pack; None where `why_not` says why a strategy cannot run. Nothing for one rank."""
    if case.cp_size == 1:
        return {}
    return {
        "all-gather": _all_gather(case),
        "all-gather zigzag": None if case.has_pairs else _all_gather_zigzag(case),
        "ring": None if case.has_pairs else _ring(case),
        "Ulysses": _ulysses(case),
        "min-heap": _min_heap(case),
    }


def why_not(name: str, case: Case) -> str:
    """Why a strategy, of the name, cannot run on a pack."""
    if name == "Ulysses":
        return f"cannot spread {case.heads.num_heads_q}:{case.heads.num_heads_kv} heads over {case.cp_size} GPUs"
    return "cuts causal documents; chosen and rejected with one prompt are none"


def _all_gather(case: Case) -> Outcome:
    plan = _plan(contiguous, case, chunks=1)
    return _everything("all-gather", case, _gathered(case, plan.work), 0, balance_of(plan))


def _all_gather_zigzag(case: Case) -> Outcome:
    return _everything("all-gather zigzag", case, _gathered(case, zigzag_work(case)), 0, (1.0, 1.0))


def _ring(case: Case) -> Outcome:
    # In each step a rank passes on T rows, over one adapter where its neighbour is in another node.
    rows = np.full(case.cp_size, float(case.tokens * (case.cp_size - 1)))
    across = rows if case.gpus_per_node < case.cp_size else 0 * rows
    work = replace(zigzag_work(case), inside=rows, across=across)
    return _everything("ring", case, work, case.cp_size - 1, (1.0, 1.0))


def _min_heap(case: Case) -> Outcome:
    plan = _plan(min_heap, case, chunks_per_rank(case.total, case.cp_size))
    # Rows travel straight to each rank that needs them.
    receiver, source, start, end = plan.transfers.T
    crosses = receiver // case.gpus_per_node != source // case.gpus_per_node

    def busier_way(some: npt.NDArray[np.bool_]) -> FloatArray:
        to, by = (np.bincount(rank[some], (end - start)[some], case.cp_size) for rank in (receiver, source))
        return np.maximum(to, by).astype(np.float64)

    passed_on = np.zeros(case.cp_size)
    work = replace(plan.work, inside=busier_way(~crosses), across=busier_way(crosses), passed_on=passed_on)
    shares = choose_stages(case.cost, work, case.heads)
    rows = plan.received_rows.astype(np.float64), work.sent
    return outcome_of("min-heap", case, work, shares, balance_of(plan), rows)


def _plan(owners: Callable[[AttnSlices, int, int], Owned], case: Case, chunks: int) -> AttnPlan:
    """The plan of an ownership; the pack is padded to a multiple of so many chunks per rank."""
    padded = -(-case.total // (chunks * case.cp_size)) * chunks * case.cp_size
    owned = owners(case.slices, padded, case.cp_size)
    return plan_ownership(case.slices, case.total, owned, 0, case.heads, case.gpus_per_node, case.cost)


def _gathered(case: Case, work: Workload) -> Workload:
    """With what an all-gather moves: a row comes once to each node, over all its adapters alike, and on from there."""
    far = (case.cp_size - case.gpus_per_node) * case.tokens / case.gpus_per_node
    near = (case.cp_size - 1) * case.tokens - far
    inside, across, none = (np.full(case.cp_size, float(rows)) for rows in (near, far, 0))
    # Nothing is `sent` that the receiver of gradients must add up: the reduce-scatter does it.
    return replace(work, inside=inside, across=across, passed_on=none, sent=none)


def _everything(name: str, case: Case, work: Workload, stages: int, balance: tuple[float, float]) -> Outcome:
    """The outcome when every rank receives the K/V of all others, in so many stages (0: before attention)."""
    rows = np.full(case.cp_size, float(case.tokens * (case.cp_size - 1)))
    shares = equal_stages(stages)
    return outcome_of(name, case, work, (shares, shares), balance, (rows, rows))


def zigzag_work(case: Case) -> Workload:
    """Work of each rank when rank r owns part r and part 2 cp - 1 - r of the 2 cp equal parts of every document.

    Parts may be fractions of a token, so that all ranks have the same pairs. Nothing is said of what travels how.
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
        remote_rows=rows * (1 + rank / (cp_size - 1)) / 2,  # in a step, in the mean: of both parts or of one
        received=rows * (cp_size - 1 - rank / 2),  # keys that it needs: those before its later part
        sent=none,
        inside=none,
        across=none,
        passed_on=none,
    )


def _ulysses(case: Case) -> Outcome | None:
    """None unless the ranks divide the query heads, and the K/V heads divide them or are divided by them."""
    cp_size, heads, cost = case.cp_size, case.heads, case.cost
    if heads.num_heads_q % cp_size or (heads.num_heads_kv % cp_size and cp_size % heads.num_heads_kv):
        return None
    own = Heads(heads.num_heads_q // cp_size, max(1, heads.num_heads_kv // cp_size), heads.head_dim)
    head_bytes = 2.0 * case.tokens * heads.head_dim
    queries, keys = head_bytes * own.num_heads_q, 2 * head_bytes * own.num_heads_kv  # what two ranks exchange
    near, far = case.gpus_per_node - 1, cp_size - case.gpus_per_node

    def all_to_all(size: float) -> float:
        times = cost.inside.seconds(np.array(near * size)), cost.across.seconds(np.array(far * size))
        return cost.stage + float(max(times) if far else times[0])

    exchanges = all_to_all(queries + keys) + all_to_all(queries)  # Q, K, V, then out; dout, then dQ, dK, dV
    # A rank does what one GPU would do with its heads.
    forward, backward = (seconds + exchanges for seconds in replace(case, cp_size=1, heads=own).ideal_seconds)
    moved, across = (np.full(cp_size, ranks * (2 * queries + keys)) for ranks in (cp_size - 1, far))
    return Outcome(
        "Ulysses", 1.0, 1.0, moved, moved, across,
        stages=(1, 1), seconds=(forward, backward), exposed=(exchanges, exchanges),
    )  # fmt: skip
