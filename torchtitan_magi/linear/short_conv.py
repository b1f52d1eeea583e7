"""The causal short convolution of a rank's tokens: parts of documents need the few rows before them, wherever they are.

Shapes: T local tokens, C channels, W width of the kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtitan_magi.cuda.tables import stream_of, uploaded
from torchtitan_magi.exchange.in_flight import Arrival
from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.linear import conv_kernels
from torchtitan_magi.linear.once import once
from torchtitan_magi.masks.geometry import Int64Array, expand, union
from torchtitan_magi.planning.document_parts import DocumentParts, RankParts
from torchtitan_magi.planning.needs import parts_of, transfers_of
from torchtitan_magi.planning.relays import ALL, NONE, Routes
from torchtitan_magi.planning.stage import Exchange, exchanges_of, numbered
from torchtitan_magi.planning.topology import Nodes
from torchtitan_magi.products import own_dtypes


@dataclass(frozen=True, eq=False)
class ConvRows:
    """Which rows the tokens of a rank need besides those that lie before them in their part.

    Such rows are called history here: first those of the rank's own other parts, then those of other ranks.

    Attributes:
        exchange: of the rows of other ranks; None if no rank of the plan needs any.
        sent: local numbers of the rows that it takes, in its order.
        offset: how many tokens of the same part come before each token, int64 [T]; -1 for tokens of no document.
        own: local numbers of the rank's own rows that are history.
        edges: tokens that have any history among their rows, ascending, int64 [E].
        taps: for each distance from 1 to W - 1, those of `edges` whose row at this distance is history, by their place
            there, and which one it is.
        lent: local rows that are history of any token, of any rank, ascending, int64 [n].
        lent_places: the places of `own` there, then of `sent`.
        tables: the same for a kernel: offset, the place of each token in `edges` or -1, and the history row of each of
            `edges` by distance or -1; int32 [T], [T], [E, W - 1].
    """

    exchange: Exchange | None
    sent: Tensor
    offset: Tensor
    own: Tensor
    edges: Tensor
    taps: list[tuple[Tensor, Tensor]]
    lent: Tensor
    lent_places: Tensor
    tables: tuple[Tensor, Tensor, Tensor]

    @property
    def num_received(self) -> int:
        """Rows of other ranks."""
        return sum(self.exchange.recv_splits) if self.exchange else 0

    @classmethod
    def of(cls, parts: RankParts, width: int, device: torch.device) -> "ConvRows":
        """Those of a rank, on its device, made once for all layers of a stream."""
        return parts.made_once((cls, width, device, stream_of(device)), lambda: cls._of(parts, width, device))

    @classmethod
    @torch.inference_mode(False)  # layers in training may share it
    def _of(cls, parts: RankParts, width: int, device: torch.device) -> "ConvRows":
        routes, offset = _routes(parts.all, width), _offset(parts)
        (exchange,), received = exchanges_of(routes, parts.rank, (NONE, ALL))
        held = numbered(np.concatenate([parts.all.owned[parts.rank], *received]))
        tokens, sources = [], []
        history = parts.all.tokens_before(width - 1)[parts.numbers]
        for distance in range(1, width):
            token, source = _tap(parts, history[:, :distance], held)
            tokens.append(token)
            sources.append(source)
        own, places = _as_history(sources, len(offset))
        edges = np.unique(np.concatenate([np.zeros(0, np.int64), *tokens]))
        tokens = [np.searchsorted(edges, of_tap) for of_tap in tokens]
        tables = _tables(offset, edges, tokens, places)
        lent, lent_places = np.unique(np.concatenate([own, exchange.send_rows]), return_inverse=True)
        sent, before, own_rows, edges, lent, lent_places, *rest = (
            uploaded(torch.tensor(x, device="cpu"), device)
            for x in (exchange.send_rows, offset, own, edges, lent, lent_places, *tokens, *places, *tables)
        )
        taps = list(zip(rest[: width - 1], rest[width - 1 : 2 * width - 2], strict=True))
        exchanged = exchange if len(routes.hops) else None
        return cls(exchanged, sent, before, own_rows, edges, taps, lent, lent_places, tuple(rest[-3:]))


def _routes(parts: DocumentParts, width: int) -> Routes:
    """The rows of other ranks that parts need: the last W - 1 before them."""
    history, limit = parts.tokens_before(width - 1), int(parts.ranges[:, 1].max(initial=0))
    part, column = np.nonzero(history >= 0)
    first = history[part, column]
    transfers = transfers_of(union(parts.rank[part], first, first + 1, limit), parts_of(parts.owned))
    return Routes.of(parts.owned, Nodes((len(parts.owned),)), transfers)


def _offset(parts: RankParts) -> Int64Array:
    """How many tokens of the same part come before each of a rank's tokens, int64 [T]; -1 for tokens of no document."""
    first, end = parts.rows[parts.numbers].T
    owned = parts.all.owned[parts.rank]
    offset = np.full((owned[:, 1] - owned[:, 0]).sum(), -1)
    offset[expand(first, end)] = expand(np.zeros_like(first), end - first)
    return offset


def _tap(parts: RankParts, history: Int64Array, held: Int64Array) -> tuple[Int64Array, Int64Array]:
    """A rank's tokens whose row at one distance is not in their part, and this row's place in what the rank holds.

    Args:
        history: the tokens before each of the rank's parts, the nearest first: int64 [n, distance].
        held: from ``numbered``: the rank's own tokens, then those that it received.
    """
    first, end = parts.rows[parts.numbers].T
    before = history[:, ::-1]  # the row of a part's first token, then of its second one
    part, place = np.nonzero((before >= 0) & (np.arange(before.shape[1]) < (end - first)[:, None]))
    source = before[part, place]
    which = np.searchsorted(held[:, 0], source, side="right") - 1
    return first[part] + place, source + held[which, 2] - held[which, 0]


def _as_history(sources: list[Int64Array], num_tokens: int) -> tuple[Int64Array, list[Int64Array]]:
    """The rank's own rows that are history, and places of sources in it, from their places in what the rank holds."""
    every = np.concatenate([np.zeros(0, np.int64), *sources])
    own = np.unique(every[every < num_tokens])
    return own, [np.where(s < num_tokens, np.searchsorted(own, s), s - num_tokens + len(own)) for s in sources]


def _tables(
    offset: Int64Array, edges: Int64Array, tokens: list[Int64Array], places: list[Int64Array]
) -> tuple[np.ndarray, ...]:
    """See ``ConvRows.tables``."""
    edge, taken = np.full(len(offset), -1), np.full((len(edges), len(tokens)), -1)
    edge[edges] = np.arange(len(edges))
    for distance, (of_tap, which) in enumerate(zip(tokens, places, strict=True)):
        taken[of_tap, distance] = which
    return tuple(x.astype(np.int32) for x in (offset, edge, taken))


def _convolved(
    x: Tensor, weight: Tensor, rows: ConvRows, activation: str | None, history: Callable[[], Tensor]
) -> Tensor:
    """out [T, C], in the dtype of x; taps inside parts first, then those that need the rows [R, C] of other ranks."""
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight.to(wide).flip(1).unbind(1)  # by distance
    values = x.to(wide)
    out = torch.where(rows.offset[:, None] >= 0, values * taps[0], 0.0)
    for distance, tap in enumerate(taps[1:], 1):
        shifted = F.pad(values, (0, 0, distance, 0))[: len(x)]
        out = out + torch.where(rows.offset[:, None] >= distance, shifted * tap, 0.0)
    before = torch.cat([values.index_select(0, rows.own), history().to(wide)])
    for (tokens, sources), tap in zip(rows.taps, taps[1:], strict=True):
        taken = F.embedding(sources, before) * tap  # whose gradients have a fixed order, also on a GPU
        out = out.index_add(0, rows.edges.index_select(0, tokens), taken)  # each token once: no order of sums
    return (F.silu(out) if activation == "silu" else out).to(x.dtype)


def forward(
    x: Tensor, weight: Tensor, rows: ConvRows, transport: Transport, activation: str | None
) -> tuple[Tensor, Tensor]:
    """out [T, C] in the dtype of x, and the rows of other ranks [R, C]. A collective where any rank needs such."""
    received, arrival = x.new_empty(rows.num_received, x.shape[1]), Arrival(lambda: None)
    if rows.exchange is not None:
        sent = x.index_select(0, rows.sent)
        arrival = transport.all_to_all(received, sent, rows.exchange, back=False)
    if conv_kernels.has_kernel(x, weight):
        own = x.index_select(0, rows.own)
        arrival.wait()
        history = torch.cat([own, received])
        return conv_kernels.forward(x, weight, history, rows.tables, activation), received

    def arrived() -> Tensor:
        arrival.wait()
        return received

    return _convolved(x, weight, rows, activation, arrived), received


def backward(
    dout: Tensor, saved: Sequence[Tensor], rows: ConvRows, transport: Transport, activation: str | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of weight. A collective where any rank needs rows of others.

    Args:
        saved: x, weight and the rows that ``forward`` received.
    """
    x, weight, received = saved
    if conv_kernels.has_kernel(x, weight):
        return _backward_by_kernel(dout, saved, rows, transport, activation)
    x, weight, received = (x.detach().requires_grad_() for x in saved)
    with torch.enable_grad():
        out = _convolved(x, weight, rows, activation, lambda: received)
    if rows.exchange is None:
        dx, dweight = torch.autograd.grad(out, (x, weight), dout)
        return dx, dweight
    (sent,) = torch.autograd.grad(out, received, dout, retain_graph=True)
    returned, arrival = _send_back(sent, rows, transport)
    dx, dweight = torch.autograd.grad(out, (x, weight), dout)
    arrival.wait()
    splits = rows.exchange.send_splits
    for numbers, grads in zip(rows.sent.split(splits), returned.split(splits), strict=True):
        dx.index_add_(0, numbers, grads)  # of one rank after the other, each row once
    return dx, dweight


def _backward_by_kernel(
    dout: Tensor, saved: Sequence[Tensor], rows: ConvRows, transport: Transport, activation: str | None
) -> tuple[Tensor, Tensor]:
    x, weight, received = saved
    history = torch.cat([x.index_select(0, rows.own), received])
    dx, dweight, dedges = conv_kernels.backward(x, weight, history, rows.tables, activation, dout)
    taps = zip(rows.taps, weight.float().flip(1).unbind(1)[1:], strict=True)
    taken = torch.cat([dedges.index_select(0, tokens) * tap for (tokens, _), tap in taps])
    sources = torch.cat([sources for _, sources in rows.taps])
    # Several branches take in the same row. On a GPU index_add has no order, an embedding's gradient has one.
    dhistory = torch.ops.aten.embedding_dense_backward(taken, sources, len(history), -1, False)
    own, sent = dhistory.split([len(rows.own), len(received)])  # float32, also on their way: each adds to others
    grads = [own]
    if rows.exchange is not None:
        returned, arrival = _send_back(sent, rows, transport)
        arrival.wait()
        grads += returned.split(rows.exchange.send_splits)
    total = dx.index_select(0, rows.lent).float()
    for places, grad in zip(rows.lent_places.split([len(grad) for grad in grads]), grads, strict=True):
        total.index_add_(0, places, grad)  # of one rank after the other, each row once
    return dx.index_copy_(0, rows.lent, total.to(dx.dtype)), dweight


def _send_back(grads: Tensor, rows: ConvRows, transport: Transport) -> tuple[Tensor, Arrival]:
    """Starts to bring gradients of received rows to the ranks that sent them."""
    assert rows.exchange is not None
    returned = grads.new_empty(len(rows.sent), grads.shape[1])
    return returned, transport.all_to_all(returned, grads.contiguous(), rows.exchange, back=True)


class _ShortConv(torch.autograd.Function):
    """One op in both directions: so every rank comes to every exchange, whatever of it depends on what."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: ConvRows, transport: Transport, activation: str | None
    ) -> Tensor:
        ctx.rest = rows, transport, activation
        with own_dtypes(x.device):
            out, received = forward(x, weight, *ctx.rest)
        ctx.save_for_backward(x, weight, received)
        return out

    @staticmethod
    @once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        with own_dtypes(dout.device):
            return *backward(dout, ctx.saved_tensors, *ctx.rest), None, None, None


short_conv = _ShortConv.apply
"""out [T, C] of x, weight, the rank's rows on the device, the transport, the activation. Differentiable once."""
