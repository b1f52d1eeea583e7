"""Host half of rows.cu: packing K/V rows, adding returned rows, rounding gradients.

The counterpart of ``comm.TorchRows``. Shapes: T tokens of this rank, S rows sent in a stage, H K/V heads, D head_dim.
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
        *((name, ctypes.c_void_p) for name in ("k", "v", "rows", "sent", "own")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_own", "num_heads", "units_per_head")),
    ]


class _AddParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("returned", "grad", "tokens", "offsets", "order")),
        *((name, ctypes.c_int) for name in ("num_tokens", "units")),
    ]


class _RoundParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dq", "dkv", "dq_to", "dk_to", "dv_to")),
        *((name, ctypes.c_longlong) for name in ("dq_units", "dkv_units")),
        ("row_units", ctypes.c_int),
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

    def gather(self, k: Tensor, v: Tensor, index: list[Tensor], sent: Tensor, own: Tensor | None) -> None:
        """The rows to send, to sent [S, 2, H, D]; all rows to the first T of own [, 2, H, D]; both contiguous.

        k, v: [T, H, D] bf16 or fp16, D a multiple of 8; strided views are fine.
        """
        rows, num_own = index[0], 0 if own is None else k.shape[0]
        num_sent = rows.shape[0]
        if num_sent + num_own == 0:
            return
        k, v = launch.copyable(k), launch.copyable(v)
        units = _UNIT // k.element_size()
        params = _GatherParams(
            *(x.data_ptr() for x in (k, v, rows, sent)),
            None if own is None else own.data_ptr(),
            *(stride // units for x in (k, v) for stride in x.stride()[:2]),
            num_sent,
            num_own,
            k.shape[1],
            k.shape[2] // units,
        )
        launch.load("rows.cu", "gather_rows", (), _WARPS * 32, 0)(k.device.index, _blocks(num_sent + num_own), params)

    def add(self, returned: Tensor, index: list[Tensor], exchange: Exchange, grad: Tensor) -> None:
        """Adds returned rows [S, 2, H, D] (bf16, fp16 or fp32) to grad fp32 [T, 2, H, D], per token in rank order."""
        _, tokens, offsets, order = index
        if num_tokens := tokens.shape[0]:
            assert grad.dtype == torch.float32
            assert grad.is_contiguous()
            assert returned.is_contiguous()
            switches = (("WIRE_FP32", returned.dtype == torch.float32), ("USE_FP16", returned.dtype == torch.float16))
            macros = tuple((name, 1) for name, on in switches if on)
            params = _AddParams(
                *(x.data_ptr() for x in (returned, grad, tokens, offsets, order)),
                num_tokens,
                grad.stride(0) * returned.element_size() // _UNIT,
            )
            kernel = launch.load("rows.cu", "add_rows", macros, _WARPS * 32, 0)
            kernel(grad.device.index, _blocks(num_tokens), params)

    def round(self, dq: Tensor, dkv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """dq [T, Hq, D], and dk and dv [T, H, D] of dkv [T, 2, H, D], in `dtype`; from fp32, contiguous, D % 8 = 0."""
        num_tokens, _, num_heads, head_dim = dkv.shape
        dq_to = torch.empty(dq.shape, dtype=dtype, device=dq.device)
        dk, dv = (torch.empty(num_tokens, num_heads, head_dim, dtype=dtype, device=dq.device) for _ in range(2))
        assert dq.is_contiguous()
        assert dkv.is_contiguous()
        params = _RoundParams(
            *(x.data_ptr() for x in (dq, dkv, dq_to, dk, dv)), dq.numel() // 8, dkv.numel() // 8, dk[0].numel() // 8
        )
        macros = (("USE_FP16", 1),) if dtype == torch.float16 else ()
        blocks = min(-(-(dq.numel() + dkv.numel()) // (8 * _WARPS * 32)), 1 << 20)
        launch.load("rows.cu", "round_grads", macros, _WARPS * 32, 0)(dq.device.index, blocks, params)
        return dq_to, dk, dv


def _blocks(rows: int) -> int:
    return min(-(-rows // _WARPS), 2048)
