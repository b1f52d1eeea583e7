"""From a plan to what the layers need of it: which kernel, and index data on the device, in one copy per microbatch."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.backends.interface import BlockAttn, StageMask
from torchtitan_magi.exchange.group_cast import StageRows
from torchtitan_magi.exchange.mesh import Mesh, as_transport
from torchtitan_magi.exchange.rows import RowMover
from torchtitan_magi.exchange.transport import SINGLE_RANK, Transport
from torchtitan_magi.masks.geometry import first_true
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import LLAMA_HEADS, Heads
from torchtitan_magi.planning.document_parts import RankParts
from torchtitan_magi.planning.plan import AttnPlan
from torchtitan_magi.planning.stage import RankShare, Stage


@dataclass(frozen=True, eq=False)
class BoundStage:
    """A stage with its index data on the device."""

    rows: StageRows
    mask: Any  # for block_attn


@dataclass(frozen=True, eq=False)
class BoundPlan:
    """One rank's share of a plan, ready to run: index data on the device, the transport and the block attention."""

    forward: tuple[BoundStage, ...]
    backward: tuple[BoundStage, ...]
    mover: RowMover
    tokens: Tensor  # the token behind each local token number, int32 [T]
    transport: Transport
    block_attn: BlockAttn
    fp32_reduce: bool
    num_bytes: int  # index data on the device
    sends_latents: bool = False  # whether rows travel as ``Latents``, if the layer has such
    plan: AttnPlan | None = None  # None for one device's mask

    @property
    def parts(self) -> RankParts:
        """This rank's parts of documents, for layers that recur.

        Raises:
            ValueError: the mask is neither of causal documents nor of trees of them.
        """
        assert self.plan is not None
        return self.plan.document_parts.ranks[self.transport.rank]

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [batch, seq_len, ...] as [batch, seq_len / cp, ...]."""
        if self.transport.size == 1:
            return x
        return x.flatten(0, 1).index_select(0, self.tokens).unflatten(0, (len(x), -1))


@dataclass(frozen=True, eq=False)
class IndexData:
    """What a rank's share of a plan needs on the device, still on the host. No process group, no device is involved."""

    share: RankShare
    masks: dict[Stage, Any]  # from BlockAttn.prepare
    row_index: dict[Stage, list[list[np.ndarray]]]  # RowMover.index of each exchange


def index_data(
    plan: AttnPlan,
    rank: int,
    block_attn: BlockAttn,
    num_heads_q: int,
    num_heads_kv: int,
    head_dims: tuple[int, int] | None = None,
) -> IndexData:
    """Index data of one rank, the costly part of ``bind_plan``; may be made ahead of time in another thread.

    Args:
        plan: the microbatch's plan.
        rank: this rank in its context-parallel group.
        block_attn: from ``choose_block_attn``.
        num_heads_q, num_heads_kv: heads of the layers on this rank (under tensor parallelism, its part of them).
        head_dims: head_dim of q and k, and of v; default: those of plan.heads.
    """
    heads = Heads(num_heads_q, num_heads_kv, *(head_dims or plan.heads.dims))
    share, mover = plan.ranks[rank], block_attn.row_mover()
    stages = dict.fromkeys((*share.forward, *share.backward))  # each once
    masks = {}
    for stage in stages:
        shape = plan.tokens_per_rank, stage.num_rows, *heads.counts
        used = stage in share.forward, stage in share.backward
        mask = StageMask(stage.slices, *shape, *used, stage.late_from, *heads.dims, plan.cost)
        masks[stage] = block_attn.prepare(mask)
    return IndexData(share, masks, {stage: [mover.index(exchange) for exchange in stage.exchanges] for stage in stages})


@torch.inference_mode(False)  # layers in training may share it
def bind_plan(
    plan: AttnPlan,
    mesh: Mesh,
    block_attn: BlockAttn,
    num_heads_q: int,
    num_heads_kv: int,
    device: torch.device,
    fp32_reduce: bool = False,
    index: IndexData | None = None,
    head_dims: tuple[int, int] | None = None,
) -> BoundPlan:
    """Readies this rank's share of a plan for its layers.

    Args:
        plan: the microbatch's plan.
        mesh: the context-parallel mesh or group; None for a single rank.
        block_attn: from ``choose_block_attn``.
        num_heads_q, num_heads_kv: heads of the layers on this rank (under tensor parallelism, its part of them).
        device: device of the layers' tensors.
        fp32_reduce: send dK/dV in float32 instead of the dtype of k.
        index: this rank's ``index_data``, if it was made ahead of time.
        head_dims: as in ``index_data``.
    """
    transport = as_transport(mesh, plan.cp_size)
    if index is None:
        index = index_data(plan, transport.rank, block_attn, num_heads_q, num_heads_kv, head_dims)
    row_index = itertools.chain.from_iterable(itertools.chain.from_iterable(index.row_index.values()))
    tokens, *rest = _upload([index.share.tokens, *(mask.words for mask in index.masks.values()), *row_index], device)
    on_device, mover = iter(rest), block_attn.row_mover()
    masks = {stage: mask.to(next(on_device)) for stage, mask in index.masks.items()}
    bound = {
        stage: BoundStage(
            StageRows(stage, [[next(on_device) for _ in each] for each in exchanges], mover, transport), masks[stage]
        )
        for stage, exchanges in index.row_index.items()
    }
    forward, backward = (
        tuple(bound[stage] for stage in stages) for stages in (index.share.forward, index.share.backward)
    )
    num_bytes = sum(x.nbytes for x in (tokens, *rest)) + sum(mask.num_bytes for mask in masks.values())
    latent = bool(plan.heads.latent)
    return BoundPlan(forward, backward, mover, tokens, transport, block_attn, fp32_reduce, num_bytes, latent, plan)


@torch.inference_mode(False)
def bind_slices(
    slices: AttnSlices,
    num_q: int,
    num_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    block_attn: BlockAttn,
    device: torch.device,
    head_dims: tuple[int, int] = LLAMA_HEADS.dims,
) -> BoundPlan:
    """Readies a mask over one device's q and k, which may differ in length: one stage, no communication.

    Raises:
        ValueError: a slice reaches beyond num_q or num_k.
    """
    for name, length, column in (("q", num_q, 1), ("k", num_k, 3)):
        if (i := first_true(slices.table[:, column] > length)) is not None:
            raise ValueError(f"slice {i} is {slices.table[i].tolist()} but {name} has {length} rows; cut the slice")
    stage = Stage(slices.canonical(), True, num_k, ())
    head_dim, value_dim = head_dims
    shape = num_q, num_k, num_heads_q, num_heads_kv
    mask = block_attn.prepare(StageMask(stage.slices, *shape, head_dim=head_dim, value_dim=value_dim))
    words, no_tokens = _upload([mask.words, np.zeros(0, np.int64)], device)
    mover, on_device = block_attn.row_mover(), mask.to(words)
    stages = (BoundStage(StageRows(stage, [], mover, SINGLE_RANK), on_device),)
    num_bytes = words.nbytes + on_device.num_bytes
    return BoundPlan(stages, stages, mover, no_tokens, SINGLE_RANK, block_attn, True, num_bytes)


def _upload(parts: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Integer arrays as int32 tensors on the device, in one copy; each begins at a multiple of 16 bytes."""
    starts = np.cumsum([0, *(-(-len(part) // 4) * 4 for part in parts)]).tolist()
    words = torch.zeros(starts[-1], dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
    for start, part in zip(starts, parts, strict=False):
        words.numpy()[start : start + len(part)] = part
    on_device = words.to(device, non_blocking=True)
    return [on_device[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]
