"""How rows travel between the ranks of a group: by collectives of torch; peer_memory.py has a faster way."""

import weakref
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.exchange.in_flight import Arrival, Piece
from torchtitan_magi.planning.stage import Exchange

T = TypeVar("T")
Channel = Literal["cast", "reduce"]

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.13


def gathered(mine: T, group: dist.ProcessGroup | None) -> list[T]:
    """The value of each rank of a group, by rank; None: of this rank alone. A collective of these."""
    found: list[Any] = [mine] * (1 if group is None else dist.get_world_size(group))
    if len(found) > 1:
        dist.all_gather_object(found, mine, group)
    return found


class Transport(Protocol):
    """What the module needs of a group of ranks.

    An exchange and its reverse (`back`) travel on channels of their own: one may overtake the other.
    """

    rank: int
    size: int
    way: str  # what rows travel by, for the log

    def pieces(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool
    ) -> tuple[Tensor, list[Piece]] | None:
        """What this rank gets, and the pieces in which the channel sends next; None if it takes `all_to_all`.

        The pieces are for ``in_flight.send``, right away.

        Args:
            shape: shape of a row.
        """

    def all_to_all(self, output: Tensor, input: Tensor, exchange: Exchange, back: bool) -> Arrival:
        """Starts an exchange of rows (dim 0) into ``output``.

        Args:
            input: contiguous; what the stream does next is not waited for.
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
        self.way = dist.get_backend(group)
        backends = dist.get_backend_config(group)  # not always those of the default group
        self.device_types = {entry.partition(":")[0] for entry in backends.split(",")}
        self._groups: dict[Channel, weakref.ref[dist.ProcessGroup]] = dict.fromkeys(
            ("cast", "reduce"), weakref.ref(group)
        )
        if self.size > 1 and "nccl" in backends:  # with CPU offload beside gloo
            ranks = dist.get_process_group_ranks(group)
            other = None if backends == dist.get_backend_config() else backends  # its time-out is of the backend, too
            reduce = dist.new_group(ranks, backend=other, use_local_synchronization=True)
            self._groups["reduce"] = weakref.ref(reduce)

    def group(self, channel: Channel) -> dist.ProcessGroup:
        """The process group of a channel. torch owns it; this object does not outlive it.

        Raises:
            RuntimeError: the group has ended.
        """
        group = self._groups[channel]() if self._groups else None
        if group not in dist.distributed_c10d._world.pg_map:  # torch may keep one that has ended, as by a DTensor
            raise RuntimeError("the process group that this plan is bound to has ended; use a mesh of the new one")
        return group

    def close(self) -> None:
        """Ends the transport, whose group has ended, and gives back its memory."""
        self._groups.clear()

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take before it ends the process."""
        for channel in self._groups:
            self.group(channel).set_timeout(timeout)

    def pieces(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool
    ) -> tuple[Tensor, list[Piece]] | None:
        """None: collectives take an exchange whole."""

    def all_to_all(self, output: Tensor, input: Tensor, exchange: Exchange, back: bool) -> Arrival:
        """As ``Transport`` has it, on the channel's communicator."""
        received, sent = map(list, exchange.splits(back))
        group = self.group("reduce" if back else "cast")
        return Arrival(dist.all_to_all_single(output, input, received, sent, group=group, async_op=True).wait)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """As ``Transport`` has it."""
        all_gather_single(output, input, group=self.group("cast"))


class SingleRank:
    """The transport of a group of one."""

    rank, size, way = 0, 1, "nothing"

    def pieces(self, *_: Any, **__: Any) -> Any:
        """Raises AssertionError: a plan for one rank never communicates."""
        raise AssertionError("a plan for one rank never communicates")

    all_to_all = pieces

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """Copies the rank's own."""
        output.copy_(input)


SINGLE_RANK = SingleRank()
