"""Host half of short_conv.cu: the causal short convolution of a rank's tokens on Hopper GPUs, in 16 bits.

Shapes: T local tokens, C channels, W width, R rows of history, E tokens that take in history.
"""

import ctypes
import functools

import torch
from torch import Tensor

from torchtitan_magi.cuda import jit, launch

RUN, THREADS, CHANNELS = 64, 128, 8  # tokens of a run, threads of a block, channels of a thread
WIDTH = 4


class ConvParams(ctypes.Structure):
    """As short_conv.cu has it."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "history", "dout", "out", "dx", "weight", "dweight", "dedges")),
        *((name, ctypes.c_void_p) for name in ("offset", "edge", "taken")),
        *((name, ctypes.c_int) for name in ("num_tokens", "units")),
    ]


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether there is a kernel for x [T, C] and weight [C, W]; else plain torch computes."""
    fits = x.dtype in (torch.bfloat16, torch.float16) and x.shape[1] % CHANNELS == 0 and weight.shape[1] == WIDTH
    return fits and x.is_cuda and jit.is_hopper(x.device.index)


def forward(
    x: Tensor, weight: Tensor, history: Tensor, tables: tuple[Tensor, Tensor, Tensor], activation: str | None
) -> Tensor:
    """out [T, C] in the dtype of x.

    Args:
        history: [R, C], rows that are taken in beside those of a token's own part.
        tables: int32, as the kernel has them: offset [T], edge [T], taken [E, W - 1].
    """
    x, history = _readable(x), _readable(history)
    out = torch.empty_like(x)
    taps = _taps(weight)
    params = _params(x, history, taps, tables)
    params.out = out.data_ptr()
    if len(x):
        _kernel("short_conv", activation, x.dtype)(x.device.index, _blocks(x), params)
    return out


def backward(
    x: Tensor,
    weight: Tensor,
    history: Tensor,
    tables: tuple[Tensor, Tensor, Tensor],
    activation: str | None,
    dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients: dx [T, C] in the dtype of x, of what tokens take in from their own parts; dweight [C, W] in that of
    the weight; and float32 [E, C] of the sums of tokens that take in history, before the activation.

    Args are those of `forward`; dout: [T, C].
    """
    x, history, dout = _readable(x), _readable(history), _readable(dout.to(x.dtype))
    taps, dx = _taps(weight), torch.empty_like(x)
    dweight = taps.new_empty(-(-len(x) // RUN), *taps.shape)
    dedges = taps.new_empty(len(tables[2]), x.shape[1])
    params = _params(x, history, taps, tables)
    params.dout, params.dx = dout.data_ptr(), dx.data_ptr()
    params.dweight, params.dedges = dweight.data_ptr(), dedges.data_ptr()
    if len(x):
        _kernel("short_conv_grads", activation, x.dtype)(x.device.index, _blocks(x), params)
    return dx, dweight.sum(0).flip(0).T.to(weight.dtype), dedges


def _readable(x: Tensor) -> Tensor:
    """x [N, C], or a copy, with contiguous rows that the kernel can read 16 bytes at a time."""
    return launch.copyable(x.contiguous()[:, None])[:, 0]


def _taps(weight: Tensor) -> Tensor:
    """float32 [W, C], contiguous, by distance."""
    return weight.float().flip(1).T.contiguous()


def _params(x: Tensor, history: Tensor, taps: Tensor, tables: tuple[Tensor, Tensor, Tensor]) -> ConvParams:
    offset, edge, taken = tables
    assert all(table.dtype == torch.int32 and table.is_contiguous() for table in tables)
    assert history.dtype == x.dtype
    return ConvParams(
        x=x.data_ptr(),
        history=history.data_ptr(),
        weight=taps.data_ptr(),
        offset=offset.data_ptr(),
        edge=edge.data_ptr(),
        taken=taken.data_ptr(),
        num_tokens=len(x),
        units=x.shape[1] // CHANNELS,
    )


def _blocks(x: Tensor) -> int:
    return -(-len(x) // RUN) * -(-x.shape[1] // (CHANNELS * THREADS))


@functools.cache
def _kernel(name: str, activation: str | None, dtype: torch.dtype) -> launch.Kernel:
    macros = {"SILU": activation == "silu", "USE_FP16": dtype == torch.float16}
    return launch.load("short_conv.cu", name, launch.variant_of(macros), THREADS)
