"""What our kernels take: compile-time variants, parameter structs, sizes that they can count."""

import ctypes
import functools
import math

import torch

from torchtitan_magi.cuda import launch
from torchtitan_magi.cuda.launch import Variant
from torchtitan_magi.tiles import BACKWARD_ROWS, KEYS, MAX_CUT, forward_rows, is_wide

MAX_COUNT = (1 << 31) - 256  # int32, with room for the threads of one block beyond the end

assert 2 + MAX_CUT <= launch.COUNTER_WORDS  # first_item in kernels/ffa_layout.cuh; a word for each tile that is cut


def check_count(what: str, count: int, limit: int = MAX_COUNT) -> None:
    """Raises ValueError for more than the kernels count in 32 bits."""
    if count > limit:
        raise ValueError(f"{what}: {count}; the ffa kernels count to {limit}: use shorter packs or more ranks")


# ------------------------------------------------------------ parameters
# Field by field the structs of the same names in the .cu files.
class Schedule(ctypes.Structure):
    """The order of work items, see kernels/ffa_layout.cuh."""

    _fields_ = [(name, ctypes.c_int) for name in ("num_early", "num_tiles", "num_tail", "num_heads", "heads_per_wave")]

    @property
    def num_items(self) -> int:
        """Work items of all heads."""
        return (self.num_early + self.num_tiles + self.num_tail) * self.num_heads


class LateKeys(ctypes.Structure):
    """Keys from `first` on, there once the word at `arrived` has reached `number`."""

    _fields_ = [("arrived", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("number", "first"))]


class ForwardParams(ctypes.Structure):
    """What a launch of kernels/ffa_forward.cu takes beside its tensor maps."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("lse", "items", "segments", "bands", "counter", "parts")),
        ("schedule", Schedule),
        *((name, ctypes.c_int) for name in ("groups_per_kv", "num_q", "num_heads_q", "parts_per_tile")),
        ("scale_log2", ctypes.c_float),
        ("late", LateKeys),
        *((name, ctypes.c_void_p) for name in ("out", "earlier", "sinks")),
        ("value_dim", ctypes.c_int),
        ("cap_scale", ctypes.c_float),
    ]


class BackwardParams(ctypes.Structure):
    """What a launch of kernels/ffa_backward.cu takes beside its tensor maps."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dk", "dv", "lse", "delta", "items", "segments", "bands")),
        *((name, ctypes.c_void_p) for name in ("components", "semaphores", "marks", "part_semaphores", "counter")),
        ("schedule", Schedule),
        *((name, ctypes.c_int) for name in ("num_packs", "num_q", "num_heads_q", "head_dim", "num_q_blocks", "store")),
        *((f"{name}_stride", ctypes.c_longlong) for name in ("dk_token", "dk_head", "dv_token", "dv_head")),
        *((name, ctypes.c_float) for name in ("softmax_scale", "scale_log2")),
        ("late", LateKeys),
        ("dq", ctypes.c_void_p),
        ("value_dim", ctypes.c_int),
        ("cap_scale", ctypes.c_float),
    ]


LOG2_E = math.log2(math.e)
BOUND = 80  # kGreatest of ffa_forward.cu: the greatest exponent of 2

STORE_PACKED, STORE_FLOAT, ADD_FLOAT = 0, 1, 2  # BackwardParams.store: how dk and dv are written


# ------------------------------------------------------------ variants
# What the kernels are compiled for: columns of q and k, and of v.
DIMS = (64, 64), (128, 128), (192, 128), (192, 192), (256, 256)


@functools.cache
def padded_dims(head_dim: int, value_dim: int | None = None) -> tuple[int, int]:
    """The smallest of DIMS that holds `head_dim` columns of q and k and `value_dim` of v (default: as many).

    Raises:
        ValueError: above 256; more columns of v than of q; not a multiple of 8 (the copy engine moves 16 bytes at a
            time), or for wide heads of 16 (their dq leaves in units of 16 columns).
    """
    value_dim = head_dim if value_dim is None else value_dim
    wide = is_wide(head_dim, value_dim)
    step = 16 if wide else 8
    if not 0 < value_dim <= head_dim <= 256 or head_dim % step or value_dim % step:
        what = f"head_dim is {head_dim}" + (f" and that of v {value_dim}" if value_dim != head_dim else "")
        raise ValueError(
            f"{what}; the ffa kernel takes multiples of 8 up to 128 and of 16 up to 256, and fewer for v in 16s"
        )
    return next(dims for dims in DIMS if is_wide(*dims) == wide and head_dim <= dims[0] and value_dim <= dims[1])


def has_wide_values(dims: tuple[int, int]) -> bool:
    """Whether the backward takes two launches, as registers do not hold dk and dv at once; and dq leaves them directly,
    in an order of columns of its own.

    Args:
        dims: one of DIMS.
    """
    return dims[1] > 128


def check_supported(head_dim: int, dtype: torch.dtype, value_dim: int | None = None) -> None:
    """Raises ValueError for a dtype or head dims that the kernel does not take."""
    padded_dims(head_dim, value_dim)
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f'attention runs in {dtype}; the ffa kernel takes bfloat16 or float16, or use backend = "flex"'
        )


def forward_keys(dims: tuple[int, int]) -> int:
    """Keys of a block of the forward: as many as fit in shared memory."""
    return {192: 112, 256: 80}.get(dims[1], KEYS)


def forward_threads(dims: tuple[int, int]) -> int:
    """Threads per block of the forward: two for each row, and the producer's."""
    return 2 * forward_rows(*dims) + 128


def forward_variant(
    dims: tuple[int, int],
    heads_per_tile: int,
    dtype: torch.dtype,
    earlier: bool = False,
    more: bool = False,
    *,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Variant:
    """A forward kernel; SHARED_BYTES is what it needs of shared memory.

    Args:
        dims: one of DIMS.
        softcap: 0 for none.
    """
    (head_dim, value_dim), tile_rows = dims, forward_rows(*dims)
    buffers = 4 if head_dim == 64 else 2  # of K, and as many of V
    queries, keys = tile_rows * head_dim * 2, buffers * forward_keys(dims) * (head_dim + value_dim) * 2
    rows = 0 if is_wide(*dims) else (1 + (earlier or more)) * tile_rows * value_dim * 2
    # Between softcaps of this size probabilities fit bf16's range of exponents, so that none needs to be looked at.
    is_bounded = 0 < softcap * LOG2_E <= BOUND and dtype == torch.bfloat16 and head_dim > 64
    switches = {"EARLIER": earlier, "MORE": more, "SOFTCAP": bool(softcap), "BOUNDED": is_bounded, "SINKS": sinks}
    return _variant(dims, heads_per_tile, dtype, queries + keys + rows + 3072, switches)


def has_grad_group(dims: tuple[int, int]) -> bool:
    """Whether dq has a warpgroup of its own in the backward."""
    return dims == (64, 64)


def backward_threads(dims: tuple[int, int]) -> int:
    """Threads per block of the backward: one warpgroup for each 64 keys of a tile, the producer's, and dq's."""
    return 2 * KEYS + 128 * (1 + has_grad_group(dims))


def backward_variants(
    dims: tuple[int, int],
    heads_per_tile: int,
    dtype: torch.dtype,
    deterministic: bool = False,
    begins: bool = False,
    *,
    softcap: float = 0.0,
) -> tuple[Variant, ...]:
    """The backward's kernels, in the order of their launches: one for all gradients, or for wide values one for dv and
    one for dk and dq. SHARED_BYTES is what each needs of shared memory.

    Args:
        dims: one of DIMS.
        begins: deterministic and without wide values: whether dq need not be zero before.
    """
    switches = {"DETERMINISTIC": deterministic, "BEGINS": begins, "SOFTCAP": bool(softcap)}
    (head_dim, value_dim), stages = dims, 3 if has_grad_group(dims) else 2
    rows = BACKWARD_ROWS * (head_dim + value_dim) * 2
    dscores = 2 * KEYS * BACKWARD_ROWS * 2
    if not has_wide_values(dims):
        buffers = 1 if is_wide(*dims) else 2  # of dscores and of dq on its way out
        queues = 3 if has_grad_group(dims) else 1  # of head_dim columns: of dq, and there of dk and dv of each 64 keys
        moving = buffers * (dscores // 2 + queues * BACKWARD_ROWS * head_dim * 4)
        shared = KEYS * (head_dim + value_dim) * 2 + stages * rows + moving
        return (_variant(dims, heads_per_tile, dtype, shared + 1024 * (1 + stages), switches),)
    values = KEYS * head_dim * 2 + stages * rows
    keys = KEYS * (head_dim + value_dim) * 2 + (1 if head_dim == 256 else stages) * rows + dscores
    return (
        _variant(dims, heads_per_tile, dtype, values + 8192, switches | {"ONLY_VALUES": True}),
        _variant(dims, heads_per_tile, dtype, keys + 3072, switches | {"NO_VALUES": True}),
    )


def _variant(
    dims: tuple[int, int], heads_per_tile: int, dtype: torch.dtype, shared: int, switches: dict[str, bool]
) -> Variant:
    macros = {"HEAD_DIM": dims[0], "VALUE_DIM": dims[1], "PACK": heads_per_tile, "SHARED_BYTES": shared}
    return launch.variant_of(macros | {"USE_FP16": dtype == torch.float16} | switches)
