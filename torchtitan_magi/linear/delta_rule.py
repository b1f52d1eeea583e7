"""The gated delta rule of a rank's tokens: parts of documents, the maps between them, both directions.

In the forward a rank first makes the maps of its parts that parts of other ranks go on from, and sends them. While they
travel it runs what waits for nobody. Then it folds the maps of the parts above its own, and runs the parts that waited,
each from the state behind its parent. The backward is the same with transposed maps, from parts to their parents: a
part's map is what it makes of the gradient of the state behind it. Parts whose parent lies on the same rank run after
it, and need no map.

Shapes: T local tokens, HK heads of q and k, H value heads, K and V elements of a head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.linear.backend import Backend, Tokens, own_dtypes
from torchtitan_magi.linear.maps import Map, folded, maps_of, send, total
from torchtitan_magi.linear.once import once
from torchtitan_magi.masks.geometry import Bools, Int64Array
from torchtitan_magi.planning.document_parts import RankParts


@dataclass(frozen=True, eq=False)
class Group:
    """Some of a rank's parts, which run at once."""

    numbers: list[int]
    lengths: list[int]
    rows: Tensor  # their tokens, local numbers
    parents: list[list[int]]  # of each, see ``DocumentParts.sources``; empty if none has one
    children: list[list[int]]  # likewise

    @classmethod
    def of(cls, parts: RankParts, numbers: Int64Array, device: torch.device) -> "Group":
        """That of these parts."""
        first, end = parts.rows[numbers].T
        rows = torch.from_numpy(parts.tokens_of(numbers)).to(device, non_blocking=True)
        parents, children = ([parts.all.sources(back)[i] for i in numbers] for back in (False, True))
        some = parents if any(parents) else [], children if any(children) else []
        return cls(numbers.tolist(), (end - first).tolist(), rows, *some)


class Groups(NamedTuple):
    """A rank's parts by whom they wait for in one direction. Groups run in their order: parts after those that they
    follow."""

    inner: Group  # wait for others in both directions
    first: list[Group]  # wait for nobody, and pass on what others wait for
    free: list[Group]  # wait for nobody, and nobody for them
    later: list[Group]  # wait for others

    @classmethod
    def of(cls, parts: RankParts, back: bool, device: torch.device) -> "Groups":
        """Those of a rank, made once for all layers."""
        return parts.made_once((cls, back, device), lambda: cls._of(parts, back, device))

    @classmethod
    @torch.inference_mode(False)  # layers in training may share it
    def _of(cls, parts: RankParts, back: bool, device: torch.device) -> "Groups":
        waits, others = (parts.all.waits(way)[parts.numbers] for way in (back, not back))
        level = parts.all.level[parts.numbers]

        def by_level(which: Bools) -> list[Group]:
            """Parents before their children; in the backward the children first."""
            levels = sorted(set(level[which].tolist()), reverse=back)
            return [Group.of(parts, parts.numbers[which & (level == one)], device) for one in levels]

        inner = Group.of(parts, parts.numbers[waits & others], device)
        return cls(inner, *map(by_level, (~waits & others, ~waits & ~others, waits)))


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

    def totals(self, passed: dict[int, Tensor], sources: list[list[int]]) -> Tensor | None:
        """What comes to each of some parts, [parts, H, K, V], of these sources; None if nothing comes to any."""
        each = [total(passed, of_one) for of_one in sources]
        if all(state is None for state in each):
            return None
        zero = self.zero
        return torch.stack([zero if state is None else state for state in each])


class Kept(NamedTuple):
    """What the forward keeps for the backward."""

    states: Tensor  # [n, H, K, V]: behind each of ``RankParts.parents``
    matrices: Tensor  # [m, H, K, K]: of the maps of ``Groups.inner``
    of_backend: tuple[Tensor, ...]  # each [T, ...]


def forward(layer: Layer) -> tuple[Tensor, Kept]:
    """out [T, H, V] of a rank, in the dtype of v, and what its backward needs. A collective where documents are cut."""
    tokens, parts, transport, scale, backend = layer
    groups = Groups.of(parts, False, tokens.v.device)
    out = torch.zeros_like(tokens.v, memory_format=torch.contiguous_format)
    passed: dict[int, Tensor] = {}  # the states behind parts
    kept = backend.room(tokens)

    def run(group: Group) -> None:
        states = layer.totals(passed, group.parents)
        outs, ends, rows = backend.forward(tokens.select(group.rows), group.lengths, scale, states)
        for target, x in zip((out, *kept), (outs, *rows), strict=True):
            target.index_copy_(0, group.rows, x.to(target.dtype))
        if group.children:
            passed.update((part, ends[i]) for i, part in enumerate(group.numbers) if group.children[i])

    inner = maps_of(tokens.select(groups.inner.rows), groups.inner.lengths, backend)
    matrices = [one.matrix for one in inner if one.matrix is not None]
    for group in groups.first:
        run(group)
    maps = {part: Map(end) for part, end in passed.items()} | dict(zip(groups.inner.numbers, inner, strict=True))
    arrived = send(maps, parts, False, layer.zero, transport)
    for group in groups.free:
        run(group)
    passed |= folded(arrived(), parts, back=False)
    for group in groups.later:
        run(group)
    states = [passed[part] for part in parts.parents]
    _, key_dim, value_dim = tokens.state_shape
    return out, Kept(_stacked(states, layer.zero, value_dim), _stacked(matrices, layer.zero, key_dim), kept)


def backward(layer: Layer, dout: Tensor, kept: Kept) -> tuple[Tensor, ...]:
    """Gradients of the tokens. A collective where documents are cut."""
    tokens, parts, transport, scale, backend = layer
    groups = Groups.of(parts, True, tokens.v.device)
    grads = tuple(torch.zeros_like(x, memory_format=torch.contiguous_format) for x in tokens)
    states = dict(zip(parts.parents, kept.states, strict=True))
    passed: dict[int, Tensor] = {}  # the gradients of the states before parts

    def run(group: Group, with_tokens: bool = True) -> dict[int, Tensor]:
        own, rows = tokens.select(group.rows), tuple(x.index_select(0, group.rows) for x in kept.of_backend)
        first, dends = layer.totals(states, group.parents), layer.totals(passed, group.children)
        douts = dout.index_select(0, group.rows)
        dtokens, dstates = backend.backward(own, group.lengths, scale, first, rows, douts, dends, with_tokens)
        for grad, x in zip(grads, dtokens or (), strict=False):
            grad.index_copy_(0, group.rows, x)
        return {} if dstates is None else dict(zip(group.numbers, dstates, strict=True))

    inner = run(groups.inner, with_tokens=False) if groups.inner.numbers else {}
    maps = {part: Map(inner[part], matrix.mT) for part, matrix in zip(inner, kept.matrices, strict=True)}
    for group in groups.first:
        passed |= run(group)
    maps |= {part: Map(dstate) for part, dstate in passed.items()}
    arrived = send(maps, parts, True, layer.zero, transport)
    for group in groups.free:
        passed |= run(group)
    passed |= folded(arrived(), parts, back=True)
    for group in groups.later:
        passed |= run(group)
    return grads


def _stacked(states: Sequence[Tensor], zero: Tensor, width: int) -> Tensor:
    return torch.stack(states) if states else zero.new_zeros(0, *zero.shape[:2], width)


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
