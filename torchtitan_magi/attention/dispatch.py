"""Token tensors between the pack's order and the ranks' shares. A differentiable pair."""

from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from torchtitan_magi.cuda.tables import uploaded
from torchtitan_magi.exchange.mesh import Mesh, as_transport
from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.planning.plan import AttnPlan, check_plan
from torchtitan_magi.wording import quoted


@_disable_dynamo
def dispatch(x: Tensor, plan: AttnPlan, mesh: Mesh, pad_value: float = 0) -> Tensor:
    """This rank's tokens.

    Args:
        x: [total_tokens, ...], the same on every rank.
        mesh: the context-parallel mesh or group; None for a single rank.
        pad_value: what the padding tokens hold (-100 for labels).

    Returns:
        [tokens_per_rank, ...]. Its gradient with respect to x is gathered from all ranks.

    Raises:
        ValueError: x is no tensor or has not plan.total_tokens rows; no plan; the mesh does not fit the plan, or x; x
            cannot hold pad_value.
    """
    check_plan(plan)
    check_tensor(x, "x")
    transport = as_transport(mesh, plan.cp_size, x.device)
    if x.ndim == 0 or len(x) != plan.total_tokens:
        raise ValueError(f"x has {_rows(x)} but the plan {plan.total_tokens} tokens; the first dimension is the token")
    _check_pad(x.dtype, pad_value)
    return _Dispatch.apply(x, plan, transport, pad_value)


@_disable_dynamo
def undispatch(x_local: Tensor, plan: AttnPlan, mesh: Mesh) -> Tensor:
    """The pack's tokens, from every rank's share.

    Args:
        x_local: [tokens_per_rank, ...].

    Returns:
        [total_tokens, ...] without padding, the same on every rank. In the backward each rank takes its own part of the
        gradient, as when every rank computes the same loss from the result.

    Raises:
        ValueError: x_local is no tensor or has not plan.tokens_per_rank rows; no plan; the mesh does not fit the plan,
            or x_local.
    """
    check_plan(plan)
    check_tensor(x_local, "x_local")
    transport = as_transport(mesh, plan.cp_size, x_local.device)
    if x_local.ndim == 0 or len(x_local) != plan.tokens_per_rank:
        raise ValueError(f"x_local has {_rows(x_local)} but the plan gives each rank {plan.tokens_per_rank} tokens")
    return _Undispatch.apply(x_local, plan, transport)


def check_tensor(x: Tensor, name: str) -> None:
    """Raises ValueError for what is no tensor, a distributed one, or one that is not strided."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is of type {type(x).__name__}; give a torch.Tensor")
    if type(x) is not Tensor and hasattr(x, "to_local"):
        raise ValueError(f"{name} is a {type(x).__name__}; give this rank's tokens, {name}.to_local()")
    if x.layout is not torch.strided or x.is_nested:
        layout = "nested" if x.is_nested else x.layout
        raise ValueError(f"{name} is a {layout} tensor; give a dense one, whose first dimension is the token")


def _rows(x: Tensor) -> str:
    return f"{len(x)} rows" if x.ndim else "no dimension"


def _check_pad(dtype: torch.dtype, pad_value: float) -> None:
    is_number = isinstance(pad_value, Real)
    if is_number and (dtype.is_floating_point or dtype.is_complex):
        is_number = pad_value in (torch.inf, -torch.inf) or not abs(pad_value) > torch.finfo(dtype).max
    elif is_number:
        least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        is_number = least <= pad_value <= most and int(pad_value) == pad_value
    if not is_number:
        raise ValueError(f"pad_value is {quoted(pad_value)}; give a number that x, of {dtype}, can hold")


def _take(x: Tensor, plan: AttnPlan, rank: int, pad_value: float) -> Tensor:
    if plan.padded_tokens > plan.total_tokens:
        padded = x.new_full((plan.padded_tokens, *x.shape[1:]), pad_value)
        padded[: plan.total_tokens] = x  # by torch.cat, autocast to bfloat16 would refuse float16, and the other way
        x = padded
    tokens = torch.tensor(plan.ranks[rank].tokens, device="cpu")
    return x.index_select(0, uploaded(tokens, x.device))


def _gather(x_local: Tensor, plan: AttnPlan, transport: Transport) -> Tensor:
    gathered = x_local.new_empty(plan.padded_tokens, *x_local.shape[1:])
    transport.all_gather(gathered, x_local.contiguous())
    tokens = np.concatenate([share.tokens for share in plan.ranks])
    rows = np.empty_like(tokens)
    rows[tokens] = np.arange(len(tokens))
    own = torch.tensor(rows[: plan.total_tokens], device="cpu")
    return gathered.index_select(0, uploaded(own, x_local.device))  # no view: it may change in place


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: AttnPlan, transport: Transport, pad_value: float) -> Tensor:
        ctx.plan, ctx.transport = plan, transport
        return _take(x, plan, transport.rank, pad_value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Undispatch.apply(grad, ctx.plan, ctx.transport), None, None, None


class _Undispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_local: Tensor, plan: AttnPlan, transport: Transport) -> Tensor:
        ctx.plan, ctx.transport = plan, transport
        return _gather(x_local, plan, transport)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dispatch.apply(grad, ctx.plan, ctx.transport, 0), None, None
