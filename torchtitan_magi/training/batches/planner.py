"""From a microbatch to what its attention layers need: boundaries -> plan -> index data on the device."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.attention.bound_plan import BoundPlan, IndexData, bind_plan, index_data
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.exchange.agreement import agreement_of
from torchtitan_magi.exchange.mesh import ranks_per_node
from torchtitan_magi.losses import IGNORE_INDEX
from torchtitan_magi.masks.builders import causal_ranges, shared_prompt
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads
from torchtitan_magi.planning.plan import AttnPlan, make_plans
from torchtitan_magi.planning.summary import describe_plan
from torchtitan_magi.training.settings.options import Magi

logger = logging.getLogger(__name__)

_NOT_FOR_THE_MODEL = ("input", "documents", "pairs", "records", "planned", "labelled", "content")


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """The plans of a microbatch, one for each kind of layer, and this rank's index data, on the host."""

    documents: npt.NDArray[np.int32]  # [n, 2] token ranges, or [n, 4] of pairs
    plans: tuple[AttnPlan, ...]
    indices: tuple[IndexData, ...]
    seconds: float  # what planning took


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


def heads_of_rank(config: ModelConfig, tensor_parallel: int) -> Heads:
    """Shape of the attention layers on one rank.

    Raises:
        ValueError: the degree does not divide the heads.
    """
    queries, keys = config.num_heads_q, config.num_heads_kv
    if queries % tensor_parallel or keys % tensor_parallel:
        raise ValueError(
            f"parallelism.tensor_parallel_degree is {tensor_parallel}, but the model has {queries} query heads and "
            f"{keys} K/V heads; use a degree that divides both"
        )
    latent = (config.latent.kv_rank, config.latent.rope_dim) if config.latent else ()
    return Heads(queries // tensor_parallel, keys // tensor_parallel, config.head_dim, config.value_dim, latent)


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

    Attributes:
        kinds: the kinds of layers: window -> number of layers.
    """

    def __init__(
        self,
        magi: Magi,
        cp_group: dist.ProcessGroup | None,
        heads: Heads,
        device: torch.device,
        count: WorkCount,
        windows: Sequence[int] = (0,),
        data_rank: int = 0,
    ) -> None:
        self.kinds = dict(sorted(Counter(windows).items()))
        self.magi, self.cp_group, self.heads, self.device, self.count = magi, cp_group, heads, device, count
        self.block_attn = choose_block_attn(magi.backend, device, magi.deterministic)
        self.num_heads = heads.num_heads_q, heads.num_heads_kv
        self.cp_size, self.cp_rank, per_node = 1, 0, None
        self.agreement = agreement_of(cp_group, data_rank)
        if cp_group is not None:
            self.cp_size, self.cp_rank = dist.get_world_size(cp_group), dist.get_rank(cp_group)
            per_node = ranks_per_node(cp_group)
        cost = CostModel.load(magi.cost_model) if magi.cost_model else H200
        self.plan_options: dict[str, Any] = {"heads": heads, "cost": cost, "gpus_per_node": per_node}
        self.logged = False

    def plan_ahead(self, inputs: dict[str, Any], labels: Tensor | None, eos_id: int | None) -> dict[str, Any]:
        """Plans one microbatch on the host; may run in another thread than the training.

        Args:
            inputs: what the loader gave. ``input``: int [batch, seq_len] tokens, the rows planned as one pack.
                ``documents``: int [n, 2] token ranges over the flattened batch; or ``pairs``: int [n, 4] of preference
                pairs: start of the prompt, of chosen and of rejected, and the end. Without either, documents end with
                EOS.
            labels: int64 [batch, seq_len], if the caller has use for ``labelled``.
            eos_id: ends a document where the loader names no boundaries.

        Returns:
            inputs with ``planned`` (a PlannedBatch); with ``labelled``, int64 [n], which of this rank's tokens have a
            label; and with ``positions`` if they are not to run over the pack.
        """
        started = time.perf_counter()
        tokens = inputs["input"]
        documents, masks = _documents_and_masks(inputs, eos_id, list(self.kinds))
        layers, stages = list(self.kinds.values()), self.magi.overlap_stages
        plans = make_plans(masks, tokens.numel(), self.cp_size, stages, layers=layers, **self.plan_options)
        _ = plans[0].fingerprint  # made here, once: `bind`, in the training's thread, compares it
        indices = tuple(index_data(plan, self.cp_rank, self.block_attn, *self.num_heads) for plan in plans)
        planned = inputs | {
            "planned": PlannedBatch(inputs.get("pairs", documents), plans, indices, time.perf_counter() - started)
        }
        if labels is not None:
            own = labels.flatten().numpy()[indices[0].share.tokens]
            planned["labelled"] = torch.from_numpy(np.flatnonzero(own != IGNORE_INDEX))
        if self.magi.positions == "pack":
            planned.pop("positions", None)
        elif self.magi.positions == "document" and "positions" not in inputs:
            planned["positions"] = positions_in(documents, tokens)
        return planned

    def bind(self, inputs: dict[str, Any], eos_id: int | None) -> tuple[dict[int, BoundPlan], dict[str, Any]]:
        """Brings the plans of one microbatch to the device. A collective of the context-parallel ranks.

        Args:
            inputs: what ``plan_ahead`` returned, or what it takes.
            eos_id: as for ``plan_ahead``.

        Returns:
            The plan of each of ``kinds``, all with the same tokens, and what of the inputs, as planned, is for the
            model.
        """
        if "planned" not in inputs:
            inputs = self.plan_ahead(inputs, None, eos_id)
        planned: PlannedBatch = inputs["planned"]
        if self.agreement is not None:
            self.agreement.check(planned.plans[0], inputs.get("content", 0))  # the others are of the same documents
        self.count.tokens += inputs["input"].numel()
        areas = [number * plan.slices.area for number, plan in zip(self.kinds.values(), planned.plans, strict=True)]
        self.count.area += sum(areas) / sum(self.kinds.values())
        rest = self.device, self.magi.fp32_reduce
        bound = {
            kind: bind_plan(plan, self.cp_group, self.block_attn, *self.num_heads, *rest, index)
            for kind, plan, index in zip(self.kinds, planned.plans, planned.indices, strict=True)
        }
        if not self.logged:
            self.logged = True
            self._log(planned, next(iter(bound.values())))
        return bound, {name: value for name, value in inputs.items() if name not in _NOT_FOR_THE_MODEL}

    def _log(self, planned: PlannedBatch, bound: BoundPlan) -> None:
        way = f", rows by {bound.transport.way}" if self.cp_size > 1 else ""
        attention = f"{'deterministic ' * self.magi.deterministic}{self.block_attn.name} attention{way}"
        took, of = f"planned in {1e3 * planned.seconds:.1f} ms", sum(self.kinds.values())
        for (window, layers), plan in zip(self.kinds.items(), planned.plans, strict=True):
            sees = f" with a window of {window}" if window else ""
            which = f" ({layers} of {of} layers{sees})" if len(self.kinds) > 1 else sees
            logger.info(f"{describe_plan(plan)}{which}; {took}; {attention}")


def check_tokens(tokens: Tensor, labels: Tensor, vocab_size: int) -> None:
    """Raises ValueError for a token or a label that the model does not have.

    On a GPU that would end in a failed assertion, or make the loss a wrong one.
    """
    for name, numbers in (("token", tokens), ("label", labels.masked_fill(labels == IGNORE_INDEX, 0))):
        smallest, largest = map(int, numbers.aminmax()) if numbers.numel() else (0, 0)
        if largest >= vocab_size:
            raise ValueError(
                f"the data has {name} {largest}, but the model a vocabulary of {vocab_size:,}; use the model's "
                "tokenizer (model.hf_assets_path), or a flavor of its size"
            )
        if smallest < 0:
            raise ValueError(
                f"the data has {name} {smallest}; tokens are numbered from 0, and a token without a label has "
                f"{IGNORE_INDEX}"
            )


def _documents_and_masks(
    inputs: dict[str, Any], eos_id: int | None, windows: Sequence[int]
) -> tuple[npt.NDArray[np.int32], list[AttnSlices]]:
    """Token ranges int32 [n, 2], each a document or a pair, and a mask for each window; see ``MagiRuntime``."""
    if "pairs" in inputs:
        pairs = inputs["pairs"]
        lengths, starts = np.diff(pairs, axis=1), pairs[:, 0]
        return pairs[:, [0, 3]], [shared_prompt(lengths, starts, window or None) for window in windows]
    documents = inputs["documents"] if "documents" in inputs else documents_from_eos(inputs["input"], eos_id)
    start, end = documents.astype(np.int64).T
    return documents, [AttnSlices(causal_ranges(start, end, window or None)) for window in windows]


def num_tokens(inputs: dict[str, Any]) -> int:
    """Tokens of the documents or pairs of a batch, without padding; of one whose loader names no boundaries, all."""
    if "pairs" in inputs:
        return int((inputs["pairs"][:, 3] - inputs["pairs"][:, 0]).sum())
    if "documents" in inputs:
        return int(np.diff(inputs["documents"], axis=1).sum())
    return int(inputs["input"].numel())


def positions_in(documents: npt.NDArray[np.int32], tokens: Tensor) -> Tensor:
    """int32 [batch, seq_len] like tokens: restarting at 0 with every document, int [n, 2] of the flattened batch."""
    starts = np.zeros(tokens.numel(), np.int64)
    starts[documents[:, 0]] = documents[:, 0]
    positions = np.arange(tokens.numel()) - np.maximum.accumulate(starts)
    return torch.from_numpy(positions.astype(np.int32)).view(tokens.shape).to(tokens.device)


def documents_from_eos(tokens: Tensor, eos_id: int | None) -> npt.NDArray[np.int32]:
    """Token ranges int32 [n, 2] of the documents of a batch [batch, seq_len]: each ends with an EOS or its row.

    Raises:
        ValueError: no eos_id.
    """
    if eos_id is None:
        raise ValueError(
            "the tokenizer has no EOS token; add one to it, or use a loader that gives document boundaries"
        )
    is_end = tokens == eos_id
    is_end[:, -1] = True
    ends = is_end.flatten().nonzero().flatten().cpu().numpy() + 1
    return np.stack([np.append(0, ends[:-1]), ends], 1).astype(np.int32)
