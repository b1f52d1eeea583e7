"""A run before it has any GPUs: its packs planned, and what all strategies would make of them."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads
from torchtitan_magi.planning.plan import AttnPlan
from torchtitan_magi.sizing.strategies.outcomes import Case, Outcome, compare, plan_outcome

OURS = "ours"
MIB = 2**20


@dataclass(frozen=True, eq=False)
class SizedPack:
    """A pack, its plan, and what each strategy would make of it.

    Attributes:
        plan_ms: processor time of the plan and of one rank's stages.
        outcomes: by strategy, ours first; None where a strategy cannot run.
    """

    case: Case
    plan: AttnPlan
    plan_ms: float
    outcomes: dict[str, Outcome | None]


@dataclass(frozen=True, eq=False)
class Sizing:
    """Packs of a run under all strategies.

    Attributes:
        source: where the packs are from.
        total: tokens of a pack.
        packs: at least one; all have the same layout.
    """

    source: str
    total: int
    packs: list[SizedPack]

    @property
    def first(self) -> AttnPlan:
        """The plan of the first pack, which shares cp_size, gpus_per_node and heads with the others."""
        return self.packs[0].plan

    def summary(self) -> list[dict[str, Any]]:
        """A row for each strategy that can run: means over packs of times and volumes, the worst of the rest."""
        return [self._row(name) for name, outcome in self.packs[0].outcomes.items() if outcome is not None]

    def _row(self, name: str) -> dict[str, Any]:
        outcomes = [outcome for pack in self.packs if (outcome := pack.outcomes[name]) is not None]
        in_rows = self.first.heads.row_bytes * self.first.tokens_per_rank
        ideal = np.array([sum(pack.case.ideal_seconds) for pack in self.packs])
        seconds, exposed = (np.array([getattr(o, field) for o in outcomes]) for field in ("seconds", "exposed"))
        area = np.mean([pack.plan.slices.area for pack in self.packs])
        flops = 14 * area * self.first.heads.out_elements / self.first.cp_size  # 4 forward, 10 backward
        return {
            "strategy": name,
            "balance_area": max(o.balance_area for o in outcomes),
            "balance_tile": max(o.balance_tile for o in outcomes),
            "received_mean": float(np.mean([o.received.mean() for o in outcomes])) / in_rows,
            "received_max": max(float(o.received.max()) for o in outcomes) / in_rows,
            "sent_max": max(float(o.sent.max()) for o in outcomes) / in_rows,
            "received_max_mib": max(float(o.received.max()) for o in outcomes) / MIB,
            "across_max_mib": max(float(o.across.max()) for o in outcomes) / MIB,
            "stages_forward": max(o.stages[0] for o in outcomes),
            "stages_backward": max(o.stages[1] for o in outcomes),
            "forward_ms": 1e3 * float(seconds[:, 0].mean()),
            "forward_exposed_ms": 1e3 * float(exposed[:, 0].mean()),
            "backward_ms": 1e3 * float(seconds[:, 1].mean()),
            "backward_exposed_ms": 1e3 * float(exposed[:, 1].mean()),
            "exposed_share": float(exposed.sum() / seconds.sum()),
            "tflops_per_gpu": float(flops / seconds.sum(1).mean() / 1e12),
            "efficiency": float(ideal.sum() / seconds.sum()),
            "efficiency_worst": float((ideal / seconds.sum(1)).min()),
        }


def size_run(
    source: str,
    packs: list[Int64Array],
    total: int,
    cp_size: int,
    gpus_per_node: int,
    heads: Heads,
    cost: CostModel = H200,
) -> Sizing:
    """Plans packs and compares strategies on them.

    Args:
        source: where the packs are from.
        packs: from ``sample_packs.make_packs``.
        total: tokens of a pack.
        cp_size: context-parallel GPUs.
        gpus_per_node: how many of them are in one node.
        heads: shape of the attention layers.
        cost: cost model of the machine.

    Raises:
        ValueError: no GPU, or more GPUs than tokens.
    """
    check_layout(total, cp_size, gpus_per_node)
    node = min(gpus_per_node, cp_size)
    return Sizing(source, total, [size_pack(Case(pack, total, cp_size, node, heads, cost)) for pack in packs])


def check_layout(total: int, cp_size: int, gpus_per_node: int) -> None:
    """Raises ValueError for no GPU, or for more GPUs than tokens."""
    if cp_size < 1 or gpus_per_node < 1:
        raise ValueError(f"{cp_size} GPUs, {gpus_per_node} per node; both must be at least 1")
    if cp_size > total:
        raise ValueError(f"total is {total} tokens for {cp_size} GPUs; give at least one token per GPU")


def size_pack(case: Case) -> SizedPack:
    """Plans one pack and compares strategies on it."""
    begin = time.process_time()
    plan = case.plan()
    _ = plan.ranks[-1].forward, plan.ranks[-1].backward
    plan_ms = 1e3 * (time.process_time() - begin)
    return SizedPack(case, plan, plan_ms, {OURS: plan_outcome(case, plan), **compare(case)})
