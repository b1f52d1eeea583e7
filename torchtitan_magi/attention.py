"""Context-parallel attention of one layer: the stage loop, forward and backward, as ops no compiler looks into.

Shapes: T local tokens, Hq query heads, H K/V heads, D head_dim, rows = K/V rows of a stage.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torchtitan_magi.backends import Gradients, OutGrads, StageInputs, check_scale, choose_block_attn
from torchtitan_magi.bound_plan import BoundPlan, BoundStage, bind_plan, bind_slices
from torchtitan_magi.exchange.group_cast import StageCasts, grad_buffer, group_reduce
from torchtitan_magi.exchange.in_flight import RowSums
from torchtitan_magi.exchange.mesh import Mesh, as_transport
from torchtitan_magi.masks.slices import AttnSlices, check_slices
from torchtitan_magi.planning.plan import AttnPlan, forget_plans

# ------------------------------------------------------------------------------------------------------- the stage loop


def _forward(bound: BoundPlan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] in the dtype of q, lse [T, Hq] in float32 or wider."""
    stages = bound.forward
    if _is_alone(stages):
        return bound.block_attn.forward(StageInputs(q, k, v, stages[0].mask, softmax_scale))
    casts = StageCasts([stage.rows for stage in stages], k, v)
    result = None
    for i, stage in enumerate(stages):
        k_rows, v_rows, late = casts.take(i)
        inputs = StageInputs(q, k_rows, v_rows, stage.mask, softmax_scale, late)
        result = bound.block_attn.forward(inputs, result, i + 1 < len(stages))
        del k_rows, v_rows, late, inputs  # their memory is for a later stage
    assert result is not None  # every rank has a stage
    return result


def _is_alone(stages: tuple[BoundStage, ...]) -> bool:
    """Whether nothing travels."""
    return len(stages) == 1 and not stages[0].rows.stage.exchanges


def _backward(
    bound: BoundPlan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv with the shapes and dtypes of q, k, v."""
    stages = bound.backward
    if _is_alone(stages):
        return _backward_alone(bound, dout, q, k, v, out, lse, softmax_scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, delta = torch.empty(q.shape, dtype=wide, device=q.device), torch.empty_like(lse)
    # dK/dV of the first stage; its first rows, the rank's own, gather what other ranks return
    gathered = grad = dq.new_empty(stages[0].rows.stage.num_rows, 2, *k.shape[1:])
    adds_keys = bound.block_attn.adds_keys(stages[0].mask)
    zeros = (dq, grad) if adds_keys else (dq,)
    casts = StageCasts([stage.rows for stage in stages], k, v, RowSums(out, dout, delta, zeros))
    out_grads = OutGrads(dout, lse, delta)
    wire = wide if bound.fp32_reduce else k.dtype
    returned = None
    for i, stage in enumerate(stages):
        k_rows, v_rows, late = casts.take(i)
        if i > 0:
            grad = grad_buffer(stage.rows, k, wire)
        inputs = StageInputs(q, k_rows, v_rows, stage.mask, softmax_scale, late)
        bound.block_attn.backward(inputs, out_grads, Gradients(dq, grad, zeroed=adds_keys and i == 0))
        del k_rows, v_rows, late, inputs
        if returned is not None:
            bound.mover.add(returned, gathered)
        if stage.rows.stage.exchanges:
            returned = group_reduce(stage.rows, grad, wire)
    assert returned is not None  # the last stage's
    return bound.mover.finish(returned, dq, gathered, softmax_scale, q.dtype)


def _backward_alone(
    bound: BoundPlan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_backward` of a rank that has all its keys.

    Where the kernel sums dk and dv up in float32, the sums lie in the memory of the rounded dq if they fit there. So
    they are rounded to dk and dv before dq is.
    """
    (stage,), wide = bound.backward, torch.promote_types(q.dtype, torch.float32)
    dq, delta = torch.empty(q.shape, dtype=wide, device=q.device), torch.empty_like(lse)
    rounded = dq.new_empty(q.shape, dtype=q.dtype)
    sums = bound.block_attn.key_sums(stage.mask, k, rounded)
    bound.mover.sum(RowSums(out, dout, delta, (dq,) if sums is None else (dq, sums)))
    inputs, out_grads = StageInputs(q, k, v, stage.mask, softmax_scale), OutGrads(dout, lse, delta)
    if sums is None:
        dk, dv = dq.new_empty(k.shape, dtype=k.dtype), dq.new_empty(v.shape, dtype=v.dtype)
        bound.block_attn.backward(inputs, out_grads, Gradients(dq, (dk, dv)))
    else:
        bound.block_attn.backward(inputs, out_grads, Gradients(dq, sums, zeroed=True))
        dk, dv = bound.mover.round_keys(sums, k.dtype)
    bound.mover.round(dq, softmax_scale, rounded)
    return rounded, dk, dv


# ------------------------------------------------------------------------------------------------------------- the ops
# Compilers see one op for the forward and one for the backward. The plan reaches them through a handle: a 0-d int64 CPU
# tensor that names it and keeps it alive, also while it is saved for the backward or for recomputation.

_bound_plans: weakref.WeakValueDictionary[int, BoundPlan] = weakref.WeakValueDictionary()
_next_handle = iter(range(1, 2**63 - 1))


@torch.inference_mode(False)  # it may be saved for a backward
def make_handle(bound: BoundPlan) -> Tensor:
    """A 0-d int64 CPU tensor through which ``attention_op`` finds ``bound``; it owns it."""
    number = next(_next_handle)
    handle = torch.tensor(number, dtype=torch.int64, device="cpu")
    handle.bound_plan = bound  # type: ignore[attr-defined]
    _bound_plans[number] = bound
    return handle


def _bound_plan(handle: Tensor) -> BoundPlan:
    """What a handle names: a copy of it, which owns nothing, names the same."""
    own: BoundPlan | None = getattr(handle, "bound_plan", None)
    return _bound_plans[int(handle)] if own is None else own


def num_live_plans() -> int:
    """Number of bound plans that are alive."""
    return len(_bound_plans)


_library = torch.library.Library("torchtitan_magi", "DEF")
# A plan's index data and its exchanges are new in every microbatch: a replayed CUDA graph would run an old plan.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
_library.define(
    "cp_varlen_attn(Tensor q, Tensor k, Tensor v, Tensor handle, float softmax_scale) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    "cp_varlen_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor handle, "
    "float softmax_scale) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)

attention_op = torch.ops.torchtitan_magi.cp_varlen_attn.default
"""(out [T, Hq, D], lse [T, Hq]) of the bound plan behind ``handle``. q [T, Hq, D]; k, v [T, H, D]. Only ``out`` is
differentiable."""

attention_backward_op = torch.ops.torchtitan_magi.cp_varlen_attn_backward.default
"""(dq, dk, dv) of ``attention_op``."""


@torch.library.impl(_library, "cp_varlen_attn", "CompositeExplicitAutograd")
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    return _forward(_bound_plan(handle), q, k, v, softmax_scale)


@torch.library.impl(_library, "cp_varlen_attn_backward", "CompositeExplicitAutograd")
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(_bound_plan(handle), dout, q, k, v, out, lse, softmax_scale)


@torch.library.register_fake("torchtitan_magi::cp_varlen_attn", lib=_library)
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype)


@torch.library.register_fake("torchtitan_magi::cp_varlen_attn_backward", lib=_library)
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _is_watched(q: Tensor) -> bool:
    """Whether someone wants to see the op: tracing, or checkpointing that looks for it. Else it is host time."""
    return type(q) is not Tensor or is_in_torch_dispatch_mode()


class _Attention(torch.autograd.Function):
    """The derivative, registered by hand: torch.library's own wrappers double the host time of a call."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor]:
        if _is_watched(q):
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = attention_op(q, k, v, handle, softmax_scale)
        else:
            out, lse = _forward(_bound_plan(handle), q, k, v, softmax_scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.handle, ctx.softmax_scale = handle, softmax_scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse), handle = ctx.saved_tensors, ctx.handle
        if _is_watched(q) or torch.is_grad_enabled():
            dq, dk, dv = attention_backward_op(grads[0], q, k, v, out, lse, handle, ctx.softmax_scale)
        else:
            dq, dk, dv = _backward(_bound_plan(handle), grads[0], q, k, v, out, lse, ctx.softmax_scale)
        return dq, dk, dv, None, None


# Function.apply itself would first look for functorch's transforms, which `_check_transforms` refuses.
_apply_attention = super(torch.autograd.Function, _Attention).apply


def _check_transforms(*tensors: Tensor) -> None:
    """Refuses what attention has no rule for, and what would drop tangents silently.

    Raises:
        RuntimeError: inside of torch.func's transforms, or with forward-mode tangents.
    """
    if torch._C._are_functorch_transforms_active() or any(
        map(torch._C._functorch.is_functorch_wrapped_tensor, tensors)
    ):
        raise RuntimeError(
            "attention cannot run inside torch.func transforms (grad, vjp, jvp, vmap); use torch.autograd.grad"
        )
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise RuntimeError("attention has no forward-mode derivative; use torch.autograd.grad")


@torch.library.impl(_library, "cp_varlen_attn", "Autograd")
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    _check_transforms(q, k, v)
    return _apply_attention(q, k, v, handle, softmax_scale)


@torch.library.impl(_library, "cp_varlen_attn_backward", "Autograd")
def _(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments if isinstance(x, Tensor)):
        raise RuntimeError("attention has no second derivatives; take its gradients without create_graph")
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward_op(*arguments)


def attend(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """``attention_op``, called directly where nobody watches: half the host time."""
    if torch.compiler.is_compiling() or _is_watched(q):
        return attention_op(q, k, v, handle, softmax_scale)
    _check_transforms(q, k, v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply_attention(q, k, v, handle, softmax_scale)
    return _forward(_bound_plan(handle), q, k, v, softmax_scale)


# ---------------------------------------------------------------------------------------------------------- public API

CACHED_PLANS, CACHED_BYTES = 16, 256 << 20  # bound plans that the public calls keep, and their memory on the device


class _Handles(OrderedDict[Any, Tensor]):
    """Handles of the public calls' last bound plans: as many as CACHED_BYTES hold, at least one."""

    def get_or_make(self, key: Any, bind: Callable[[], BoundPlan]) -> Tensor:
        if key not in self:
            self[key] = make_handle(bind())
            sizes = {key: _bound_plan(handle).num_bytes for key, handle in self.items()}
            while len(self) > CACHED_PLANS or (len(self) > 1 and sum(sizes.values()) > CACHED_BYTES):
                sizes.pop(self.popitem(last=False)[0])
        self.move_to_end(key)
        return self[key]


_handles = _Handles()


def clear_caches() -> None:
    """Forgets the plans of ``make_plan`` and what ``cp_varlen_attn`` and ``flex_flash_attn`` keep on devices."""
    _handles.clear()
    forget_plans()


def cp_varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    mesh: Mesh = None,
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
    deterministic: bool = False,
    fp32_reduce: bool = False,
) -> Tensor:
    """Attention of this rank's tokens over all K/V their mask lets them see, wherever they are. Differentiable.

    Every rank of the mesh calls it with its share of the tokens, in the order of ``dispatch``.

    Args:
        q: [T, Hq, D] with T = plan.tokens_per_rank. k, v: [T, H, D], Hq a multiple of H.
        plan: from ``make_plan``, the same on every rank; layers that share it also share its index data.
        mesh: the context-parallel mesh or group; None for a single rank.
        softmax_scale: factor of the scores, positive; default D ** -0.5.
        backend: "auto" (our kernel on CUDA, flex_attention on CPU), "ffa" or "flex".
        deterministic: repeat bit for bit.
        fp32_reduce: send dK/dV in float32 instead of the dtype of k.

    Returns:
        [T, Hq, D] in the dtype of q; rows that see no key are 0.

    Every value of q, k and v must be finite, also in tokens that the mask leaves out: a masked score counts as 0, and
    0 times infinity or NaN is NaN. Fill padding with zeros, as ``dispatch`` does.

    Raises:
        ValueError: shapes that do not fit each other, the plan or the mesh; dtypes that differ or are of integers; no
            plan; a scale that is not positive; an unknown or unusable backend.
        RuntimeError: inside torch.func's transforms or with forward-mode tangents; the mesh's process group has ended.
    """
    if not isinstance(plan, AttnPlan):
        raise ValueError(
            f"plan is of type {type(plan).__name__}; make one with make_plan(slices, total_tokens, cp_size)"
        )
    _check_inputs(q, k, v)
    if not len(q) == len(k) == plan.tokens_per_rank:
        raise ValueError(
            f"q has {len(q)} rows but the plan gives each rank {plan.tokens_per_rank} tokens; dispatch them first"
        )
    transport = as_transport(mesh, plan.cp_size)  # not the mesh: one like it may come after its groups have ended
    key = (plan, q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device, backend, deterministic, fp32_reduce, transport)

    def bind() -> BoundPlan:
        block_attn = choose_block_attn(backend, q.device, deterministic)
        block_attn.check(q.shape[2], q.dtype)
        return bind_plan(plan, transport, block_attn, q.shape[1], k.shape[1], q.device, fp32_reduce)

    return attend(q, k, v, _handles.get_or_make(key, bind), _scale(softmax_scale, q))[0]


def flex_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    *,
    softmax_scale: float | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention under any list of AttnSlices, on one device. ``out`` is differentiable, ``lse`` is not.

    Args:
        q: [Tq, Hq, D]. k, v: [Tk, H, D], Hq a multiple of H.
        slices: the mask; queries in rows of q, keys in rows of k.
        softmax_scale, backend, deterministic: as in ``cp_varlen_attn``.

    Returns:
        out [Tq, Hq, D] in the dtype of q and lse [Tq, Hq], natural logarithms in float32 or wider; rows that no slice
        touches have out 0 and lse -inf.

    Raises:
        ValueError: shapes or dtypes that do not fit; no AttnSlices, or one beyond Tq or Tk; an unknown or unusable
            backend.
    """
    check_slices(slices)
    _check_inputs(q, k, v)
    key = (slices, q.shape, k.shape, q.dtype, q.device, backend, deterministic)

    def bind() -> BoundPlan:
        block_attn = choose_block_attn(backend, q.device, deterministic)
        block_attn.check(q.shape[2], q.dtype)
        return bind_slices(slices, len(q), len(k), q.shape[1], k.shape[1], block_attn, q.device)

    return attend(q, k, v, _handles.get_or_make(key, bind), _scale(softmax_scale, q))


def _scale(softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        return float(q.shape[-1] ** -0.5)
    check_scale(softmax_scale)
    return softmax_scale


def _check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_transforms(q, k, v)
    fits = q.ndim == k.ndim == 3 and k.shape == v.shape and q.shape[2] == k.shape[2] and q.shape[2] > 0
    if not fits or not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}; give [T, Hq, D], [T, H, D], [T, H, D] with Hq a multiple of H and D above 0"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give all three the same floating-point dtype")
