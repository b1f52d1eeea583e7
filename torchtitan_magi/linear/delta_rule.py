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
from torchtitan_magi.linear.chunked import Tokens, own_dtypes, run
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
    later: Group  # all that wait for a state: inner ones, and those with which a document ends

    @classmethod
    def of(cls, parts: RankParts, device: torch.device) -> "Groups":
        """Those of a rank, made once for all layers."""
        return parts.made_once((cls, device), lambda: cls._of(parts, device))

    @classmethod
    @torch.inference_mode(False)  # layers in training may share it
    def _of(cls, parts: RankParts, device: torch.device) -> "Groups":
        inner, last = parts.select(False, False), parts.select(False, True)
        each = parts.select(True, True), parts.select(True, False), inner, np.sort(np.append(inner, last))
        return cls(*(Group.of(parts, numbers, device) for numbers in each))


class Kept(NamedTuple):
    """What the forward keeps for the backward."""

    states: Tensor  # [n, H, K, V]: before each of ``Groups.later``
    matrices: Tensor  # [m, H, K, K]: of the maps of ``Groups.inner``


def forward(tokens: Tokens, parts: RankParts, transport: Transport, scale: float) -> tuple[Tensor, Kept]:
    """out [T, H, V] of a rank, in the dtype of v, and what its backward needs. A collective where documents are cut."""
    groups = Groups.of(parts, tokens.v.device)
    zero = tokens.v.new_zeros(tokens.state_shape, dtype=tokens.wide)
    out = torch.zeros_like(tokens.v, memory_format=torch.contiguous_format)

    def run_group(group: Group, states: Tensor | None = None) -> Tensor:
        rows, ends = run(tokens.select(group.rows), group.lengths, scale, states)
        out.index_copy_(0, group.rows, rows.to(out.dtype))
        return ends

    inner = maps_of(tokens.select(groups.inner.rows), groups.inner.lengths)
    matrices = _stacked([one.matrix for one in inner if one.matrix is not None], zero)
    maps = dict(zip(groups.inner.numbers, inner, strict=True))
    maps |= {part: Map(end) for part, end in zip(groups.first.numbers, run_group(groups.first), strict=True)}
    arrived = send(maps, parts, False, zero, transport)
    run_group(groups.whole)
    before = states_before(parts, arrived(), back=False)
    states = _stacked([before[part] for part in groups.later.numbers], zero)
    run_group(groups.later, states)
    return out, Kept(states, matrices)


def backward(
    tokens: Tokens, dout: Tensor, kept: Kept, parts: RankParts, transport: Transport, scale: float
) -> tuple[Tensor, ...]:
    """Gradients of the tokens. Runs all parts again; a collective where documents are cut."""
    groups = Groups.of(parts, tokens.v.device)
    zero = tokens.v.new_zeros(tokens.state_shape, dtype=tokens.wide)
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tokens)

    def finish(again: _Again, behind: dict[int, Tensor]) -> None:
        dends = _stacked([behind.get(part, zero) for part in again.group.numbers], zero)
        for grad, rows in zip(grads, again.token_grads(dends), strict=True):
            grad.index_copy_(0, again.group.rows, rows)

    later = _Again(tokens, groups.later, scale, dout, kept.states)
    transposed = dict(zip(groups.inner.numbers, kept.matrices.mT, strict=True))
    own = zip(groups.later.numbers, later.state_grads(), strict=True)
    arrived = send({part: Map(dstate, transposed.get(part)) for part, dstate in own}, parts, True, zero, transport)
    finish(_Again(tokens, groups.whole, scale, dout), {})
    behind = states_before(parts, arrived(), back=True)
    finish(later, behind)
    finish(_Again(tokens, groups.first, scale, dout), behind)
    return grads


class _Again:
    """The forward of a group of parts once more, with a graph."""

    def __init__(self, tokens: Tokens, group: Group, scale: float, dout: Tensor, states: Tensor | None = None) -> None:
        self.group = group
        self.tokens = Tokens(*(x.requires_grad_() for x in tokens.select(group.rows)))
        self.states = None if states is None else states.detach().requires_grad_()
        with torch.enable_grad():
            self.out, self.ends = run(self.tokens, group.lengths, scale, self.states)
        self.dout = dout.index_select(0, group.rows).to(self.out.dtype)

    def state_grads(self) -> Tensor:
        """Gradients of the first states, if those of the last ones are zero; [parts, H, K, V]."""
        return torch.autograd.grad(self.out, self.states, self.dout, retain_graph=True)[0]

    def token_grads(self, dends: Tensor) -> tuple[Tensor, ...]:
        """Gradients of the tokens, with those of the last states [parts, H, K, V]."""
        return torch.autograd.grad((self.out, self.ends), self.tokens, (self.dout, dends))


def _stacked(states: Sequence[Tensor], zero: Tensor) -> Tensor:
    return torch.stack(states) if states else zero.new_zeros(0, *zero.shape)


class _DeltaRule(torch.autograd.Function):
    """One op in both directions: so every rank comes to every exchange, whatever of it depends on what."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, parts: RankParts, transport: Transport,
        scale: float,
    ) -> Tensor:  # fmt: skip
        tokens = Tokens(q, k, v, g, beta)
        with own_dtypes(v.device):
            out, kept = forward(tokens, parts, transport, scale)
        ctx.save_for_backward(*tokens, *kept)
        ctx.rest = parts, transport, scale
        return out

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *tokens, states, matrices = ctx.saved_tensors
        with own_dtypes(dout.device):
            grads = backward(Tokens(*tokens), dout, Kept(states, matrices), *ctx.rest)
        return *grads, None, None, None


delta_rule = _DeltaRule.apply
"""out [T, H, V] of q, k, v, g, beta, the rank's parts, the transport, scale. Differentiable once."""
