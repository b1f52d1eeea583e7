"""Moving the K/V rows that are needed, and only those: group_cast to the ranks that need them, group_reduce back.

Shapes: T tokens of this rank, S rows sent and R rows received in a stage, H K/V heads, D head_dim, Dv value_dim. K and
V travel fused as [rows, width], see ``RowShape``. What is received lies in the order in which the plan numbered it, so
nothing is un-permuted.
in_flight.py has the states that rows go through.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan_magi.exchange.in_flight import (
    Arrival,
    KeysAndValues,
    LateKeys,
    Piece,
    Returned,
    RowShape,
    RowSums,
    Unsent,
    Wait,
    as_rows,
    send,
)
from torchtitan_magi.exchange.rows import RowMover
from torchtitan_magi.exchange.transport import Channel, Transport
from torchtitan_magi.planning.stage import Stage, sent_before


@dataclass(frozen=True, eq=False)
class StageRows:
    """The rows of a stage that travel, and what moves them.

    Attributes:
        index: ``RowMover.index`` of each exchange of the stage, on the device.
    """

    stage: Stage
    index: list[list[Tensor]]
    mover: RowMover
    transport: Transport

    @property
    def one_way(self) -> bool:
        """Whether a single exchange brings all that travels."""
        return len(self.stage.exchanges) == 1

    @property
    def travels_whole(self) -> bool:
        """Whether nothing is added to gradients before they leave: a single exchange takes all of them."""
        return self.one_way and not self.stage.holds_local

    def arriving(self, i: int, buffer: Tensor, first: int = 0) -> Tensor:
        """Rows that exchange i brings, in a buffer that begins with row `first` of the stage."""
        start, rows = self.stage.arriving[i]
        return buffer if rows == buffer.shape[0] else buffer.narrow(0, start - first, rows)


def group_cast(
    rows: StageRows, k: Tensor, v: Tensor, later: bool = False, sums: RowSums | None = None
) -> tuple[Tensor, Arrival]:
    """Starts to bring the K/V rows of a stage.

    Args:
        k, v: [T, H, D] and [T, H, Dv], this rank's own.
        later: the caller will `begin` the arrival, soon and before the next exchange.
        sums: what else is computed while the rows travel.

    Returns:
        The stage's K/V rows [rows, width] without the rank's own, and their arrival.
    """
    stage, mover, transport, shape = rows.stage, rows.mover, rows.transport, RowShape.of(k, v)
    if rows.one_way and mover.writes_to_places:
        found = transport.pieces((shape.width,), k.dtype, stage.exchanges[0], back=False)
        if found is not None:
            received, pieces = found

            def gather(piece: Piece) -> None:
                parts = piece.cut(rows.index[0][0])
                numbers = parts[0] if len(parts) == 1 else torch.cat(parts)
                mover.gather(k, v, [numbers], piece.places, sums if piece is pieces[-1] else None)

            arrival = send(pieces, gather)
            if not later or _launches_block():
                arrival.begin()
                arrival = Arrival(arrival.wait, arrival.flag)
            return received, arrival
    first = stage.arriving[0][0]
    buffer = k.new_empty(stage.num_rows - first, shape.width)

    def exchange(i: int, k: Tensor, v: Tensor) -> Arrival:
        exchange = stage.exchanges[i]
        sent = buffer.new_empty(len(exchange.send_rows), shape.width)
        mover.gather(k, v, rows.index[i], sent)
        return transport.all_to_all(rows.arriving(i, buffer, first), sent, exchange, back=False)

    def both() -> None:
        exchange(0, k, v).wait()
        exchange(1, *shape.split(rows.arriving(0, buffer, first))).wait()

    arrival = exchange(0, k, v) if rows.one_way else Arrival(_beside(both, k.device, "cast"))
    if sums is not None:
        mover.sum(sums)
    return buffer, arrival


@functools.cache
def _launches_block() -> bool:
    """Whether the host waits for each kernel: then an exchange must be under way before the kernel that awaits it."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"


class StageCasts:
    """The K/V rows of a layer's stages: one stage in use and one under way, or two under way while a rank attends to
    its own.

    Rows are gathered before all else: attention takes every SM until its end, and what is not gathered by then waits
    for it. The host begins an only exchange after the launch of attention.

    Args:
        stages: the layer's stages.
        k, v: [T, H, D] and [T, H, Dv], this rank's own.
        sums: computed right after the first rows are gathered.
    """

    def __init__(self, stages: list[StageRows], k: Tensor, v: Tensor, sums: RowSums | None = None) -> None:
        self.stages, self.k, self.v = stages, k, v
        self.pending: list[tuple[Tensor, Arrival] | None] = []
        self._start(0, sums)

    def _start(self, i: int, sums: RowSums | None = None) -> None:
        """Starts what may be under way beside stage i."""
        travels = bool(self.stages[i].stage.exchanges)
        for rows in self.stages[len(self.pending) : sent_before(i, travels, len(self.stages))]:
            if not rows.stage.exchanges:
                self.pending.append(None)
            else:
                self.pending.append(group_cast(rows, self.k, self.v, len(self.stages) == 1, sums))
                sums = None
        if sums is not None:
            self.stages[0].mover.sum(sums)

    def take(self, i: int) -> tuple[Tensor, Tensor, LateKeys | None]:
        """K and V of stage i, [rows, H, ..] each, and the rows that follow and may still be under way; once."""
        pending, self.pending[i] = self.pending[i], None
        late = None
        if pending is not None and self.stages[i].stage.holds_local:
            late = LateKeys(*pending)
        elif pending is not None:
            pending[1].wait()
        self._start(i)  # this may replace the memory that flags lie in
        if pending is None or late is not None:
            return self.k, self.v, late
        return *RowShape.of(self.k, self.v).split(pending[0]), None


def grad_buffer(rows: StageRows, k: Tensor, v: Tensor, wire: torch.dtype) -> Tensor:
    """Memory for the gradients of a later stage's K/V rows, [rows, width], contiguous.

    In the dtype in which they travel, unless something is added to them first: what a rank passes on is in float32 or
    wider.
    """
    dtype = wire if rows.travels_whole else torch.promote_types(k.dtype, torch.float32)
    return k.new_empty(rows.stage.num_rows, RowShape.of(k, v).width, dtype=dtype)


def group_reduce(rows: StageRows, grad: KeysAndValues, wire: torch.dtype) -> Returned:
    """Starts to send gradients of a stage's K/V rows back to their owners; the reverse of ``group_cast``.

    Gradients that a kernel writes to their owners stay unsent: ``RowMover.finish`` sends them. Those that fill more
    memory than the ranks have for it are fetched by their owners piece by piece.
    Gradients of rows that a relay passed on are added to the relay's own before they leave the node.

    Args:
        grad: gradients of the stage's rows; float32 or wider for the first stage, from ``grad_buffer`` for the others;
            or of an only exchange K and V [rows, H, ..] in the dtype `wire`.
        wire: dtype in which gradients travel.

    Returns:
        What comes back to this rank, for ``RowMover.add`` or ``RowMover.finish``.
    """
    stage, transport = rows.stage, rows.transport

    def leaving(i: int) -> Tensor:
        start, count = stage.arriving[i]
        return as_rows(grad, start, start + count)

    like, width = (grad, grad.shape[1]) if isinstance(grad, Tensor) else (grad[0], RowShape.of(*grad).width)
    if rows.one_way and stage.holds_local and rows.mover.writes_to_places:
        found = transport.pieces((width,), wire, stage.exchanges[0], back=True)
        if found is not None:
            received, pieces = found
            places, slot, arrival = pieces[-1][1:]
            unsent = Unsent(grad, stage.arriving[0][0], places) if slot is None else None
            if unsent is None:
                send(pieces, functools.partial(rows.mover.round_to, leaving(0))).begin()
            return Returned(received, rows.index[0], stage.exchanges[0], arrival, unsent)

    def memory(i: int) -> Tensor:
        return like.new_empty(len(stage.exchanges[i].send_rows), width, dtype=wire)

    def exchange(i: int, returned: Tensor) -> Returned:
        exchange = stage.exchanges[i]
        sent = leaving(i).to(wire).contiguous()
        return Returned(returned, rows.index[i], exchange, transport.all_to_all(returned, sent, exchange, back=True))

    returned = memory(0)
    if rows.one_way:
        return exchange(0, returned)
    assert isinstance(grad, Tensor)
    own = rows.arriving(0, grad)

    def both() -> None:  # `returned` was made on the stream that reads it last
        rows.mover.add(exchange(1, memory(1)), own)
        exchange(0, returned).arrival.wait()

    return Returned(returned, rows.index[0], stage.exchanges[0], Arrival(_beside(both, like.device, "reduce")))


def _beside(work: Callable[[], None], device: torch.device, channel: Channel) -> Wait:
    """Does `work` beside what the current CUDA stream does next; calling the result makes the stream wait for it.

    On the CPU it is done at once.
    """
    if device.type != "cuda":
        work()
        return lambda: None
    side = _side_stream(device, channel)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    return functools.partial(_wait_for, device, side.record_event(), work)


def _wait_for(device: torch.device, done: torch.cuda.Event, work: Callable[[], None]) -> None:
    """`work` is kept until here, and with it the memory that it reads and writes."""
    torch.cuda.current_stream(device).wait_event(done)


@functools.lru_cache(maxsize=16)
def _side_stream(device: torch.device, channel: Channel) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
