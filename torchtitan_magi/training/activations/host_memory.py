"""Pinned memory of the host, and copies to and from it on streams of their own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

SLACK = 1.25  # a buffer serves tensors that need not much less; all take not much more than was in use at once


class HostMemory:
    """Memory that is pinned once and used again by each step.

    Buffers have the size that is asked for, where PyTorch's own cache of pinned memory rounds up to powers of two.
    Sizes that change from step to step, as those of experts' tokens do, would ask for more and more: where all together
    are SLACK times what was in use at once, a larger one serves, or those that are too small make way.
    """

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned, self._free, self._all = is_pinned, list[Tensor](), list[Tensor]()
        self._most = 0  # bytes that were in use at once when a buffer was missing

    @property
    def num_bytes(self) -> int:
        """Bytes taken in all."""
        return sum(buffer.numel() for buffer in self._all)

    def take(self, num_bytes: int) -> Tensor:
        """A buffer of at least that size, uint8 [n].

        Raises:
            RuntimeError: the host has no such memory left that can be pinned; one line with the remedy.
        """
        smallest = min((free for free in self._free if free.numel() >= num_bytes), key=Tensor.numel, default=None)
        if smallest is not None and (smallest.numel() <= SLACK * num_bytes or not self._has_room(num_bytes)):
            self._free = _without(self._free, smallest)
            return smallest
        while not self._has_room(num_bytes) and self._free:
            largest = max(self._free, key=Tensor.numel)
            self._unpin([largest])
            self._free, self._all = _without(self._free, largest), _without(self._all, largest)
        try:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            if self._is_pinned:
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), num_bytes, 0)))
        except RuntimeError as error:
            raise RuntimeError(
                f"the host cannot pin {num_bytes / 2**30:.1f} GiB more for what layers offload, beside "
                f"{self.num_bytes / 2**30:.1f} GiB ({error}); free memory of the host, or set magi.keep to a mix that "
                "offloads less"
            ) from error
        self._all.append(buffer)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Takes a buffer back."""
        self._free.append(buffer)

    def close(self) -> None:
        """Unpins and frees all; not while anything is in use."""
        self._unpin(self._all)
        self._all, self._free = [], []

    def _has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes more are not much more than are or were in use."""
        in_use = self.num_bytes - sum(map(Tensor.numel, self._free)) + num_bytes
        self._most = max(self._most, in_use)
        return self.num_bytes + num_bytes <= SLACK * self._most

    def _unpin(self, buffers: Sequence[Tensor]) -> None:
        if self._is_pinned:
            torch.cuda.synchronize()  # copies may still be under way
            for buffer in buffers:
                torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def _without(buffers: list[Tensor], one: Tensor) -> list[Tensor]:
    return [buffer for buffer in buffers if buffer is not one]


class Copies:
    """Copies between a device and the host; on the CPU at once.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self.memory = HostMemory(self._is_gpu)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if self._is_gpu else []  # to the host, and back

    def to_host(self, x: Tensor) -> tuple[Tensor, Any]:
        """A buffer that x is on its way to, and the event of its arrival, until which x must live."""
        source = as_bytes(x)
        buffer = self.memory.take(len(source))
        return buffer, self._copy(0, buffer[: len(source)], source)

    def from_host(self, x: Tensor, buffer: Tensor) -> Any:
        """Starts to fill x, of the current stream, with what is in a buffer; the event of its arrival."""
        to = as_bytes(x)
        return self._copy(1, to, buffer[: len(to)])

    def _copy(self, way: int, to: Tensor, source: Tensor) -> Any:
        if not self._is_gpu:
            to.copy_(source)
            return None
        stream, other = self._streams[way], self._streams[1 - way]
        stream.wait_stream(torch.cuda.current_stream())  # which made the source, or read what lay in ``to``
        stream.wait_stream(other)  # which may still read or write the buffer
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
        return stream.record_event()

    def end(self, buffer: Tensor, arrival: Any) -> None:
        """Takes back a buffer of ``to_host``. What it was filled from may be freed next on the current stream."""
        self.wait(arrival)
        self.memory.give(buffer)

    def wait(self, event: Any) -> None:
        """Lets the current stream wait for a copy."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)


def as_bytes(x: Tensor) -> Tensor:
    """The memory of a dense tensor, uint8 [n]. PyTorch's own copy to the host of one that is to be read conjugated, as
    rotary positions are in a backward, conjugates there what an asynchronous copy has not yet brought.

    Args:
        x: not to be read conjugated or negated.
    """
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)
