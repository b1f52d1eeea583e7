"""How rows travel between the ranks of a group: by collectives of torch, or not at all. peer.py has a third way."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.cuda.memory import empty
from torchtitan_magi.planning.plan import Exchange

Wait = Callable[[], object]
Channel = Literal["cast", "reduce"]
MAX_PEERS = 7  # that one kernel writes to


class Flag(NamedTuple):
    """A word in device memory that says when something has arrived: when it has reached `number`, modulo 2^32."""

    address: int
    number: int


class Arrival(NamedTuple):
    """What is under way may be read on the current stream after `wait`, or by kernels that see the flag themselves.

    `flag` returns None where there is none, or none any more because everything has arrived. Either way something on
    the stream has to wait, and memory is used again in the belief that it did.
    """

    wait: Wait
    flag: Callable[[], Flag | None] = lambda: None
    begin: Callable[[], object] = lambda: None  # to be called once: the host's part in an exchange from `places`


KeysAndValues: TypeAlias = Tensor | tuple[Tensor, Tensor]  # [rows, 2, H, D], or K and V of [rows, H, D] each


def keys_and_values(both: KeysAndValues) -> tuple[Tensor, Tensor]:
    """Two tensors [rows, H, D]."""
    if isinstance(both, tuple):
        return both
    keys, values = both.unbind(1)
    return keys, values


class LateKeys(NamedTuple):
    """K/V rows that follow a rank's own. Who reads them begins their exchange and waits for them."""

    kv: Tensor  # [rows, 2, H, D], contiguous
    arrival: Arrival


@dataclass(frozen=True, eq=False)
class Places:
    """Where a kernel packs the rows of an exchange: in memory of the ranks that they go to, or in this rank's own."""

    ends: list[int]  # of each place: the row after its last one, in the order in which rows are sent; ascending
    addresses: list[int]  # of each place: where row 0 would be if it belonged there
    begin: int  # the row to begin with, so that not all write to the same rank at once
    flags: list[int]  # addresses of words of the ranks, int32, to which the kernel adds one when it has packed
    prepared: dict[Any, Any] = field(default_factory=dict)  # launches that repeat from call to call


class RowSums(NamedTuple):
    """What is done before a backward: delta = rowsum(out * dout), and zeros where sums are kept.

    out, dout: [T, Hq, D] of one dtype. delta: [T, Hq], float32 or wider. zeros: one or two, contiguous, of that dtype.
    """

    out: Tensor
    dout: Tensor
    delta: Tensor
    zeros: tuple[Tensor, ...]


class Returned(NamedTuple):
    """Gradients of rows that come back from an exchange. Who reads them waits for them."""

    rows: Tensor  # [S, 2, H, D]
    row_index: list[Tensor]  # Rows.index of the exchange
    exchange: Exchange
    arrival: Arrival
    unsent: tuple[Tensor, int, Places] | None = None  # rows from this one on are still to be sent: Rows.finish does


class Transport(Protocol):
    """What the module needs of a group of ranks.

    An exchange and its reverse (`back`) travel on channels of their own: one may overtake the other.
    """

    rank: int
    size: int
    way: str  # what rows travel by, for the log

    def places(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool
    ) -> tuple[Places, Tensor, Arrival] | None:
        """Where a kernel is to pack what the channel sends next, and what this rank gets. None: it takes `all_to_all`.

        Args:
            shape: of a row.
        """

    def send_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, exchange: Exchange, back: bool
    ) -> Tensor:
        """Memory for what the channel sends next, contiguous."""

    def all_to_all(self, output: Tensor, input: Tensor, exchange: Exchange, back: bool) -> Arrival:
        """Starts an exchange of rows (dim 0) into ``output``.

        Args:
            input: from `send_buffer`; what the stream does next is not waited for.
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
        self.groups: dict[Channel, dist.ProcessGroup] = {"cast": group, "reduce": group}
        if self.size > 1 and "nccl" in dist.get_backend_config(group):  # with CPU offload beside gloo
            ranks = dist.get_process_group_ranks(group)
            self.groups["reduce"] = dist.new_group(ranks, use_local_synchronization=True)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a collective may take before it ends the process."""
        for group in set(self.groups.values()):
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def places(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool
    ) -> tuple[Places, Tensor, Arrival] | None:
        return None

    def send_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, exchange: Exchange, back: bool
    ) -> Tensor:
        return empty(shape, dtype, device)

    def all_to_all(self, output: Tensor, input: Tensor, exchange: Exchange, back: bool) -> Arrival:
        received, sent = map(list, exchange.splits(back))
        group = self.groups["reduce" if back else "cast"]
        return Arrival(dist.all_to_all_single(output, input, received, sent, group=group, async_op=True).wait)

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        dist.all_gather_into_tensor(output, input, group=self.groups["cast"])


class SingleRank:
    """The transport of a group of one."""

    rank, size, way = 0, 1, "nothing"

    def places(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool
    ) -> tuple[Places, Tensor, Arrival] | None:
        raise AssertionError("a plan for one rank never communicates")

    def send_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, exchange: Exchange, back: bool
    ) -> Tensor:
        raise AssertionError("a plan for one rank never communicates")

    def all_to_all(self, output: Tensor, input: Tensor, exchange: Exchange, back: bool) -> Arrival:
        raise AssertionError("a plan for one rank never communicates")

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        output.copy_(input)


SINGLE_RANK = SingleRank()
