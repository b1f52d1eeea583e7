"""Context-parallel attention of one layer: the stage loop, forward and backward, as ops no compiler looks into.

Shapes: T local tokens, Hq query heads, H K/V heads, D head_dim of q and k, Dv of v, rows = K/V rows of a stage.

With sinks, a row's softmax runs over its scores and its head's sink, which has no value. Its out is what the scores
alone would give times exp(lse - lse'), lse' = log(exp(lse) + exp(sink)), applied once, when lse is final over all
stages. From then on lse means lse': with it, P, delta and so all gradients have their usual form, and dsink = -sum over
rows of exp(sink - lse') * delta. The gradient of lse joins delta = rowsum(out * dout) - dlse: dS = P * (dP - delta).
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torchtitan_magi.attention.bound_plan import BoundPlan, BoundStage, bind_plan, bind_slices
from torchtitan_magi.attention.dispatch import check_tensor
from torchtitan_magi.attention.latents import Latents
from torchtitan_magi.backends.choose import check_backend, check_switch, choose_block_attn
from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs, check_scale, check_softcap
from torchtitan_magi.exchange.group_cast import StageCasts, grad_buffer, group_reduce
from torchtitan_magi.exchange.in_flight import KeysAndValues, LateKeys, RowShape, RowSums
from torchtitan_magi.exchange.mesh import Mesh, as_transport, at_end_of_transports
from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.masks.slices import AttnSlices, check_slices
from torchtitan_magi.planning.cost_model import Heads
from torchtitan_magi.planning.plan import AttnPlan, check_plan, forget_plans

# ------------------------------------------------------------------------------------------------------- the stage loop


class LayerInputs(NamedTuple):
    """What the attention of a layer reads."""

    q: Tensor  # [T, Hq, D]
    k: Tensor  # [T, H, D]
    v: Tensor  # [T, H, Dv]
    softmax_scale: float  # > 0
    sinks: Tensor | None = None  # [Hq]
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay as they are
    latents: Latents | None = None  # what travels in place of k and v

    @property
    def travelling(self) -> tuple[Tensor, Tensor]:
        """[T, H, D] and [T, H, Dv], of which the rows go that other ranks need."""
        return (self.k, self.v) if self.latents is None else self.latents.travelling

    def keys(self, i: int, k_rows: Tensor, v_rows: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of stage i, whose rows have arrived as they travel."""
        if self.latents is None:
            return k_rows, v_rows
        return (self.k, self.v) if i == 0 else self.latents.expand(k_rows, v_rows, RowShape.of(self.k, self.v))

    def of_stage(self, mask: Any, k: Tensor, v: Tensor, late: LateKeys | None = None) -> StageInputs:
        return StageInputs(self.q, k, v, mask, self.softmax_scale, late, self.softcap, self.sinks)


def _forward(bound: BoundPlan, layer: LayerInputs) -> tuple[Tensor, Tensor]:
    """out [T, Hq, Dv] in the dtype of q, lse [T, Hq] in float32 or wider."""
    stages = bound.forward
    if _is_alone(stages):
        return bound.block_attn.forward(layer.of_stage(stages[0].mask, layer.k, layer.v))
    assert layer.latents is None or not stages[0].rows.stage.exchanges
    casts = StageCasts([stage.rows for stage in stages], *layer.travelling)
    result = None
    for i, stage in enumerate(stages):
        k_rows, v_rows, late = casts.take(i)
        k_rows, v_rows = layer.keys(i, k_rows, v_rows)
        inputs = layer.of_stage(stage.mask, k_rows, v_rows, late)
        result = bound.block_attn.forward(inputs, result, i + 1 < len(stages))
        del k_rows, v_rows, late, inputs  # their memory is for a later stage
    assert result is not None  # every rank has a stage
    return result


def _is_alone(stages: tuple[BoundStage, ...]) -> bool:
    """Whether nothing travels."""
    return len(stages) == 1 and not stages[0].rows.stage.exchanges


class Result(NamedTuple):
    """What a layer's backward reads of its forward, and the gradients of both results."""

    out: Tensor  # [T, Hq, Dv]
    lse: Tensor  # [T, Hq]
    dout: Tensor  # like out
    dlse: Tensor | None  # like lse; None: zeros


class LayerGrads(NamedTuple):
    """Gradients of a layer's inputs, with their shapes and dtypes; None where there is no such input."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None
    dlatents: Tensor | None = None
    dweight: Tensor | None = None


def _backward(bound: BoundPlan, layer: LayerInputs, result: Result) -> LayerGrads:
    delta = torch.empty_like(result.lse)
    if _is_alone(bound.backward):
        grads = LayerGrads(*_backward_alone(bound, layer, result, delta))
        if layer.latents is not None:  # nothing travels
            dlatents, dweight = map(torch.zeros_like, layer.latents)
            grads = grads._replace(dlatents=dlatents, dweight=dweight)
    elif layer.latents is None:
        grads = LayerGrads(*_backward_in_stages(bound, layer, result, delta))
    else:
        grads = _backward_of_latents(bound, layer, layer.latents, result, delta)
    if layer.sinks is None:
        return grads
    dsinks = bound.mover.sink_grads(layer.sinks.to(delta.dtype), result.lse, delta)
    return grads._replace(dsinks=dsinks.to(layer.sinks.dtype))


def _backward_in_stages(
    bound: BoundPlan, layer: LayerInputs, result: Result, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv; fills delta."""
    stages, (q, k, v, softmax_scale, *_), (out, lse, dout, dlse) = bound.backward, layer, result
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty(q.shape, dtype=wide, device=q.device)
    # dK/dV of the first stage; its first rows, the rank's own, gather what other ranks return
    shape, num_rows = RowShape.of(k, v), stages[0].rows.stage.num_rows
    adds_keys, marks = bound.block_attn.adds_keys(stages[0].mask), bound.block_attn.marks(stages[0].mask, k, v)
    wire = wide if bound.fp32_reduce else k.dtype
    zeros: tuple[Tensor, ...] = (dq if marks is None else marks,)
    gathered: KeysAndValues
    if len(stages) == 1 and stages[0].rows.one_way and not adds_keys and wire == k.dtype:  # each row is written once
        gathered = k.new_empty(num_rows, *k.shape[1:]), v.new_empty(num_rows, *v.shape[1:])
    else:
        gathered = sums = dq.new_empty(num_rows, shape.width)
        zeros = (*zeros, sums) if adds_keys else zeros
    grad = gathered
    casts = StageCasts([stage.rows for stage in stages], k, v, RowSums(out, dout, delta, zeros, dlse))
    out_grads = OutGrads(dout, lse, delta)
    returned = None
    for i, stage in enumerate(stages):
        k_rows, v_rows, late = casts.take(i)
        if i > 0:
            grad = grad_buffer(stage.rows, k, v, wire)
        inputs = layer.of_stage(stage.mask, k_rows, v_rows, late)
        bound.block_attn.backward(inputs, out_grads, Gradients(dq, grad, adds_keys and i == 0, marks))
        del k_rows, v_rows, late, inputs
        marks = None  # now all of dq holds sums
        if returned is not None:
            assert isinstance(gathered, Tensor)
            bound.mover.add(returned, gathered)
        if stage.rows.stage.exchanges:
            returned = group_reduce(stage.rows, grad, wire)
    assert returned is not None  # the last stage's
    return bound.mover.finish(returned, dq, gathered, shape, softmax_scale, q.dtype)


def _backward_of_latents(
    bound: BoundPlan, layer: LayerInputs, latents: Latents, result: Result, delta: Tensor
) -> LayerGrads:
    """All but dsinks; fills delta. The first stage has the rank's own keys and nothing else."""
    stages, (q, k, v, softmax_scale, *_), (out, lse, dout, dlse) = bound.backward, layer, result
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty(q.shape, dtype=wide, device=q.device)
    shape, wire = RowShape.of(k, v), wide if bound.fp32_reduce else k.dtype
    adds_keys, marks = bound.block_attn.adds_keys(stages[0].mask), bound.block_attn.marks(stages[0].mask, k, v)
    own: KeysAndValues = k.new_empty(k.shape), v.new_empty(v.shape)
    zeros: tuple[Tensor, ...] = (dq if marks is None else marks,)
    if adds_keys:
        own = dq.new_empty(len(k), shape.width)
        zeros = (*zeros, own)
    dlatents, dweight = (x.new_zeros(x.shape, dtype=wide) for x in latents)
    casts = StageCasts([stage.rows for stage in stages], *latents.travelling, RowSums(out, dout, delta, zeros, dlse))
    out_grads = OutGrads(dout, lse, delta)
    returned = None
    for i, stage in enumerate(stages):
        *rows, late = casts.take(i)
        grad = own if i == 0 else k.new_empty(stage.rows.stage.num_rows, shape.width)
        inputs = layer.of_stage(stage.mask, *layer.keys(i, *rows), late)
        bound.block_attn.backward(inputs, out_grads, Gradients(dq, grad, adds_keys and i == 0, marks))
        del inputs
        marks = None
        if returned is not None:
            bound.mover.add(returned, dlatents)
        if i > 0:
            drows = grad_buffer(stage.rows, *latents.travelling, wire)
            latents.reduce(rows[0], grad, shape, drows, dweight)
            returned = group_reduce(stage.rows, drows, wire)
        del rows, grad
    assert returned is not None
    bound.mover.add(returned, dlatents)
    rounded = torch.empty_like(q, memory_format=torch.contiguous_format)
    bound.mover.round(dq, shape, softmax_scale, rounded)
    dk, dv = bound.mover.round_keys(own, shape, k.dtype) if isinstance(own, Tensor) else own
    return LayerGrads(rounded, dk, dv, None, dlatents.to(latents.rows.dtype), dweight.to(latents.weight.dtype))


def _backward_alone(
    bound: BoundPlan, layer: LayerInputs, result: Result, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`_backward_in_stages` of a rank that has all its keys.

    Where the kernel sums dk and dv up in float32, the sums lie in the memory of the rounded dq if they fit there. So
    they are rounded to dk and dv before dq is.
    """
    (stage,), (q, k, v, softmax_scale, *_), (out, lse, dout, dlse) = bound.backward, layer, result
    dq = torch.empty(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    shape, rounded = RowShape.of(k, v), dq.new_empty(q.shape, dtype=q.dtype)
    sums = bound.block_attn.key_sums(stage.mask, k, v, rounded)
    marks = bound.block_attn.marks(stage.mask, k, v)
    zeros = tuple(x for x in (dq if marks is None else marks, sums) if x is not None)
    bound.mover.sum(RowSums(out, dout, delta, zeros, dlse))
    inputs, out_grads = layer.of_stage(stage.mask, k, v), OutGrads(dout, lse, delta)
    if sums is None:
        dk, dv = dq.new_empty(k.shape, dtype=k.dtype), dq.new_empty(v.shape, dtype=v.dtype)
        bound.block_attn.backward(inputs, out_grads, Gradients(dq, (dk, dv), marks=marks))
    else:
        bound.block_attn.backward(inputs, out_grads, Gradients(dq, sums, True, marks))
        dk, dv = bound.mover.round_keys(sums, shape, k.dtype)
    bound.mover.round(dq, shape, softmax_scale, rounded)
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
    "cp_varlen_attn(Tensor q, Tensor k, Tensor v, Tensor handle, float softmax_scale, Tensor? sinks=None, "
    "float softcap=0., Tensor? latents=None, Tensor? weight=None) -> (Tensor, Tensor)",
    tags=_TAGS,
)
_library.define(
    "cp_varlen_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor handle, "
    "float softmax_scale, Tensor? sinks=None, float softcap=0., Tensor? dlse=None, Tensor? latents=None, "
    "Tensor? weight=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=_TAGS,
)

attention_op = torch.ops.torchtitan_magi.cp_varlen_attn.default
"""(out [T, Hq, Dv], lse [T, Hq]) of the bound plan behind ``handle``, both differentiable. q [T, Hq, D]; k [T, H, D];
v [T, H, Dv]; sinks [Hq]; latents and weight as ``Latents`` has them."""

attention_backward_op = torch.ops.torchtitan_magi.cp_varlen_attn_backward.default
"""``LayerGrads`` of ``attention_op``; empty where there is no such input."""


def _layer(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, sinks: Tensor | None, softcap: float,
    latents: Tensor | None, weight: Tensor | None,
) -> LayerInputs:  # fmt: skip
    both = None if latents is None or weight is None else Latents(latents, weight)
    return LayerInputs(q, k, v, softmax_scale, sinks, softcap, both)


@torch.library.impl(_library, "cp_varlen_attn", "CompositeExplicitAutograd")
def _(
    q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float, sinks: Tensor | None = None,
    softcap: float = 0.0, latents: Tensor | None = None, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _forward(_bound_plan(handle), _layer(q, k, v, softmax_scale, sinks, softcap, latents, weight))


@torch.library.impl(_library, "cp_varlen_attn_backward", "CompositeExplicitAutograd")
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, handle: Tensor, softmax_scale: float,
    sinks: Tensor | None = None, softcap: float = 0.0, dlse: Tensor | None = None, latents: Tensor | None = None,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    layer = _layer(q, k, v, softmax_scale, sinks, softcap, latents, weight)
    grads = _backward(_bound_plan(handle), layer, Result(out, lse, dout, dlse))
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


def _is_watched(q: Tensor) -> bool:
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
        if _is_watched(q):
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = attention_op(q, k, v, handle, *options)
        else:
            out, lse = _forward(_bound_plan(handle), _layer(q, k, v, *options))
        ctx.save_for_backward(q, k, v, out, lse, sinks, latents, weight)
        ctx.handle, ctx.softmax_scale, ctx.softcap = handle, softmax_scale, softcap
        ctx.set_materialize_grads(False)  # mostly nobody asks for the gradient of lse
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse, sinks, latents, weight), (dout, dlse) = ctx.saved_tensors, grads
        if dout is None:
            dout = torch.zeros_like(out)
        if _is_watched(q) or torch.is_grad_enabled():
            options = ctx.softmax_scale, sinks, ctx.softcap, dlse, latents, weight
            found = attention_backward_op(dout, q, k, v, out, lse, ctx.handle, *options)
        else:
            layer = _layer(q, k, v, ctx.softmax_scale, sinks, ctx.softcap, latents, weight)
            found = _backward(_bound_plan(ctx.handle), layer, Result(out, lse, dout, dlse))
        dq, dk, dv, *others = found
        dsinks, *rest = (None if x is None else dx for x, dx in zip((sinks, latents, weight), others, strict=True))
        return dq, dk, dv, None, None, dsinks, None, *rest


# Function.apply itself would first look for functorch's transforms, which `_check_transforms` refuses.
_apply_attention = super(torch.autograd.Function, _Attention).apply


def _check_transforms(*maybe: Tensor | None) -> None:
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
def _(
    q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float, sinks: Tensor | None = None,
    softcap: float = 0.0, latents: Tensor | None = None, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _check_transforms(q, k, v, sinks, latents, weight)
    return _apply_attention(q, k, v, handle, softmax_scale, sinks, softcap, latents, weight)


@torch.library.impl(_library, "cp_varlen_attn_backward", "Autograd")
def _(*arguments: Any) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments if isinstance(x, Tensor)):
        raise RuntimeError("attention has no second derivatives; take its gradients without create_graph")
    with torch._C._AutoDispatchBelowAutograd():
        return attention_backward_op(*arguments)


def attend(
    q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float, sinks: Tensor | None = None,
    softcap: float = 0.0, latents: Tensor | None = None, weight: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``attention_op``, called directly where nobody watches: half the host time."""
    options = softmax_scale, sinks, softcap, latents, weight
    if torch.compiler.is_compiling() or _is_watched(q):
        return attention_op(q, k, v, handle, *options)
    inputs = q, k, v, sinks, latents, weight
    _check_transforms(*inputs)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _apply_attention(q, k, v, handle, *options)
    return _forward(_bound_plan(handle), _layer(q, k, v, *options))


# ---------------------------------------------------------------------------------------------------------- public API

CACHED_PLANS, CACHED_BYTES = 16, 256 << 20  # bound plans that the public calls keep, and their memory on the device


class _Handles(OrderedDict[Any, Tensor]):
    """Handles of the public calls' last bound plans: as many as CACHED_BYTES hold, at least one.

    A key ends with the transport, where there is one. What is bound to it goes when it ends.
    """

    def get_or_make(self, key: Any, bind: Callable[[], BoundPlan]) -> Tensor:
        if key not in self:
            self[key] = make_handle(bind())
            total = sum(map(_size, list(self.values())))
            while len(self) > CACHED_PLANS or (len(self) > 1 and total > CACHED_BYTES):
                total -= _size(self.popitem(last=False)[1])
        self.move_to_end(key)
        return self[key]

    def forget(self, transport: Transport) -> None:
        for key in [key for key in list(self) if key[-1] is transport]:
            self.pop(key, None)


def _size(handle: Tensor) -> int:
    return _bound_plan(handle).num_bytes


_handles = _Handles()
at_end_of_transports(_handles.forget)


def clear_caches() -> None:
    """Forgets the plans of ``make_plan`` and what ``cp_varlen_attn`` and ``flex_flash_attn`` keep on devices.

    It gives back memory; nothing else needs it. What belongs to a process group is forgotten when the group ends.
    """
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
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    fp32_reduce: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's tokens over all K/V their mask lets them see, wherever they are. Differentiable.

    Every rank of the mesh calls it with its share of the tokens, in the order of ``dispatch``.

    Args:
        q: [T, Hq, D] with T = plan.tokens_per_rank. k: [T, H, D], v: [T, H, Dv], Hq a multiple of H.
        plan: from ``make_plan``, the same on every rank; layers that share it also share its index data.
        mesh: the context-parallel mesh or group; None for a single rank.
        softmax_scale: factor of the scores, positive; default D ** -0.5.
        softcap: scores s become softcap * tanh(s / softcap); 0: they stay as they are.
        sinks: [Hq], any float dtype: a score for each query head that takes part in the softmax of all its rows,
            without a value. Differentiable; a rank's gradient is that of its own rows. -inf is no sink, with a gradient
            of 0; infinity and NaN spread, as in q, k and v.
        return_lse: also return lse, differentiable too.
        backend: "auto" (our kernel on CUDA, flex_attention on CPU), "ffa" or "flex".
        deterministic: repeat bit for bit. None: if torch.use_deterministic_algorithms asks for it.
        fp32_reduce: send dK/dV in float32 instead of the dtype of k.

    Returns:
        out [T, Hq, Dv] in the dtype of q; rows that see no key are 0. With `return_lse` also lse [T, Hq]: the natural
        logarithm of the sum of a row's exponentials, the sink's included, in float32 or wider; -inf if there are none.

    Every value of q, k and v must be finite, also in tokens that the mask leaves out: a masked score counts as 0, and
    0 times infinity or NaN is NaN. Fill padding with zeros, as ``dispatch`` does.

    Raises:
        ValueError: q, k, v or sinks are no tensors; shapes that do not fit each other, the plan or the mesh; dtypes or
            devices that differ; integers; no plan; a scale that is not positive; a negative softcap; an unknown or
            unusable backend.
        RuntimeError: inside torch.func's transforms or with forward-mode tangents; the mesh's process group has ended.
    """
    check_plan(plan)
    check_switch(fp32_reduce, "fp32_reduce")
    deterministic = _checked_options(backend, deterministic)
    _check_inputs(q, k, v, sinks, softcap)
    if not len(q) == len(k) == plan.tokens_per_rank:
        raise ValueError(
            f"q has {len(q)} rows but the plan gives each rank {plan.tokens_per_rank} tokens; dispatch them first"
        )
    # kept by transport, not by mesh: one like it may come after its groups have ended
    transport = as_transport(mesh, plan.cp_size, q.device)
    shapes = q.shape[1:], k.shape[1:], v.shape[1:]
    key = (plan, shapes, q.dtype, q.device, backend, deterministic, fp32_reduce, transport)

    def bind() -> BoundPlan:
        heads = _heads_of(q, k, v)
        block_attn = choose_block_attn(backend, q.device, deterministic)
        block_attn.check(heads.head_dim, q.dtype, heads.value_dim)
        return bind_plan(plan, transport, block_attn, *heads.counts, q.device, fp32_reduce, head_dims=heads.dims)

    handle = _handles.get_or_make(key, bind)
    out, lse = attend(q, k, v, handle, _scale(softmax_scale, q), sinks, softcap)
    return (out, lse) if return_lse else out


def flex_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention under any list of AttnSlices, on one device. ``out`` and ``lse`` are differentiable.

    Args:
        q: [Tq, Hq, D]. k: [Tk, H, D], v: [Tk, H, Dv], Hq a multiple of H.
        slices: the mask; queries in rows of q, keys in rows of k.
        softmax_scale, softcap, sinks, backend, deterministic: as in ``cp_varlen_attn``.

    Returns:
        out [Tq, Hq, Dv] in the dtype of q and lse [Tq, Hq], natural logarithms in float32 or wider; rows that no slice
        touches have out 0 and lse -inf, or their head's sink.

    Raises:
        ValueError: no tensors; shapes, dtypes or devices that do not fit; no AttnSlices, or one beyond Tq or Tk; an
            unknown or unusable backend.
    """
    check_slices(slices)
    deterministic = _checked_options(backend, deterministic)
    _check_inputs(q, k, v, sinks, softcap)
    key = (slices, q.shape, k.shape, v.shape, q.dtype, q.device, backend, deterministic)

    def bind() -> BoundPlan:
        heads = _heads_of(q, k, v)
        block_attn = choose_block_attn(backend, q.device, deterministic)
        block_attn.check(heads.head_dim, q.dtype, heads.value_dim)
        return bind_slices(slices, len(q), len(k), *heads.counts, block_attn, q.device, heads.dims)

    return attend(q, k, v, _handles.get_or_make(key, bind), _scale(softmax_scale, q), sinks, softcap)


def _heads_of(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return Heads(q.shape[1], k.shape[1], q.shape[2], v.shape[2])


def _scale(softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        return float(q.shape[-1] ** -0.5)
    check_scale(softmax_scale)
    return softmax_scale


def _checked_options(backend: str, deterministic: bool | None) -> bool:
    """Whether to repeat bit for bit."""
    check_backend(backend)
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    check_switch(deterministic, "deterministic")
    return deterministic


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, softcap: float) -> None:
    check_tensor(q, "q")
    check_tensor(k, "k")
    check_tensor(v, "v")
    if sinks is not None:
        check_tensor(sinks, "sinks")
    _check_transforms(q, k, v, sinks)
    check_softcap(softcap)
    fits = q.ndim == k.ndim == v.ndim == 3 and k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2]
    if not fits or not q.shape[2] or not v.shape[2] or not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}; give [T, Hq, D], [T, H, D], [T, H, Dv]: Hq a multiple of H, D above 0"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give all three the same floating-point dtype, of 16 bits or "
            "more"
        )
    if not q.device == k.device == v.device or (sinks is not None and sinks.device != q.device):
        devices = ", ".join(str(x.device) for x in (q, k, v, sinks) if x is not None)
        raise ValueError(f"q, k, v{'' if sinks is None else ', sinks'} are on {devices}; move them to one device")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.dtype.is_floating_point):
        raise ValueError(
            f"sinks are {sinks.dtype} {tuple(sinks.shape)} for {q.shape[1]} query heads; give one float for each"
        )
