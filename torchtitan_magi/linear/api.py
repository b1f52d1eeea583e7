"""The public calls: gated delta rule and short convolution of a rank's tokens by a plan, and of one device's."""

from numbers import Real
from typing import Literal

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from torchtitan_magi.attention.dispatch import check_tensor
from torchtitan_magi.exchange.mesh import Mesh, as_transport
from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.linear.choose import choose_backend
from torchtitan_magi.linear.chunked import run
from torchtitan_magi.linear.delta_rule import delta_rule
from torchtitan_magi.linear.kernels import Kernels, documents
from torchtitan_magi.linear.short_conv import ConvRows, short_conv
from torchtitan_magi.masks.builders import varlen_causal
from torchtitan_magi.planning.plan import AttnPlan, check_plan
from torchtitan_magi.products import own_dtypes
from torchtitan_magi.wording import quoted


@_disable_dynamo
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: object, *, scale: float | None = None
) -> Tensor:
    """The gated delta rule of packed documents on one device. Differentiable, on GPUs in 16 bits once.

    Each document begins with the state S = 0, of each value head, and token by token

        S = exp(g) (I - beta k k^T) S + beta k v^T,      out = scale S^T q.

    The source is Gated Delta Networks, arXiv 2412.06464, computed in chunks as in arXiv 2406.06484. Where q, k, v have
    16 bits and are on a GPU, FlashQLA's kernels compute it: they multiply in 16 bits, states are float32. Else it is
    plain torch in float32, or in float64 if any input is.

    Args:
        q: [T, HK, K].
        k: [T, HK, K], of length 1 or less for a state that does not grow; nothing is normalized here.
        v: [T, H, V], H a multiple of HK: consecutive value heads share a head of q and k.
        g: [T, H], the logarithm of the gate, at most 0.
        beta: [T, H], from 0 to 1.
        cu_seqlens: integers [num_documents + 1], cumulative document lengths in tokens: from 0 to T.
        scale: factor of the output, positive; default K ** -0.5.

    Returns:
        out [T, H, V] in the dtype of v.

    Every value must be finite. Results repeat bit for bit.

    Raises:
        ValueError: no tensors; shapes that do not fit; q, k, v of several dtypes, or integers; several devices; a gate
            per channel (KDA), which is not there yet; cu_seqlens as in ``varlen_causal``; a scale that is not positive;
            16 bits on a GPU with heads that are not of 128, before Hopper, or without the extra ``linear``.
        RuntimeError: a second derivative, by kernels.
    """
    tokens, scale = _checked(q, k, v, g, beta, scale)
    table = varlen_causal(cu_seqlens, len(v)).table
    lengths = (table[:, 1] - table[:, 0]).tolist()
    if lengths and isinstance(choose_backend(tokens), Kernels):
        return documents(*tokens, lengths, scale)
    with own_dtypes(v.device):
        out, _ = run(tokens, lengths, scale)
    return out.to(v.dtype)


@_disable_dynamo
def cp_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    plan: AttnPlan,
    mesh: Mesh = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """``gated_delta_rule`` of this rank's tokens, whose documents may go on at other ranks. Differentiable once.

    Every rank of the mesh calls it, forward and backward, with its share of the tokens, in the order of ``dispatch``. A
    document that lies on one rank needs nothing of others. Of one that is cut each part's map of the state,
    [H, K, V + K] or for the first part [H, K, V], goes once to each rank that has a later part; in the backward the
    transposed maps go to ranks with earlier ones. They travel in float32, or float64. In a tree of ``tree_causal`` or
    ``shared_prompt`` a node goes on from the state at its parent's last token, wherever this lies.

    Arguments that are not named below are those of ``gated_delta_rule``, with T = plan.tokens_per_rank.

    Args:
        plan: from ``make_plan`` or ``make_plans``, the same on every rank, with a mask of causal documents, or of trees
            without a window whose nodes lie behind their parents in the pack.
        mesh: the context-parallel mesh or group; None for a single rank.

    Returns:
        out [T, H, V] in the dtype of v; tokens of no document, such as padding, have zeros.

    All sums have a fixed order: results repeat bit for bit.

    Raises:
        ValueError: as ``gated_delta_rule``; rows that are not plan.tokens_per_rank; no plan, or one of another mask; a
            mesh that does not fit the plan or the tensors.
        RuntimeError: the mesh's process group has ended; a second derivative.
    """
    check_plan(plan)
    tokens, scale = _checked(q, k, v, g, beta, scale)
    _check_rows("q", q, plan)
    parts = plan.document_parts
    transport = as_transport(mesh, plan.cp_size, v.device)
    return delta_rule(*tokens, parts.ranks[transport.rank], transport, scale, choose_backend(tokens))


@_disable_dynamo
def cp_causal_conv1d(
    x: Tensor, weight: Tensor, plan: AttnPlan, mesh: Mesh = None, *, activation: Literal["silu"] | None = None
) -> Tensor:
    """Causal convolution of each channel over the tokens of its document, on this rank's tokens. Differentiable once.

    With W the width, out_t = activation(sum_i weight[:, i] x_{t - W + 1 + i}); what lies before the document counts as
    zero; in a tree the row before a node's first token is that of its parent's last one. Every rank of the mesh calls
    it, forward and backward, in the order of ``dispatch``. A part of a document needs the W - 1 rows before it, from
    one or several ranks; each row goes once to each rank that needs it.

    Args:
        x: [T, C] with T = plan.tokens_per_rank.
        weight: [C, W], the last column of the token itself: ``conv.weight.squeeze(1)`` of a depthwise torch.nn.Conv1d.
            A rank's gradient is that of its own tokens.
        plan: from ``make_plan`` or ``make_plans``, the same on every rank, with a mask of causal documents, or of trees
            without a window whose nodes lie behind their parents in the pack.
        mesh: the context-parallel mesh or group; None for a single rank.
        activation: "silu" or None.

    Returns:
        out [T, C] in the dtype of x, computed in float32 or wider; tokens of no document, such as padding, have zeros.

    Every value must be finite, also in padding. All sums have a fixed order: results repeat bit for bit on the CPU.

    Raises:
        ValueError: no tensors; shapes that do not fit each other or the plan; integers; several devices; an unknown
            activation; no plan, or one of another mask; a mesh that does not fit.
        RuntimeError: the mesh's process group has ended; a second derivative.
    """
    check_plan(plan)
    _check_conv(x, weight, activation)
    _check_rows("x", x, plan)
    parts = plan.document_parts
    transport = as_transport(mesh, plan.cp_size, x.device)
    rows = ConvRows.of(parts.ranks[transport.rank], weight.shape[1], x.device)
    return short_conv(x, weight, rows, transport, activation)


def _checked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None) -> tuple[Tokens, float]:
    """The inputs, and the scale.

    Raises:
        ValueError: as ``gated_delta_rule``.
    """
    tokens = Tokens(q, k, v, g, beta)
    for name, x in tokens._asdict().items():
        check_tensor(x, name)
    shapes = ", ".join(str(tuple(x.shape)) for x in tokens)
    if q.ndim == g.ndim == 3:
        raise ValueError(
            f"g has shape {tuple(g.shape)}: a gate per channel (KDA) is not there yet; give one per head, [T, H]"
        )
    fits = q.ndim == v.ndim == 3 and q.shape == k.shape and q.shape[0] == v.shape[0]
    if not fits or not g.shape == beta.shape == v.shape[:2] or not all(q.shape[1:]) or not all(v.shape[1:]):
        raise ValueError(
            f"q, k, v, g, beta have shapes {shapes}; give [T, HK, K] twice, [T, H, V] and [T, H] twice, no dimension "
            "but T of 0"
        )
    if v.shape[1] % q.shape[1]:
        raise ValueError(f"v has {v.shape[1]} heads for {q.shape[1]} of q and k; give a multiple of that")
    floats = all(x.dtype.is_floating_point and x.dtype.itemsize >= 2 for x in tokens)
    if not floats or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v, g, beta are {', '.join(str(x.dtype) for x in tokens)}; give floating-point dtypes of 16 bits or "
            "more, q, k and v the same"
        )
    _check_one_device(tokens._asdict())
    if scale is None:
        return tokens, float(q.shape[2] ** -0.5)
    if not isinstance(scale, Real) or not 0 < scale <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"scale is {quoted(scale)}; it must be a positive number of Python or NumPy that float32 holds, K ** -0.5 "
            "by default"
        )
    return tokens, float(scale)


def _check_conv(x: Tensor, weight: Tensor, activation: str | None) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        check_tensor(tensor, name)
    if x.ndim != 2 or weight.ndim != 2 or len(weight) != x.shape[1] or not weight.shape[1]:
        raise ValueError(
            f"x and weight have shapes {tuple(x.shape)} and {tuple(weight.shape)}; give [T, C] and [C, W], W at least 1"
        )
    if not all(tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2 for tensor in (x, weight)):
        raise ValueError(f"x and weight are {x.dtype}, {weight.dtype}; give floating-point dtypes of 16 bits or more")
    _check_one_device({"x": x, "weight": weight})
    if activation not in (None, "silu"):
        raise ValueError(f'activation is {quoted(activation)}; use "silu" or None')


def _check_one_device(tensors: dict[str, Tensor]) -> None:
    if len(devices := {str(x.device) for x in tensors.values()}) > 1:
        raise ValueError(f"{', '.join(tensors)} are on {' and '.join(sorted(devices))}; move them to one device")


def _check_rows(name: str, x: Tensor, plan: AttnPlan) -> None:
    if len(x) != plan.tokens_per_rank:
        raise ValueError(
            f"{name} has {len(x)} rows but the plan gives each rank {plan.tokens_per_rank} tokens; dispatch them first"
        )
