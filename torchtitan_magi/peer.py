"""Exchanges between GPUs of one machine through peer memory, in one of two ways. The host waits for nobody.

Copy engines fetch rows out of each other's send buffers. No SM takes part, so attention has all of them, and an
exchange starts while attention runs; NCCL's kernels would wait for its end, or take SMs from it. Ranks find each other
by stream operations of the driver: before a rank fetches, its stream writes the exchange's number into every peer's
memory and waits for theirs.

Or a kernel of ours writes rows where they are wanted, and then counts up a word there. That is at most one launch for
the host, and done sooner where nothing could be done meanwhile: for few rows, and for gradients that come back last.
"""

import ctypes
import functools
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi import driver
from torchtitan_magi.driver import StreamOperation
from torchtitan_magi.memory import layout
from torchtitan_magi.plan import Exchange, Parcel
from torchtitan_magi.transport import MAX_PEERS, Arrival, Flag, Inboxes, ProcessGroupTransport

# Buffers of a channel, taken in turn, to send from or to be written to. An exchange is issued after the wait for the
# last but one before it, thus after every peer came to that one, and by then was done with the one before: had fetched
# all of it, or used what was written to it, as nothing that is written follows before that. Hence three.
SLOTS = 3
FLAG_BYTES = 4096  # for the numbers, before the slots
WRITTEN_BYTES = 8 << 20  # K/V rows up to so many bytes per rank are written; more are fetched while attention runs


class _Channel:
    """A stream for one kind of exchange, and how far it has come."""

    def __init__(self, peers: int) -> None:
        self.stream = torch.cuda.Stream(priority=-1)
        self.raw_stream = self.stream.cuda_stream
        self.number = 0  # of the exchange before the next
        self.written = 0  # how many of them were written
        self.counts: list[int] = []  # addresses of the words that writers count up: this rank's, then the peers'
        self.ready = StreamOperation(StreamOperation.WRITE)  # this rank's stream tells the channel's: input is there
        self.there = StreamOperation(StreamOperation.WRITE)  # the other way round: output is there
        self.operations = (StreamOperation * (1 + 2 * peers))()
        words = (ctypes.c_uint64 * (len(self.operations) * ctypes.sizeof(StreamOperation) // 8)).from_buffer(
            self.operations
        )
        self.values = np.ctypeslib.as_array(words).reshape(len(self.operations), -1)[:, StreamOperation.VALUE_WORD]

    def aim(self, mine: list[int], theirs: list[int], ready: int, there: int, counts: list[int]) -> None:
        """Writes go to `theirs`, waits look at `mine`, an address for each peer; `ready` and `there` are its own."""
        kinds = [StreamOperation.WAIT] + [StreamOperation.WRITE] * len(theirs) + [StreamOperation.WAIT] * len(mine)
        for operation, kind, address in zip(self.operations, kinds, [ready, *theirs, *mine], strict=True):
            operation.operation, operation.address = kind, address
        self.ready.address, self.there.address, self.number = ready, there, 0
        self.counts, self.written = counts, 0


class PeerTransport(ProcessGroupTransport):
    """Exchanges through peer memory; relays and all-gathers by NCCL.

    Send buffers lie in symmetric memory that grows when an exchange needs more: all ranks know what each of them sends,
    so they grow together. Creating the object and growing are collectives of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.group, self.way = group, "peer memory"
        self.device = torch.cuda.current_device()
        self.channels = _Channel(self.size - 1), _Channel(self.size - 1)  # there, back
        self.slot_bytes = 0
        self.memory: Any = None  # uint8: the flags, then the slots of both channels
        self.view = functools.lru_cache(maxsize=64)(self._view)
        self.inboxes_of = functools.lru_cache(maxsize=32)(self._inboxes_of)
        self.bases: list[int] = []  # of each rank's memory, as this rank sees it

    def send_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, exchange: Exchange, back: bool
    ) -> Tensor:
        if exchange.hops is None:
            return super().send_buffer(shape, dtype, device, exchange, back)
        return self._buffer(shape, dtype, exchange.most_sent(back), back)

    def inboxes(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool
    ) -> tuple[Inboxes, Arrival] | None:
        channel = self.channels[back]
        inboxes = self.inboxes_of(shape, dtype, exchange, back, channel.number % SLOTS)
        if inboxes is None:
            return None
        channel.number += 1
        channel.written += 1
        return inboxes, self._arrival(channel.counts[0], channel.written * (self.size - 1))

    def _inboxes_of(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool, slot: int
    ) -> Inboxes | None:
        """The inboxes of an exchange that is written, with the channel's next slot."""
        most, row_bytes = exchange.most_sent(not back), math.prod(shape) * dtype.itemsize
        is_writable = exchange.hops is not None and exchange.is_whole and self.size - 1 <= MAX_PEERS
        if not is_writable or (not back and most * row_bytes > WRITTEN_BYTES):
            return None
        received = self._buffer((sum(exchange.splits(back)[0]), *shape), dtype, most, back)
        start, deliveries, counts = self._slot(back), exchange.deliveries(back), self.channels[back].counts
        ends = [parcel.first + parcel.rows for parcel in deliveries]
        addresses = [self.bases[other] + start + (place - first) * row_bytes for other, first, _, place in deliveries]
        begin = next((parcel.first for parcel in deliveries if parcel.other > self.rank), 0)
        return Inboxes(ends, addresses, begin, counts[1:], received)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype, most: int, back: bool) -> Tensor:
        """The channel's next buffer; `most` rows are the most that any rank needs of it."""
        _, strides = layout(shape)
        if (needed := most * strides[0] * dtype.itemsize) > self.slot_bytes:
            self._grow(needed)
        return self.view(shape, dtype, self._slot(back))

    def _view(self, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
        """The memory from byte `start` on."""
        _, strides = layout(shape)
        view: Tensor = self.memory.view(dtype).as_strided(shape, strides, start // dtype.itemsize)
        return view

    def all_to_all(self, output: Tensor, input: Tensor, exchange: Exchange, back: bool, later: bool = False) -> Arrival:
        if exchange.hops is None:
            return super().all_to_all(output, input, exchange, back)
        channel, slot = self.channels[back], self._slot(back)
        assert input.numel() == 0 or input.data_ptr() == self.bases[self.rank] + slot
        channel.number += 1
        channel.values[:] = channel.ready.value = channel.there.value = channel.number
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        driver.check(_calls().operate(stream, 1, ctypes.byref(channel.ready), 0))
        fetch = functools.partial(self._fetch, channel, slot, output, exchange.fetches(back))
        arrival = self._arrival(channel.there.address, channel.number)
        if later and not _launches_block():
            return arrival._replace(begin=fetch)
        fetch()
        return arrival

    def _fetch(self, channel: _Channel, slot: int, output: Tensor, fetches: tuple[Parcel, ...]) -> None:
        """Lets the channel's stream find the peers and fetch the rows."""
        calls, stream = _calls(), channel.raw_stream
        row_bytes, to = output.stride(0) * output.element_size(), output.data_ptr()
        status = calls.operate(stream, len(channel.operations), channel.operations, 0)
        for source, first, rows, place in fetches:
            taken = self.bases[source] + slot + first * row_bytes
            status |= calls.copy(to + place * row_bytes, taken, rows * row_bytes, stream)
        driver.check(status | calls.operate(stream, 1, ctypes.byref(channel.there), 0))

    def _arrival(self, address: int, number: int) -> Arrival:
        there = functools.partial(self._flag, self.memory, address, number)
        return Arrival(functools.partial(self._wait, there), there)

    def _wait(self, there: Callable[[], Flag | None]) -> None:
        if (flag := there()) is not None:
            wait = StreamOperation(StreamOperation.WAIT, *flag)
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            driver.check(_calls().operate(stream, 1, ctypes.byref(wait), 0))

    def _flag(self, memory: Tensor, address: int, number: int) -> Flag | None:
        """None when `memory`, where the flag lay, has been replaced: before that everything had arrived."""
        return Flag(address, number) if memory is self.memory else None

    def _slot(self, back: bool) -> int:
        """Where in the memory the channel's next buffer begins, in bytes."""
        return FLAG_BYTES + (back * SLOTS + self.channels[back].number % SLOTS) * self.slot_bytes

    def _grow(self, needed: int) -> None:
        """Symmetric memory with slots of the next power of two of bytes. A collective; waits for the device."""
        from torch._C._distributed_c10d import _SymmetricMemory

        torch.cuda.synchronize(self.device)  # fetches out of the old one are done when all ranks have come here
        self.slot_bytes = max(1 << 20, 1 << (needed - 1).bit_length())
        self.view.cache_clear()
        self.inboxes_of.cache_clear()
        self.memory = None
        size, name = FLAG_BYTES + 2 * SLOTS * self.slot_bytes, self.group.group_name
        self.memory = _SymmetricMemory.empty_strided_p2p(
            (size,), (1,), torch.uint8, torch.device("cuda", self.device), name
        )
        self.memory[:FLAG_BYTES].zero_()
        torch.cuda.synchronize(self.device)  # before anyone may write there
        self._aim(list(_SymmetricMemory.rendezvous(self.memory, name).buffer_ptrs))

    def _aim(self, bases: list[int]) -> None:
        """Takes up the addresses of all ranks' memory."""
        self.bases = bases
        peers = [rank for rank in range(self.size) if rank != self.rank]
        for i, channel in enumerate(self.channels):
            # A word for each rank, its own: `there`; then `ready`, and the count of what was written.
            flags = [base + 4 * i * (self.size + 2) for base in bases]
            mine = [flags[self.rank] + 4 * peer for peer in peers]
            theirs = [flags[peer] + 4 * self.rank for peer in peers]
            own = flags[self.rank]
            counts = [flags[rank] + 4 * (self.size + 1) for rank in (self.rank, *peers)]
            channel.aim(mine, theirs, ready=own + 4 * self.size, there=own + 4 * self.rank, counts=counts)


class _Calls:
    def __init__(self) -> None:
        self.operate, self.copy = driver.function("cuStreamBatchMemOp_v2"), driver.function("cuMemcpyAsync")


_calls = functools.cache(_Calls)


@functools.cache
def _launches_block() -> bool:
    """Whether the host waits for each kernel: then an exchange must be under way before the kernel that awaits it."""
    return os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"


def can_reach_each_other(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of an NCCL group sit in one machine, with GPUs that reach each other's memory. A collective."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    mine = machine, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group)
    here = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    others = [other for other in everyone if other != mine]
    reached = _has_stream_operations() and all(
        boot == machine and gpu in here and torch.cuda.can_device_access_peer(here[mine[1]], here[gpu])
        for boot, gpu in others
    )
    verdicts: list[Any] = [None] * len(everyone)
    dist.all_gather_object(verdicts, reached, group)
    return all(verdicts)


def _has_stream_operations() -> bool:
    """Whether the current device's streams write to memory by themselves; under some virtual GPUs they do not."""
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    operation = StreamOperation(StreamOperation.WRITE, word.data_ptr(), 1)
    status = _calls().operate(torch.cuda.current_stream().cuda_stream, 1, ctypes.byref(operation), 0)
    return status == 0 and word.item() == 1
