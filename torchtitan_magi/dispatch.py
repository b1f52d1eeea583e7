"""Token tensors between the pack's order and the ranks' shares. A differentiable pair."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_magi.exchange.mesh import Mesh, as_transport
from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.planning.plan import AttnPlan


def dispatch(x: Tensor, plan: AttnPlan, mesh: Mesh, pad_value: float = 0) -> Tensor:
    """This rank's tokens.

    Args:
        x: [total_tokens, ...], the same on every rank.
        mesh: the context-parallel mesh or group; None for a single rank.
        pad_value: what the padding tokens hold (-100 for labels).

    Returns:
        [tokens_per_rank, ...]. Its gradient with respect to x is gathered from all ranks.

    Raises:
        ValueError: x has not plan.total_tokens rows; the mesh does not fit the plan.
    """
    transport = as_transport(mesh, plan.cp_size)
    if len(x) != plan.total_tokens:
        raise ValueError(
            f"x has {len(x)} rows but the plan {plan.total_tokens} tokens; the first dimension is the token"
        )
    return _Dispatch.apply(x, plan, transport, pad_value)


def undispatch(x_local: Tensor, plan: AttnPlan, mesh: Mesh) -> Tensor:
    """The pack's tokens, from every rank's share.

    Args:
        x_local: [tokens_per_rank, ...].

    Returns:
        [total_tokens, ...] without padding, the same on every rank. In the backward each rank takes its own part of the
        gradient, as when every rank computes the same loss from the result.

    Raises:
        ValueError: x_local has not plan.tokens_per_rank rows; the mesh does not fit the plan.
    """
    transport = as_transport(mesh, plan.cp_size)
    if len(x_local) != plan.tokens_per_rank:
        raise ValueError(f"x_local has {len(x_local)} rows but the plan gives each rank {plan.tokens_per_rank} tokens")
    return _Undispatch.apply(x_local, plan, transport)


def _take(x: Tensor, plan: AttnPlan, rank: int, pad_value: float) -> Tensor:
    missing = plan.padded_tokens - plan.total_tokens
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 1) + (0, missing), value=pad_value)
    return x.index_select(0, torch.tensor(plan.ranks[rank].tokens).to(x.device, non_blocking=True))


def _gather(x_local: Tensor, plan: AttnPlan, transport: Transport) -> Tensor:
    gathered = x_local.new_empty(plan.padded_tokens, *x_local.shape[1:])
    transport.all_gather(gathered, x_local.contiguous())
    tokens = torch.cat([torch.tensor(share.tokens) for share in plan.ranks]).to(x_local.device, non_blocking=True)
    return torch.empty_like(gathered).index_copy_(0, tokens, gathered)[: plan.total_tokens]


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttnPlan, transport: Transport, pad_value: float) -> Tensor:
        ctx.plan, ctx.transport = plan, transport
        return _take(x, plan, transport.rank, pad_value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grad, ctx.plan, ctx.transport), None, None, None


class _Undispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, plan: AttnPlan, transport: Transport) -> Tensor:
        ctx.plan, ctx.rank = plan, transport.rank
        return _gather(x_local, plan, transport)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _take(grad, ctx.plan, ctx.rank, 0), None, None
