"""Launching our kernels: tensor maps, work counters, kernel arguments. Imports CUDA when first used."""

import ctypes
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_magi import jit

NUM_COUNTERS = 1024  # launches that may be in flight at once


@functools.cache
def num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _counters(device: int) -> tuple[Tensor, int, Iterator[int]]:
    counters = torch.zeros(NUM_COUNTERS, 2, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.synchronize(device)  # other streams may use them next
    return counters, counters.data_ptr(), itertools.count()


def next_counter(device: int) -> int:
    """Address of a work counter: two int32 zeros, which the kernel leaves at zero when it ends."""
    _, base, numbers = _counters(device)
    return base + next(numbers) % NUM_COUNTERS * 8


def copyable(x: Tensor) -> Tensor:
    """x [T, H, D], or a contiguous copy where the copy engine cannot read it: it needs 16-byte aligned rows."""
    token_stride, head_stride, column_stride = x.stride()
    step = 16 // x.element_size()
    fits = (
        column_stride == 1
        and x.data_ptr() % 16 == 0
        and (token_stride % step == 0 or x.shape[0] == 1)
        and (head_stride % step == 0 or x.shape[1] == 1)
    )
    return x if fits else x.contiguous()


def tensor_map(x: Tensor, heads: int, tokens: int) -> Any:
    """A map over x [T, H, D] with boxes of 128 bytes of columns x `heads` x `tokens`, stored as swizzled rows."""
    return _encode(x.data_ptr(), x.dtype, x.shape, x.stride(), heads, tokens)


@functools.lru_cache(maxsize=8192)
def _encode(
    address: int, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], heads: int, tokens: int
) -> Any:
    from cuda.bindings import driver

    types = {
        torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    u32, u64 = driver.cuuint32_t, driver.cuuint64_t
    num_tokens, num_heads, head_dim = shape
    size = dtype.itemsize
    row_bytes = -(-head_dim * size // 16) * 16  # stands in for the stride of a dimension of length 1
    head_bytes = strides[1] * size if num_heads > 1 else row_bytes
    token_bytes = strides[0] * size if num_tokens > 1 else row_bytes
    encoded = jit.check(
        driver.cuTensorMapEncodeTiled(
            types[dtype],
            3,
            address,
            [u64(head_dim), u64(num_heads), u64(num_tokens)],
            [u64(head_bytes), u64(token_bytes)],
            [u32(128 // size), u32(heads), u32(tokens)],
            [u32(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return (ctypes.c_ulonglong * 16).from_buffer_copy(ctypes.string_at(encoded.getPtr(), 128))


class Kernel:
    """One compiled variant, ready to launch.

    Args:
        name, function: file in kernels/ and kernel in it.
        variant: macros.
        threads: of a block. shared_bytes: of dynamic shared memory.
    """

    def __init__(
        self, name: str, function: str, variant: tuple[tuple[str, int], ...], threads: int, shared_bytes: int
    ) -> None:
        from cuda.bindings import driver

        self.handle = jit.load_kernel(name, function, variant, shared_bytes)
        self.threads, self.shared_bytes = threads, shared_bytes
        self._launch = driver.cuLaunchKernel

    def __call__(self, device: int, num_blocks: int, *arguments: Any) -> None:
        """Launches on the current stream of `device`. arguments: ctypes values, the kernel's parameters in order."""
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                return self(device, num_blocks, *arguments)
        pointers = _pointer_array(len(arguments))(*map(ctypes.addressof, arguments))
        stream = torch._C._cuda_getCurrentRawStream(device)  # current_stream(device).cuda_stream without the objects
        (status,) = self._launch(
            self.handle, num_blocks, 1, 1, self.threads, 1, 1, self.shared_bytes, stream, ctypes.addressof(pointers), 0
        )
        if status:
            raise RuntimeError(f"kernel launch failed: {status!r}")


load = functools.cache(Kernel)


@functools.cache
def _pointer_array(length: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * length
