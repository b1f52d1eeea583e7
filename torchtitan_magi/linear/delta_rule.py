"""The gated delta rule of a rank's tokens: parts of documents, the maps between them, both directions.

In the forward a rank first makes the maps of its parts that others continue, and sends them. While they travel it runs
whole documents. Then it folds the maps of the parts before its own, and runs the parts that waited, each from its right
state. The backward is the same with transposed maps, from the last part to the first: a part's map is what it makes of
the gradient of the state behind it.

Shapes: T local tokens, HK heads of q and k, H value heads, K and V elements of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.linear.backend import Backend, Tokens, own_dtypes
from torchtitan_magi.linear.maps import Map, maps_of, send, states_before
from torchtitan_magi.linear.once import once
from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.planning.document_parts import RankParts


@dataclass(frozen=True, eq=False)
class Group:
    """Some of a rank's parts, which run at once."""

    numbers: list[int]
    lengths: list[int]
    rows: Tensor  # their tokens, local numbers

    @classmethod
    def of(cls, parts: RankParts, numbers: Int64Array, device: torch.device) -> "Group":
        """That of these parts."""
        first, end = parts.rows[numbers].T
        rows = torch.from_numpy(parts.tokens_of(numbers)).to(device, non_blocking=True)
        return cls(numbers.tolist(), (end - first).tolist(), rows)


class Groups(NamedTuple):
    """A rank's parts by where they lie in their documents."""

    whole: Group  # documents that lie here only
    first: Group  # a document begins with them and goes on elsewhere
    inner: Group  # a document comes from elsewhere, and goes on elsewhere
    last: Group  # a document ends with them and comes from elsewhere
    later: Group  # all that wait for a state: inner and last ones

    @classmethod
    def of(cls, parts: RankParts, device: torch.device) -> "Groups":
        """Those of a rank, made once for all layers."""
        return parts.made_once((cls, device), lambda: cls._of(parts, device))

    @classmethod
    @torch.inference_mode(False)  # layers in training may share it
    def _of(cls, parts: RankParts, device: torch.device) -> "Groups":
        inner, last = parts.select(False, False), parts.select(False, True)
        both = np.sort(np.append(inner, last))
        each = parts.select(True, True), parts.select(True, False), inner, last, both
        return cls(*(Group.of(parts, numbers, device) for numbers in each))


class Layer(NamedTuple):
    """What both directions of a rank's layer take."""

    tokens: Tokens
    parts: RankParts
    transport: Transport
    scale: float
    backend: Backend

    @property
    def zero(self) -> Tensor:
        """A state of zeros, [H, K, V]."""
        return self.tokens.v.new_zeros(self.tokens.state_shape, dtype=self.tokens.wide)


class Kept(NamedTuple):
    """What the forward keeps for the backward."""

    states: Tensor  # [n, H, K, V]: before each of ``Groups.later``
    matrices: Tensor  # [m, H, K, K]: of the maps of ``Groups.inner``
    rows: list[Tensor]  # of the backend, each [T, ...]


def forward(layer: Layer) -> tuple[Tensor, Kept]:
    """out [T, H, V] of a rank, in the dtype of v, and what its backward needs. A collective where documents are cut."""
    tokens, parts, transport, scale, backend = layer
    groups, zero = Groups.of(parts, tokens.v.device), layer.zero
    out = torch.zeros_like(tokens.v, memory_format=torch.contiguous_format)
    kept: list[Tensor] = []

    def run(group: Group, states: Tensor | None = None) -> dict[int, Tensor]:
        if not group.numbers:
            return {}
        outs, ends, rows = backend.forward(tokens.select(group.rows), group.lengths, scale, states)
        if not kept:
            kept.extend(x.new_zeros(len(out), *x.shape[1:]) for x in rows)
        for target, x in zip((out, *kept), (outs, *rows), strict=True):
            target.index_copy_(0, group.rows, x.to(target.dtype))
        return dict(zip(group.numbers, ends, strict=True))

    inner = maps_of(tokens.select(groups.inner.rows), groups.inner.lengths, backend)
    matrices = _stacked([one.matrix for one in inner if one.matrix is not None], zero)
    maps = dict(zip(groups.inner.numbers, inner, strict=True))
    maps |= {part: Map(end) for part, end in run(groups.first).items()}
    arrived = send(maps, parts, False, zero, transport)
    run(groups.whole)
    before = states_before(parts, arrived(), back=False)
    states = _stacked([before[part] for part in groups.later.numbers], zero)
    run(groups.later, states)
    return out, Kept(states, matrices, kept)


def backward(layer: Layer, dout: Tensor, kept: Kept) -> tuple[Tensor, ...]:
    """Gradients of the tokens. A collective where documents are cut."""
    tokens, parts, transport, scale, backend = layer
    groups, zero = Groups.of(parts, tokens.v.device), layer.zero
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tokens)
    before = dict(zip(groups.later.numbers, kept.states, strict=True))

    def run(group: Group, behind: dict[int, Tensor], with_tokens: bool = True) -> dict[int, Tensor]:
        if not group.numbers:
            return {}
        states = torch.stack([before[part] for part in group.numbers]) if group.numbers[0] in before else None
        dends = torch.stack([behind[part] for part in group.numbers]) if group.numbers[0] in behind else None
        own, rows = tokens.select(group.rows), tuple(x.index_select(0, group.rows) for x in kept.rows)
        douts = dout.index_select(0, group.rows)
        dtokens, dstates = backend.backward(own, group.lengths, scale, states, rows, douts, dends, with_tokens)
        for grad, x in zip(grads, dtokens or (), strict=False):
            grad.index_copy_(0, group.rows, x)
        return {} if dstates is None else dict(zip(group.numbers, dstates, strict=True))

    transposed = dict(zip(groups.inner.numbers, kept.matrices.mT, strict=True))
    dstates = run(groups.inner, {}, with_tokens=False) | run(groups.last, {})
    maps = {part: Map(dstate, transposed.get(part)) for part, dstate in dstates.items()}
    arrived = send(maps, parts, True, zero, transport)
    run(groups.whole, {})
    behind = states_before(parts, arrived(), back=True)
    run(groups.inner, behind)
    run(groups.first, behind)
    return grads


def _stacked(states: Sequence[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(states) if states else zero.new_zeros(0, *zero.shape)


class _DeltaRule(torch.autograd.Function):
    """One op in both directions: so every rank comes to every exchange, whatever of it depends on what."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: RankParts, transport: Transport,
        scale: float, backend: Backend,
    ) -> Tensor:  # fmt: skip
        tokens, ctx.rest = Tokens(q, k, v, g, beta), (parts, transport, scale, backend)
        with own_dtypes(v.device):
            out, kept = forward(Layer(tokens, *ctx.rest))
        ctx.save_for_backward(*tokens, kept.states, kept.matrices, *kept.rows)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, states, matrices, *rows = ctx.saved_tensors
        with own_dtypes(dout.device):
            grads = backward(Layer(Tokens(q, k, v, g, beta), *ctx.rest), dout, Kept(states, matrices, rows))
        return *grads, None, None, None, None


delta_rule = _DeltaRule.apply
"""out [T, H, V] of q, k, v, g, beta, the rank's parts, the transport, scale, the backend. Differentiable once."""
