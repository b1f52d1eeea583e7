"""From a microbatch to the attention metadata of all layers: boundaries -> plan -> index data on the device."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.attention import VarlenMetadata
from torchtitan.tools.logging import logger

from torchtitan_magi.agreement import PlanAgreement
from torchtitan_magi.attention import make_handle
from torchtitan_magi.bind import BoundPlan, bind_plan, choose_block_attn
from torchtitan_magi.plan import make_plan
from torchtitan_magi.report import describe_plan
from torchtitan_magi.slices import CAUSAL, AttnSlices, shared_prompt
from torchtitan_magi.titan.job_config import Magi


class PlanMetadata(VarlenMetadata):
    """What torchtitan hands to every layer of one microbatch: the handle of its plan.

    The handle takes the place of ``cu_seq_q`` and ``cu_seq_k``: FSDP2 rebuilds named tuples from their fields when it
    casts the inputs, and anything else would be lost on the way to the layers.
    """

    positions: (
        Tensor | None
    )  # int [batch, seq_len] of the whole pack; None: torchtitan's own. Read before the model runs

    @classmethod
    def of(cls, bound: BoundPlan, positions: Tensor | None) -> "PlanMetadata":
        handle = make_handle(bound)
        metadata = cls(handle, handle, 0, 0)
        metadata.positions = positions
        return metadata

    @property
    def handle(self) -> Tensor:
        """0-d int64 on the CPU, see ``attention.make_handle``."""
        return self.cu_seq_q

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [batch, seq_len, ...] as [batch, seq_len / cp, ...]."""
        tokens = self.handle.bound_plan.tokens  # type: ignore[attr-defined]
        return x.flatten(0, 1).index_select(0, tokens).unflatten(0, (len(x), -1))


@dataclass
class WorkCount:
    """What the metrics need to know of the microbatches since they were last logged."""

    tokens: int = 0
    area: int = 0  # (query, key) pairs

    def take(self) -> tuple[int, int]:
        counted = self.tokens, self.area
        self.tokens = self.area = 0
        return counted


class MagiRuntime:
    """Makes the metadata of each microbatch.

    Args:
        magi: the [magi] options.
        cp_mesh: torchtitan's context-parallel mesh, None without context parallelism.
        num_heads_q, num_heads_kv: heads of a layer on this rank.
        device: of the model.
        count: to which the work of each microbatch is added.
    """

    def __init__(
        self,
        magi: Magi,
        cp_mesh: DeviceMesh | None,
        num_heads_q: int,
        num_heads_kv: int,
        device: torch.device,
        count: WorkCount,
    ) -> None:
        self.magi, self.cp_mesh, self.device, self.count = magi, cp_mesh, device, count
        self.num_heads_q, self.num_heads_kv = num_heads_q, num_heads_kv
        self.cp_size = 1 if cp_mesh is None else cp_mesh.size()
        self.block_attn = choose_block_attn(magi.backend, device)
        self.agreement = None if cp_mesh is None else PlanAgreement(cp_mesh.get_group())
        self.logged = False

    def attention_metadata(self, tokens: Tensor, eos_id: int | None, extra_inputs: dict[str, Any]) -> PlanMetadata:
        """Plans one microbatch.

        Args:
            tokens: [batch, seq_len]; the rows of the batch are planned as one pack.
            eos_id: ends a document where the loader names no boundaries.
            extra_inputs: what else the loader gave. Taken out of it: ``documents``, int [n, 2] token ranges over the
                flattened batch; or ``pairs``, int [n, 4] of preference pairs: their start, the starts of chosen and
                of rejected, their end; ``positions`` if context parallelism shards them (else the model finds them
                here).
        """
        documents, pairs = extra_inputs.pop("documents", None), extra_inputs.pop("pairs", None)
        if pairs is not None:
            documents = pairs[:, [0, 3]]
        elif documents is None:
            documents = documents_from_eos(tokens, eos_id)
        positions = self._positions(documents, extra_inputs.pop("positions", None), tokens)
        if self.cp_size == 1:
            in_pack = torch.arange(tokens.shape[1], device=tokens.device)[None]
            extra_inputs["positions"] = in_pack if positions is None else positions

        started = time.perf_counter()
        if pairs is not None:
            slices = shared_prompt(np.diff(pairs, axis=1), pairs[:, 0])
        else:
            start, end = documents.astype(np.int64).T
            slices = AttnSlices(np.stack([start, end, start, end, np.full_like(start, CAUSAL)], 1))
        plan = make_plan(slices, tokens.numel(), self.cp_size, self.magi.overlap_stages)
        if self.agreement is not None:
            self.agreement.check(plan)
        self.count.tokens += tokens.numel()
        self.count.area += plan.slices.area
        bound = bind_plan(
            plan,
            self.cp_mesh,
            self.block_attn,
            self.num_heads_q,
            self.num_heads_kv,
            self.device,
            self.magi.deterministic,
            self.magi.fp32_reduce,
        )
        if not self.logged:
            self.logged = True
            milliseconds = 1e3 * (time.perf_counter() - started)
            logger.info(f"{describe_plan(plan)}; planned in {milliseconds:.1f} ms; {self.block_attn.name} attention")
        return PlanMetadata.of(bound, positions)

    def _positions(self, documents: npt.NDArray[np.int32], loaded: Tensor | None, tokens: Tensor) -> Tensor | None:
        """int [batch, seq_len], or None for torchtitan's own, which run over the pack."""
        if self.magi.positions == "pack":
            return None
        if self.magi.positions == "document" and loaded is None:
            starts = np.zeros(tokens.numel(), np.int64)
            starts[documents[:, 0]] = documents[:, 0]
            own = np.arange(tokens.numel()) - np.maximum.accumulate(starts)
            return torch.from_numpy(own.astype(np.int32)).view(tokens.shape).to(tokens.device)
        return loaded


def documents_from_eos(tokens: Tensor, eos_id: int | None) -> npt.NDArray[np.int32]:
    """Token ranges int32 [n, 2] of the documents of a batch [batch, seq_len]: each ends with an EOS or its row.

    Waits for the device, as torchtitan's own boundaries do; loaders that name their boundaries avoid it.

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
