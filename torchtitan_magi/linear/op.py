"""Layers that recur, as a model calls them: by the handle of its microbatch's plan.

Shapes: T local tokens, HK heads of q and k, H value heads, K and V elements of a head, C channels, W width of a kernel.
"""

from typing import Literal

from torch import Tensor

from torchtitan_magi.attention.op import PlanHandle
from torchtitan_magi.linear.chunked import Chunked
from torchtitan_magi.linear.delta_rule import delta_rule
from torchtitan_magi.linear.short_conv import ConvRows, short_conv


def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: PlanHandle, scale: float) -> Tensor:
    """``cp_gated_delta_rule`` of a bound plan: out [T, H, V] of q, k [T, HK, K], v [T, H, V], g, beta [T, H]."""
    bound = handle.bound_plan
    return delta_rule(q, k, v, g, beta, bound.parts, bound.transport, scale, Chunked())


def convolve(x: Tensor, weight: Tensor, handle: PlanHandle, activation: Literal["silu"] | None) -> Tensor:
    """``cp_causal_conv1d`` of a bound plan: out [T, C] of x [T, C] and weight [C, W]."""
    bound = handle.bound_plan
    rows = ConvRows.of(bound.parts, weight.shape[1], x.device)
    return short_conv(x, weight, rows, bound.transport, activation)
