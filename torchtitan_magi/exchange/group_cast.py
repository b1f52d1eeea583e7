"""Moving the K/V rows that are needed, and only those: group_cast to the ranks that need them, group_reduce back.

Shapes: T tokens of this rank, S rows sent and R rows received in a stage, H K/V heads, D head_dim. K and V travel fused
as [rows, 2, H, D]. What is received lies in the order in which the plan numbered it, so nothing is un-permuted.
"""

import functools
import os
from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_magi.cuda.memory import empty
from torchtitan_magi.exchange.peer_memory import PeerTransport, can_reach_each_other
from torchtitan_magi.exchange.transport import (
    SINGLE_RANK,
    Arrival,
    Channel,
    Places,
    ProcessGroupTransport,
    Returned,
    RowSums,
    Transport,
    Wait,
)
from torchtitan_magi.planning.plan import Exchange, Stage


@functools.lru_cache(maxsize=8)
def process_group_transport(group: dist.ProcessGroup) -> ProcessGroupTransport:
    """The one transport of a group. Its first call is a collective of the group's ranks."""
    if "nccl" in dist.get_backend_config(group) and dist.get_world_size(group) > 1 and can_reach_each_other(group):
        return PeerTransport(group)
    return ProcessGroupTransport(group)


Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup | Transport | None


def as_transport(mesh: Mesh, cp_size: int) -> Transport:
    """The transport of a one-dimensional mesh, a process group, or None (a single rank).

    Raises:
        ValueError: no mesh; it has several dimensions, or not cp_size ranks.
    """
    if mesh is None:
        transport: Transport = SINGLE_RANK
    elif isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has dimensions {mesh.mesh_dim_names}; pass the context-parallel one, mesh['cp']"
            )
        transport = process_group_transport(mesh.get_group())
    elif isinstance(mesh, dist.ProcessGroup):
        transport = process_group_transport(mesh)
    elif hasattr(mesh, "all_to_all"):
        transport = mesh
    else:
        raise ValueError(f"mesh is {mesh!r}; pass the context-parallel DeviceMesh, its process group, or None")
    if transport.size != cp_size:
        raise ValueError(
            f"the plan is for {cp_size} ranks but the mesh has {transport.size}; plan with cp_size of the mesh"
        )
    return transport


def gpus_per_node(mesh: Mesh, local_world_size: int) -> int | None:
    """How many ranks of the mesh sit in each node, for ``make_plan``; None if all sit in one, or not equally many.

    Args:
        mesh: a one-dimensional mesh or a process group, whose ranks may be any of the world's, ascending.
        local_world_size: processes on each machine; torchrun's LOCAL_WORLD_SIZE.
    """
    if isinstance(mesh, DeviceMesh):
        mesh = mesh.get_group()
    if not isinstance(mesh, dist.ProcessGroup):
        return None
    nodes = [rank // local_world_size for rank in dist.get_process_group_ranks(mesh)]
    count = nodes.count(nodes[0])
    is_regular = all(nodes[first : first + count] == [nodes[first]] * count for first in range(0, len(nodes), count))
    return count if is_regular and count < len(nodes) else None


class Rows(Protocol):
    """How rows are packed, added and rounded: by torch, or by our own kernels (rows.py)."""

    packs_to_places: bool  # whether `gather` and `finish` write to other ranks' memory

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        """Index data of an exchange, on the host; the other methods take it from the device."""

    def gather(
        self, k: Tensor, v: Tensor, index: list[Tensor], to: Tensor | Places, sums: RowSums | None = None
    ) -> None:
        """Copies the rows of k and v [T, H, D] that are sent, to a tensor [S, 2, H, D] or to places; then `sums`."""

    def sum(self, sums: RowSums) -> None:
        """Does what `sums` says."""

    def add(self, returned: Returned, grad: Tensor) -> None:
        """Adds returned rows to grad [T, 2, H, D], for each token in the order of the ranks, when they are there."""

    def round(self, dq: Tensor, softmax_scale: float, out: Tensor) -> None:
        """What the block attention left in dq [T, Hq, D], times the scale, to out."""

    def round_keys(self, dkv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk and dv [T, H, D] of dkv [T, 2, H, D], in `dtype`."""

    def finish(
        self, returned: Returned, dq: Tensor, dkv: Tensor, softmax_scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In `dtype`: dq as `round` has it, and dk and dv [T, H, D] of dkv [T, 2, H, D] with `returned` added to it, as
        `add` does."""


class TorchRows:
    """Row movement by torch's own operations, on any device."""

    packs_to_places = False

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        return [exchange.send_rows]

    def gather(
        self, k: Tensor, v: Tensor, index: list[Tensor], to: Tensor | Places, sums: RowSums | None = None
    ) -> None:
        assert isinstance(to, Tensor)
        to[:, 0], to[:, 1] = k.index_select(0, index[0]), v.index_select(0, index[0])
        if sums is not None:
            self.sum(sums)

    def sum(self, sums: RowSums) -> None:
        wide = sums.delta.dtype
        torch.sum(sums.out.to(wide) * sums.dout.to(wide), -1, out=sums.delta)
        for zero in sums.zeros:
            zero.zero_()

    def add(self, returned: Returned, grad: Tensor) -> None:
        returned.arrival.wait()
        # One rank asks for a row at most once: within one rank no two rows collide, so the sums have a fixed order.
        splits = returned.exchange.send_splits
        for rows, values in zip(returned.row_index[0].split(splits), returned.rows.split(splits), strict=True):
            grad.index_add_(0, rows, values.to(grad.dtype))

    def round(self, dq: Tensor, softmax_scale: float, out: Tensor) -> None:
        out.copy_(dq * softmax_scale)

    def round_keys(self, dkv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return dkv[:, 0].to(dtype, copy=True), dkv[:, 1].to(dtype, copy=True)

    def finish(
        self, returned: Returned, dq: Tensor, dkv: Tensor, softmax_scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.add(returned, dkv)
        return (dq * softmax_scale).to(dtype), *self.round_keys(dkv[: len(dq)], dtype)


def group_cast(
    stage: Stage,
    rows: Rows,
    index: list[list[Tensor]],
    k: Tensor,
    v: Tensor,
    transport: Transport,
    later: bool = False,
    sums: RowSums | None = None,
) -> tuple[Tensor, Arrival]:
    """Starts to bring the K/V rows of a stage.

    Args:
        index: ``rows.index`` of each exchange of the stage, on the device of k.
        k, v: [T, H, D], this rank's own.
        later: the arrival's `begin` will be called, soon and before the next exchange.
        sums: what is to be done besides, while the rows travel.

    Returns:
        The stage's K/V rows [rows, 2, H, D] without the rank's own, and when they may be read.
    """
    if len(stage.exchanges) == 1 and rows.packs_to_places:
        found = transport.places((2, *k.shape[1:]), k.dtype, stage.exchanges[0], back=False)
        if found is not None:
            places, received, arrival = found
            rows.gather(k, v, index[0], places, sums)
            return received, arrival if later and not _launches_block() else _begun(arrival)
    first = stage.arriving[0][0]
    buffer = empty((stage.num_rows - first, 2, *k.shape[1:]), k.dtype, k.device)

    def exchange(i: int, k: Tensor, v: Tensor) -> Arrival:
        exchange = stage.exchanges[i]
        shape = (len(exchange.send_rows), *buffer.shape[1:])
        sent = transport.send_buffer(shape, k.dtype, k.device, exchange, back=False)
        rows.gather(k, v, index[i], sent)
        return transport.all_to_all(_of_exchange(stage, i, buffer, first), sent, exchange, back=False)

    def both() -> None:
        exchange(0, k, v).wait()
        arrived = _of_exchange(stage, 0, buffer, first)
        exchange(1, arrived[:, 0], arrived[:, 1]).wait()

    arrival = exchange(0, k, v) if len(stage.exchanges) == 1 else Arrival(_beside(both, k.device, "cast"))
    if sums is not None:
        rows.sum(sums)
    return buffer, arrival


def _begun(arrival: Arrival) -> Arrival:
    arrival.begin()
    return Arrival(arrival.wait, arrival.flag)


@functools.cache
def _launches_block() -> bool:
    """Whether the host waits for each kernel: then an exchange must be under way before the kernel that awaits it."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"


def grad_buffer(stage: Stage, like: Tensor, wire: torch.dtype, transport: Transport) -> Tensor:
    """Memory for the gradients of a later stage's K/V rows, [stage.num_rows, 2, H, D], contiguous.

    In the dtype in which they travel, and where they are sent from, unless something is added to them first: what a
    rank passes on is in float32 or wider.

    Args:
        like: k [T, H, D].
    """
    shape = (stage.num_rows, 2, *like.shape[1:])
    if _travels_whole(stage):
        return transport.send_buffer(shape, wire, like.device, stage.exchanges[0], back=True)
    return empty(shape, torch.promote_types(like.dtype, torch.float32), like.device)


def _travels_whole(stage: Stage) -> bool:
    return not stage.holds_local and len(stage.exchanges) == 1


def group_reduce(
    stage: Stage, rows: Rows, index: list[list[Tensor]], grad: Tensor, wire: torch.dtype, transport: Transport
) -> Returned:
    """Starts to send gradients of a stage's K/V rows back to their owners; the reverse of ``group_cast``.

    Where a kernel writes them to the owners, ``Rows.finish`` does so.

    Gradients of rows that a relay passed on are added to the relay's own before they leave the node.

    Args:
        grad: of the stage's rows; float32 or wider for the first stage, from ``grad_buffer`` for the others.
        wire: dtype in which gradients travel.

    Returns:
        What comes back to this rank, for ``Rows.add`` or ``Rows.finish``.
    """

    if len(stage.exchanges) == 1 and stage.holds_local and rows.packs_to_places:
        found = transport.places(grad.shape[1:], wire, stage.exchanges[0], back=True)
        if found is not None:
            places, received, arrival = found
            return Returned(received, index[0], stage.exchanges[0], arrival, (grad, stage.arriving[0][0], places))

    def memory(i: int) -> Tensor:
        return empty((len(stage.exchanges[i].send_rows), *grad.shape[1:]), wire, grad.device)

    def exchange(i: int, returned: Tensor) -> Returned:
        sent, exchange = _of_exchange(stage, i, grad), stage.exchanges[i]
        if not _travels_whole(stage):
            wide, sent = sent, transport.send_buffer(sent.shape, wire, grad.device, exchange, back=True)
            sent.copy_(wide)
        return Returned(returned, index[i], exchange, transport.all_to_all(returned, sent, exchange, back=True))

    returned = memory(0)
    if len(stage.exchanges) == 1:
        return exchange(0, returned)

    def both() -> None:  # `returned` was made on the stream that reads it last
        rows.add(exchange(1, memory(1)), _of_exchange(stage, 0, grad))
        exchange(0, returned).arrival.wait()

    return Returned(returned, index[0], stage.exchanges[0], Arrival(_beside(both, grad.device, "reduce")))


def _of_exchange(stage: Stage, i: int, buffer: Tensor, first: int = 0) -> Tensor:
    """Rows of the stage that exchange i brings, in a buffer that begins with row `first`."""
    start, rows = stage.arriving[i]
    return buffer if rows == buffer.shape[0] else buffer.narrow(0, start - first, rows)


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
