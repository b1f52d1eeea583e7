"""Layers that recur, as a model calls them: by the handle of its microbatch's plan, as ops of torch where one looks.

Compilers and selective checkpointing see one op for each direction. What a forward keeps is among its results, some of
it as often as the plan has certain parts. These numbers come in beside the handle: so the shapes of all results follow
from the arguments, also where an op is recomputed or its results are held back, and a graph serves plans with any.

Shapes: T local tokens, HK heads of q and k, H value heads, K and V elements of a head, C channels, W width of a kernel.
"""

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_magi.attention.op import TAGS, PlanHandle, bound_plan_of, is_watched
from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.linear import delta_rule, short_conv
from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.linear.choose import choose_backend
from torchtitan_magi.linear.delta_rule import Kept, Layer
from torchtitan_magi.linear.once import once
from torchtitan_magi.linear.short_conv import ConvRows
from torchtitan_magi.products import own_dtypes

_library = torch.library.Library("torchtitan_magi", "FRAGMENT")
_TOKENS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
_library.define(
    f"cp_gated_delta_rule({_TOKENS}, Tensor handle, float scale, SymInt num_states, SymInt num_matrices) -> "
    "(Tensor, Tensor, Tensor, Tensor[])",
    tags=TAGS,
)
_library.define(
    f"cp_gated_delta_rule_backward(Tensor dout, {_TOKENS}, Tensor states, Tensor matrices, Tensor[] of_backend, "
    "Tensor handle, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=TAGS,
)
_library.define(
    "cp_causal_conv1d(Tensor x, Tensor weight, Tensor handle, str? activation, SymInt num_cut) -> (Tensor, Tensor)",
    tags=TAGS,
)
_library.define(
    "cp_causal_conv1d_backward(Tensor dout, Tensor x, Tensor weight, Tensor received, Tensor handle, str? activation) "
    "-> (Tensor, Tensor)",
    tags=TAGS,
)

rule_op = torch.ops.torchtitan_magi.cp_gated_delta_rule.default
"""out [T, H, V] in the dtype of v, differentiable, and ``delta_rule.Kept``: states [num_states, H, K, V], matrices
[num_matrices, H, K, K], and what the backend keeps. Numbers are those of the plan's ``PlanHandle.counts``."""

rule_backward_op = torch.ops.torchtitan_magi.cp_gated_delta_rule_backward.default
"""Gradients of q, k, v, g, beta."""

conv_op = torch.ops.torchtitan_magi.cp_causal_conv1d.default
"""out [T, C] in the dtype of x, differentiable, and the rows of other ranks, [num_cut (W - 1), C] with zeros at the
end: a part whose parent lies on another rank needs W - 1 or fewer, and those that follow it on its rank no others."""

conv_backward_op = torch.ops.torchtitan_magi.cp_causal_conv1d_backward.default
"""Gradients of x and weight."""


def recur(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: PlanHandle, scale: float) -> Tensor:
    """``cp_gated_delta_rule`` of a bound plan: out [T, H, V] of q, k [T, HK, K], v [T, H, V], g, beta [T, H]."""
    if torch.compiler.is_compiling() or is_watched(q):
        states, matrices, _ = handle.counts
        out, *_ = rule_op(q, k, v, g, beta, handle.tensor, scale, len(states), len(matrices))
        return out  # type: ignore[no-any-return]
    tokens, *rest = _layer(Tokens(q, k, v, g, beta), handle.tensor, scale)
    return delta_rule.delta_rule(*tokens, *rest)


def convolve(x: Tensor, weight: Tensor, handle: PlanHandle, activation: Literal["silu"] | None) -> Tensor:
    """``cp_causal_conv1d`` of a bound plan: out [T, C] of x [T, C] and weight [C, W]."""
    if torch.compiler.is_compiling() or is_watched(x):
        *_, cut = handle.counts
        out, _ = conv_op(x, weight, handle.tensor, activation, len(cut))
        return out  # type: ignore[no-any-return]
    return short_conv.short_conv(x, weight, *_rows(x, weight, handle.tensor), activation)


def _layer(tokens: Tokens, handle: Tensor, scale: float) -> Layer:
    bound = bound_plan_of(handle)
    return Layer(tokens, bound.parts, bound.transport, scale, choose_backend(tokens))


def _rows(x: Tensor, weight: Tensor, handle: Tensor) -> tuple[ConvRows, Transport]:
    bound = bound_plan_of(handle)
    return ConvRows.of(bound.parts, weight.shape[1], x.device), bound.transport


def _autograd() -> AbstractContextManager[Any]:
    """Within it autograd works, which torch switches off inside of ops. A backward of plain torch is made of it."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)


@torch.library.impl(_library, "cp_gated_delta_rule", "CompositeExplicitAutograd")
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: Tensor, scale: float, *_: int
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    with own_dtypes(v.device):
        out, kept = delta_rule.forward(_layer(Tokens(q, k, v, g, beta), handle, scale))
    return out.contiguous(), kept.states, kept.matrices, list(kept.of_backend)


@torch.library.register_fake("torchtitan_magi::cp_gated_delta_rule", lib=_library)
def _(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, handle: Tensor, scale: float, num_states: int,
    num_matrices: int,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    tokens = Tokens(q, k, v, g, beta)
    num_heads, key_dim, value_dim = tokens.state_shape
    states = v.new_empty(num_states, num_heads, key_dim, value_dim, dtype=tokens.wide)
    matrices = v.new_empty(num_matrices, num_heads, key_dim, key_dim, dtype=tokens.wide)
    return v.new_empty(v.shape), states, matrices, list(choose_backend(tokens).room(tokens))


@torch.library.impl(_library, "cp_gated_delta_rule_backward", "CompositeExplicitAutograd")
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, matrices: Tensor,
    of_backend: list[Tensor], handle: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    layer = _layer(Tokens(q, k, v, g, beta), handle, scale)
    with own_dtypes(v.device), _autograd():
        grads = delta_rule.backward(layer, dout, Kept(states, matrices, tuple(of_backend)))
    return tuple(x.contiguous() for x in grads)


@torch.library.register_fake("torchtitan_magi::cp_gated_delta_rule_backward", lib=_library)
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, beta))


@torch.library.impl(_library, "cp_causal_conv1d", "CompositeExplicitAutograd")
def _(x: Tensor, weight: Tensor, handle: Tensor, activation: str | None, num_cut: int) -> tuple[Tensor, Tensor]:
    with own_dtypes(x.device):
        out, received = short_conv.forward(x, weight, *_rows(x, weight, handle), activation)
    return out.contiguous(), F.pad(received, (0, 0, 0, num_cut * (weight.shape[1] - 1) - len(received)))


@torch.library.register_fake("torchtitan_magi::cp_causal_conv1d", lib=_library)
def _(x: Tensor, weight: Tensor, handle: Tensor, activation: str | None, num_cut: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(num_cut * (weight.shape[1] - 1), x.shape[1])


@torch.library.impl(_library, "cp_causal_conv1d_backward", "CompositeExplicitAutograd")
def _(
    dout: Tensor, x: Tensor, weight: Tensor, received: Tensor, handle: Tensor, activation: str | None
) -> tuple[Tensor, ...]:
    rows, transport = _rows(x, weight, handle)
    with own_dtypes(x.device), _autograd():
        saved = x, weight, received[: rows.num_received]
        dx, dweight = short_conv.backward(dout, saved, rows, transport, activation)
    return dx.contiguous(), dweight.contiguous()


@torch.library.register_fake("torchtitan_magi::cp_causal_conv1d_backward", lib=_library)
def _(dout: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _keep_rule(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tokens, ctx.handle, ctx.scale, _, _ = inputs
    _, states, matrices, of_backend = output
    ctx.save_for_backward(*tokens, states, matrices, *of_backend)
    ctx.mark_non_differentiable(states, matrices, *of_backend)
    ctx.set_materialize_grads(False)


@once
def _rule_grads(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    q, k, v, g, beta, states, matrices, *rest = ctx.saved_tensors
    grads = rule_backward_op(dout, q, k, v, g, beta, states, matrices, rest, ctx.handle, ctx.scale)
    return *grads, None, None, None, None


def _keep_conv(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.handle, ctx.activation, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@once
def _conv_grads(ctx: Any, dout: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *conv_backward_op(dout, *ctx.saved_tensors, ctx.handle, ctx.activation), None, None, None


for _op, _grads, _keep in ((rule_op, _rule_grads, _keep_rule), (conv_op, _conv_grads, _keep_conv)):
    torch.library.register_autograd(_op, _grads, setup_context=_keep, lib=_library)
