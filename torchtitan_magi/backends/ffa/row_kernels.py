"""Host half of rows.cu: row bands, gathering K/V rows, adding returned rows, rounding gradients.

The counterpart of ``exchange.rows.TorchRowMover``.
Shapes: T tokens of this rank, S rows sent in a stage, H K/V heads, D head_dim, Dv value_dim; width, see ``RowShape``.
"""

import ctypes
import functools
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan_magi.backends.ffa.params import check_count, has_wide_values, padded_dims
from torchtitan_magi.cuda import launch
from torchtitan_magi.exchange.in_flight import (
    MAX_PEERS,
    KeysAndValues,
    LeftGrads,
    Piece,
    Places,
    Returned,
    RowShape,
    RowSums,
    Unsent,
)
from torchtitan_magi.planning.stage import Exchange
from torchtitan_magi.tiles import NUM_SMS

_WARPS = 8  # warps per block, one row each
_UNIT = 16  # bytes that a lane moves at once
_ELEMENTS = 8  # elements of a gradient that a thread handles at once: one unit
_THREADS_PER_ROW = 16  # threads that sum up a row of out * dout
_MAX_BLOCKS = 1 << 20  # blocks of add_rows
_LEAST_TOKENS, _MAX_SUMS = 16, NUM_SMS  # of sum_sinks: tokens of a block, and blocks; the last one adds all parts
_FINISH_UNITS = 1024  # units that a block of finish_grads handles


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
        *((name, ctypes.c_void_p) for name in ("out", "dout", "delta", "zero", "more_zero", "dlse")),
        *((name, ctypes.c_longlong) for name in ("num_rows", "num_zero", "num_more_zero")),
        ("value_dim", ctypes.c_int),
    ]


class _SinksParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("sinks", "lse", "delta", "parts", "dsinks", "blocks_done")),
        *((name, ctypes.c_int) for name in ("num_tokens", "num_heads")),
    ]


class _BandsParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("slices", "bands")),
        *((name, ctypes.c_int) for name in ("num_slices", "num_bands")),
    ]


class _GatherParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v", "rows")),
        ("places", _Places),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("k_token", "k_head", "v_token", "v_head")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_heads", "key_units", "value_units", "num_blocks")),
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
        *((name, ctypes.c_uint) for name in ("key_units", "num_own")),
    ]


class CudaRowMover:
    """Row movement by our own kernels, one launch each."""

    writes_to_places = True

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        """Index data of an exchange: rows to send; for what returns, each token's rows in rank order: where, which."""
        rows = exchange.send_rows
        counts = np.bincount(rows)
        order = np.argsort(rows.astype(np.min_scalar_type(len(counts))), kind="stable")  # 16 bits: a radix sort
        return [rows, np.append(0, counts.cumsum()), order]

    def gather(
        self, k: Tensor, v: Tensor, index: list[Tensor], to: Tensor | Places, sums: RowSums | None = None
    ) -> None:
        """The rows to send, to a tensor [S, width], contiguous, or to several places; then `sums`.

        k [T, H, D], v [T, H, Dv]: bf16 or fp16, D and Dv multiples of 8; strided views are fine.
        """
        rows = index[0]
        if isinstance(to, Tensor):
            if not rows.shape[0]:
                return None if sums is None else self.sum(sums)
            to = Places([rows.shape[0]], [to.data_ptr()], 0, [])
        of_sums = None if sums is None else (sums.out.shape, *(zero.shape for zero in sums.zeros))
        key = get_ident(), k.shape, v.shape, k.stride(), v.stride(), k.dtype, of_sums
        prepared, k_at, v_at = to.prepared.get(key), k.data_ptr(), v.data_ptr()
        if prepared is None or (k_at | v_at) % 16:
            if not launch.are_copyable(k, v):
                return self.gather(launch.copyable(k), launch.copyable(v), index, to, sums)
            prepared = to.prepared[key] = _gather_launch(k, v, rows.shape[0], to, sums)
        params = prepared.params
        params.k, params.v, params.rows = k_at, v_at, rows.data_ptr()
        if to.flags:
            params.places.blocks_done = launch.next_counter(prepared.device)
        _alive = None if sums is None else _aim_sums(params.sums, sums)
        prepared()

    def sum(self, sums: RowSums) -> None:
        """delta = rowsum(out * dout) - dlse of bf16 or fp16, and the zeros; sizes are multiples of 8."""
        out = sums.out
        prepared = _sums_launch(get_ident(), out.device, out.dtype, out.shape, *map(Tensor.numel, sums.zeros))
        _alive = _aim_sums(prepared.params.sums, sums)
        prepared()

    def sink_grads(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """-sum over tokens of exp(sinks - lse) * delta, fp32 [Hq], in a fixed order; lse and delta fp32 [T, Hq].

        0 for a sink of -inf.
        """
        sinks = sinks.contiguous()
        assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (sinks, lse, delta))
        num_tokens, num_heads = lse.shape
        blocks = max(1, min(num_tokens // _LEAST_TOKENS, _MAX_SUMS))
        parts, device = lse.new_empty(blocks + 1, num_heads), lse.device.index
        params = _SinksParams(
            sinks.data_ptr(), lse.data_ptr(), delta.data_ptr(), parts.data_ptr(), parts[-1].data_ptr(),
            launch.next_counter(device), num_tokens, num_heads,
        )  # fmt: skip
        _kernel("sum_sinks", torch.bfloat16)(device, blocks, params)
        return parts[-1]

    def round_to(self, grad: Tensor, piece: Piece) -> None:
        """The piece of gradients [S, width] to its slot, in the slot's dtype; then its words are counted up."""
        assert piece.slot is not None
        torch.cat(piece.cut(grad), out=piece.slot)
        params = _GatherParams(places=_places(piece.places), num_blocks=1)  # no rows: a launch that only counts
        params.places.blocks_done = launch.next_counter(grad.device.index)
        _kernel("gather_rows", piece.slot.dtype)(grad.device.index, 1, params)

    def add(self, returned: Returned, grad: Tensor) -> None:
        """Adds returned rows (bf16, fp16 or fp32) to grad fp32 [T, width], per token in rank order."""
        returned.arrival.wait()
        assert grad.dtype == torch.float32
        assert grad.is_contiguous()
        units = grad.stride(0) // _ELEMENTS
        rows = _ReturnedRows(*_addresses_of(returned), _num_tokens(returned), units)
        if rows.num_tokens:
            kernel = _kernel("add_rows", returned.rows.dtype, returned.rows.dtype)
            blocks = min(-(-_units(rows.num_tokens * grad.stride(0)) // (_WARPS * 32)), _MAX_BLOCKS)
            kernel(grad.device.index, blocks, _AddParams(rows, grad.data_ptr()))

    def round(
        self, dq: Tensor, dkv: KeysAndValues, shape: RowShape, softmax_scale: float, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What FfaBlockAttn.backward left in dq (fp32 [T, Hq, D], contiguous), times the scale, to out (16 bits).

        Returns:
            dk and dv, as `round_keys` makes them of dkv [T, width] unless they are given.
        """
        assert dq.is_contiguous()
        num_dkv = dkv.numel() if isinstance(dkv, Tensor) else 0
        rounding = _rounding(get_ident(), dq.device, shape, out.dtype, dq.numel(), num_dkv)
        params = rounding.params
        params.dq, params.dq_to, params.softmax_scale = dq.data_ptr(), out.data_ptr(), softmax_scale
        if isinstance(dkv, Tensor):
            dkv = _aim_keys(params, dkv, shape, out.dtype)
        rounding()
        return dkv

    def round_keys(self, dkv: Tensor, shape: RowShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk [T, H, D] and dv [T, H, Dv] of dkv [T, width], fp32 and contiguous, in `dtype`."""
        rounding = _rounding(get_ident(), dkv.device, shape, dtype, 0, dkv.numel())
        both = _aim_keys(rounding.params, dkv, shape, dtype)
        rounding()
        return both

    def finish(self, returned: Returned, left: LeftGrads) -> tuple[Tensor, Tensor, Tensor]:
        """dq [T, Hq, D] as `round` has it, and dk [T, H, D] and dv [T, H, Dv] of the first T rows of dkv, all in
        left.dtype; `returned` is added to dk and dv as soon as it is there. What is unsent is sent before.

        Args:
            left: dq and sums in fp32; dk and dv that are rounded already are changed and returned. Contiguous; D and Dv
                are multiples of 8. Sums are per token in rank order.
        """
        dq, dkv, shape, softmax_scale, dtype = left
        num_tokens, is_rounded = dq.shape[0], isinstance(dkv, tuple)
        assert dq.is_contiguous()
        dq_to = dq.new_empty(dq.shape, dtype=dtype)
        if isinstance(dkv, tuple):
            assert all(x.is_contiguous() and x.dtype == dtype for x in dkv)
            dk, dv = (x[:num_tokens] for x in dkv)
        else:
            assert dkv.is_contiguous()
            dk, dv = _new_keys_and_values(dkv, num_tokens, shape, dtype)
        unsent = returned.unsent
        launches = {} if unsent is None else unsent.places.prepared
        key = "finish", get_ident(), dq.shape, shape, dtype, is_rounded
        finishing = launches.get(key)
        if finishing is None:
            kernel = _finish_kernel(shape, dtype, returned.rows.dtype, is_rounded)
            num_rows = _num_tokens(returned) if is_rounded else num_tokens
            finishing = _finish_launch(kernel, dq.device, dq.numel(), num_rows * shape.width, shape, unsent)
            finishing.params.returned.num_tokens = _num_tokens(returned)
            launches[key] = finishing
        params = finishing.params
        params.dq, params.softmax_scale = dq.data_ptr(), softmax_scale
        params.dq_to, params.dk_to, params.dv_to = dq_to.data_ptr(), dk.data_ptr(), dv.data_ptr()
        params.arrived = None
        if isinstance(dkv, Tensor):
            params.dkv = dkv.data_ptr()
        if unsent is not None:
            grad, first, _ = unsent
            if isinstance(grad, Tensor):
                assert grad.is_contiguous()
                params.unsent = grad.data_ptr() + 4 * first * shape.width
            params.started = launch.next_counter(finishing.device)
            params.places.blocks_done = params.started + 4
        params.returned.rows, params.returned.offsets, params.returned.order = _addresses_of(returned)
        if (flag := returned.arrival.flag()) is None:
            returned.arrival.wait()
        elif params.returned.num_tokens:
            params.arrived, params.number = flag
        finishing()
        if not params.returned.num_tokens:
            returned.arrival.wait()  # only now, as other ranks may wait for what has been sent
        return dq_to, dk, dv


def write_bands(slices: Tensor, bands: Tensor) -> None:
    """The keys that each row sees.

    Args:
        slices: int32 [n, 5], contiguous, ascending: first row and end, first key and end, mask type; no row in two.
        bands: int32 [rows, 2], contiguous; set to lo, hi: keys [lo, hi). 0, 0 for rows of no slice.
    """
    if len(bands):
        kernel = _kernel("write_bands", torch.bfloat16)
        params = _BandsParams(slices.data_ptr(), bands.data_ptr(), len(slices), len(bands))
        kernel(bands.device.index, -(-len(bands) // (_WARPS * 32)), params)


def _gather_launch(k: Tensor, v: Tensor, num_rows: int, to: Places, sums: RowSums | None) -> launch.Launch:
    (k_token, k_head, _), (v_token, v_head, _) = k.stride(), v.stride()
    num_heads, head_dim, value_dim = RowShape.of(k, v)
    units = _UNIT // k.element_size()
    # So many that all run at once: at its end each waits until what it wrote has arrived.
    blocks = max(1, min(-(-num_rows // _WARPS), 1024))
    params = _GatherParams(
        None, None, None, _places(to), k_token // units, k_head // units, v_token // units, v_head // units,
        num_rows, num_heads, head_dim // units, value_dim // units, blocks,
    )  # fmt: skip
    if sums is not None:
        params.sums, sums_blocks = _row_sums(sums.out.shape, *map(Tensor.numel, sums.zeros))
        blocks += sums_blocks
    return launch.Launch(_kernel("gather_rows", k.dtype), k.device.index, blocks, (), params)


@functools.lru_cache(maxsize=256)
def _sums_launch(
    thread: int, device: torch.device, dtype: torch.dtype, shape: torch.Size, num_zero: int, num_more_zero: int = 0
) -> launch.Launch:
    """`CudaRowMover.sum` of this thread for an out of this shape."""
    row_sums, blocks = _row_sums(shape, num_zero, num_more_zero)
    return launch.Launch(_kernel("gather_rows", dtype), device.index, blocks, (), _GatherParams(sums=row_sums))


@functools.lru_cache(maxsize=256)
def _rounding(
    thread: int, device: torch.device, shape: RowShape, dtype: torch.dtype, num_dq: int, num_dkv: int
) -> launch.Launch:
    """`_finish_launch` of this thread for gradients that stay on this rank."""
    return _finish_launch(_finish_kernel(shape, dtype), device, num_dq, num_dkv, shape)


def _aim_keys(params: Any, dkv: Tensor, shape: RowShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dk and dv, to which a launch will round dkv."""
    assert dkv.is_contiguous()
    dk, dv = _new_keys_and_values(dkv, dkv.shape[0], shape, dtype)
    params.dkv, params.dk_to, params.dv_to = dkv.data_ptr(), dk.data_ptr(), dv.data_ptr()
    return dk, dv


def _row_sums(shape: torch.Size, num_zero: int, num_more_zero: int = 0) -> tuple[_RowSums, int]:
    """Kernel parameters without addresses, and the number of blocks; shape: of out."""
    num_q, num_heads, value_dim = shape
    params = _RowSums(num_rows=num_q * num_heads, num_zero=num_zero, num_more_zero=num_more_zero, value_dim=value_dim)
    threads = max(_THREADS_PER_ROW * params.num_rows, (num_zero + num_more_zero) // _ELEMENTS)
    return params, -(-threads // (_WARPS * 32))


def _aim_sums(params: _RowSums, sums: RowSums) -> tuple[Tensor, ...]:
    """Sets the addresses; returns the tensors that must live until the launch."""
    assert sums.out.dtype == sums.dout.dtype
    assert sums.delta.dtype == torch.float32
    out, dout = sums.out.contiguous(), launch.copyable(sums.dout).contiguous()
    params.out, params.dout, params.delta = out.data_ptr(), dout.data_ptr(), sums.delta.data_ptr()
    params.zero = sums.zeros[0].data_ptr()
    if len(sums.zeros) > 1:
        params.more_zero = sums.zeros[1].data_ptr()
    params.dlse = None
    if sums.dlse is None:
        return out, dout
    assert sums.dlse.dtype == torch.float32
    dlse = sums.dlse.contiguous()
    params.dlse = dlse.data_ptr()
    return out, dout, dlse


def _places(places: Places) -> _Places:
    """Kernel parameters, but for `blocks_done`."""
    params, count = _Places(num_flags=len(places.flags), begin=places.begin), len(places.ends)
    params.to[:count], params.ends[:count] = places.addresses, places.ends
    params.flags[: params.num_flags] = places.flags
    return params


def _finish_launch(
    kernel: launch.Kernel, device: torch.device, num_dq: int, num_dkv: int, row: RowShape, unsent: Unsent | None = None
) -> launch.Launch:
    """A launch over num_dq and num_dkv elements.

    Args:
        row: of dkv.
        unsent: gradients that the launch sends first.
    """
    params = _FinishParams(returned=_ReturnedRows(units=row.width // _ELEMENTS), key_units=row.key_width // _ELEMENTS)
    params.dq_units, params.dkv_units = _units(num_dq), _units(num_dkv)
    writers = 0
    if unsent is not None:
        grad, first, places = unsent
        like = grad if isinstance(grad, Tensor) else grad[0]
        assert isinstance(grad, tuple) or grad.dtype == torch.float32
        params.unsent_units, params.places = _units((like.shape[0] - first) * row.width), _places(places)
        params.num_own = first
        writers = max(1, _finish_blocks(params.unsent_units))
    blocks = writers + _finish_blocks(params.dq_units) + _finish_blocks(params.dkv_units)
    return launch.Launch(kernel, device.index, blocks, (), params)


def _finish_kernel(
    shape: RowShape, dtype: torch.dtype, wire: torch.dtype | None = None, is_rounded: bool = False
) -> launch.Kernel:
    """The kernel for dq as the backward left it; is_rounded: dk and dv are in `dtype`."""
    wide = has_wide_values(padded_dims(shape.head_dim, shape.value_dim))
    return _kernel("finish_grads", dtype, wire, wide, is_rounded)


def _new_keys_and_values(like: Tensor, rows: int, shape: RowShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_heads, head_dim, value_dim = shape
    dk = torch.empty(rows, num_heads, head_dim, dtype=dtype, device=like.device)
    return dk, torch.empty(rows, num_heads, value_dim, dtype=dtype, device=like.device)


def _finish_blocks(units: int) -> int:
    return -(-units // _FINISH_UNITS)


def _addresses_of(returned: Returned) -> tuple[int, int, int]:
    _, offsets, order = returned.row_index
    assert returned.rows.is_contiguous()
    return returned.rows.data_ptr(), offsets.data_ptr(), order.data_ptr()


def _num_tokens(returned: Returned) -> int:
    """The last token to which a gradient returns, plus one."""
    return returned.row_index[1].shape[0] - 1


@functools.cache
def _kernel(
    name: str, dtype: torch.dtype, wire: torch.dtype | None = None, wide: bool = False, is_rounded: bool = False
) -> launch.Kernel:
    """wire: dtype of returned rows, where it matters; else dtype. wide, is_rounded: see `_finish_kernel`."""
    macros = {"USE_FP16": dtype == torch.float16, "WIRE_FP32": wire == torch.float32, "WIDE": wide}
    macros["ROUNDED"] = is_rounded
    return launch.load("rows.cu", name, launch.variant_of(macros), _WARPS * 32)


def _units(elements: int) -> int:
    """Units of a gradient; kernels count them in 32 bits, and add_rows one step of its grid beyond the last.

    Raises:
        ValueError: there are more.
    """
    units = elements // _ELEMENTS
    check_count(f"units of {_ELEMENTS} elements in a gradient", units, (1 << 32) - _MAX_BLOCKS * _WARPS * 32)
    return units
