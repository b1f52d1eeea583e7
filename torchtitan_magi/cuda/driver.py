"""The CUDA driver calls that every layer makes, through ctypes: cuda.bindings would take more of the host's time."""

import ctypes
import functools
from typing import Any

_INT, _UINT, _POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_void_p
_SIGNATURES: dict[str, list[Any]] = {
    "cuLaunchKernelEx": [_POINTER, _POINTER, _POINTER, _POINTER],  # LaunchConfig, function, arguments, extra
    "cuMemcpyAsync": [_POINTER, _POINTER, ctypes.c_size_t, _POINTER],  # to, from, bytes, stream
    # many of them: to, from, bytes, number, attributes, the first copy of each attribute, number of those, stream
    "cuMemcpyBatchAsync_v2": [*[_POINTER] * 3, ctypes.c_size_t, *[_POINTER] * 2, ctypes.c_size_t, _POINTER],
    "cuStreamBatchMemOp_v2": [_POINTER, _UINT, _POINTER, _UINT],  # stream, number, operations, flags
    # where the map goes, type, rank, address, sizes, strides, box, steps, interleave, swizzle, L2 promotion, fill
    "cuTensorMapEncodeTiled": [_POINTER, _INT, _UINT, *[_POINTER] * 5, *[_INT] * 4],
}
TENSOR_MAP_FLOAT16, TENSOR_MAP_FLOAT32, TENSOR_MAP_BFLOAT16 = 6, 7, 9
SWIZZLE_128B, PROMOTION_256B = 3, 3


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute."""

    PROGRAMMATIC_STREAM_SERIALIZATION = 6
    _fields_ = [("id", _UINT), ("padding", _UINT), ("value", _INT), ("unused", _UINT * 15)]


# The kernel may begin before the one ahead of it in its stream has ended: it waits for that one itself.
_MAY_BEGIN_EARLY = _LaunchAttribute(_LaunchAttribute.PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig for a one-dimensional grid."""

    _fields_ = [
        *((name, _UINT) for name in ("num_blocks", "grid_y", "grid_z", "threads", "block_y", "block_z")),
        ("shared_bytes", _UINT),
        *((name, _POINTER) for name in ("stream", "attributes")),
        ("num_attributes", _UINT),
    ]

    @classmethod
    def of(cls, num_blocks: int, threads: int, shared_bytes: int, stream: int) -> "LaunchConfig":
        """A launch of blocks of `threads` threads that may begin before the one ahead of it in `stream` has ended."""
        attributes = ctypes.addressof(_MAY_BEGIN_EARLY)
        return cls(num_blocks, 1, 1, threads, 1, 1, shared_bytes, stream, attributes, 1)


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    IN_STREAM_ORDER = 1  # sources are read when the copy's turn has come
    _fields_ = [("source_access", _INT), ("location_hints", _INT * 4), ("flags", _UINT)]


class StreamOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams of a 32-bit wait or write."""

    WAIT, WRITE = 1, 2
    _fields_ = [
        ("operation", _UINT),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", _UINT),  # 0: a wait is over when the word has reached the value, in 32-bit modular order
        ("alias", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
    ]


@functools.cache
def _library() -> ctypes.PyDLL:
    # A PyDLL keeps the interpreter lock: these calls are short, and getting it back may take long while a thread plans.
    return ctypes.PyDLL("libcuda.so.1")


@functools.cache
def function(name: str) -> Any:
    """A function of the driver, which returns a status for `check`; None if this driver lacks it."""
    if (found := getattr(_library(), name, None)) is not None:
        found.argtypes, found.restype = _SIGNATURES[name], _INT
    return found


def check(status: int) -> None:
    """Raises RuntimeError when a call failed."""
    if status:
        raise RuntimeError(f"CUDA driver call failed with error {status}")
