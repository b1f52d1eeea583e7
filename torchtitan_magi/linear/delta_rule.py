"""The gated delta rule of a rank's tokens: parts of documents, the maps between them, both directions.

In the forward a rank first makes the maps of its parts that others go on from, and sends those that other ranks need.
It folds the maps of the parts above its own to the state behind each parent, and runs all its parts at once, each from
its right state. The backward is the same with transposed maps, from parts to their parents: a part's map is what it
makes of the gradient of the state behind it.

Shapes: T local tokens, HK heads of q and k, H value heads, K and V elements of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.linear.backend import Backend, Tokens
from torchtitan_magi.linear.maps import Map, pass_on, totals
from torchtitan_magi.linear.once import once
from torchtitan_magi.planning.document_parts import RankParts
from torchtitan_magi.products import own_dtypes


@dataclass(frozen=True)
class Runs:
    """A rank's tokens as sequences: its parts, and what lies between them, which is of no document.

    Attributes:
        lengths: tokens of each sequence.
        gaps: first and end row of those of no document.
        parts: which sequence each part is, ascending.
        sources: from where something comes to sequences, in the forward and in the backward: sequence -> parts, see
            ``DocumentParts.sources``.
    """

    lengths: list[int]
    gaps: list[tuple[int, int]]
    parts: dict[int, int]
    sources: tuple[dict[int, list[int]], dict[int, list[int]]]

    @classmethod
    def of(cls, parts: RankParts) -> "Runs":
        """Those of a rank, made once for all layers."""
        return parts.made_once(cls, lambda: cls._of(parts))

    @classmethod
    def _of(cls, parts: RankParts) -> "Runs":
        first, end = parts.rows[parts.numbers].T
        owned = parts.all.owned[parts.rank]
        starts = np.append(first, (owned[:, 1] - owned[:, 0]).sum())
        before = np.insert(end, 0, 0)  # a gap may lie before each part, and behind the last
        lengths = np.stack([starts - before, np.append(end - first, 0)], 1).ravel()
        numbers = np.stack([np.full(len(starts), -1), np.append(parts.numbers, -1)], 1).ravel()[lengths > 0]
        lengths = lengths[lengths > 0]
        ends = lengths.cumsum()
        gaps = np.stack([ends - lengths, ends], 1)[numbers < 0]
        of_parts = {part: i for i, part in enumerate(numbers.tolist()) if part >= 0}
        there, back = (
            {i: parts.all.sources(back)[part] for part, i in of_parts.items() if parts.all.sources(back)[part]}
            for back in (False, True)
        )
        return cls(lengths.tolist(), list(map(tuple, gaps.tolist())), of_parts, (there, back))

    def mapped(self, back: bool) -> dict[int, int]:
        """Which sequence each part is that others follow, ascending; in the backward that follows others."""
        return {part: i for part, i in self.parts.items() if i in self.sources[not back]}


class Layer(NamedTuple):
    """What both directions of a rank's layer take."""

    tokens: Tokens
    parts: RankParts
    transport: Transport
    scale: float
    backend: Backend

    @property
    def no_states(self) -> Tensor:
        """[0, H, K, V]."""
        return self.tokens.v.new_empty(0, *self.tokens.state_shape, dtype=self.tokens.wide)


class Kept(NamedTuple):
    """What the forward keeps for the backward."""

    states: Tensor  # [n, H, K, V]: behind each of ``RankParts.parents``
    matrices: Tensor  # [m, H, K, K]: of the maps of parts that have a parent and children
    of_backend: tuple[Tensor, ...]


def forward(layer: Layer) -> tuple[Tensor, Kept]:
    """out [T, H, V] of a rank, in the dtype of v, and what its backward needs. A collective where documents are cut."""
    tokens, parts, transport, scale, backend = layer
    runs, none = Runs.of(parts), layer.no_states
    if not runs.parts:
        pass_on({}, parts, False, none, transport)
        return torch.zeros_like(tokens.v), Kept(none, _stacked([], none, tokens.k.shape[2]), backend.room(tokens))
    mapped = runs.mapped(back=False)
    started = backend.start(tokens, runs.lengths, scale, [*mapped.values()])
    maps = {}
    if mapped:
        for (part, i), state, matrix in zip(mapped.items(), *started.maps(), strict=True):
            maps[part] = Map(state.to(none.dtype), matrix.to(none.dtype) if i in runs.sources[False] else None)
    passed = pass_on(maps, parts, False, none, transport, partial(started.prepare, runs.sources[False]))
    out, of_backend = started.finish(totals(passed, runs.sources[False]))
    states, (_, key_dim, value_dim) = [passed[part] for part in parts.parents], tokens.state_shape
    matrices = [one.matrix for one in maps.values() if one.matrix is not None]
    return _without(out, runs.gaps), Kept(
        _stacked(states, none, value_dim), _stacked(matrices, none, key_dim), of_backend
    )


def backward(layer: Layer, dout: Tensor, kept: Kept) -> tuple[Tensor, ...]:
    """Gradients of the tokens. A collective where documents are cut."""
    tokens, parts, transport, scale, backend = layer
    runs, none = Runs.of(parts), layer.no_states
    if not runs.parts:
        pass_on({}, parts, True, none, transport)
        return tuple(map(torch.zeros_like, tokens))
    mapped = runs.mapped(back=True)
    states = totals(dict(zip(parts.parents, kept.states, strict=True)), runs.sources[False])
    started = backend.start_backward(tokens, runs.lengths, scale, states, kept.of_backend, dout, [*mapped.values()])
    maps, matrices = {}, iter(kept.matrices.mT)
    if mapped:
        for (part, i), dstate in zip(mapped.items(), started.state_grads(), strict=True):
            maps[part] = Map(dstate, next(matrices) if i in runs.sources[True] else None)
    passed = pass_on(maps, parts, True, none, transport, partial(started.prepare, runs.sources[True]))
    grads = started.finish(totals(passed, runs.sources[True]))
    return tuple(_without(x, runs.gaps) for x in grads)


def _without(x: Tensor, gaps: list[tuple[int, int]]) -> Tensor:
    """x [T, ...] with zeros for tokens of no document, in place."""
    for first, end in gaps:
        x[first:end] = 0
    return x


def _stacked(states: Sequence[Tensor], none: Tensor, width: int) -> Tensor:
    return torch.stack(states) if states else none.new_empty(*none.shape[:-1], width)


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
        ctx.save_for_backward(*tokens, kept.states, kept.matrices, *kept.of_backend)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, states, matrices, *rest = ctx.saved_tensors
        with own_dtypes(dout.device):
            grads = backward(Layer(Tokens(q, k, v, g, beta), *ctx.rest), dout, Kept(states, matrices, tuple(rest)))
        return *grads, None, None, None, None


delta_rule = _DeltaRule.apply
"""out [T, H, V] of q, k, v, g, beta, the rank's parts, the transport, scale, the backend. Differentiable once."""
