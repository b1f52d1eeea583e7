"""Context-parallel attention of one layer as ops of torch, into which no compiler looks, and the plan's way to them.

Shapes: T local tokens, Hq query heads, H K/V heads, D head_dim of q and k, Dv of v.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torchtitan_magi.attention.bound_plan import BoundPlan
from torchtitan_magi.attention.latents import Latents
from torchtitan_magi.attention.stage_loop import LayerInputs, Result, backward, forward

# Compilers see one op for the forward and one for the backward. A plan reaches them through a tensor that names it.

_bound_plans: weakref.WeakValueDictionary[int, BoundPlan] = weakref.WeakValueDictionary()
_numbers = iter(range(1, 2**63 - 1))


class PlanHandle:
    """A bound plan on its way to the layers of a model.

    A plain object, which FSDP2, pipelining, compilers and activation checkpointing pass on untouched. They would take
    a bare tensor for data: FSDP2 copies tensors to the GPU, and a copy owns no plan, and reading it would make every
    layer wait for the device.

    Attributes:
        bound_plan: the plan.
        sends_latents: whether layers that have latent vectors send these in place of K and V.
        tensor: what ops take: 0-d int64 on the CPU. It names the plan and keeps it alive, also while it is saved for
            the backward or for recomputation.
        counts: of layers that recur, ``RankParts.counts`` as lengths of tensors: compilers take those for numbers that
            are known when a graph runs, so that one serves all plans. Empty unless asked for.
    """

    @torch.inference_mode(False)  # the tensor may be saved for a backward
    def __init__(self, bound_plan: BoundPlan, recurs: bool = False) -> None:
        """recurs: whether the model has layers that recur."""
        number = next(_numbers)
        self.bound_plan, self.sends_latents = bound_plan, bound_plan.sends_latents
        self.tensor = torch.tensor(number, dtype=torch.int64, device="cpu")
        self.tensor.bound_plan = bound_plan  # type: ignore[attr-defined]
        _bound_plans[number] = bound_plan
        self.counts = tuple(map(_length, bound_plan.parts.counts)) if recurs else ()

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [batch, seq_len, ...] as [batch, seq_len / cp, ...]."""
        return self.bound_plan.take(x)


def _length(number: int) -> Tensor:
    """A tensor of this length, of which no graph knows more."""
    from torch._dynamo.decorators import mark_unbacked  # takes seconds

    x = torch.empty(number, dtype=torch.bool, device="cpu")
    mark_unbacked(x, 0)
    return x


def bound_plan_of(handle: Tensor) -> BoundPlan:
    """The plan that the tensor of a ``PlanHandle`` names; a copy of it, which owns nothing, names the same."""
    own: BoundPlan | None = getattr(handle, "bound_plan", None)
    return _bound_plans[int(handle)] if own is None else own


def num_live_plans() -> int:
    """Number of bound plans that are alive."""
    return len(_bound_plans)


_library = torch.library.Library("torchtitan_magi", "DEF")
# A plan's index data and its exchanges are new in every microbatch: a replayed CUDA graph would run an old plan.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library.define(
    "cp_varlen_attn(Tensor q, Tensor k, Tensor v, Tensor handle, float softmax_scale, Tensor? sinks=None, "
    "float softcap=0., Tensor? latents=None, Tensor? weight=None) -> (Tensor, Tensor)",
    tags=TAGS,
)
_library.define(
    "cp_varlen_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor handle, "
    "float softmax_scale, Tensor? sinks=None, float softcap=0., Tensor? dlse=None, Tensor? latents=None, "
    "Tensor? weight=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=TAGS,
)

attention_op = torch.ops.torchtitan_magi.cp_varlen_attn.default
"""out [T, Hq, Dv] in the dtype of q and lse [T, Hq] in float32 or wider, of the plan whose ``PlanHandle.tensor`` is
given; both differentiable. q [T, Hq, D]; k [T, H, D]; v [T, H, Dv]; sinks [Hq]; latents and weight as ``Latents`` has
them."""

attention_backward_op = torch.ops.torchtitan_magi.cp_varlen_attn_backward.default
"""``LayerGrads`` of ``attention_op``; empty where there is no such input."""


def _layer(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, sinks: Tensor | None = None, softcap: float = 0.0,
    latents: Tensor | None = None, weight: Tensor | None = None,
) -> LayerInputs:  # fmt: skip
    """What the ops take, without what they know already: the plan, and in the backward the results."""
    both = None if latents is None or weight is None else Latents(latents, weight)
    return LayerInputs(q, k, v, softmax_scale, sinks, softcap, both)


@torch.library.impl(_library, "cp_varlen_attn", "CompositeExplicitAutograd")
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return forward(bound_plan_of(handle), _layer(q, k, v, *options))


@torch.library.impl(_library, "cp_varlen_attn_backward", "CompositeExplicitAutograd")
def _run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor, softmax_scale: float,
    sinks: Tensor | None = None, softcap: float = 0.0, dlse: Tensor | None = None, latents: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    layer = _layer(q, k, v, softmax_scale, sinks, softcap, latents, weight)
    grads = backward(bound_plan_of(handle), layer, Result(out, lse, dout, dlse))
    return tuple(lse.new_empty(0) if grad is None else grad for grad in grads)


@torch.library.register_fake("torchtitan_magi::cp_varlen_attn", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[:2], dtype=lse_dtype)


@torch.library.register_fake("torchtitan_magi::cp_varlen_attn_backward", lib=_library)
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor, softmax_scale: float,
    sinks: Tensor | None = None, softcap: float = 0.0, dlse: Tensor | None = None, latents: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    maybe = (lse.new_empty(0) if x is None else x.new_empty(x.shape) for x in (sinks, latents, weight))
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *maybe


def is_watched(q: Tensor) -> bool:
    """Whether someone wants to see the op: tracing, or checkpointing that looks for it. Else it is host time."""
    return type(q) is not Tensor or is_in_torch_dispatch_mode()


class _Attention(torch.autograd.Function):
    """The derivative, registered by hand: torch.library's own wrappers double the host time of a call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float, sinks: Tensor | None,
        softcap: float, latents: Tensor | None, weight: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        options = softmax_scale, sinks, softcap, latents, weight
        if is_watched(q):
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = attention_op(q, k, v, handle, *options)
        else:
            out, lse = forward(bound_plan_of(handle), _layer(q, k, v, *options))
        ctx.save_for_backward(q, k, v, out, lse, sinks, latents, weight)
        ctx.handle, ctx.softmax_scale, ctx.softcap = handle, softmax_scale, softcap
        ctx.set_materialize_grads(False)  # mostly nobody asks for the gradient of lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse, sinks, latents, weight), (dout, dlse) = ctx.saved_tensors, grads
        if dout is None:
            dout = torch.zeros_like(out)
        if is_watched(q) or torch.is_grad_enabled():
            options = ctx.softmax_scale, sinks, ctx.softcap, dlse, latents, weight
            found = attention_backward_op(dout, q, k, v, out, lse, ctx.handle, *options)
        else:
            layer = _layer(q, k, v, ctx.softmax_scale, sinks, ctx.softcap, latents, weight)
            found = backward(bound_plan_of(ctx.handle), layer, Result(out, lse, dout, dlse))
        dq, dk, dv, *others = found
        dsinks, *rest = (None if x is None else dx for x, dx in zip((sinks, latents, weight), others, strict=True))
        return dq, dk, dv, None, None, dsinks, None, *rest


# Function.apply itself would first look for functorch's transforms, which `check_transforms` refuses.
_apply_attention = super(torch.autograd.Function, _Attention).apply


def check_transforms(*maybe: Tensor | None) -> None:
    """Refuses what attention has no rule for, and what would drop tangents silently.

    Raises:
        RuntimeError: inside of torch.func's transforms, or with forward-mode tangents.
    """
    tensors = [x for x in maybe if x is not None]
    if torch._C._are_functorch_transforms_active() or any(
        map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)
    ):
        raise RuntimeError(
            "attention cannot run inside torch.func transforms (grad, vjp, jvp, vmap); use torch.autograd.grad"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("attention has no forward-mode derivative; use torch.autograd.grad")


@torch.library.impl(_library, "cp_varlen_attn", "Autograd")
def _attend(
    q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float, sinks: Tensor | None = None,
    softcap: float = 0.0, latents: Tensor | None = None, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    inputs = q, k, v, sinks, latents, weight
    check_transforms(*inputs)
    differentiates = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    if differentiates or is_watched(q):
        return _apply_attention(q, k, v, handle, softmax_scale, sinks, softcap, latents, weight)
    return forward(bound_plan_of(handle), _layer(q, k, v, softmax_scale, sinks, softcap, latents, weight))


@torch.library.impl(_library, "cp_varlen_attn_backward", "Autograd")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments if isinstance(x, Tensor)):
        raise RuntimeError("attention has no second derivatives; take its gradients without create_graph")
    if not is_watched(arguments[0]):
        return _run_backward(*arguments)
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward_op(*arguments)


def attend(
    q: Tensor, k: Tensor, v: Tensor, handle: PlanHandle, softmax_scale: float, sinks: Tensor | None = None,
    softcap: float = 0.0, latents: Tensor | None = None, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``attention_op`` of a plan, called directly where nobody watches: half the host time."""
    options = softmax_scale, sinks, softcap, latents, weight
    if torch.compiler.is_compiling() or is_watched(q):
        return attention_op(q, k, v, handle.tensor, *options)
    return _attend(q, k, v, handle.tensor, *options)
