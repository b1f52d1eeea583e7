"""Context-parallel attention of one layer: the stage loop, forward and backward, as ops no compiler looks into.

Shapes: T local tokens, Hq query heads, H K/V heads, D head_dim, rows = K/V rows of a stage.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from torchtitan_magi.bound_plan import BoundPlan, BoundStage, bind_plan, bind_slices, choose_block_attn
from torchtitan_magi.cuda.memory import empty
from torchtitan_magi.exchange.group_cast import Mesh, as_transport, grad_buffer, group_cast, group_reduce
from torchtitan_magi.exchange.transport import Arrival, LateKeys, RowSums
from torchtitan_magi.masks.slices import AttnSlices, check_slices
from torchtitan_magi.planning.plan import AttnPlan
from torchtitan_magi.planning.stages import sent_before

# ------------------------------------------------------------------------------------------------------- the stage loop


def _forward(bound: BoundPlan, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [T, Hq, D] in the dtype of q, lse [T, Hq] in float32 or wider."""
    stages = bound.forward
    if len(stages) == 1 and not stages[0].stage.exchanges:
        return bound.block_attn.forward(q, k, v, stages[0].mask, softmax_scale)
    arriving = _Arrivals(bound, stages, k, v)
    result = None
    for i, bound_stage in enumerate(stages):
        k_rows, v_rows, late = arriving.take(i)
        more = i + 1 < len(stages)
        result = bound.block_attn.forward(q, k_rows, v_rows, bound_stage.mask, softmax_scale, result, more, late)
        del k_rows, v_rows, late  # their memory is for a later stage
    assert result is not None  # every rank has a stage
    return result


def _backward(
    bound: BoundPlan, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv with the shapes and dtypes of q, k, v."""
    stages = bound.backward
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, delta = empty(q.shape, wide, q.device), empty(lse.shape, wide, q.device)
    if len(stages) == 1 and not stages[0].stage.exchanges:
        mask, rounded = stages[0].mask, empty(q.shape, q.dtype, q.device)
        sums = bound.block_attn.sums(mask, k, rounded)
        bound.rows.sum(RowSums(out, dout, delta, (dq,) if sums is None else (dq, sums)))
        if sums is None:
            dk, dv = empty(k.shape, k.dtype, k.device), empty(v.shape, v.dtype, v.device)
            bound.block_attn.backward(dout, q, k, v, lse, delta, mask, softmax_scale, dq, (dk, dv))
        else:
            bound.block_attn.backward(dout, q, k, v, lse, delta, mask, softmax_scale, dq, sums, zeroed=True)
            dk, dv = bound.rows.round_keys(sums, k.dtype)
        bound.rows.round(dq, softmax_scale, rounded)
        return rounded, dk, dv
    # dK/dV of the first stage; its first rows, the rank's own, gather what other ranks return
    gathered = grad = empty((stages[0].stage.num_rows, 2, *k.shape[1:]), wide, q.device)
    adds_keys = bound.block_attn.adds_keys(stages[0].mask)
    arriving = _Arrivals(bound, stages, k, v, RowSums(out, dout, delta, (dq, grad) if adds_keys else (dq,)))
    wire = wide if bound.fp32_reduce else k.dtype
    returned = None
    for i, bound_stage in enumerate(stages):
        stage = bound_stage.stage
        k_rows, v_rows, late = arriving.take(i)
        if i > 0:
            grad = grad_buffer(stage, k, wire, bound.transport)
        zeroed = adds_keys and i == 0
        bound.block_attn.backward(
            dout, q, k_rows, v_rows, lse, delta, bound_stage.mask, softmax_scale, dq, grad, zeroed=zeroed, late=late
        )
        del k_rows, v_rows, late
        if returned is not None:
            bound.rows.add(returned, gathered)
        if stage.exchanges:
            returned = group_reduce(stage, bound.rows, bound_stage.row_index, grad, wire, bound.transport)
    assert returned is not None  # of the last stage
    return bound.rows.finish(returned, dq, gathered, softmax_scale, q.dtype)


class _Arrivals:
    """The K/V buffers of the stages: one in use and one under way, or two under way while a rank's own K/V are used.

    Rows are packed before all else: attention takes every SM until its end, and what is not packed by then would wait
    for it. `sums` are done right after the first ones. What the host has to do to start an only exchange comes after
    the launch of attention.
    """

    def __init__(
        self, bound: BoundPlan, stages: tuple[BoundStage, ...], k: Tensor, v: Tensor, sums: RowSums | None = None
    ) -> None:
        self.bound, self.stages, self.k, self.v, self.sums = bound, stages, k, v, sums
        self.pending: list[tuple[Tensor, Arrival] | None] = []
        self._start(0)
        if self.sums is not None:
            bound.rows.sum(self.sums)

    def _start(self, i: int) -> None:
        travels = bool(self.stages[i].stage.exchanges)
        for bound_stage in self.stages[len(self.pending) : sent_before(i, travels, len(self.stages))]:
            stage, row_index = bound_stage.stage, bound_stage.row_index
            if not stage.exchanges:
                self.pending.append(None)
            else:
                sums, self.sums = self.sums, None
                cast = group_cast(
                    stage, self.bound.rows, row_index, self.k, self.v, self.bound.transport, len(self.stages) == 1, sums
                )
                self.pending.append(cast)

    def take(self, i: int) -> tuple[Tensor, Tensor, LateKeys | None]:
        """K and V rows of stage i, [rows, H, D] each, and those that follow and may still be under way; once.

        Starts what may be under way beside the stage.
        """
        pending, self.pending[i] = self.pending[i], None
        if pending is None:
            self._start(i)
            return self.k, self.v, None
        buffer, arrival = pending
        if self.stages[i].stage.holds_local:
            self._start(i)  # this may replace the memory that flags lie in
            return self.k, self.v, LateKeys(buffer, arrival)
        arrival.wait()
        self._start(i)
        k_rows, v_rows = buffer.unbind(1)
        return k_rows, v_rows, None


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
    """How many bound plans are alive."""
    return len(_bound_plans)


_library = torch.library.Library("torchtitan_magi", "DEF")
_library.define(
    "cp_varlen_attn(Tensor q, Tensor k, Tensor v, Tensor handle, float softmax_scale) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "cp_varlen_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor handle, "
    "float softmax_scale) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
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


# Function.apply itself would first look for functorch's transforms, which this op does not have.
_apply_attention = super(torch.autograd.Function, _Attention).apply


@torch.library.impl(_library, "cp_varlen_attn", "Autograd")
def _(q: Tensor, k: Tensor, v: Tensor, handle: Tensor, softmax_scale: float) -> tuple[Tensor, Tensor]:
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
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _apply_attention(q, k, v, handle, softmax_scale)
    return _forward(_bound_plan(handle), q, k, v, softmax_scale)


# ---------------------------------------------------------------------------------------------------------- public API

_handles: weakref.WeakKeyDictionary[AttnPlan, dict[tuple[Any, ...], Tensor]] = weakref.WeakKeyDictionary()


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
        softmax_scale: default D ** -0.5.
        backend: "auto" (our kernel on CUDA, flex_attention on CPU), "ffa" or "flex".
        deterministic: repeat bit for bit.
        fp32_reduce: send dK/dV in float32 instead of the dtype of k.

    Returns:
        [T, Hq, D] in the dtype of q; rows that see no key are 0. Only ``out`` is differentiable.

    Raises:
        ValueError: shapes that do not fit each other, the plan or the mesh; dtypes that differ or are of integers; no
            plan; an unknown or unusable backend.
    """
    if not isinstance(plan, AttnPlan):
        raise ValueError(
            f"plan is of type {type(plan).__name__}; make one with make_plan(slices, total_tokens, cp_size)"
        )
    _check_inputs(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if not len(q) == len(k) == plan.tokens_per_rank:
        raise ValueError(
            f"q has {len(q)} rows but the plan gives each rank {plan.tokens_per_rank} tokens; dispatch them first"
        )
    transport = as_transport(mesh, plan.cp_size)  # not the mesh: one like it may come after its groups have ended
    key = (q.shape[1], k.shape[1], q.device, backend, deterministic, fp32_reduce, transport)
    handles = _handles.setdefault(plan, {})
    if key not in handles:
        block_attn = choose_block_attn(backend, q.device, deterministic)
        bound = bind_plan(plan, transport, block_attn, q.shape[1], k.shape[1], q.device, fp32_reduce)
        handles[key] = make_handle(bound)
    return attend(q, k, v, handles[key], q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)[0]


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
    of_inputs = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype
    handle = _slices_handle(slices, of_inputs, q.device, backend, deterministic)
    return attend(q, k, v, handle, q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)


@functools.lru_cache(maxsize=16)
def _slices_handle(
    slices: AttnSlices,
    of_inputs: tuple[torch.Size, torch.Size, torch.Size, torch.dtype, torch.dtype, torch.dtype],
    device: torch.device,
    backend: str,
    deterministic: bool,
) -> Tensor:
    _check_inputs(*of_inputs)
    q_shape, k_shape, *_ = of_inputs
    block_attn = choose_block_attn(backend, device, deterministic)
    return make_handle(bind_slices(slices, q_shape[0], k_shape[0], q_shape[1], k_shape[1], block_attn, device))


def _check_inputs(
    q: torch.Size, k: torch.Size, v: torch.Size, of_q: torch.dtype, of_k: torch.dtype, of_v: torch.dtype
) -> None:
    if len(q) != 3 or len(k) != 3 or k != v or q[-1] != k[-1] or not q[1] or not k[1] or q[1] % k[1]:
        raise ValueError(
            f"q, k, v have shapes {tuple(q)}, {tuple(k)}, {tuple(v)}; give [T, Hq, D], [T, H, D], [T, H, D] with Hq a "
            "multiple of H"
        )
    if not of_q == of_k == of_v or not of_q.is_floating_point:
        raise ValueError(f"q, k, v are {of_q}, {of_k}, {of_v}; give all three the same floating-point dtype")
