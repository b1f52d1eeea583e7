"""The gated delta rule in plain torch, chunk by chunk, in float64, too.

A head's state S [K, V] takes in a token by (Gated Delta Networks, arXiv 2412.06464, equation 10, transposed)

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,      out_t = scale * S_t^T q_t.

Inside a chunk that begins with the state S, with b_i the sum of g up to token i, each token adds one outer product:
S_i = exp(b_i) S + sum_{j <= i} exp(b_i - b_j) k_j u_j^T. What it adds follows from those before it (the WY form of
arXiv 2406.06484, section 3, with gates):

    (I + L) U = beta (v - exp(b) k S),      L_ij = beta_i exp(b_i - b_j) k_i^T k_j for j < i.

Shapes: N chunks of C tokens, H value heads, D documents; the rest as in ``delta_rule``.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.cuda.tables import uploaded
from torchtitan_magi.linear.backend import Tokens, spread

CHUNK = 64  # tokens


@dataclass(frozen=True, eq=False)
class _Layout:
    """Documents as chunks, step by step: the first chunks of all documents, then the second ones of those that go on.

    Attributes:
        rows: token of each place of a chunk, int64 [N, C]; the number of tokens where there is none.
        places: place of each token, int64 [T].
        order: documents, the longest first, int64 [D].
        steps: how many documents have a chunk in each step.
    """

    rows: np.ndarray
    places: np.ndarray
    order: np.ndarray
    steps: list[int]

    @classmethod
    def of(cls, lengths: Sequence[int], size: int) -> "_Layout":
        """That of documents of these lengths, at least one token each, in chunks of `size` tokens."""
        length = np.asarray(lengths, np.int64)
        start = length.cumsum() - length
        chunks = -(-length // size)
        order = np.argsort(-chunks, kind="stable")
        steps = [int((chunks > step).sum()) for step in range(max(1, chunks.max(initial=0)))]
        document = np.concatenate([order[:count] for count in steps])
        first = size * np.repeat(np.arange(len(steps)), steps)
        inside = first[:, None] + np.arange(size)
        is_token = inside < length[document, None]
        rows = np.where(is_token, start[document, None] + inside, length.sum())
        places = np.empty(length.sum(), np.int64)
        places[rows[is_token]] = np.flatnonzero(is_token)
        return cls(rows, places, order, steps)


class Chunked:
    """The rule in plain torch: a ``Backend`` that keeps nothing, and runs the forward again in the backward."""

    def start(
        self, tokens: Tokens, lengths: Sequence[int], scale: float, mapped: Sequence[int] = ()
    ) -> "ChunkedForward":
        """As ``Backend.start``."""
        return ChunkedForward(tokens, lengths, scale, mapped)

    def start_backward(
        self, tokens: Tokens, lengths: Sequence[int], scale: float, states: dict[int, Tensor],
        kept: tuple[Tensor, ...], dout: Tensor, mapped: Sequence[int] = (),
    ) -> "ChunkedBackward":  # fmt: skip
        """As ``Backend.start_backward``."""
        return ChunkedBackward(tokens, lengths, scale, states, dout, mapped)

    def room(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """As ``Backend.room``: nothing."""
        return ()


class ChunkedForward:
    """A ``Forward``."""

    def __init__(self, tokens: Tokens, lengths: Sequence[int], scale: float, mapped: Sequence[int]) -> None:
        self.tokens, self.lengths, self.scale, self.mapped = tokens, lengths, scale, mapped

    def maps(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """As ``Forward.maps``: with values [v, 0] the state [0, I] becomes [state, matrix]."""
        num_heads, key_dim, value_dim = self.tokens.state_shape
        rows = np.split(np.arange(len(self.tokens.v)), np.cumsum(self.lengths)[:-1])
        of_mapped = torch.from_numpy(np.concatenate([rows[i] for i in self.mapped]))
        tokens = self.tokens.select(uploaded(of_mapped, self.tokens.v.device))
        values = torch.cat([tokens.v, tokens.v.new_zeros(len(tokens.v), num_heads, key_dim)], -1)
        one = torch.eye(key_dim, dtype=tokens.wide, device=values.device)
        first = torch.cat([one.new_zeros(key_dim, value_dim), one], 1).expand(len(self.mapped), num_heads, -1, -1)
        lengths = [self.lengths[i] for i in self.mapped]
        with torch.no_grad():
            _, ends = run(tokens._replace(v=values), lengths, 1.0, first, with_out=False)
        return ends[..., :value_dim].unbind(), ends[..., value_dim:].unbind()

    def prepare(self, waiting: Collection[int]) -> None:
        """As ``Forward.prepare``: nothing."""

    def finish(self, states: dict[int, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As ``Forward.finish``."""
        with torch.no_grad():
            out, _ = run(self.tokens, self.lengths, self.scale, _all_states(self.tokens, self.lengths, states))
        return out.to(self.tokens.v.dtype), ()


class ChunkedBackward:
    """A ``Backward``: the forward once more, with a graph."""

    def __init__(
        self, tokens: Tokens, lengths: Sequence[int], scale: float, states: dict[int, Tensor], dout: Tensor,
        mapped: Sequence[int],
    ) -> None:  # fmt: skip
        self.tokens, self.lengths, self.mapped = Tokens(*(x.detach().requires_grad_() for x in tokens)), lengths, mapped
        self.states = _all_states(tokens, lengths, states).requires_grad_()
        with torch.enable_grad():
            self.out, self.ends = run(self.tokens, lengths, scale, self.states)
        self.dout = dout.to(self.out.dtype)

    def state_grads(self) -> Sequence[Tensor]:
        """As ``Backward.state_grads``."""
        (grads,) = torch.autograd.grad(self.out, self.states, self.dout, retain_graph=True)
        return [grads[i] for i in self.mapped]

    def prepare(self, waiting: Collection[int] = ()) -> None:
        """As ``Backward.prepare``: nothing, autograd does all at once."""

    def finish(self, dends: dict[int, Tensor]) -> Tokens:
        """As ``Backward.finish``."""
        gradients = self.dout, _all_states(self.tokens, self.lengths, dends)
        return Tokens(*torch.autograd.grad((self.out, self.ends), self.tokens, gradients))


def _all_states(tokens: Tokens, lengths: Sequence[int], states: dict[int, Tensor]) -> Tensor:
    """[D, H, K, V] of those of some sequences."""
    return spread(states, tokens.v.new_zeros(len(lengths), *tokens.state_shape, dtype=tokens.wide))


def run(
    tokens: Tokens, lengths: Sequence[int], scale: float, states: Tensor | None = None, with_out: bool = True
) -> tuple[Tensor, Tensor]:
    """The rule over documents one after another. Differentiable by autograd.

    Args:
        lengths: tokens of each document, at least one.
        states: [D, H, K, V], of ``tokens.wide``: what each begins with; None: zeros.
        with_out: whether to compute out; else it is empty.

    Returns:
        out [T, H, V] and the last states [D, H, K, V], of ``tokens.wide``.
    """
    device = tokens.v.device
    if states is None:
        states = tokens.v.new_zeros(len(lengths), *tokens.state_shape, dtype=tokens.wide)
    layout = _Layout.of(lengths, min(CHUNK, max(lengths, default=1)))
    order = uploaded(torch.from_numpy(layout.order), device)
    outs, ends = _scan(_Terms.of(_chunks(tokens, layout)), layout.steps, states.index_select(0, order), with_out)
    ends = ends.index_select(0, uploaded(torch.from_numpy(np.argsort(layout.order)), device))
    if not with_out:
        return ends.new_empty(0), ends
    places = uploaded(torch.from_numpy(layout.places), device)
    return scale * outs.transpose(1, 2).flatten(0, 1).index_select(0, places), ends


def _chunks(tokens: Tokens, layout: _Layout) -> Tokens:
    """Tokens as [N, H, C, ...]; a place without a token has zeros, which leave the state as it is."""
    rows = uploaded(torch.from_numpy(layout.rows.ravel()), tokens.v.device)
    num_heads = tokens.v.shape[1]

    def chunked(x: Tensor) -> Tensor:
        x = x.to(tokens.wide).repeat_interleave(num_heads // x.shape[1], 1)
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return padded.index_select(0, rows).unflatten(0, layout.rows.shape).transpose(1, 2)

    return Tokens(*map(chunked, tokens))


class _Terms(NamedTuple):
    """What of all chunks does not depend on states. Of a chunk that the state S comes to:

    added = own - from_state S [C, V], out = reads S + scores added, and S becomes whole S + kept^T added.
    """

    own: Tensor  # [N, H, C, V]
    from_state: Tensor  # [N, H, C, K]
    reads: Tensor  # [N, H, C, K]
    scores: Tensor  # [N, H, C, C]
    whole: Tensor  # [N, H, 1, 1]
    kept: Tensor  # [N, H, C, K]

    @classmethod
    def of(cls, chunks: Tokens) -> "_Terms":
        q, k, v, g, beta = chunks
        gate = g.cumsum(-1)
        between = g[..., :, None].masked_fill(_above(g, 0), 0.0).cumsum(-2)  # b_i - b_j, without its rounding
        decay = between.masked_fill(_above(g, 1), -torch.inf).exp()
        below = (beta[..., None] * decay * (k @ k.mT)).masked_fill(_above(gate, 0), 0.0)  # L; the solver takes I + L
        right = torch.cat([beta[..., None] * v, (beta * gate.exp())[..., None] * k], -1)
        added = torch.linalg.solve_triangular(below, right, upper=False, unitriangular=True)
        reads, scores = gate.exp()[..., None] * q, decay * (q @ k.mT)
        whole, kept = gate[..., -1:, None].exp(), decay[..., -1, :, None] * k
        own, from_state = added.split([v.shape[-1], k.shape[-1]], -1)
        return cls(own, from_state, reads, scores, whole, kept)


def _scan(terms: _Terms, steps: list[int], states: Tensor, with_out: bool) -> tuple[Tensor, Tensor]:
    """out [N, H, C, V], without the scale, and the last states; documents are ordered as in the layout."""
    outs, ended = [terms.own[:0]], []
    each = zip(*(x.split(steps) for x in terms), strict=True)  # slices would have a gradient of all chunks each
    for (own, from_state, reads, scores, whole, kept), going_on in zip(each, [*steps[1:], 0], strict=True):
        added = own - from_state @ states
        if with_out:
            outs.append(reads @ states + scores @ added)
        states = whole * states + kept.mT @ added
        ended.append(states[going_on:])
        states = states[:going_on]
    return torch.cat(outs), torch.cat(ended[::-1])


def _above(gate: Tensor, diagonal: int) -> Tensor:
    """Places (i, j) of a chunk with j >= i + diagonal, bool [C, C]."""
    return torch.ones(gate.shape[-1], gate.shape[-1], dtype=torch.bool, device=gate.device).triu(diagonal)
