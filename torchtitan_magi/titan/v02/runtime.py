"""From a microbatch to the attention metadata of all layers: boundaries -> plan -> index data on the device."""

import os
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.models.attention import VarlenMetadata
from torchtitan.tools.logging import logger

from torchtitan_magi.attention import make_handle
from torchtitan_magi.backends import choose_block_attn
from torchtitan_magi.bound_plan import BoundPlan, IndexData, bind_plan, index_data
from torchtitan_magi.exchange.agreement import PlanAgreement
from torchtitan_magi.exchange.mesh import gpus_per_node
from torchtitan_magi.masks.slices import CAUSAL, AttnSlices, shared_prompt
from torchtitan_magi.planning.plan import AttnPlan, make_plan
from torchtitan_magi.planning.stages import H200, CostModel, Heads
from torchtitan_magi.planning.summary import describe_plan
from torchtitan_magi.titan.v02.job_config import Magi


class HandleHolder:
    """Keeps a handle from being taken for data: the tensor stays as it is, wherever the inputs of a model go."""

    def __init__(self, handle: Tensor) -> None:
        self.handle = handle


class PlanMetadata(VarlenMetadata):
    """What torchtitan hands to every layer of one microbatch: the handle of its plan.

    It takes the place of ``cu_seq_q``: FSDP2 rebuilds named tuples from their fields, and anything else would be lost
    on the way to the layers. It travels inside an object, because FSDP2 copies tensors to the GPU: a copy of a handle
    owns no plan, and reading it would make every layer wait for the device.
    """

    positions: (
        Tensor | None
    )  # int [batch, seq_len] of the whole pack; None: torchtitan's own. Read before the model runs

    @classmethod
    def of(cls, bound: BoundPlan, positions: Tensor | None) -> "PlanMetadata":
        metadata = cls(HandleHolder(make_handle(bound)), None, 0, 0)  # type: ignore[arg-type]
        metadata.positions = positions
        return metadata

    @property
    def handle(self) -> Tensor:
        """0-d int64 on the CPU, see ``attention.make_handle``."""
        return self.cu_seq_q.handle  # type: ignore[attr-defined]

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [batch, seq_len, ...] as [batch, seq_len / cp, ...]."""
        tokens = self.handle.bound_plan.tokens  # type: ignore[attr-defined]
        return x.flatten(0, 1).index_select(0, tokens).unflatten(0, (len(x), -1))


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """The plan of a batch and this rank's index data, on the host."""

    plan: AttnPlan
    index: IndexData
    seconds: float  # that planning took


@dataclass
class WorkCount:
    """What the metrics need to know of the microbatches since they were last logged."""

    tokens: int = 0
    area: int = 0  # (query, key) pairs
    waited: float = 0.0  # seconds, for plans

    def wait(self, seconds: float) -> None:
        self.waited += seconds

    def take(self) -> "WorkCount":
        counted = replace(self)
        self.tokens, self.area, self.waited = 0, 0, 0.0
        return counted


class MagiRuntime:
    """Plans microbatches and makes the metadata of each.

    Args:
        magi: the [magi] options.
        cp_mesh: torchtitan's context-parallel mesh, None without context parallelism.
        heads: shape of the attention layers on this rank.
        device: of the model.
        count: to which the work of each microbatch is added.
    """

    def __init__(
        self,
        magi: Magi,
        cp_mesh: DeviceMesh | None,
        heads: Heads,
        device: torch.device,
        count: WorkCount,
    ) -> None:
        self.magi, self.cp_mesh, self.device, self.count = magi, cp_mesh, device, count
        self.heads = heads
        self.cost = CostModel.load(magi.cost_model) if magi.cost_model else H200
        self.cp_size = 1 if cp_mesh is None else cp_mesh.size()
        self.cp_rank = 0 if cp_mesh is None else cp_mesh.get_local_rank()
        self.gpus_per_node = None
        if cp_mesh is not None:
            self.gpus_per_node = gpus_per_node(cp_mesh, int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())))
        self.block_attn = choose_block_attn(magi.backend, device, magi.deterministic)
        self.agreement = None if cp_mesh is None else PlanAgreement(cp_mesh.get_group())
        self.logged = False

    def plan_ahead(self, inputs: dict[str, Any], labels: Tensor | None, eos_id: int | None) -> dict[str, Any]:
        """Plans one microbatch on the host; may run in another thread than the training.

        Args:
            inputs: of the loader. ``input``: int [batch, seq_len] tokens, the rows planned as one pack. ``documents``:
                int [n, 2] token ranges over the flattened batch; or ``pairs``: int [n, 4] of preference pairs: their
                start, the starts of chosen and of rejected, their end; without either, documents end with EOS.
            labels: int64 [batch, seq_len], if the caller has use for ``labelled``.
            eos_id: ends a document where the loader names no boundaries.

        Returns:
            inputs with ``planned`` (a PlannedBatch); with ``labelled``, int64 [n], which of this rank's tokens have a
            label; and with ``positions`` if they are not to run over the pack.
        """
        started = time.perf_counter()
        tokens, pairs = inputs["input"], inputs.get("pairs")
        if pairs is not None:
            documents, slices = pairs[:, [0, 3]], shared_prompt(np.diff(pairs, axis=1), pairs[:, 0])
        else:
            documents = inputs["documents"] if "documents" in inputs else documents_from_eos(tokens, eos_id)
            start, end = documents.astype(np.int64).T
            slices = AttnSlices(np.stack([start, end, start, end, np.full_like(start, CAUSAL)], 1))
        stages, heads, nodes = self.magi.overlap_stages, self.heads, self.gpus_per_node
        plan = make_plan(slices, tokens.numel(), self.cp_size, stages, heads=heads, cost=self.cost, gpus_per_node=nodes)
        index = index_data(plan, self.cp_rank, self.block_attn, heads.num_heads_q, heads.num_heads_kv)
        planned = inputs | {"planned": PlannedBatch(plan, index, time.perf_counter() - started)}
        if labels is not None:
            own = labels.flatten().numpy()[index.share.tokens]
            planned["labelled"] = torch.from_numpy(np.flatnonzero(own != IGNORE_INDEX))
        if self.magi.positions == "pack":
            planned.pop("positions", None)
        elif self.magi.positions == "document" and "positions" not in inputs:
            planned["positions"] = positions_in(documents, tokens)
        return planned

    def attention_metadata(self, tokens: Tensor, eos_id: int | None, extra_inputs: dict[str, Any]) -> PlanMetadata:
        """The metadata that all layers of one microbatch share.

        Args:
            tokens: [batch, seq_len] on the device.
            eos_id: see ``plan_ahead``.
            extra_inputs: what else the loader gave, planned or not. What the model does not take is taken out of it;
                ``positions`` only if context parallelism shards them (else the model finds them here).
        """
        if "planned" not in extra_inputs:
            extra_inputs |= self.plan_ahead({"input": tokens, **extra_inputs}, None, eos_id)
            del extra_inputs["input"]
        planned, positions = extra_inputs.pop("planned"), extra_inputs.pop("positions", None)
        for name in ("documents", "pairs", "labelled"):
            extra_inputs.pop(name, None)
        if self.cp_size == 1:
            in_pack = torch.arange(tokens.shape[1], device=tokens.device)[None]
            extra_inputs["positions"] = in_pack if positions is None else positions
        if self.agreement is not None:
            self.agreement.check(planned.plan)
        self.count.tokens += tokens.numel()
        self.count.area += planned.plan.slices.area
        bound = bind_plan(
            planned.plan,
            self.cp_mesh,
            self.block_attn,
            self.heads.num_heads_q,
            self.heads.num_heads_kv,
            self.device,
            self.magi.fp32_reduce,
            planned.index,
        )
        if not self.logged:
            self.logged = True
            took = f"planned in {1e3 * planned.seconds:.1f} ms"
            way = f", rows by {bound.transport.way}" if self.cp_size > 1 else ""
            logger.info(f"{describe_plan(planned.plan)}; {took}; {self.block_attn.name} attention{way}")
        return PlanMetadata.of(bound, positions)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raises ValueError for a token that the model does not have, which on a GPU would end in a failed assertion."""
    largest = int(tokens.max()) if tokens.numel() else 0
    if largest >= vocab_size:
        raise ValueError(
            f"the data has token {largest}, but the model a vocabulary of {vocab_size:,}; use the model's tokenizer "
            "(model.hf_assets_path), or a flavor of its size"
        )


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
