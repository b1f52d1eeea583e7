"""Context-parallel attention of one layer, stage by stage: forward and backward.

Shapes: T local tokens, Hq query heads, H K/V heads, D head_dim of q and k, Dv of v, rows = K/V rows of a stage.

With sinks, a row's softmax runs over its scores and its head's sink, which has no value. Its out is what the scores
alone would give times exp(lse - lse'), lse' = log(exp(lse) + exp(sink)), applied once, when lse is final over all
stages. From then on lse means lse': with it, P, delta and so all gradients have their usual form, and dsink = -sum over
rows of exp(sink - lse') * delta. The gradient of lse joins delta = rowsum(out * dout) - dlse: dS = P * (dP - delta).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.attention.bound_plan import BoundPlan, BoundStage
from torchtitan_magi.attention.latents import Latents
from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs
from torchtitan_magi.exchange.group_cast import StageCasts, grad_buffer, group_reduce
from torchtitan_magi.exchange.in_flight import KeysAndValues, LateKeys, LeftGrads, RowShape, RowSums
from torchtitan_magi.products import own_dtypes


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
        """What the attention of a stage with these K/V rows reads; late: rows that follow them."""
        return StageInputs(self.q, k, v, mask, self.softmax_scale, late, self.softcap, self.sinks)


def forward(bound: BoundPlan, layer: LayerInputs) -> tuple[Tensor, Tensor]:
    """The layer's out [T, Hq, Dv] in the dtype of q, and lse [T, Hq] in float32 or wider."""
    with own_dtypes(layer.q.device):
        return _forward(bound, layer)


def _forward(bound: BoundPlan, layer: LayerInputs) -> tuple[Tensor, Tensor]:
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


def backward(bound: BoundPlan, layer: LayerInputs, result: Result) -> LayerGrads:
    """Gradients of what the layer's forward read."""
    with own_dtypes(layer.q.device):
        return _backward(bound, layer, result)


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
    return bound.mover.finish(returned, LeftGrads(dq, gathered, shape, softmax_scale, q.dtype))


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
    dk, dv = bound.mover.round(dq, own, shape, softmax_scale, rounded)
    return LayerGrads(rounded, dk, dv, None, dlatents.to(latents.rows.dtype), dweight.to(latents.weight.dtype))


def _backward_alone(
    bound: BoundPlan, layer: LayerInputs, result: Result, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`_backward_in_stages` of a rank that has all its keys.

    Where the kernel sums dk and dv up in float32, large sums lie in the memory of the rounded dq if they fit there.
    Then they are rounded to dk and dv before dq is.
    """
    (stage,), (q, k, v, softmax_scale, *_), (out, lse, dout, dlse) = bound.backward, layer, result
    dq = torch.empty(q.shape, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    shape, rounded = RowShape.of(k, v), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = bound.block_attn.key_sums(stage.mask, k, v, rounded)
    marks = bound.block_attn.marks(stage.mask, k, v)
    zeros = tuple(x for x in (dq if marks is None else marks, sums) if x is not None)
    bound.mover.sum(RowSums(out, dout, delta, zeros, dlse))
    inputs, out_grads = layer.of_stage(stage.mask, k, v), OutGrads(dout, lse, delta)
    dkv: KeysAndValues
    if sums is None:
        dkv = torch.empty(k.shape, dtype=k.dtype, device=k.device), torch.empty(v.shape, dtype=v.dtype, device=v.device)
    else:
        dkv = sums
    bound.block_attn.backward(inputs, out_grads, Gradients(dq, dkv, sums is not None, marks))
    if sums is not None and sums.data_ptr() == rounded.data_ptr():
        dkv = bound.mover.round_keys(sums, shape, k.dtype)
    return rounded, *bound.mover.round(dq, dkv, shape, softmax_scale, rounded)
