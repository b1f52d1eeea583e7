"""Ranks that exchange through peer memory in one process, without GPUs: a driver that works on memory of the host."""

import contextlib
import ctypes
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from torchtitan_magi.cuda import driver
from torchtitan_magi.exchange import peer_memory as peer
from torchtitan_magi.exchange.peer_memory import FLAG_BYTES, PeerTransport
from torchtitan_magi.exchange.transport import ProcessGroupTransport


class Driver:
    """Does copies and flag writes at once, and notes what is waited for."""

    def __init__(self, is_new=False):
        self.waits = []
        self.more = {"cuMemcpyBatchAsync_v2": self.copy_many if is_new else None}

    def function(self, name):
        return {"cuMemcpyAsync": self.copy, "cuStreamBatchMemOp_v2": self.operate, **self.more}[name]

    def stream(self, name):
        return SimpleNamespace()  # the only one

    def put(self, stream, work):
        work()

    def wait(self, stream, word, value):
        self.waits.append((word, value))

    def copy(self, to, origin, size, stream):
        self.put(stream, partial(ctypes.memmove, to, origin, size))
        return 0

    def copy_many(self, to, origins, sizes, count, attributes, firsts, num_attributes, stream):
        assert driver.CopyAttributes.from_address(attributes).source_access == driver.CopyAttributes.IN_STREAM_ORDER
        assert (ctypes.c_size_t.from_address(firsts).value, num_attributes) == (0, 1)
        for each in zip(to, origins, sizes, strict=True):
            count -= 1
            self.copy(*each, stream)
        assert count == 0
        return 0

    def operate(self, stream, count, operations, flags):
        for each in ctypes.cast(operations, ctypes.POINTER(driver.StreamOperation))[:count]:
            word = ctypes.c_uint32.from_address(each.address)
            if each.operation == driver.StreamOperation.WRITE:
                self.put(stream, partial(setattr, word, "value", each.value))
            else:
                self.wait(stream, word, each.value)
        return 0


class Rank(PeerTransport):
    """A rank among others in this process, in memory of the host."""

    def __init__(self, rank, everyone):
        self.rank, self.size, self.everyone = rank, everyone.size, everyone
        super().__init__(None)

    def _grow(self, needed):
        self.everyone.grow(1 << (needed - 1).bit_length())


class Everyone:
    def __init__(self, size):
        self.size = size
        self.ranks = [Rank(rank, self) for rank in range(size)]

    def grow(self, slot_bytes):
        memories = [torch.zeros(FLAG_BYTES + 2 * peer.SLOTS * slot_bytes, dtype=torch.uint8) for _ in self.ranks]
        for rank, memory in zip(self.ranks, memories, strict=True):
            rank._let_go()
            rank._take_up(memory, [memory.data_ptr() for memory in memories])


@contextlib.contextmanager
def in_place_of_the_driver(fake, new_stream, current_stream):
    """Without CUDA: calls go to `fake`; new_stream: a handle; current_stream: the one of a device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(driver, "function", fake.function)
        monkeypatch.setattr(torch.cuda, "Stream", lambda priority: SimpleNamespace(cuda_stream=new_stream()))
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", current_stream, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: fake.stream(current_stream(device)))
        monkeypatch.setattr(ProcessGroupTransport, "__init__", lambda self, group: None)
        yield monkeypatch


def pack(places, rows):
    """What the kernel does that packs rows."""
    first = 0
    for end, address in zip(places.ends, places.addresses, strict=True):
        part = rows[first:end].contiguous()
        ctypes.memmove(address + first * rows.stride(0) * rows.element_size(), part.data_ptr(), part.nbytes)
        first = end
    assert first == len(rows)
    count(places)


def count(places):
    """What the kernel does when all rows are packed."""
    for flag in places.flags:
        ctypes.c_int32.from_address(flag).value += 1


def arriving(exchanges, sent, back):
    """What each rank gets of the rows that each sends."""
    parts = [rows.split(exchange.splits(back)[1]) for exchange, rows in zip(exchanges, sent, strict=True)]
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]
