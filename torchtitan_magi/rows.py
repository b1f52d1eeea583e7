"""Host half of rows.cu: packing K/V rows, adding returned rows. The counterpart of ``comm.TorchRows``.

Shapes: T tokens of this rank, S rows sent in a stage, H K/V heads, D head_dim.
"""

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan_magi import launch
from torchtitan_magi.plan import Exchange

_WARPS = 8  # of a block, one row each
_UNIT = 16  # bytes that a lane moves at once


class _GatherParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "rows", "out")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_heads", "units_per_head")),
    ]


class _AddParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("returned", "grad", "tokens", "offsets", "order")),
        *((name, ctypes.c_int) for name in ("num_tokens", "units")),
    ]


class CudaRows:
    """Row movement by our own kernels, one launch each."""

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        """Index data of an exchange: rows to send; for what returns, the tokens, and each one's rows in rank order."""
        rows = exchange.send_rows
        counts = np.bincount(rows)
        tokens = np.flatnonzero(counts)
        order = np.argsort(rows.astype(np.min_scalar_type(len(counts))), kind="stable")  # 16 bits: a radix sort
        return [rows, tokens, np.append(0, counts[tokens].cumsum()), order]

    def gather(self, k: Tensor, v: Tensor, index: list[Tensor]) -> Tensor:
        """The rows to send, [S, 2, H, D]. k, v: [T, H, D] bf16 or fp16, D a multiple of 8; strided views are fine."""
        rows = index[0]
        sent = torch.empty(len(rows), 2, *k.shape[1:], dtype=k.dtype, device=k.device)
        if len(rows):
            k, v = launch.copyable(k), launch.copyable(v)
            units = _UNIT // k.element_size()
            params = _GatherParams(
                *(x.data_ptr() for x in (k, v, rows, sent)),
                *(stride // units for x in (k, v) for stride in x.stride()[:2]),
                len(rows),
                k.shape[1],
                k.shape[2] // units,
            )
            launch.load("rows.cu", "gather_rows", (), _WARPS * 32, 0)(k.device.index, _blocks(len(rows)), params)
        return sent

    def add(self, returned: Tensor, index: list[Tensor], exchange: Exchange, grad: Tensor) -> None:
        """Adds returned rows [S, 2, H, D] (bf16, fp16 or fp32) to grad fp32 [T, 2, H, D], per token in rank order."""
        _, tokens, offsets, order = index
        if len(tokens):
            assert grad.dtype == torch.float32
            assert grad.is_contiguous()
            assert returned.is_contiguous()
            switches = (("WIRE_FP32", returned.dtype == torch.float32), ("USE_FP16", returned.dtype == torch.float16))
            macros = tuple((name, 1) for name, on in switches if on)
            params = _AddParams(
                *(x.data_ptr() for x in (returned, grad, tokens, offsets, order)),
                len(tokens),
                grad[0].numel() * returned.element_size() // _UNIT,
            )
            kernel = launch.load("rows.cu", "add_rows", macros, _WARPS * 32, 0)
            kernel(grad.device.index, _blocks(len(tokens)), params)


def _blocks(rows: int) -> int:
    return min(-(-rows // _WARPS), 2048)
