"""The dispatch plan of one microbatch: who owns which tokens, who sends which K/V rows when, who computes what.

A plan is a pure function of replicated input. Every rank computes the same one, without a process group or a
collective, and any rank's share can be computed anywhere. It is made once per microbatch and shared by all layers.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, first_true, frozen, slice_areas
from torchtitan_magi.masks.slices import MAX_TOKENS, AttnSlices, check_slices, is_integer
from torchtitan_magi.planning.choose_stages import SIMPLER, choose_rows
from torchtitan_magi.planning.cost_model import H200, LLAMA_HEADS, CostModel, Heads
from torchtitan_magi.planning.document_parts import DocumentParts
from torchtitan_magi.planning.needs import cut_at_parts, key_needs, parts_of, sums, transfers_of
from torchtitan_magi.planning.placement.place import placements
from torchtitan_magi.planning.relays import Routes, Spans
from torchtitan_magi.planning.stage import RankShare
from torchtitan_magi.planning.timeline import Timeline, Workload, predict, workloads
from torchtitan_magi.planning.topology import Nodes
from torchtitan_magi.wording import quoted

Plans = TypeVar("Plans")  # a plan, or one for each kind of layer
MAX_STAGES = 16  # each stage has launches and index data of its own


@dataclass(frozen=True, eq=False)
class AttnPlan:
    """The plan of one microbatch. Immutable, and the same on every rank.

    Attributes:
        slices: the mask over the pack's tokens, canonical.
        total_tokens: tokens of the pack.
        routes: who owns which tokens, and which way K/V rows travel.
        ranks: per rank its share (``ranges``, ``tokens``, ``forward`` and ``backward`` stages).
        areas: (query, key) pairs that each rank computes, int64 [cp_size].
        forward: the span of the remote K/V that each stage of the forward brings.
        backward: the same of the backward.
        work: what each rank has to do, in the terms of the cost model.
        heads: shape of the layers for which the plan was made; with ``latent`` where latent vectors travel.
        cost: what the plan takes exchanges and kernels to cost.
    """

    slices: AttnSlices
    total_tokens: int
    routes: Routes = field(repr=False)
    ranks: tuple[RankShare, ...] = field(repr=False)
    areas: Int64Array = field(repr=False)
    forward: Spans
    backward: Spans
    work: Workload = field(repr=False)
    heads: Heads
    cost: CostModel = field(repr=False)

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.ranks)

    @property
    def nodes(self) -> Nodes:
        """Which ranks sit in which node."""
        return self.routes.nodes

    @property
    def gpus_per_node(self) -> int:
        """Ranks of a node, the most if they differ; cp_size if all ranks are in one."""
        return max(self.nodes.sizes)

    @property
    def padded_tokens(self) -> int:
        """Tokens of the pack, rounded up to a multiple of cp_size; the padding comes last and takes part in nothing."""
        return self.tokens_per_rank * self.cp_size

    @property
    def transfers(self) -> Int64Array:
        """K/V rows that each rank needs of others, int64 [n, 4]: destination, source, first token, end token."""
        return self.routes.transfers

    @property
    def hops(self) -> Int64Array:
        """How they travel at first, int64 [n, 6], see ``Routes``."""
        return self.routes.hops

    @property
    def tokens_per_rank(self) -> int:
        """Tokens that each rank owns, padding included: padded_tokens / cp_size."""
        return self.work.tokens

    @functools.cached_property
    def fingerprint(self) -> int:
        """63-bit fingerprint of the plan."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.slices.table, self.hops, self.transfers, *(share.ranges for share in self.ranks)):
            digest.update(np.ascontiguousarray(array).tobytes())
        sizes = self.total_tokens, self.cp_size, self.nodes.sizes
        chosen = self.forward, self.backward, self.heads.latent, self.routes.has_relays
        digest.update(repr((*sizes, *chosen)).encode())
        return int.from_bytes(digest.digest()) >> 1

    @functools.cached_property
    def document_parts(self) -> DocumentParts:
        """The parts of documents on ranks, for linear attention.

        Raises:
            ValueError: the mask is neither of causal documents nor of trees of them.
        """
        return DocumentParts.of(self.slices, self.routes.owned)

    @property
    def received_rows(self) -> Int64Array:
        """K/V rows of others that each rank needs, int64 [cp_size]."""
        return self.work.received.astype(np.int64)

    @property
    def rows_across_nodes(self) -> Int64Array:
        """K/V rows that each rank receives from other nodes, for itself or as a relay, int64 [cp_size]."""
        receiver, source, start, end = self.hops[:, :4].T
        crosses = self.nodes.node[receiver] != self.nodes.node[source]
        return np.bincount(receiver, (end - start) * crosses, self.cp_size).astype(np.int64)

    def predict(self, cost: CostModel = H200) -> tuple[Timeline, Timeline]:
        """When a layer's forward and backward do what, by the cost model.

        Raises:
            ValueError: no CostModel.
        """
        if not isinstance(cost, CostModel):
            raise ValueError(f"cost is {quoted(cost)}; give a CostModel, or leave it out")
        forward, backward = ((self.forward, False), (self.backward, True))
        return predict(cost, self.work, self.heads, *forward), predict(cost, self.work, self.heads, *backward)

    @functools.cached_property
    def _seconds(self) -> float:
        """By which plans are compared: the time predicted, a tenth of the time that rows travel, as on a machine less
        of it hides, and what each stage must save."""
        return sum(
            (part.seconds + part.link_seconds / 10) / SIMPLER ** len(stages)
            for part, stages in zip(self.predict(self.cost), (self.forward, self.backward), strict=True)
        )


def check_plan(plan: AttnPlan) -> None:
    """Raises ValueError for what is no plan."""
    if not isinstance(plan, AttnPlan):
        raise ValueError(
            f"plan is of type {type(plan).__name__}; make one with make_plan(slices, total_tokens, cp_size)"
        )


@dataclass(frozen=True)
class PlanSpec:
    """What a pack is planned for, in the terms of ``make_plan``; `nodes` follow from its gpus_per_node."""

    total_tokens: int
    cp_size: int
    overlap_stages: int
    heads: Heads
    nodes: Nodes
    cost: CostModel

    @classmethod
    def checked(
        cls,
        total_tokens: int,
        cp_size: int,
        overlap_stages: int,
        heads: Heads,
        gpus_per_node: int | Sequence[int] | None,
        cost: CostModel,
    ) -> "PlanSpec":
        """That of a user's arguments. Raises ValueError as ``make_plan``."""
        if not isinstance(heads, Heads) or not isinstance(cost, CostModel):
            raise ValueError(
                f"heads is {quoted(heads)} and cost {quoted(cost)}; give Heads(num_heads_q, num_heads_kv, head_dim) of "
                "one rank and a CostModel, or leave them out"
            )
        if not (is_integer(cp_size, 1) and is_integer(total_tokens, 0)):
            raise ValueError(
                f"cp_size is {quoted(cp_size)} and total_tokens {quoted(total_tokens)}; they must be integers, "
                "at least 1 and 0"
            )
        if int(total_tokens) + int(cp_size) - 1 > MAX_TOKENS:
            raise ValueError(f"total_tokens is {total_tokens}; token numbers must fit in 32 bits: plan a shorter pack")
        if not is_integer(overlap_stages, -1) or overlap_stages > MAX_STAGES:
            raise ValueError(
                f"overlap_stages is {quoted(overlap_stages)}; use 0 for no overlap, the number of stages (at most "
                f"{MAX_STAGES}), or -1 to have it chosen"
            )
        nodes = Nodes.of(gpus_per_node, int(cp_size))
        return cls(int(total_tokens), int(cp_size), int(overlap_stages), heads, nodes, cost)


def make_plan(
    slices: AttnSlices,
    total_tokens: int,
    cp_size: int,
    overlap_stages: int = -1,
    *,
    heads: Heads = LLAMA_HEADS,
    gpus_per_node: int | Sequence[int] | None = None,
    cost: CostModel = H200,
) -> AttnPlan:
    """Plans one microbatch.

    Args:
        slices: the mask over the pack; rows that no slice touches (padding) attend to nothing and cost nothing.
        total_tokens: tokens of the pack; any number. When it does not divide by cp_size the plan pads at the end.
        cp_size: number of context-parallel ranks.
        overlap_stages: into how many stages the remote K/V are cut. The first is on its way while a rank attends to
            its own K/V, each next one while the one before is attended to. 0: one attention call over all K/V, which
            inside a node awaits the remote ones while it runs. -1: chosen by the cost model, see ``choose_stages``.
        heads: shape of the attention layers on one rank. It guides the balance and the choice of stages; the plan holds
            for any.
        gpus_per_node: ranks [0, gpus_per_node) are in one node, and so on; or a list of the ranks of each node. Ranks
            that share a document are then put in one node, and where that is faster, a K/V row crosses to a node once
            and is passed on inside. None: all ranks are in one node.
        cost: what kernels and messages take on this kind of machine, see ``CostModel.load``.

    Raises:
        ValueError: no AttnSlices, Heads or CostModel; a slice beyond total_tokens; a size below 1 or no integer; more
            tokens than 32 bits count; stages below -1 or above MAX_STAGES.
    """
    check_slices(slices)
    spec = PlanSpec.checked(total_tokens, cp_size, overlap_stages, heads, gpus_per_node, cost)
    return _recent_plans((slices,), (1,), spec)[0]


def make_plans(
    masks: Sequence[AttnSlices],
    total_tokens: int,
    cp_size: int,
    overlap_stages: int = -1,
    *,
    layers: Sequence[int] | None = None,
    heads: Heads = LLAMA_HEADS,
    gpus_per_node: int | Sequence[int] | None = None,
    cost: CostModel = H200,
) -> tuple[AttnPlan, ...]:
    """Plans one microbatch for a model whose layers have different masks, such as full and window attention in turn.

    Tokens are placed once, so that the work of all layers together is balanced. Each mask has a plan of its own over
    this placement: its layers exchange the K/V rows that it needs, a window's layers only those of the window. Any of
    the plans dispatches tokens. Arguments that are not named below are those of ``make_plan``.

    Args:
        masks: one for each kind of layer.
        layers: how many layers of each kind there are; one each by default.

    Returns:
        a plan for each of `masks`.

    Raises:
        ValueError: as ``make_plan``; no masks; not a number of layers, at least 1, for each.

    Examples:
        >>> cu = [0, 300, 1000]
        >>> full, window = make_plans([varlen_causal(cu), sliding_window(cu, 128)], 1000, 2, layers=[12, 12])
        >>> [len(full.ranks[0].tokens), len(window.ranks[0].tokens)]
        [500, 500]
    """
    if not isinstance(masks, list | tuple):
        raise ValueError(f"masks are a {type(masks).__name__}; give a list of AttnSlices, one for each kind of layer")
    for slices in masks:
        check_slices(slices)
    layers = [1] * len(masks) if layers is None else layers
    counts = list(layers) if isinstance(layers, list | tuple | np.ndarray) else []
    if not masks or len(counts) != len(masks) or not all(is_integer(count, 1) for count in counts):
        raise ValueError(
            f"layers is {quoted(layers)} for {len(masks)} masks; give at least one mask, and for each how many "
            "layers have it"
        )
    spec = PlanSpec.checked(total_tokens, cp_size, overlap_stages, heads, gpus_per_node, cost)
    return _recent_plans(tuple(masks), tuple(map(int, counts)), spec)


def plan_afresh(slices: AttnSlices, spec: PlanSpec) -> AttnPlan:
    """`make_plan`, which checks its arguments and remembers its last plans, without that.

    Raises:
        ValueError: a slice beyond spec.total_tokens.
    """
    return _plans_afresh((slices,), (1,), spec)[0]


def _plans_afresh(masks: tuple[AttnSlices, ...], layers: tuple[int, ...], spec: PlanSpec) -> tuple[AttnPlan, ...]:
    """`make_plans`, likewise."""
    for slices in masks:
        _check_end(slices, spec.total_tokens)
    masks = tuple(slices.canonical() for slices in masks)
    nodes, cost = spec.nodes, spec.cost
    has_units = not any(width % 8 for width in spec.heads.latent)  # of 8 elements, in which kernels move rows
    heads = spec.heads if has_units and len(nodes) > 1 else spec.heads.with_whole_rows
    padded_tokens = -(-spec.total_tokens // spec.cp_size) * spec.cp_size
    rest = spec.overlap_stages, heads, nodes, cost

    def seconds(plans: tuple[AttnPlan, ...]) -> float:
        return sum(plan._seconds * count for plan, count in zip(plans, layers, strict=True))

    ways = placements(tuple(zip(masks, layers, strict=True)), padded_tokens, spec.cp_size, nodes, heads.tile_rows)
    all_plans = (tuple(plan_ownership(slices, spec.total_tokens, owned, *rest) for slices in masks) for owned in ways)
    return _shortest(all_plans, seconds)


def _shortest(candidates: Iterable[Plans], seconds: Callable[[Plans], float]) -> Plans:
    """The candidate of the fewest seconds; these are asked for only where there is a choice."""
    first, *others = candidates
    return min([first, *others], key=seconds) if others else first


def _check_end(slices: AttnSlices, total_tokens: int) -> None:
    if (i := first_true(slices.table[:, [1, 3]].max(1, initial=0) > total_tokens)) is not None:
        raise ValueError(
            f"slice {i} is {slices.table[i].tolist()} but the pack has {total_tokens} tokens; cut it to fit"
        )


_recent_plans = functools.lru_cache(maxsize=32)(_plans_afresh)


def forget_plans() -> None:
    """Forgets the plans that ``make_plan`` and ``make_plans`` remember."""
    _recent_plans.cache_clear()


def plan_ownership(
    slices: AttnSlices,
    total_tokens: int,
    owned: tuple[Int64Array, ...],
    overlap_stages: int,
    heads: Heads = LLAMA_HEADS,
    nodes: Nodes | None = None,
    cost: CostModel = H200,
) -> AttnPlan:
    """The plan that follows from who owns which tokens: rows travel straight or through relays, as is faster.

    Args:
        slices: canonical.
        owned: per rank int64 [n, 2] token ranges, ascending; together they cover the padded pack, equally many each.
        overlap_stages, heads, cost: as in ``make_plan``.
        nodes: which ranks sit in which node; None: all are in one.
    """
    nodes = nodes or Nodes((len(owned),))
    parts = parts_of(owned)
    mask = cut_at_parts(slices, parts)
    transfers = transfers_of(key_needs(mask, parts), parts)
    direct = Routes.of(tuple(frozen(ranges.copy()) for ranges in owned), nodes, transfers)
    ways = [direct, direct.relayed] if direct.can_be_relayed else [direct]
    areas = frozen(sums(mask.owner, slice_areas(mask.table), len(owned)))

    def plan(routes: Routes, work: Workload) -> AttnPlan:
        chosen, forward, backward = choose_rows(cost, work, heads, overlap_stages)
        spans = forward, backward
        ranks = tuple(RankShare(rank, slices, routes, spans) for rank in range(len(owned)))
        return AttnPlan(slices, total_tokens, routes, ranks, areas, *spans, work, chosen, cost)

    return _shortest(map(plan, ways, workloads(parts, mask, ways, heads)), lambda plan: plan._seconds)
