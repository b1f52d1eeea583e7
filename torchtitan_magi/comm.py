"""Moving the K/V rows that are needed, and only those: group_cast to the ranks that need them, group_reduce back.

Shapes: T tokens of this rank, S rows sent and R rows received in a stage, H K/V heads, D head_dim. K and V travel fused
as [rows, 2, H, D]. What is received lies in the order in which the plan numbered it, so nothing is un-permuted.
"""

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_magi.plan import Exchange, Stage

Wait = Callable[[], object]


Channel = Literal["cast", "reduce"]


class Transport(Protocol):
    """What the module needs of a group of ranks."""

    rank: int
    size: int

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        channel: Channel = "cast",
    ) -> Wait:
        """Starts to exchange blocks of rows (dim 0); calling the result waits until ``output`` may be read.

        Exchanges of different channels may overtake each other.
        """

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Concatenates the equal-sized inputs of all ranks along dim 0."""


class ProcessGroupTransport:
    """Collectives of a torch process group (NCCL on GPUs, gloo on CPU).

    On NCCL the "reduce" channel is a communicator of its own, so that in the backward gradients flow back while the
    next K/V rows come in. Its creation is a collective of the group's ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.groups: dict[Channel, dist.ProcessGroup] = {"cast": group, "reduce": group}
        if self.size > 1 and "nccl" in dist.get_backend_config(group):  # with CPU offload beside gloo
            ranks = dist.get_process_group_ranks(group)
            self.groups["reduce"] = dist.new_group(ranks, use_local_synchronization=True)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take before it ends the process."""
        for group in set(self.groups.values()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        channel: Channel = "cast",
    ) -> Wait:
        splits = list(output_splits), list(input_splits)
        return dist.all_to_all_single(output, input, *splits, group=self.groups[channel], async_op=True).wait

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        dist.all_gather_into_tensor(output, input, group=self.groups["cast"])


@functools.lru_cache(maxsize=8)
def process_group_transport(group: dist.ProcessGroup) -> ProcessGroupTransport:
    """The one transport of a group."""
    return ProcessGroupTransport(group)


class SingleRank:
    """The transport of a group of one."""

    rank, size = 0, 1

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        channel: Channel = "cast",
    ) -> Wait:
        raise AssertionError("a plan for one rank never communicates")

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        output.copy_(input)


Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup | Transport | None


def as_transport(mesh: Mesh, cp_size: int) -> Transport:
    """The transport of a one-dimensional mesh, a process group, or None (a single rank).

    Raises:
        ValueError: the mesh has several dimensions, or not cp_size ranks.
    """
    if mesh is None:
        transport: Transport = SingleRank()
    elif isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has dimensions {mesh.mesh_dim_names}; pass the context-parallel one, mesh['cp']"
            )
        transport = process_group_transport(mesh.get_group())
    elif isinstance(mesh, dist.ProcessGroup):
        transport = process_group_transport(mesh)
    else:
        transport = mesh
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
    """How rows are packed and added: by torch, or by our own kernels (rows.py)."""

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        """Index data of an exchange, on the host; the other methods take it from the device."""

    def gather(self, k: Tensor, v: Tensor, index: list[Tensor]) -> Tensor:
        """The rows to send, [S, 2, H, D], of k and v [T, H, D]."""

    def add(self, returned: Tensor, index: list[Tensor], exchange: Exchange, grad: Tensor) -> None:
        """Adds returned rows [S, 2, H, D] to grad [T, 2, H, D], for each token in the order of the ranks."""


class TorchRows:
    """Row movement by torch's own operations, on any device."""

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        return [exchange.send_rows]

    def gather(self, k: Tensor, v: Tensor, index: list[Tensor]) -> Tensor:
        return torch.stack((k.index_select(0, index[0]), v.index_select(0, index[0])), 1)

    def add(self, returned: Tensor, index: list[Tensor], exchange: Exchange, grad: Tensor) -> None:
        # One rank asks for a row at most once: within one rank no two rows collide, so the sums have a fixed order.
        splits = exchange.send_splits
        for rows, values in zip(index[0].split(splits), returned.split(splits), strict=True):
            grad.index_add_(0, rows, values.to(grad.dtype))


def group_cast(
    stage: Stage, rows: Rows, index: list[list[Tensor]], k: Tensor, v: Tensor, transport: Transport
) -> tuple[Tensor, Wait]:
    """Starts to bring the K/V rows of a stage.

    Args:
        index: ``rows.index`` of each exchange of the stage, on the device of k.
        k, v: [T, H, D], this rank's own.

    Returns:
        The stage's K/V buffer [stage.num_rows, 2, H, D] (own rows first if the stage holds them), to be read after
        calling the second value.
    """
    buffer = k.new_empty(stage.num_rows, 2, *k.shape[1:])
    own, *arriving = _parts(stage, buffer)
    if stage.holds_local:
        own[:, 0], own[:, 1] = k, v

    def exchange(i: int, k: Tensor, v: Tensor) -> Wait:
        splits = stage.exchanges[i].recv_splits, stage.exchanges[i].send_splits
        return transport.all_to_all(arriving[i], rows.gather(k, v, index[i]), *splits)

    if len(stage.exchanges) == 1:
        return buffer, exchange(0, k, v)

    def both() -> None:
        exchange(0, k, v)()
        exchange(1, arriving[0][:, 0], arriving[0][:, 1])()

    return buffer, _beside(both, k.device, "cast")


def group_reduce(
    stage: Stage,
    rows: Rows,
    index: list[list[Tensor]],
    grad: Tensor,
    wire: torch.dtype,
    dkv: Tensor,
    transport: Transport,
) -> Wait:
    """Starts to send gradients of a stage's K/V rows back to their owners; the reverse of ``group_cast``.

    Gradients of rows that a relay passed on are added to the relay's own before they leave the node.

    Args:
        grad: [stage.num_rows, 2, H, D], contiguous; float32 or wider where the stage has a second exchange.
        wire: dtype in which gradients travel.
        dkv: [T, 2, H, D], float32 or wider: to which calling the result adds what comes back.
    """
    _, *leaving = _parts(stage, grad)

    def exchange(i: int) -> tuple[Tensor, Wait]:
        send_splits, recv_splits = stage.exchanges[i].send_splits, stage.exchanges[i].recv_splits
        returned = grad.new_empty(sum(send_splits), *grad.shape[1:], dtype=wire)
        return returned, transport.all_to_all(returned, leaving[i].to(wire), send_splits, recv_splits, "reduce")

    if len(stage.exchanges) == 1:
        returned, wait = exchange(0)
    else:
        # On the stream that will read it, so that the memory is not given away too early.
        first = stage.exchanges[0]
        returned = grad.new_empty(sum(first.send_splits), *grad.shape[1:], dtype=wire)

        def both() -> None:
            passed_on, wait = exchange(1)
            wait()
            rows.add(passed_on, index[1], stage.exchanges[1], leaving[0])
            transport.all_to_all(returned, leaving[0].to(wire), first.send_splits, first.recv_splits, "reduce")()

        wait = _beside(both, grad.device, "reduce")

    def finish() -> None:
        wait()
        rows.add(returned, index[0], stage.exchanges[0], dkv)

    return finish


def _parts(stage: Stage, buffer: Tensor) -> tuple[Tensor, ...]:
    """The stage's buffer by where its rows come from: the rank itself, then each exchange."""
    arriving = [sum(exchange.recv_splits) for exchange in stage.exchanges]
    return buffer.split([len(buffer) - sum(arriving), *arriving])


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
