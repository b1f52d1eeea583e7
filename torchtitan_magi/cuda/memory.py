"""Uninitialised tensors for little of the host's time."""

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._dynamo.guards import (  # type: ignore[attr-defined]  # what code made by torch.compile calls
    _empty_strided_cpu,
    _empty_strided_cuda,
)

# torch.cuda.current_device without its check that CUDA has been used before; missing where torch has no CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.empty, contiguous, in a third of its time.

    CUDA devices other than the current one take the long way, and so does torch's deterministic mode, which fills what
    is not initialised with NaN.
    """
    if not torch._C._get_deterministic_algorithms():
        sizes, strides = layout(shape)
        if device.type == "cpu":
            return _empty_strided_cpu(sizes, strides, dtype)
        if device.index == current_device():
            return _empty_strided_cuda(sizes, strides, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


@functools.lru_cache(maxsize=1024)
def layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and strides of a contiguous tensor, as tuples of ints and nothing else."""
    return tuple(shape), tuple(math.prod(shape[i:]) for i in range(1, len(shape) + 1))
