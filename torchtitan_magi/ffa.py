"""Host half of the FFA kernel: tensor maps, launches, and attention over work lists as a differentiable function.

Shapes: Tq queries, Tk keys, Hq query heads, Hk K/V heads, D head_dim. Nothing CUDA is imported until a kernel is needed.
"""

import ctypes
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_magi import jit
from torchtitan_magi.slices import AttnSlices
from torchtitan_magi.worklists import BACKWARD_ROWS, KEYS, ROWS, ListSizes, WorkLists, build_worklists

THREADS = 384
PANEL = 64  # columns of a 128-byte shared-memory row
NUM_COUNTERS = 1024  # launches that may be in flight at once

Variant = tuple[tuple[str, int], ...]


# ------------------------------------------------------------------------------------------------------ kernel parameters
# Field by field the structs of the same names in the .cu files.
class Schedule(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("num_tiles", "num_heads", "heads_per_wave")]


class ForwardParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("out", "lse", "items", "segments", "bands", "counter")),
        ("schedule", Schedule),
        *((name, ctypes.c_int) for name in ("groups_per_kv", "num_q", "num_heads_q", "head_dim")),
        ("scale_log2", ctypes.c_float),
    ]


class BackwardParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dk", "dv", "lse", "delta", "items", "segments", "bands")),
        *((name, ctypes.c_void_p) for name in ("components", "semaphores", "counter", "workspace")),
        ("schedule", Schedule),
        *((name, ctypes.c_int) for name in ("num_packs", "num_slots", "num_q", "num_k", "num_heads_q")),
        *((name, ctypes.c_int) for name in ("head_dim", "num_q_blocks", "store_float")),
        *((name, ctypes.c_longlong) for name in ("dk_token_stride", "dk_head_stride")),
        *((name, ctypes.c_longlong) for name in ("dv_token_stride", "dv_head_stride")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "scale_log2")),
        ("dq", ctypes.c_void_p),
    ]


class CombineParams(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("workspace", "dk", "dv", "split_tiles")),
        *((name, ctypes.c_int) for name in ("num_slots", "num_heads", "num_k", "head_dim", "store_float")),
        *((name, ctypes.c_longlong) for name in ("dk_token_stride", "dk_head_stride")),
        *((name, ctypes.c_longlong) for name in ("dv_token_stride", "dv_head_stride")),
    ]


# -------------------------------------------------------------------------------------------------------------- variants
def padded_head_dim(head_dim: int) -> int:
    """The kernel's head dim that holds `head_dim`.

    Raises:
        ValueError: above 128, or not a multiple of 8 (the copy engine moves 16 bytes at a time).
    """
    if not 0 < head_dim <= 128 or head_dim % 8:
        raise ValueError(f"head_dim is {head_dim}; the ffa kernel takes multiples of 8 up to 128")
    return 64 if head_dim <= 64 else 128


def forward_variant(head_dim: int, pack: int, dtype: torch.dtype, accumulate: bool) -> tuple[Variant, int]:
    """Macros and bytes of shared memory of a forward kernel."""
    padded = padded_head_dim(head_dim)
    stages = 4 if padded == 64 else 2
    shared = (1 + 2 * stages) * ROWS * padded * 2 + 2048
    macros = {"HEAD_DIM": padded, "PACK": pack, "SHARED_BYTES": shared, "USE_FP16": dtype == torch.float16}
    return _variant(macros | {"ACCUMULATE": accumulate}), shared


def backward_variant(head_dim: int, pack: int, dtype: torch.dtype, deterministic: bool) -> tuple[Variant, int]:
    """Macros and bytes of shared memory of a backward kernel."""
    padded = padded_head_dim(head_dim)
    keys, rows = 2 * KEYS * padded * 2, 2 * 2 * BACKWARD_ROWS * padded * 2
    shared = keys + rows + 2 * KEYS * 128 + 2 * BACKWARD_ROWS * padded * 4 + 3072
    macros = {"HEAD_DIM": padded, "PACK": pack, "SHARED_BYTES": shared, "USE_FP16": dtype == torch.float16}
    return _variant(macros | {"DETERMINISTIC": deterministic}), shared


def _variant(macros: dict[str, int]) -> Variant:
    """Switches that are off are left undefined."""
    return tuple((name, int(value)) for name, value in macros.items() if value)


# ----------------------------------------------------------------------------------------------------------------- lists
@dataclass(frozen=True, eq=False)
class DeviceLists:
    """Work lists of one mask on a device; `words` int32 [n], 16-byte aligned."""

    words: Tensor
    sizes: ListSizes

    def pointer(self, offset: int) -> int:
        return self.words.data_ptr() + 4 * offset


@dataclass(frozen=True, eq=False)
class HostLists:
    """Work lists of one mask, made on the host; upload `words` (int32 [n]) and call `to`."""

    lists: WorkLists

    @property
    def words(self) -> Any:
        return self.lists.words

    def to(self, device_words: Tensor) -> DeviceLists:
        """The lists around `device_words`, a copy of `words` on the device. Copies it when it is not 16-byte aligned."""
        assert device_words.dtype == torch.int32 and len(device_words) == len(self.words)
        aligned = device_words.data_ptr() % 16 == 0 and device_words.is_contiguous()
        return DeviceLists(device_words if aligned else device_words.clone(), self.lists.sizes)


# ---------------------------------------------------------------------------------------------------------------- launch
@functools.cache
def _num_sms(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _counters(device: int) -> tuple[int, Any]:
    """Work counters, two ints per launch in flight. The kernel leaves them at zero."""
    counters = torch.zeros(NUM_COUNTERS, 2, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.synchronize(device)  # other streams may use them next
    _keep_alive.append(counters)
    return counters.data_ptr(), itertools.count()


_keep_alive: list[Tensor] = []


def _next_counter(device: int) -> int:
    base, numbers = _counters(device)
    return base + next(numbers) % NUM_COUNTERS * 8


def _launch(
    handle: Any, blocks: int | tuple[int, int, int], threads: int, shared_bytes: int, arguments: list[Any]
) -> None:
    from cuda.bindings import driver

    grid = (blocks, 1, 1) if isinstance(blocks, int) else blocks
    pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
    stream = torch.cuda.current_stream().cuda_stream
    (status,) = driver.cuLaunchKernel(
        handle, *grid, threads, 1, 1, shared_bytes, stream, ctypes.addressof(pointers), 0
    )
    if int(status) != 0:
        raise RuntimeError(f"kernel launch failed: {status!r}")


@functools.cache
def _map_constants() -> Any:
    from cuda.bindings import driver

    types = {
        torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.float32: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    }
    fixed = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    ones = [driver.cuuint32_t(1)] * 3
    return driver.cuTensorMapEncodeTiled, types, fixed, ones, driver.cuuint64_t, driver.cuuint32_t


def _tensor_map(x: Tensor, heads: int, tokens: int) -> Any:
    """A map over x [T, H, D] whose box is 128 bytes of columns x `heads` x `tokens`, stored as 128-byte swizzled rows."""
    encode, types, fixed, ones, u64, u32 = _map_constants()
    num_tokens, num_heads, head_dim = x.shape
    size = x.element_size()
    row_bytes = -(-head_dim * size // 16) * 16  # stands in for the stride of a dimension of length 1
    head_bytes = x.stride(1) * size if num_heads > 1 else row_bytes
    token_bytes = x.stride(0) * size if num_tokens > 1 else row_bytes
    status, tensor_map = encode(
        types[x.dtype],
        3,
        x.data_ptr(),
        [u64(head_dim), u64(num_heads), u64(num_tokens)],
        [u64(head_bytes), u64(token_bytes)],
        [u32(128 // size), u32(heads), u32(tokens)],
        ones,
        *fixed,
    )
    if int(status) != 0:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled failed: {status!r} for shape {tuple(x.shape)}, strides {x.stride()}"
        )
    return (ctypes.c_ulonglong * 16).from_buffer_copy(ctypes.string_at(tensor_map.getPtr(), 128))


def _copyable(x: Tensor) -> Tensor:
    """x, or a contiguous copy where the copy engine cannot read it in place (it needs 16-byte aligned rows)."""
    size = x.element_size()
    strides = [stride * size % 16 for stride, length in zip(x.stride()[:2], x.shape[:2], strict=True) if length > 1]
    fits = x.stride(2) == 1 and x.data_ptr() % 16 == 0 and not any(strides)
    return x if fits else x.contiguous()


# --------------------------------------------------------------------------------------------------------- the attention
class FfaBlockAttn:
    """Attention of one stage's queries over its K/V buffer with our Hopper kernel; `reference.FlexBlockAttn`'s methods.

    Args:
        device: a CUDA device of compute capability 9.0.

    Raises:
        ValueError: any other device.
    """

    name = "ffa"

    def __init__(self, device: torch.device | str = "cuda") -> None:
        device = torch.device(device)
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ValueError(f'backend "ffa" needs a Hopper GPU (sm_90), not {device}; use backend = "flex"')
        index = torch.cuda.current_device() if device.index is None else device.index
        if not jit.is_hopper(index):
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            raise ValueError(
                f'backend "ffa" needs a Hopper GPU (sm_90); {name} is sm_{capability[0]}{capability[1]}: '
                'use backend = "flex"'
            )

    def prepare(self, slices: AttnSlices, num_q: int, num_k: int, num_heads_q: int, num_heads_kv: int) -> HostLists:
        """Work lists on the host; their `.to(words_on_device)` is the `mask` of the calls below.

        Raises:
            ValueError: head counts do not divide, or a slice reaches beyond num_q or num_k.
        """
        return HostLists(build_worklists(slices, num_q, num_k, num_heads_q, num_heads_kv))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: DeviceLists,
        softmax_scale: float,
        accumulate: tuple[Tensor, Tensor] | None = None,
        sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Attention over k, v; merged into `accumulate` in place if given.

        Args:
            q: [Tq, Hq, D] bf16 or fp16. k, v: [Tk, Hk, D], the same dtype. Strided views are read in place.
            accumulate: contiguous fp32 (out [Tq, Hq, D], lse [Tq, Hq]); 0 and -inf where no key was seen yet.
            softmax_scale: > 0.
            sm_margin: SMs to leave to others.

        Returns:
            out [Tq, Hq, D] in the dtype of q and lse fp32 [Tq, Hq], natural logarithms; rows that see no key have out 0
            and lse -inf. With accumulate, that pair, merged; rows that see no key are left as they were.

        Raises:
            ValueError: head_dim, dtype, scale or shapes that the kernel does not take.
        """
        s = mask.sizes
        _check_inputs(q, k, v, s, softmax_scale)
        if accumulate is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
            num_tiles = s.num_forward_tiles
            if s.num_k == 0:
                return out.zero_(), lse.fill_(-math.inf)
        else:
            out, lse = accumulate
            assert out.dtype == lse.dtype == torch.float32 and out.is_contiguous() and lse.is_contiguous()
            num_tiles = s.num_forward_tiles_with_work
        if num_tiles == 0:
            return out, lse
        q, k, v = _copyable(q), _copyable(k), _copyable(v)
        device, num_groups = q.device.index, s.num_heads_q // s.forward_pack
        variant, shared = forward_variant(q.shape[2], s.forward_pack, q.dtype, accumulate is not None)
        params = ForwardParams(
            out.data_ptr(),
            lse.data_ptr(),
            mask.pointer(s.forward_items),
            mask.pointer(s.forward_segments),
            mask.pointer(s.bands),
            _next_counter(device),
            Schedule(num_tiles, num_groups, s.forward_heads_per_wave),
            num_groups // s.num_heads_kv,
            s.num_q,
            s.num_heads_q,
            q.shape[2],
            softmax_scale * math.log2(math.e),
        )
        maps = [
            _tensor_map(q, s.forward_pack, ROWS // s.forward_pack),
            _tensor_map(k, 1, KEYS),
            _tensor_map(v, 1, KEYS),
        ]
        with torch.cuda.device(device):
            kernel = jit.load_kernel("ffa_forward.cu", "ffa_forward", variant, shared)
            blocks = min(num_tiles * num_groups, max(1, _num_sms(device) - sm_margin))
            _launch(kernel, blocks, THREADS, shared, [*maps, params])
        return out, lse

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: DeviceLists,
        softmax_scale: float,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        deterministic: bool = False,
        sm_margin: int = 0,
    ) -> None:
        """Gradients of one stage.

        P = exp(scale * q k^T - lse), dS = P * (dout v^T - delta): the FlashAttention-2 backward (arXiv 2307.08691).

        Args:
            dout, q: [Tq, Hq, D]. k, v: [Tk, Hk, D]. bf16 or fp16, all alike; strided views are read in place.
            lse, delta: fp32 [Tq, Hq] contiguous, final over all stages; delta = rowsum(out * dout).
            dq: fp32 [Tq, Hq, D] contiguous, added to.
            dk, dv: [Tk, Hk, D], overwritten; fp32 or the dtype of k, innermost dimension contiguous, rows 16-byte aligned.
            deterministic: add to dq in a fixed order, so that runs repeat bit for bit.
            sm_margin: SMs to leave to others.

        Raises:
            ValueError: head_dim, dtype, scale or shapes that the kernel does not take.
        """
        s = mask.sizes
        _check_inputs(q, k, v, s, softmax_scale)
        assert dq.dtype == lse.dtype == delta.dtype == torch.float32 and dout.dtype == q.dtype
        assert dq.is_contiguous() and lse.is_contiguous() and delta.is_contiguous()
        assert dk.dtype == dv.dtype and dk.stride(2) == dv.stride(2) == 1
        if s.num_k == 0:
            return
        if s.num_q == 0:
            dk.zero_(), dv.zero_()
            return
        dout, q, k, v = _copyable(dout), _copyable(q), _copyable(k), _copyable(v)
        device, head_dim = q.device.index, q.shape[2]
        variant, shared = backward_variant(head_dim, s.backward_pack, q.dtype, deterministic)
        tokens, num_packs = BACKWARD_ROWS // s.backward_pack, s.num_heads_q // s.backward_pack
        workspace = None
        if s.num_slots:
            shape = (2, s.num_slots, s.num_heads_kv, KEYS, head_dim)
            workspace = torch.empty(shape, dtype=torch.float32, device=k.device)
        semaphores = torch.zeros(s.num_q_blocks * num_packs * 2, dtype=torch.int32, device=k.device) if deterministic else None
        store_float = dk.dtype == torch.float32
        strides = dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1)
        params = BackwardParams(
            dk.data_ptr(),
            dv.data_ptr(),
            lse.data_ptr(),
            delta.data_ptr(),
            mask.pointer(s.backward_items_in_order if deterministic else s.backward_items),
            mask.pointer(s.backward_segments),
            mask.pointer(s.bands),
            mask.pointer(s.components),
            0 if semaphores is None else semaphores.data_ptr(),
            _next_counter(device),
            0 if workspace is None else workspace.data_ptr(),
            Schedule(s.num_backward_items, s.num_heads_kv, s.backward_heads_per_wave),
            num_packs // s.num_heads_kv,
            s.num_slots,
            s.num_q,
            s.num_k,
            s.num_heads_q,
            head_dim,
            s.num_q_blocks,
            store_float,
            *strides,
            softmax_scale,
            softmax_scale * math.log2(math.e),
            dq.data_ptr(),
        )
        maps = [_tensor_map(x, s.backward_pack, tokens) for x in (q, dout)]
        maps += [_tensor_map(k, 1, KEYS), _tensor_map(v, 1, KEYS), _tensor_map(dq, s.backward_pack, tokens)]
        with torch.cuda.device(device):
            kernel = jit.load_kernel("ffa_backward.cu", "ffa_backward", variant, shared)
            items = s.num_backward_items * s.num_heads_kv
            _launch(kernel, min(items, max(1, _num_sms(device) - sm_margin)), THREADS, shared, [*maps, params])
            if workspace is not None:
                combine = CombineParams(
                    workspace.data_ptr(),
                    dk.data_ptr(),
                    dv.data_ptr(),
                    mask.pointer(s.split_tiles),
                    s.num_slots,
                    s.num_heads_kv,
                    s.num_k,
                    head_dim,
                    store_float,
                    *strides,
                )
                kernel = jit.load_kernel("ffa_rows.cu", "ffa_combine", _variant({"USE_FP16": q.dtype == torch.float16}), 0)
                _launch(kernel, (s.num_split_tiles, s.num_heads_kv, 2), 256, 0, [combine])

    def delta(self, out: Tensor, dout: Tensor, dq: Tensor | None = None) -> Tensor:
        """rowsum(out * dout), fp32 [Tq, Hq]; sets dq (fp32 [Tq, Hq, D], contiguous) to zero on the way if given.

        Args:
            out: [Tq, Hq, D] fp32 or the dtype of dout. dout: bf16 or fp16.
        """
        padded_head_dim(out.shape[2])
        assert out.dtype in (dout.dtype, torch.float32)
        out, dout = out.contiguous(), dout.contiguous()
        delta = torch.empty(out.shape[:2], dtype=torch.float32, device=out.device)
        if delta.numel() == 0:
            return delta
        switches = {"USE_FP16": dout.dtype == torch.float16, "OUT_FP32": out.dtype == torch.float32}
        pointers = [out.data_ptr(), dout.data_ptr(), delta.data_ptr(), 0 if dq is None else dq.data_ptr()]
        sizes = [ctypes.c_longlong(delta.numel()), ctypes.c_int(out.shape[2])]
        with torch.cuda.device(out.device):
            kernel = jit.load_kernel("ffa_rows.cu", "ffa_delta", _variant(switches), 0)
            _launch(kernel, -(-delta.numel() // 16), 256, 0, [*map(ctypes.c_void_p, pointers), *sizes])
        return delta


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, s: ListSizes, softmax_scale: float) -> None:
    padded_head_dim(q.shape[2])
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; the ffa kernel takes bfloat16 or float16, all alike"
        )
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be positive")
    want = ((s.num_q, s.num_heads_q), (s.num_k, s.num_heads_kv), (s.num_k, s.num_heads_kv))
    if tuple(tuple(x.shape[:2]) for x in (q, k, v)) != want or not q.shape[2] == k.shape[2] == v.shape[2]:
        raise ValueError(f"q, k, v have shapes {[tuple(x.shape) for x in (q, k, v)]}; the work lists are for {want}")


# ---------------------------------------------------------------------------------------------------------------- autograd
class _FfaAttn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: DeviceLists, softmax_scale: float, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = _block_attn(q.device).forward(q, k, v, mask, softmax_scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mask, ctx.softmax_scale, ctx.deterministic = mask, softmax_scale, deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        block_attn = _block_attn(q.device)
        dout = grads[0]
        dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        delta = block_attn.delta(out, dout, dq)
        dk, dv = (
            torch.empty(k.shape, dtype=k.dtype, device=k.device),
            torch.empty(v.shape, dtype=v.dtype, device=v.device),
        )
        block_attn.backward(
            dout, q, k, v, lse, delta, ctx.mask, ctx.softmax_scale, dq, dk, dv, deterministic=ctx.deterministic
        )
        return dq.to(q.dtype), dk, dv, None, None, None


@functools.cache
def _block_attn(device: torch.device) -> FfaBlockAttn:
    return FfaBlockAttn(device)


def upload_lists(lists: HostLists, device: torch.device | str) -> DeviceLists:
    """The lists on a device, in one copy."""
    return lists.to(torch.from_numpy(lists.words).to(device))


def ffa_attn(
    q: Tensor, k: Tensor, v: Tensor, mask: DeviceLists, softmax_scale: float | None = None, deterministic: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention on one device under work lists that are already there. `out` is differentiable, `lse` is not.

    Args:
        q: [Tq, Hq, D] bf16 or fp16. k, v: [Tk, Hk, D].
        mask: `upload_lists(FfaBlockAttn(device).prepare(slices, Tq, Tk, Hq, Hk), device)`.
        softmax_scale: default D ** -0.5.
        deterministic: a backward that repeats bit for bit.

    Returns:
        out [Tq, Hq, D] in the dtype of q, lse fp32 [Tq, Hq]; rows that see no key have out 0 and lse -inf.
    """
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    return _FfaAttn.apply(q, k, v, mask, scale, deterministic)
