"""The kernel's tiles: their sizes and what one costs. Shared by the planner and by the host half of the kernel."""

import functools

import numpy as np
import numpy.typing as npt

BACKWARD_ROWS = 64  # rows of a backward query block
KEYS = 128  # keys of a block (forward) or of a tile (backward)
NUM_SMS = 132  # SMs of an H200; only heuristics use it
MAX_CUT = NUM_SMS // 2  # forward tiles, times groups of heads, that are cut into chunks, at most
WHOLE_TILES_PER_SM = 4  # so many backward tiles keep the SMs busy without cuts where no query heads share a K/V head
ITEM_COST = 1.2  # prologue and epilogue of a work item, in blocks


def is_wide(head_dim: int, value_dim: int) -> bool:
    """Whether the kernels' variants for wide heads serve these dims of q and k, and of v."""
    return head_dim > 128 or head_dim != value_dim


def forward_rows(head_dim: int, value_dim: int) -> int:
    """Rows of a forward tile: query tokens x the heads that share it."""
    return 192 if head_dim <= 64 and not is_wide(head_dim, value_dim) else 128


def tile_cost(num_blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Run time of work items by their number of blocks, in units of one block; no blocks, no cost."""
    return np.where(num_blocks > 0, num_blocks + ITEM_COST, 0.0)


def stay_whole(num_tiles: int, num_heads_q: int, num_heads_kv: int) -> bool:
    """Whether the backward cuts none of so many tiles of keys: their sums of dK and dV would be as large as dQ."""
    return num_heads_q == num_heads_kv and num_tiles * num_heads_kv >= WHOLE_TILES_PER_SM * NUM_SMS


@functools.cache
def largest_divisor(n: int, limit: int) -> int:
    """The largest divisor of n that is at most `limit` (at least 1)."""
    return next(d for d in range(max(1, min(n, limit)), 0, -1) if n % d == 0)


def forward_heads_per_tile(group: int) -> int:
    """Query heads of one K/V head, of `group`, that share a forward tile: at most 16."""
    return largest_divisor(group, 16)
