"""From a microbatch to what its attention layers need: boundaries -> plan -> index data on the device."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.attention.bound_plan import BoundPlan, bind_plan, index_data
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.data.packs.prefix_trees import positions_of
from torchtitan_magi.exchange.agreement import agreement_of
from torchtitan_magi.exchange.mesh import ranks_per_node
from torchtitan_magi.losses import IGNORE_INDEX
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads
from torchtitan_magi.planning.plan import make_plans
from torchtitan_magi.planning.summary import describe_plan
from torchtitan_magi.training.batches.microbatch import Microbatch
from torchtitan_magi.training.process.groups import Group, rank_and_size_in
from torchtitan_magi.training.settings.options import Magi

logger = logging.getLogger(__name__)


@dataclass
class WorkCount:
    """Work of the microbatches since the metrics were last logged."""

    tokens: int = 0
    area: float = 0.0  # (query, key) pairs, the mean of all layers
    waited: float = 0.0  # seconds, for plans

    def wait(self, seconds: float) -> None:
        """Adds a wait for a plan."""
        self.waited += seconds

    def take(self) -> "WorkCount":
        """The numbers so far; counting begins anew."""
        counted = replace(self)
        self.tokens, self.area, self.waited = 0, 0.0, 0.0
        return counted


def attention_options(job_config: Any) -> Magi:
    """[magi], where torchtitan's ``debug.deterministic`` makes attention repeat bit for bit as well."""
    magi: Magi = job_config.magi
    return replace(magi, deterministic=magi.deterministic or job_config.debug.deterministic)


class MagiRuntime:
    """Plans microbatches, and binds their plans to this rank's device. Creating one is a collective of all ranks.

    Args:
        magi: the [magi] options.
        cp_group: the context-parallel ranks; None without context parallelism.
        heads: shape of the attention layers on this rank.
        device: where the model runs.
        count: accumulates the work of each microbatch.
        windows: by layer, how many tokens a row sees at most; 0: all of its document. One number: all layers are alike.
        data_rank: the data-parallel rank; other ranks that have it must get the same microbatches.
        recurs: whether some layers recur, and need the parts of documents.

    Attributes:
        kinds: the kinds of layers: window -> number of layers.
    """

    def __init__(
        self,
        magi: Magi,
        cp_group: Group,
        heads: Heads,
        device: torch.device,
        count: WorkCount,
        windows: Sequence[int] = (0,),
        data_rank: int = 0,
        recurs: bool = False,
    ) -> None:
        self.kinds = dict(sorted(Counter(windows).items()))
        self.magi, self.cp_group, self.heads, self.device, self.count = magi, cp_group, heads, device, count
        self.recurs = recurs
        self.block_attn = choose_block_attn(magi.backend, device, magi.deterministic)
        self.num_heads = heads.num_heads_q, heads.num_heads_kv
        self.cp_rank, self.cp_size = rank_and_size_in(cp_group)
        self.agreement = agreement_of(cp_group, data_rank)
        per_node = None if cp_group is None else ranks_per_node(cp_group)
        cost = CostModel.load(magi.cost_model) if magi.cost_model else H200
        self.plan_options: dict[str, Any] = {"heads": heads, "cost": cost, "gpus_per_node": per_node}
        self.logged = False

    def plan_ahead(self, inputs: dict[str, Any], labels: Tensor | None, eos_id: int | None) -> Microbatch:
        """Plans one microbatch on the host; may run in another thread than the training.

        Args:
            inputs: what the loader gave, see ``Microbatch.of``.
            labels: int64 [batch, seq_len], if the caller has use for ``labelled``.
            eos_id: ends a document where the loader names no boundaries.
        """
        started = time.perf_counter()
        batch = Microbatch.of(inputs, labels, eos_id)
        layers, stages = list(self.kinds.values()), self.magi.overlap_stages
        masks, num_tokens = batch.masks(list(self.kinds)), batch.tokens.numel()
        plans = make_plans(masks, num_tokens, self.cp_size, stages, layers=layers, **self.plan_options)
        _ = plans[0].fingerprint  # made here, once: `bind`, in the training's thread, compares it
        if self.recurs:
            _ = plans[0].document_parts  # likewise, for the layers
        batch.plans = tuple(plans)
        batch.indices = tuple(index_data(plan, self.cp_rank, self.block_attn, *self.num_heads) for plan in plans)
        if labels is not None:
            own = labels.flatten().numpy()[batch.indices[0].share.tokens]
            batch.labelled = torch.from_numpy(np.flatnonzero(own != IGNORE_INDEX))
        if self.magi.positions == "pack":
            batch.model_inputs.pop("positions", None)
        elif self.magi.positions == "document" and "positions" not in batch.model_inputs:
            positions = positions_of(batch.branches, batch.tokens.numel())
            batch.model_inputs["positions"] = torch.from_numpy(positions).view(batch.tokens.shape)
        batch.planning_seconds = time.perf_counter() - started
        return batch

    def bind(self, batch: Microbatch) -> tuple[dict[int, BoundPlan], dict[str, Any]]:
        """Brings the plans of one microbatch to the device. A collective of the context-parallel ranks.

        Returns:
            The plan of each of ``kinds``, all with the same tokens, and the model's inputs on the device.
        """
        if self.agreement is not None:
            self.agreement.check(batch.plans[0], batch.content)  # the others are of the same documents
        self.count.tokens += batch.tokens.numel()
        areas = [number * plan.slices.area for number, plan in zip(self.kinds.values(), batch.plans, strict=True)]
        self.count.area += sum(areas) / sum(self.kinds.values())
        rest = self.device, self.magi.fp32_reduce
        bound = {
            kind: bind_plan(plan, self.cp_group, self.block_attn, *self.num_heads, *rest, index)
            for kind, plan, index in zip(self.kinds, batch.plans, batch.indices, strict=True)
        }
        if not self.logged:
            self.logged = True
            self._log(batch, next(iter(bound.values())))
        inputs = batch.model_inputs.items()
        return bound, {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in inputs}

    def _log(self, batch: Microbatch, bound: BoundPlan) -> None:
        way = f", rows by {bound.transport.way}" if self.cp_size > 1 else ""
        attention = f"{'deterministic ' * self.magi.deterministic}{self.block_attn.name} attention{way}"
        took, of = f"planned in {1e3 * batch.planning_seconds:.1f} ms", sum(self.kinds.values())
        for (window, layers), plan in zip(self.kinds.items(), batch.plans, strict=True):
            sees = f" with a window of {window}" if window else ""
            which = f" ({layers} of {of} layers{sees})" if len(self.kinds) > 1 else sees
            logger.info(f"{describe_plan(plan)}{which}; {took}; {attention}")
