"""Launching our kernels: variants, parameter structs, tensor maps, work counters. Imports CUDA when first used."""

import ctypes
import functools
import itertools
from collections.abc import Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.cuda import driver, jit
from torchtitan_magi.tiles import BACKWARD_ROWS, KEYS, MAX_CUT, ROWS

THREADS = 384  # of a block of the forward and of the backward
NUM_COUNTERS = 1024  # launches that may be in flight at once
COUNTER_WORDS = 2 + MAX_CUT

Variant = tuple[tuple[str, int], ...]


# ------------------------------------------------------------ kernel parameters
# Field by field the structs of the same names in the .cu files.
class Schedule(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("num_early", "num_tiles", "num_tail", "num_heads", "heads_per_wave")]

    @property
    def num_items(self) -> int:
        return (self.num_early + self.num_tiles + self.num_tail) * self.num_heads


class LateKeys(ctypes.Structure):
    _fields_ = [("arrived", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("number", "first"))]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lse", "items", "segments", "bands", "counter", "parts")),
        ("schedule", Schedule),
        *((name, ctypes.c_int) for name in ("groups_per_kv", "num_q", "num_heads_q", "parts_per_tile")),
        ("scale_log2", ctypes.c_float),
        ("late", LateKeys),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dk", "dv", "lse", "delta", "items", "segments", "bands")),
        *((name, ctypes.c_void_p) for name in ("components", "semaphores", "part_semaphores", "counter")),
        ("schedule", Schedule),
        *((name, ctypes.c_int) for name in ("num_packs", "num_q", "num_heads_q")),
        *((name, ctypes.c_int) for name in ("head_dim", "num_q_blocks", "store")),
        *((name, ctypes.c_longlong) for name in ("dk_token_stride", "dk_head_stride")),
        *((name, ctypes.c_longlong) for name in ("dv_token_stride", "dv_head_stride")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "scale_log2")),
        ("late", LateKeys),
    ]


STORE_PACKED, STORE_FLOAT, ADD_FLOAT = 0, 1, 2


# ------------------------------------------------------------ variants
def padded_head_dim(head_dim: int) -> int:
    """The kernel's head dim that holds `head_dim`.

    Raises:
        ValueError: above 128, or not a multiple of 8 (the copy engine moves 16 bytes at a time).
    """
    if not 0 < head_dim <= 128 or head_dim % 8:
        raise ValueError(f"head_dim is {head_dim}; the ffa kernel takes multiples of 8 up to 128")
    return 64 if head_dim <= 64 else 128


def check_supported(head_dim: int, dtype: torch.dtype) -> None:
    """Raises ValueError for a head_dim or a dtype of q, k and v that the kernel does not take."""
    padded_head_dim(head_dim)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f'attention runs in {dtype}; the ffa kernel takes bfloat16 or float16, or use backend = "flex"'
        )


def forward_variant(head_dim: int, pack: int, dtype: torch.dtype, earlier: bool, more: bool) -> tuple[Variant, int]:
    """Macros and bytes of shared memory of a forward kernel."""
    padded = padded_head_dim(head_dim)
    stages = 4 if padded == 64 else 2
    shared = (2 + 2 * stages + (earlier or more)) * ROWS * padded * 2 + 2048
    macros = {"HEAD_DIM": padded, "PACK": pack, "SHARED_BYTES": shared, "USE_FP16": dtype == torch.float16}
    return variant_of(macros | {"EARLIER": earlier, "MORE": more}), shared


def backward_variant(head_dim: int, pack: int, dtype: torch.dtype, deterministic: bool) -> tuple[Variant, int]:
    """Macros and bytes of shared memory of a backward kernel."""
    padded = padded_head_dim(head_dim)
    keys, rows = 2 * KEYS * padded * 2, 2 * 2 * BACKWARD_ROWS * padded * 2
    shared = keys + rows + 2 * KEYS * 128 + 2 * BACKWARD_ROWS * padded * 4 + 3072
    macros = {"HEAD_DIM": padded, "PACK": pack, "SHARED_BYTES": shared, "USE_FP16": dtype == torch.float16}
    return variant_of(macros | {"DETERMINISTIC": deterministic}), shared


def variant_of(macros: dict[str, int]) -> Variant:
    """Switches that are off are left undefined."""
    return tuple((name, int(value)) for name, value in macros.items() if value)


# ------------------------------------------------------------------------------------------------------------ launching


@functools.cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _counters(device: int) -> tuple[Iterator[int], Tensor]:
    """Addresses of the counters in turn, and what they lie in."""
    counters = torch.zeros(NUM_COUNTERS, COUNTER_WORDS, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.synchronize(device)  # other streams may use them next
    return itertools.cycle([row.data_ptr() for row in counters]), counters


def next_counter(device: int) -> int:
    """Address of a work counter: COUNTER_WORDS int32 zeros, which the kernel leaves at zero when it ends."""
    return next(_counters(device)[0])


def copyable(x: Tensor) -> Tensor:
    """x [T, H, D], or a contiguous copy where the copy engine cannot read it: it needs 16-byte aligned rows."""
    fits = x.data_ptr() % 16 == 0 and _has_aligned_rows(x)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def are_copyable(*tensors: Tensor) -> bool:
    return all(copyable(x) is x for x in tensors)


def _has_aligned_rows(x: Tensor) -> bool:
    """Whether the rows of x [T, H, D] are, if the first one is."""
    token_stride, head_stride, column_stride = x.stride()
    step = 16 // x.element_size()
    return (
        column_stride == 1
        and (token_stride % step == 0 or x.shape[0] == 1)
        and (head_stride % step == 0 or x.shape[1] == 1)
    )


_TENSOR_MAP_TYPES = {
    torch.float16: driver.TENSOR_MAP_FLOAT16,
    torch.float32: driver.TENSOR_MAP_FLOAT32,
    torch.bfloat16: driver.TENSOR_MAP_BFLOAT16,
}


class MapLayout(NamedTuple):
    """What a tensor map says of its tensor [T, H, D], but for the address, and of its boxes: 128 bytes of columns x
    `heads` x `tokens`, stored as swizzled rows.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    heads: int
    tokens: int


class Maps(dict[int, int]):
    """Addresses of tensor maps of one layout, by those of the tensors, which are multiples of 16; made when missing."""

    KEPT = 4096

    def __init__(self, layout: MapLayout) -> None:
        (num_tokens, num_heads, head_dim), size = layout.shape, layout.dtype.itemsize
        row_bytes = -(-head_dim * size // 16) * 16  # stands in for the stride of a dimension of length 1
        head_bytes = layout.strides[1] * size if num_heads > 1 else row_bytes
        token_bytes = layout.strides[0] * size if num_tokens > 1 else row_bytes
        box = ctypes.c_uint * 3
        self.kind = _TENSOR_MAP_TYPES[layout.dtype]
        self.dimensions = (  # sizes, strides in bytes, box, steps
            (ctypes.c_ulonglong * 3)(head_dim, num_heads, num_tokens),
            (ctypes.c_ulonglong * 2)(head_bytes, token_bytes),
            box(128 // size, layout.heads, layout.tokens),
            box(1, 1, 1),
        )
        self.memory: list[Any] = []
        self.memory_before = self.memory  # of maps that are no longer found, but may be about to be used

    def __missing__(self, address: int) -> int:
        if len(self) == self.KEPT:
            self.clear()
            self.memory_before, self.memory = self.memory, []
        memory = (ctypes.c_ulonglong * 24)()
        start = ctypes.addressof(memory)
        start += -start % 64  # a map begins at a multiple of 64 bytes
        encode = driver.function("cuTensorMapEncodeTiled")
        options = 0, driver.SWIZZLE_128B, driver.PROMOTION_256B, 0
        driver.check(encode(start, self.kind, 3, address, *self.dimensions, *options))
        self.memory.append(memory)
        self[address] = start
        return start


maps_over = functools.lru_cache(maxsize=512)(Maps)


class Kernel:
    """One compiled variant, ready to launch. Its last argument is a struct of parameters; tensor maps come before it.

    Args:
        name, function: file in kernels/ and kernel in it.
        variant: macros.
        threads: of a block. shared_bytes: of dynamic shared memory.
    """

    def __init__(
        self, name: str, function: str, variant: tuple[tuple[str, int], ...], threads: int, shared_bytes: int
    ) -> None:
        self.load = functools.cache(functools.partial(jit.load_kernel, name, function, variant, shared_bytes))
        self.threads, self.shared_bytes = threads, shared_bytes
        self._launch = driver.function("cuLaunchKernelEx")
        self._config = functools.lru_cache(maxsize=256)(self._make_config)

    def __call__(self, device: int, num_blocks: int, params: ctypes.Structure) -> None:
        """Launches on the current stream of `device`."""
        self.launch(device, num_blocks, _OnePointer(ctypes.addressof(params)))

    def launch(self, device: int, num_blocks: int, arguments: ctypes.Array[ctypes.c_void_p]) -> None:
        """The same with addresses of all arguments."""
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self.launch(device, num_blocks, arguments)
        stream = torch._C._cuda_getCurrentRawStream(device)  # current_stream(device).cuda_stream without the objects
        _config, address, function = self._config(device, num_blocks, stream)
        driver.check(self._launch(address, function, arguments, None))

    def _make_config(self, device: int, num_blocks: int, stream: int) -> tuple[driver.LaunchConfig, int, int]:
        """Not to be changed; the address of it; the kernel's handle."""
        config = driver.LaunchConfig.of(num_blocks, self.threads, self.shared_bytes, stream)
        return config, ctypes.addressof(config), self.load(device)


load = functools.cache(Kernel)
_OnePointer = ctypes.c_void_p * 1


class Launch:
    """A launch that repeats from call to call, with its arguments in place, for one thread at a time.

    Args:
        maps: layouts of what the tensor maps are over; they are the kernel's first arguments.
        params: the last one; what has changed since the call before is set there before a call.
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
        """Does nothing where there is no block. addresses: of what the maps are over, multiples of 16."""
        if not self.num_blocks:
            return
        assert len(addresses) == len(self._maps)
        if addresses:
            self._arguments[: len(addresses)] = list(map(getitem, self._maps, addresses))
        self.kernel.launch(self.device, self.num_blocks, self._arguments)
