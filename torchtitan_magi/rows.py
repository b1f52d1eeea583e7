"""Host half of rows.cu: packing K/V rows, adding returned rows, rounding gradients.

The counterpart of ``comm.TorchRows``. Shapes: T tokens of this rank, S rows sent in a stage, H K/V heads, D head_dim.
"""

import ctypes
import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan_magi import launch
from torchtitan_magi.memory import empty
from torchtitan_magi.plan import Exchange
from torchtitan_magi.transport import MAX_PEERS, Places, Returned, RowSums

_WARPS = 8  # of a block, one row each
_UNIT = 16  # bytes that a lane moves at once
_ELEMENTS = 8  # of a gradient that a thread handles at once
_THREADS_PER_ROW = 16  # of out and dout
_FINISH_UNITS = 1024  # times so many, that a block of finish_grads handles


class _Places(ctypes.Structure):
    _fields_ = [
        ("to", ctypes.c_void_p * MAX_PEERS),
        ("flags", ctypes.c_void_p * (MAX_PEERS + 1)),
        ("blocks_done", ctypes.c_void_p),
        ("ends", ctypes.c_int * MAX_PEERS),
        *((name, ctypes.c_int) for name in ("num_flags", "begin")),
    ]


class _RowSums(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "dout", "delta", "zero", "more_zero")),
        *((name, ctypes.c_longlong) for name in ("num_rows", "num_zero", "num_more_zero")),
        ("head_dim", ctypes.c_int),
    ]


class _GatherParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "rows")),
        ("places", _Places),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_heads", "units_per_head", "num_blocks")),
        ("sums", _RowSums),
    ]


class _ReturnedRows(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("rows", "offsets", "order")),
        *((name, ctypes.c_uint) for name in ("num_tokens", "units")),
    ]


class _AddParams(ctypes.Structure):
    _fields_ = [("returned", _ReturnedRows), ("dkv", ctypes.c_void_p)]


class _FinishParams(ctypes.Structure):
    _fields_ = [
        ("places", _Places),
        *((name, ctypes.c_void_p) for name in ("unsent", "started")),
        ("returned", _ReturnedRows),
        ("arrived", ctypes.c_void_p),
        ("number", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in ("dkv", "dq", "dk_to", "dv_to", "dq_to")),
        *((name, ctypes.c_uint) for name in ("unsent_units", "dq_units", "dkv_units")),
        ("softmax_scale", ctypes.c_float),
    ]


class CudaRows:
    """Row movement by our own kernels, one launch each."""

    packs_to_places = True

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        """Index data of an exchange: rows to send; for what returns, each token's rows in rank order: where, which."""
        rows = exchange.send_rows
        counts = np.bincount(rows)
        order = np.argsort(rows.astype(np.min_scalar_type(len(counts))), kind="stable")  # 16 bits: a radix sort
        return [rows, np.append(0, counts.cumsum()), order]

    def gather(
        self, k: Tensor, v: Tensor, index: list[Tensor], to: Tensor | Places, sums: RowSums | None = None
    ) -> None:
        """The rows to send, to a tensor [S, 2, H, D], contiguous, or to several places; then `sums`.

        k, v: [T, H, D] bf16 or fp16, D a multiple of 8; strided views are fine.
        """
        rows = index[0]
        num_rows = rows.shape[0]
        if num_rows == 0 and isinstance(to, Tensor):
            return None if sums is None else self.sum(sums)
        k, v = launch.copyable(k), launch.copyable(v)
        device, units = k.device.index, _UNIT // k.element_size()
        (k_token, k_head, _), (v_token, v_head, _), (_, num_heads, head_dim) = k.stride(), v.stride(), k.shape
        # So many that all run at once: at its end each waits until what it wrote has arrived.
        blocks = max(1, min(-(-num_rows // _WARPS), 1024))
        params = _GatherParams(
            k.data_ptr(), v.data_ptr(), rows.data_ptr(), _places(to, num_rows),
            k_token // units, k_head // units, v_token // units, v_head // units,
            num_rows, num_heads, head_dim // units, blocks,
        )  # fmt: skip
        if not isinstance(to, Tensor):
            params.places.blocks_done = launch.next_counter(device)
        if sums is not None:
            params.sums, more_blocks, _alive = _row_sums(sums)
            blocks += more_blocks
        _kernel("gather_rows", k.dtype, k.dtype)(device, blocks, params)

    def sum(self, sums: RowSums) -> None:
        """delta = rowsum(out * dout) of bf16 or fp16, and the zeros; sizes are multiples of 8."""
        row_sums, blocks, _alive = _row_sums(sums)
        if blocks:
            kernel = _kernel("gather_rows", sums.out.dtype, sums.out.dtype)
            kernel(sums.out.device.index, blocks, _GatherParams(sums=row_sums))

    def add(self, returned: Returned, grad: Tensor) -> None:
        """Adds returned rows (bf16, fp16 or fp32) to grad fp32 [T, 2, H, D], per token in rank order."""
        returned.arrival.wait()
        assert grad.dtype == torch.float32
        assert grad.is_contiguous()
        rows = _returned_rows(returned, grad.stride(0) // _ELEMENTS)
        if rows.num_tokens:
            kernel = _kernel("add_rows", returned.rows.dtype, returned.rows.dtype)
            blocks = _thread_blocks(rows.num_tokens * rows.units)
            kernel(grad.device.index, blocks, _AddParams(rows, grad.data_ptr()))

    def round(self, dq: Tensor, softmax_scale: float, out: Tensor) -> None:
        """What FfaBlockAttn.backward left in dq (fp32 [T, Hq, D], contiguous), times the scale, to out (16 bits)."""
        params = _FinishParams(returned=_ReturnedRows(units=1))
        _add_queries(params, dq, softmax_scale, out)
        _finish(params, dq.device, out.dtype, out.dtype)

    def round_keys(self, dkv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk and dv [T, H, D] of dkv [T, 2, H, D], fp32 and contiguous, in `dtype`."""
        params, dk, dv = _of_keys(None, dkv, dkv.shape[0], dtype)
        _finish(params, dkv.device, dtype, dtype)
        return dk, dv

    def finish(
        self, returned: Returned | None, dq: Tensor, dkv: Tensor, softmax_scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In `dtype`: dq [T, Hq, D] as `round` has it, and dk and dv [T, H, D] of the first T rows of dkv [.., 2, H, D]
        with `returned` added to them, as soon as it is there. What is unsent is sent before.

        dq and dkv are fp32 and contiguous, D is a multiple of 8; the sums are per token in rank order.
        """
        params, dk, dv = _of_keys(returned, dkv, dq.shape[0], dtype)
        dq_to = empty(dq.shape, dtype, dq.device)
        _add_queries(params, dq, softmax_scale, dq_to)
        if returned is None:
            _finish(params, dq.device, dtype, dtype)
            return dq_to, dk, dv
        if (flag := returned.arrival.flag()) is None:
            returned.arrival.wait()
        elif params.returned.num_tokens:
            params.arrived, params.number = flag
        if returned.unsent is not None:
            grad, first, places = returned.unsent
            assert grad.is_contiguous()
            assert grad.dtype == torch.float32
            row = grad.stride(0)
            params.unsent = grad.data_ptr() + 4 * first * row
            params.unsent_units = (grad.shape[0] - first) * row // _ELEMENTS
            params.places = _places_of(places)
            params.started = launch.next_counter(dq.device.index)
            params.places.blocks_done = params.started + 4
        _finish(params, dq.device, dtype, returned.rows.dtype)
        if not params.returned.num_tokens:
            returned.arrival.wait()  # only now, as other ranks may wait for what has been sent
        return dq_to, dk, dv


def _row_sums(sums: RowSums) -> tuple[_RowSums, int, tuple[Tensor, Tensor]]:
    """What the kernel is told, the number of its blocks, and tensors that must live until it is launched."""
    num_q, num_heads, head_dim = sums.out.shape
    assert sums.out.dtype == sums.dout.dtype
    assert sums.delta.dtype == torch.float32
    assert sums.delta.is_contiguous()
    out, dout = launch.copyable(sums.out).contiguous(), launch.copyable(sums.dout).contiguous()
    params = _RowSums(
        out.data_ptr(), dout.data_ptr(), sums.delta.data_ptr(), num_rows=num_q * num_heads, head_dim=head_dim
    )
    zero, *more = sums.zeros
    params.zero, params.num_zero = zero.data_ptr(), zero.numel()
    if more:
        params.more_zero, params.num_more_zero = more[0].data_ptr(), more[0].numel()
    threads = max(_THREADS_PER_ROW * params.num_rows, (params.num_zero + params.num_more_zero) // _ELEMENTS)
    return params, -(-threads // (_WARPS * 32)), (out, dout)


def _places(to: Tensor | Places, num_rows: int) -> _Places:
    if not isinstance(to, Tensor):
        return _places_of(to)
    places = _Places()
    places.to[0], places.ends[0] = to.data_ptr(), num_rows
    return places


def _places_of(places: Places) -> _Places:
    """To be completed by `blocks_done`."""
    if "params" not in places.prepared:
        params, count = _Places(num_flags=len(places.flags), begin=places.begin), len(places.ends)
        params.to[:count], params.ends[:count] = places.addresses, places.ends
        params.flags[: params.num_flags] = places.flags
        places.prepared["params"] = params
    return places.prepared["params"]


def _of_keys(
    returned: Returned | None, dkv: Tensor, num_tokens: int, dtype: torch.dtype
) -> tuple[_FinishParams, Tensor, Tensor]:
    num_heads, head_dim = dkv.shape[2:]
    assert dkv.is_contiguous()
    dk, dv = (empty((num_tokens, num_heads, head_dim), dtype, dkv.device) for _ in range(2))
    units = 2 * num_heads * head_dim // _ELEMENTS
    rows = _ReturnedRows(units=units) if returned is None else _returned_rows(returned, units)
    params = _FinishParams(
        returned=rows, dkv=dkv.data_ptr(), dk_to=dk.data_ptr(), dv_to=dv.data_ptr(), dkv_units=num_tokens * units
    )
    return params, dk, dv


def _add_queries(params: _FinishParams, dq: Tensor, softmax_scale: float, dq_to: Tensor) -> None:
    assert dq.is_contiguous()
    params.dq, params.dq_to, params.dq_units = dq.data_ptr(), dq_to.data_ptr(), dq.numel() // _ELEMENTS
    params.softmax_scale = softmax_scale


def _finish(params: _FinishParams, device: torch.device, dtype: torch.dtype, wire: torch.dtype) -> None:
    writers = max(1, _finish_blocks(params.unsent_units)) if params.started else 0
    if blocks := writers + _finish_blocks(params.dq_units) + _finish_blocks(params.dkv_units):
        _kernel("finish_grads", dtype, wire)(device.index, blocks, params)


def _finish_blocks(units: int) -> int:
    return -(-units // _FINISH_UNITS)


def _returned_rows(returned: Returned, units: int) -> _ReturnedRows:
    _, offsets, order = returned.row_index
    assert returned.rows.is_contiguous()
    return _ReturnedRows(returned.rows.data_ptr(), offsets.data_ptr(), order.data_ptr(), offsets.shape[0] - 1, units)


@functools.cache
def _kernel(name: str, dtype: torch.dtype, wire: torch.dtype) -> launch.Kernel:
    macros = {"USE_FP16": dtype == torch.float16, "WIRE_FP32": wire == torch.float32}
    return launch.load("rows.cu", name, launch.variant_of(macros), _WARPS * 32, 0)


def _thread_blocks(units: int) -> int:
    return min(-(-units // (_WARPS * 32)), 1 << 20)
