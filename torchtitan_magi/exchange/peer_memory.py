"""Exchanges between GPUs of one machine through peer memory, in one of two ways. The host never waits.

Fetched: copy engines fetch rows from the peers' send buffers. No SM takes part, so attention has all of them, and an
exchange starts while attention runs; NCCL's kernels would wait for its end, or take SMs from it. Before a rank fetches,
a stream of its own waits for a word in its memory, which the kernels that gather the rows count up.

Written: a kernel of ours writes rows straight into the receivers' memory, and then counts up a word there. It takes the
host one launch at most, and is faster where nothing else runs meanwhile: for few rows, and for the last gradients.

What fills more than MAX_SLOT_BYTES is fetched in several pieces, each of which is an exchange of its own in all that
follows.
"""

import ctypes
import functools
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.cuda import driver
from torchtitan_magi.cuda.driver import CopyAttributes, StreamOperation
from torchtitan_magi.exchange.hidden_gpus import hidden_gpus_are_reached
from torchtitan_magi.exchange.in_flight import MAX_PEERS, Arrival, Flag, Piece, Places
from torchtitan_magi.exchange.pieces import Flow, Parcel
from torchtitan_magi.exchange.transport import ProcessGroupTransport, gathered
from torchtitan_magi.planning.stage import Exchange

logger = logging.getLogger(__name__)

# Slots of a channel: buffers to send from or to be written to, taken in turn. Two suffice. A rank gathers for exchange
# n+2 after it waited for n+1. By then all ranks have gathered for n+1, each after it waited for n and used what it got.
# So nobody reads a slot of n any more, be it its own or another rank's.
SLOTS = 2
MAX_SLOT_BYTES = 1 << 30  # more travels in pieces; both channels take 4 GiB at most
FLAG_BYTES = 4096  # for the channels' words, before the slots
WRITTEN_BYTES = 8 << 20  # at most as many bytes of K/V rows per rank are written; more are fetched beside attention


def memory_bytes(largest: int) -> int:
    """Symmetric memory that a rank takes, in bytes.

    Args:
        largest: bytes of rows of the rank that sends or gets the most in one exchange.
    """
    slot_bytes = 1 << (min(largest, MAX_SLOT_BYTES) - 1).bit_length()
    return FLAG_BYTES + 2 * SLOTS * max(1 << 20, slot_bytes)


class _Copies:
    """Copies of rows from the other ranks' memory.

    Args:
        sources: where the rows of each rank begin.
    """

    IN_ORDER = CopyAttributes(CopyAttributes.IN_STREAM_ORDER)
    FROM_THE_FIRST = ctypes.c_size_t(0)

    def __init__(self, fetches: tuple[Parcel, ...], sources: list[int], row_bytes: int) -> None:
        addresses = ctypes.c_uint64 * len(fetches)
        self.places = [fetch.place * row_bytes for fetch in fetches]
        self.sources = addresses(*(sources[fetch.other] + fetch.first * row_bytes for fetch in fetches))
        self.sizes = addresses(*(fetch.rows * row_bytes for fetch in fetches))
        self.targets = addresses()
        self.how = ctypes.addressof(self.IN_ORDER), ctypes.addressof(self.FROM_THE_FIRST), 1

    def issue(self, to: int, stream: int) -> int:
        """Copies to the rows that begin at `to`; returns the driver's status."""
        self.targets[:] = [to + place for place in self.places]
        copy, copy_many = driver.function("cuMemcpyAsync"), driver.function("cuMemcpyBatchAsync_v2")  # new in CUDA 13
        count, status = len(self.places), 0
        if count > 1 and copy_many is not None:
            return int(copy_many(self.targets, self.sources, self.sizes, count, *self.how, stream))
        for each in zip(self.targets, self.sources, self.sizes, strict=True):
            status |= copy(*each, stream)
        return status


class _Prepared(NamedTuple):
    """What of a piece does not change from call to call."""

    arriving: Callable[[Arrival], Piece]
    copies: _Copies | None  # None: other ranks write


class _Channel:
    """A stream for one kind of exchange, and how far it has come."""

    number = 0  # exchanges issued since the memory was taken up
    gathered = 0  # how often the ranks' kernels will have counted up `gathered_word` by then

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream(priority=-1)
        self.raw_stream = self.stream.cuda_stream
        self.slot = 0  # slot of the next exchange; kept when the memory grows, as prepared launches are kept by slot
        self.issuer: Any = None  # stream of the last exchange
        self.raw_issuer = -1

    def begin(self, size: int) -> None:
        """Counts an exchange of so many ranks."""
        self.number += 1
        self.gathered += size
        self.slot = (self.slot + 1) % SLOTS

    def aim(self, rank: int, flags: list[int]) -> None:
        """Counts anew in two words of each rank, at `flags`, now zero: gathered by all ranks, fetched by itself."""
        self.there, self.gathered_words = flags[rank] + 4, flags
        # Every rank counts it up when it has gathered: by then the memory of `received` is free again. One word
        # suffices: a rank gathers for an exchange only after it waited for the one before, thus for all ranks.
        self.gathered_word = flags[rank]
        self.number = self.gathered = 0


class PeerTransport(ProcessGroupTransport):
    """A layer's only exchange through peer memory; stages, relays and all-gathers by NCCL.

    Rows lie in symmetric memory that grows when an exchange needs more, up to slots of MAX_SLOT_BYTES. All ranks know
    what each of them sends, so they grow together and cut an exchange into as many pieces. Creating the object and
    growing are collectives of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.way = "peer memory"
        self.device = torch.cuda.current_device()
        self.channels = _Channel(), _Channel()  # there, back
        self.slot_bytes = 0
        self.memory: Any = None  # uint8: the flags, then the slots of both channels
        self.prepared = functools.lru_cache(maxsize=32)(self._prepare)
        self.bases: list[int] = []  # of each rank's memory, as this rank sees it

    @property
    def num_bytes(self) -> int:
        """Symmetric memory that this rank has taken; PyTorch's allocator does not count it."""
        return 0 if self.memory is None else int(self.memory.nbytes)

    def pieces(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool
    ) -> tuple[Tensor, list[Piece]] | None:
        """As ``Transport`` has it; a collective where the memory must grow. None for one of several exchanges."""
        channel = self.channels[back]
        found = self.prepared(shape, dtype, exchange, back, channel.slot)
        if found is None:
            return None
        received, prepared = found
        self._follow(channel)
        if received is None:
            received = self._received((sum(exchange.splits(back)[0]), *shape), dtype)
        return received, [self._piece(channel, received, each) for each in prepared]

    def _piece(self, channel: _Channel, received: Tensor, prepared: _Prepared) -> Piece:
        """Counts an exchange that this rank takes part in next."""
        channel.begin(self.size)
        if prepared.copies is None:
            return prepared.arriving(self._arrival(channel.gathered_word, channel.gathered))
        fetch = functools.partial(self._fetch, channel, channel.gathered, channel.number, received, prepared.copies)
        return prepared.arriving(self._arrival(channel.there, channel.number, fetch))

    def _received(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for rows that are fetched; PyTorch's allocator uses it again in the order of the stream."""
        return torch.empty(shape, dtype=dtype, device=self.memory.device)

    def _prepare(
        self, shape: tuple[int, ...], dtype: torch.dtype, exchange: Exchange, back: bool, slot: int
    ) -> tuple[Tensor | None, list[_Prepared]] | None:
        """`pieces` from a slot on: what other ranks will have written to it, None if rows are fetched; and the pieces.

        None for one of several exchanges that overlap: a kernel's word would tell that the rank has come to an
        exchange, but not that its stream has fetched all rows of the one before.
        """
        if exchange.hops is None or not exchange.is_whole or self.size - 1 > MAX_PEERS:
            return None
        channel, row_bytes, flow = self.channels[back], math.prod(shape) * dtype.itemsize, Flow.of(exchange, back)
        most = flow.most_received * row_bytes
        if most <= min(MAX_SLOT_BYTES, MAX_SLOT_BYTES if back else WRITTEN_BYTES):
            self._provide(most)
            start, deliveries = self._start(back, slot), flow.deliveries
            ends = [parcel.first + parcel.rows for parcel in deliveries]
            places = [self.bases[other] + start + (place - first) * row_bytes for other, first, _, place in deliveries]
            begin = next((parcel.first for parcel in deliveries if parcel.other > self.rank), 0)
            received = self._view((sum(exchange.splits(back)[0]), *shape), dtype, start)
            written = Places(ends, places, begin, channel.gathered_words)
            return received, [_Prepared(functools.partial(Piece, None, written, None), None)]
        self._provide(flow.most_sent * row_bytes)
        count, prepared = flow.num_pieces(MAX_SLOT_BYTES // row_bytes), []
        for i in range(count):
            start, parts = self._start(back, (slot + i) % SLOTS), flow.parts(i, count)
            rows = sum(part.stop - part.start for part in parts)
            own = Places([rows], [self.bases[self.rank] + start], 0, channel.gathered_words)
            view = self._view((rows, *shape), dtype, start)
            copies = _Copies(flow.fetches(i, count), [base + start for base in self.bases], row_bytes)
            arriving = functools.partial(Piece, None if count == 1 else parts, own, view)
            prepared.append(_Prepared(arriving, copies))
        return None, prepared

    def _provide(self, needed: int) -> None:
        """Makes sure that a slot holds so many bytes, or the most that it may."""
        needed = min(needed, MAX_SLOT_BYTES)
        if self.memory is None or needed > self.slot_bytes:
            self._grow(needed)

    @torch.inference_mode(False)  # it may serve training later
    def _view(self, shape: tuple[int, ...], dtype: torch.dtype, start: int) -> Tensor:
        """The memory from byte `start` on."""
        strides = torch.empty(shape, device="meta").stride()  # contiguous
        view: Tensor = self.memory.view(dtype).as_strided(shape, strides, start // dtype.itemsize)
        return view

    def _follow(self, channel: _Channel) -> None:
        """If the current stream is not that of the exchange before, it waits for all that was issued there.

        Peers count this rank's exchanges, so they must come one after another.
        """
        raw = torch._C._cuda_getCurrentRawStream(self.device)
        if raw != channel.raw_issuer:
            current = torch.cuda.current_stream(self.device)
            if channel.issuer is not None:
                current.wait_stream(channel.issuer)
            channel.issuer, channel.raw_issuer = current, raw

    def _fetch(self, channel: _Channel, gathered: int, number: int, received: Tensor, copies: _Copies) -> None:
        """Lets the channel's stream wait until all ranks have gathered, and fetch the rows."""
        stream = channel.raw_stream
        status = _operate(stream, StreamOperation.WAIT, channel.gathered_word, gathered)
        status |= copies.issue(received.data_ptr(), stream)
        driver.check(status | _operate(stream, StreamOperation.WRITE, channel.there, number))

    def _arrival(self, address: int, number: int, begin: Callable[[], object] = lambda: None) -> Arrival:
        there = functools.partial(self._flag, self.memory, address, number)
        return Arrival(functools.partial(self._wait, there), there, begin)

    def _wait(self, there: Callable[[], Flag | None]) -> None:
        if (flag := there()) is not None:
            stream = torch._C._cuda_getCurrentRawStream(self.device)
            driver.check(_operate(stream, StreamOperation.WAIT, *flag))

    def _flag(self, memory: Tensor, address: int, number: int) -> Flag | None:
        """None when `memory`, where the flag lay, has been replaced: before that everything had arrived."""
        return Flag(address, number) if memory is self.memory else None

    def _start(self, back: bool, slot: int) -> int:
        """Where in the memory a slot of a channel begins, in bytes."""
        return FLAG_BYTES + (back * SLOTS + slot) * self.slot_bytes

    @torch.inference_mode(False)
    def _grow(self, needed: int) -> None:
        """Symmetric memory whose slots hold so many bytes. A collective; waits for the device.

        It lies outside PyTorch's allocator, which by now may keep all of the GPU in its cache and then gives that back.

        Raises:
            RuntimeError: on all ranks: one of them has too little memory.
        """
        torch.cuda.synchronize(self.device)  # fetches out of the old one are done when all ranks have come here
        self._let_go()
        size = memory_bytes(needed)
        memory, least = self._allocated_by_all(size)
        if memory is None:
            torch.cuda.empty_cache()
            memory, least = self._allocated_by_all(size)
        if memory is None:
            raise RuntimeError(
                f"rows of other ranks need {size >> 20:,} MiB of each GPU outside PyTorch's allocator, and one has "
                f"only {least >> 20:,} MiB free; use more context-parallel ranks, shorter packs, or more of "
                "activation_checkpoint"
            )
        memory[:FLAG_BYTES].zero_()
        torch.cuda.synchronize(self.device)  # before anyone may write there
        self._take_up(memory, self._bases_of_all(memory))

    def _allocated_by_all(self, size: int) -> tuple[Tensor | None, int]:
        """Symmetric memory of so many bytes, None if a rank has too little; and the least free bytes of a GPU."""
        memory = self._allocated(size)
        free = torch.cuda.mem_get_info(self.device)[0]
        found = torch.tensor([memory is not None, free], device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.group("cast"))
        all_have, least = found.tolist()
        return memory if all_have else None, least

    def _allocated(self, size: int) -> Tensor | None:
        """This rank's part of symmetric memory, None if there is too little."""
        from torch._C._distributed_c10d import _SymmetricMemory

        device, name = torch.device("cuda", self.device), self.group("cast").group_name
        try:
            return _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device, name)
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            return None

    def _bases_of_all(self, memory: Tensor) -> list[int]:
        """Where the memory of each rank begins, as this rank sees it. A collective."""
        from torch._C._distributed_c10d import _SymmetricMemory

        return list(_SymmetricMemory.rendezvous(memory, self.group("cast").group_name).buffer_ptrs)

    def close(self) -> None:
        """As the base class; waits for the device."""
        super().close()
        if self.memory is not None:
            torch.cuda.synchronize(self.device)
            self._let_go()

    def _let_go(self) -> None:
        """Gives up the memory and all that was prepared for it."""
        self.memory = None
        self.prepared.cache_clear()

    def _take_up(self, memory: Tensor, bases: list[int]) -> None:
        """This rank's memory, with flags that are zero, and the addresses of all ranks'."""
        self.memory, self.bases, self.slot_bytes = memory, bases, (len(memory) - FLAG_BYTES) // (2 * SLOTS)
        logger.info(f"Rows by peer memory: {len(memory) >> 20:,} MiB of each GPU, outside PyTorch's allocator")
        for i, channel in enumerate(self.channels):
            channel.aim(self.rank, [base + 8 * i for base in bases])


def _operate(stream: int, kind: int, address: int, value: int) -> int:
    """A wait for a word to reach a value, or a write of it, by a stream; returns the driver's status."""
    operation = StreamOperation(kind, address, value)
    return int(driver.function("cuStreamBatchMemOp_v2")(stream, 1, ctypes.byref(operation), 0))


def machine() -> str:
    """Tells this machine from others, the same in all its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def can_reach_each_other(group: dist.ProcessGroup) -> bool:
    """Whether all ranks of an NCCL group sit in one machine, with GPUs that reach each other's memory. A collective."""
    mine = machine(), str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    everyone = gathered(mine, group)
    if len({its_machine for its_machine, _ in everyone}) > 1:
        return False
    seen = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    others = {gpu for _, gpu in everyone if gpu != mine[1]}
    access = [torch.cuda.can_device_access_peer(seen[mine[1]], seen[gpu]) for gpu in others & set(seen)]
    verdicts = gathered((_has_stream_operations() and all(access), others <= set(seen)), group)
    reached, sees_all = map(all, zip(*verdicts, strict=True))
    return reached and (sees_all or hidden_gpus_are_reached(group))


def _has_stream_operations() -> bool:
    """Whether the current device's streams write to memory by themselves; under some virtual GPUs they do not."""
    word = torch.zeros(1, dtype=torch.int32, device="cuda")
    status = _operate(torch.cuda.current_stream().cuda_stream, StreamOperation.WRITE, word.data_ptr(), 1)
    return status == 0 and word.item() == 1
