"""What our kernels take: compile-time variants, parameter structs, sizes that they can count."""

import ctypes

import torch

from torchtitan_magi.cuda import launch
from torchtitan_magi.cuda.launch import Variant
from torchtitan_magi.tiles import BACKWARD_ROWS, KEYS, MAX_CUT, ROWS

THREADS = 384  # threads per block of the forward and of the backward
MAX_COUNT = (1 << 31) - 256  # int32, with room for the threads of one block beyond the end

assert 2 + MAX_CUT <= launch.COUNTER_WORDS  # first_item in kernels/ffa_layout.cuh; a word for each tile that is cut


def check_count(what: str, count: int, limit: int = MAX_COUNT) -> None:
    """Raises ValueError for more than the kernels count in 32 bits."""
    if count > limit:
        raise ValueError(f"{what}: {count}; the ffa kernels count to {limit}: use shorter packs or more ranks")


# ------------------------------------------------------------ parameters
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
        *((name, ctypes.c_int) for name in ("num_packs", "num_q", "num_heads_q", "head_dim", "num_q_blocks", "store")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("dk_token", "dk_head", "dv_token", "dv_head")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "scale_log2")),
        ("late", LateKeys),
    ]


STORE_PACKED, STORE_FLOAT, ADD_FLOAT = 0, 1, 2  # BackwardParams.store: how dk and dv are written


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


def forward_variant(head_dim: int, heads_per_tile: int, dtype: torch.dtype, earlier: bool, more: bool) -> Variant:
    """A forward kernel; SHARED_BYTES is what it needs of shared memory."""
    padded = padded_head_dim(head_dim)
    buffers = 4 if padded == 64 else 2  # of K, and as many of V
    shared = (2 + 2 * buffers + (earlier or more)) * ROWS * padded * 2 + 2048
    return _variant(padded, heads_per_tile, dtype, shared, EARLIER=earlier, MORE=more)


def backward_variant(head_dim: int, heads_per_tile: int, dtype: torch.dtype, deterministic: bool) -> Variant:
    """A backward kernel; SHARED_BYTES is what it needs of shared memory."""
    padded = padded_head_dim(head_dim)
    keys, rows = 2 * KEYS * padded * 2, 2 * 2 * BACKWARD_ROWS * padded * 2
    shared = keys + rows + 2 * KEYS * 128 + 2 * BACKWARD_ROWS * padded * 4 + 3072
    return _variant(padded, heads_per_tile, dtype, shared, DETERMINISTIC=deterministic)


def _variant(padded: int, heads_per_tile: int, dtype: torch.dtype, shared: int, **switches: bool) -> Variant:
    macros = {"HEAD_DIM": padded, "PACK": heads_per_tile, "SHARED_BYTES": shared, "USE_FP16": dtype == torch.float16}
    return launch.variant_of(macros | switches)
