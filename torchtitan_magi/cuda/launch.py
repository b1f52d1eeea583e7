"""Launches compiled kernels: tensor maps, work counters, arguments. Imports CUDA when first used."""

import ctypes
import functools
import itertools
import threading
from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.cuda import driver, jit

NUM_COUNTERS = 1024  # launches of a stream that may be in flight at once
COUNTER_WORDS = 68  # int32 words of a counter, as many as any kernel needs

Variant = tuple[tuple[str, int], ...]


def variant_of(macros: dict[str, int]) -> Variant:
    """A kernel variant by its macros; switches that are off are left undefined."""
    return tuple((name, int(value)) for name, value in macros.items() if value)


@functools.cache
def num_sms(device: int) -> int:
    """SMs of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _counters(device: int, stream: int) -> tuple[Iterator[int], Tensor]:
    """The addresses of a stream's counters in turn, and the tensor that holds them. Another stream, which may be any
    number of launches ahead, has its own. `stream`: the current one."""
    counters = torch.zeros(NUM_COUNTERS, COUNTER_WORDS, dtype=torch.int32, device=f"cuda:{device}")
    return itertools.cycle([row.data_ptr() for row in counters]), counters


def next_counter(device: int) -> int:
    """Address of COUNTER_WORDS int32 zeros, for a launch on the current stream; the kernel sets them back to zero when
    it ends."""
    return next(_counters(device, torch._C._cuda_getCurrentRawStream(device))[0])


def copyable(x: Tensor) -> Tensor:
    """x [T, H, D], or a contiguous copy where the copy engine cannot read it: it needs 16-byte aligned rows."""
    step, (token_stride, head_stride, column_stride) = 16 // x.element_size(), x.stride()
    fits = (
        x.data_ptr() % 16 == 0
        and column_stride == 1
        and (token_stride % step == 0 or x.shape[0] == 1)
        and (head_stride % step == 0 or x.shape[1] == 1)
    )
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def are_copyable(*tensors: Tensor) -> bool:
    """Whether the copy engine can read all tensors in place."""
    return all(copyable(x) is x for x in tensors)


_TENSOR_MAP_TYPES = {
    torch.float16: driver.TENSOR_MAP_FLOAT16,
    torch.float32: driver.TENSOR_MAP_FLOAT32,
    torch.bfloat16: driver.TENSOR_MAP_BFLOAT16,
}


class MapLayout(NamedTuple):
    """What a tensor map says of a tensor [T, H, D], but for its address.

    One copy moves a box: `tokens` x `heads` x 128 bytes of columns, which become swizzled rows in shared memory.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    heads: int
    tokens: int

    def dimensions(self) -> tuple[Any, ...]:
        """Sizes, strides in bytes, box and steps as cuTensorMapEncodeTiled takes them: innermost dimension first."""
        (num_tokens, num_heads, head_dim), size = self.shape, self.dtype.itemsize
        row_bytes = -(-head_dim * size // 16) * 16  # stands in for the stride of a dimension of length 1
        head_bytes = self.strides[1] * size if num_heads > 1 else row_bytes
        token_bytes = self.strides[0] * size if num_tokens > 1 else row_bytes
        sizes = (ctypes.c_ulonglong * 3)(head_dim, num_heads, num_tokens)
        strides = (ctypes.c_ulonglong * 2)(head_bytes, token_bytes)
        box = (ctypes.c_uint * 3)(128 // size, self.heads, self.tokens)
        return sizes, strides, box, (ctypes.c_uint * 3)(1, 1, 1)


class Maps(dict[int, int]):
    """Tensor maps of one layout, made at first use: the address of a tensor -> the address of its map.

    Tensors begin at multiples of 16 bytes, maps at multiples of 64. When KEPT maps are there, all are forgotten. Their
    memory lives until the next KEPT are forgotten, as a caller may be about to launch with them.
    """

    KEPT = 4096
    MAP_BYTES, ALIGNMENT = 128, 64

    def __init__(self, layout: MapLayout) -> None:
        self.kind, self.dimensions = _TENSOR_MAP_TYPES[layout.dtype], layout.dimensions()
        self.memory: list[Any] = []
        self.forgotten = self.memory

    def __missing__(self, tensor: int) -> int:
        if len(self) == self.KEPT:
            self.clear()
            self.forgotten, self.memory = self.memory, []
        memory = ctypes.create_string_buffer(self.MAP_BYTES + self.ALIGNMENT)
        address = ctypes.addressof(memory)
        address += -address % self.ALIGNMENT
        encode = driver.function("cuTensorMapEncodeTiled")
        options = 0, driver.SWIZZLE_128B, driver.PROMOTION_256B, 0
        driver.check(encode(address, self.kind, 3, tensor, *self.dimensions, *options))
        self.memory.append(memory)
        self[tensor] = address
        return address


maps_over = functools.lru_cache(maxsize=512)(Maps)


class Kernel:
    """One compiled variant, ready to launch. Its arguments are tensor maps, then a struct of parameters.

    Args:
        name, function: file in kernels/ and kernel in it.
        variant: macros; SHARED_BYTES is the dynamic shared memory per block.
        threads: threads per block.
    """

    def __init__(self, name: str, function: str, variant: Variant, threads: int) -> None:
        self.threads, self.shared_bytes = threads, dict(variant).get("SHARED_BYTES", 0)
        self.load = functools.cache(functools.partial(jit.load_kernel, name, function, variant, self.shared_bytes))
        self._launch = driver.function("cuLaunchKernelEx")
        self._config = functools.lru_cache(maxsize=256)(self._make_config)

    def __call__(self, device: int, num_blocks: int, params: ctypes.Structure) -> None:
        """Launches, without tensor maps, on the current stream of `device`."""
        self.launch(device, num_blocks, _OnePointer(ctypes.addressof(params)))

    def launch(self, device: int, num_blocks: int, arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        """Launches with the addresses of all arguments on the current stream of `device`."""
        if torch._C._cuda_getDevice() != device:  # current_device() without its check that CUDA is up
            with torch.cuda.device(device):
                return self.launch(device, num_blocks, arguments)
        if not getattr(_thread, "has_context", False):
            _make_context(device)
        stream = torch._C._cuda_getCurrentRawStream(device)  # current_stream(device).cuda_stream without the objects
        _config, address, function = self._config(device, num_blocks, stream)
        driver.check(self._launch(address, function, arguments, None))

    def _make_config(self, device: int, num_blocks: int, stream: int) -> tuple[driver.LaunchConfig, int, int]:
        """A launch configuration (shared: do not change it), its address, and the kernel's handle."""
        config = driver.LaunchConfig.of(num_blocks, self.threads, self.shared_bytes, stream)
        return config, ctypes.addressof(config), self.load(device)


_thread = threading.local()


def _make_context(device: int) -> None:
    """Lets CUDA's runtime make its context current; a thread of autograd may come here before it has called it."""
    torch.cuda.current_stream(device).query()
    _thread.has_context = True


load = functools.cache(Kernel)
_OnePointer = ctypes.c_void_p * 1


class Launch:
    """A launch that repeats from call to call, with its arguments in place. One thread at a time may use it.

    Args:
        maps: layouts of the tensors behind the tensor maps, the kernel's first arguments.
        params: the last argument; set there what has changed before each call.
    """

    def __init__(
        self, kernel: Kernel, device: int, num_blocks: int, maps: Sequence[MapLayout], params: ctypes.Structure
    ) -> None:
        self.kernel, self.device, self.num_blocks = kernel, device, num_blocks
        self.params: Any = params
        self._maps = [maps_over(layout) for layout in maps]
        self._arguments = (ctypes.c_void_p * (len(maps) + 1))()
        self._arguments[len(maps)] = ctypes.addressof(params)

    def __call__(self, *addresses: int) -> None:
        """Launches with the tensors at `addresses` (multiples of 16) behind the maps; without a block, does nothing."""
        if not self.num_blocks:
            return
        assert len(addresses) == len(self._maps)
        if addresses:
            self._arguments[: len(addresses)] = list(map(getitem, self._maps, addresses))
        self.kernel.launch(self.device, self.num_blocks, self._arguments)
