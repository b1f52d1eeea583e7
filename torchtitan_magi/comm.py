"""Moving the K/V rows that are needed, and only those: group_cast to the ranks that need them, group_reduce back.

Shapes: T tokens of this rank, S rows sent and R rows received in a stage, H K/V heads, D head_dim. K and V travel fused
as [rows, 2, H, D]. What is received lies in the order in which the plan numbered it, so nothing is un-permuted.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_magi.plan import Stage

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
        if self.size > 1 and dist.get_backend(group) == "nccl":
            ranks = dist.get_process_group_ranks(group)
            self.groups["reduce"] = dist.new_group(ranks, use_local_synchronization=True)

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
def _process_group_transport(group: dist.ProcessGroup) -> ProcessGroupTransport:
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
        transport = _process_group_transport(mesh.get_group())
    elif isinstance(mesh, dist.ProcessGroup):
        transport = _process_group_transport(mesh)
    else:
        transport = mesh
    if transport.size != cp_size:
        raise ValueError(
            f"the plan is for {cp_size} ranks but the mesh has {transport.size}; plan with cp_size of the mesh"
        )
    return transport


class Rows(Protocol):
    """How rows are packed and added: by torch, or by our own kernels (rows.py)."""

    def index(self, stage: Stage) -> list[npt.NDArray[np.integer]]:
        """Index data of a stage, on the host; the other methods take it from the device."""

    def gather(self, k: Tensor, v: Tensor, index: list[Tensor]) -> Tensor:
        """The rows to send, [S, 2, H, D], of k and v [T, H, D]."""

    def add(self, returned: Tensor, index: list[Tensor], stage: Stage, grad: Tensor) -> None:
        """Adds returned rows [S, 2, H, D] to grad [T, 2, H, D], for each token in the order of the ranks."""


class TorchRows:
    """Row movement by torch's own operations, on any device."""

    def index(self, stage: Stage) -> list[npt.NDArray[np.integer]]:
        return [stage.send_rows]

    def gather(self, k: Tensor, v: Tensor, index: list[Tensor]) -> Tensor:
        return torch.stack((k.index_select(0, index[0]), v.index_select(0, index[0])), 1)

    def add(self, returned: Tensor, index: list[Tensor], stage: Stage, grad: Tensor) -> None:
        # One rank asks for a row at most once: within one rank no two rows collide, so the sums have a fixed order.
        for rows, values in zip(index[0].split(stage.send_splits), returned.split(stage.send_splits), strict=True):
            grad.index_add_(0, rows, values.to(grad.dtype))


def group_cast(
    stage: Stage, rows: Rows, index: list[Tensor], k: Tensor, v: Tensor, transport: Transport
) -> tuple[Tensor, Wait]:
    """Starts to bring the K/V rows of a stage.

    Args:
        index: ``rows.index(stage)`` on the device of k.
        k, v: [T, H, D], this rank's own.

    Returns:
        The stage's K/V buffer [stage.num_rows, 2, H, D] (own rows first if the stage holds them), to be read after
        calling the second value.
    """
    buffer = k.new_empty(stage.num_rows, 2, *k.shape[1:])
    received = buffer
    if stage.holds_local:
        buffer[: len(k), 0] = k
        buffer[: len(k), 1] = v
        received = buffer[len(k) :]
    return buffer, transport.all_to_all(received, rows.gather(k, v, index), stage.recv_splits, stage.send_splits)


def group_reduce(stage: Stage, received_grad: Tensor, transport: Transport) -> tuple[Tensor, Wait]:
    """Starts to send gradients of received K/V rows back to their owners; the reverse of ``group_cast``.

    Args:
        received_grad: [R, 2, H, D], contiguous, in the dtype in which it travels.

    Returns:
        [S, 2, H, D]: the gradients of the rows this rank sent, for ``Rows.add`` after calling the second value.
    """
    returned = received_grad.new_empty(sum(stage.send_splits), *received_grad.shape[1:])
    wait = transport.all_to_all(returned, received_grad, stage.send_splits, stage.recv_splits, "reduce")
    return returned, wait
