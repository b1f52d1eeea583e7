"""What one layer's attention and communication cost on a kind of machine, by the shape of its heads."""

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchtitan_magi.files import read_text
from torchtitan_magi.machine import lack
from torchtitan_magi.masks.slices import is_integer
from torchtitan_magi.tiles import forward_heads_per_tile, forward_rows, is_wide
from torchtitan_magi.wording import one_line, quoted, shown

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Heads:
    """Shape of the attention layers on one rank.

    Attributes:
        head_dim: of q and k.
        value_dim: of v; 0: head_dim.
        latent: of multi-head latent attention, whose rows may travel as latent vectors: their width, and the columns of
            k that are rotated; empty: rows are K and V.
    """

    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    value_dim: int = 0
    latent: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)
        values = self.num_heads_q, self.num_heads_kv, self.head_dim, self.value_dim
        is_whole = all(is_integer(value, 1) for value in values)
        if self.latent and not (len(self.latent) == 2 and is_whole and self.num_heads_q == self.num_heads_kv):
            raise ValueError(
                f"latent is {quoted(self.latent)} for {quoted(self.num_heads_q)} query heads and "
                f"{quoted(self.num_heads_kv)} K/V heads; give the width of the latent vector and the rotated columns "
                "of k, for as many K/V heads as query heads, or leave it out"
            )
        if not is_whole or self.num_heads_q % self.num_heads_kv:
            raise ValueError(
                f"{quoted(self.num_heads_q)} query heads, {quoted(self.num_heads_kv)} K/V heads, head_dim "
                f"{quoted(self.head_dim)}, value_dim {quoted(self.value_dim)}; the query heads must be a multiple of "
                "the K/V heads, all integers of at least 1"
            )

    @property
    def counts(self) -> tuple[int, int]:
        """Query heads and K/V heads."""
        return self.num_heads_q, self.num_heads_kv

    @property
    def dims(self) -> tuple[int, int]:
        """head_dim and value_dim."""
        return self.head_dim, self.value_dim

    @property
    def is_wide(self) -> bool:
        """Whether the kernel's variants for wide heads serve them."""
        return is_wide(*self.dims)

    @property
    def mean_dim(self) -> float:
        """What the products of a pair take: half of them are over head_dim, half over value_dim."""
        return (self.head_dim + self.value_dim) / 2

    @property
    def tile_rows(self) -> int:
        """Query tokens per tile of the kernel's forward."""
        return forward_rows(*self.dims) // forward_heads_per_tile(self.num_heads_q // self.num_heads_kv)

    def tile_filling(self, rows: npt.NDArray[Any]) -> FloatArray:
        """Pairs that tiles over a stretch of so many rows compute, over pairs of the mask; the mean of all offsets."""
        return 1 + (self.tile_rows - 1) / np.maximum(rows, 1)

    @property
    def with_whole_rows(self) -> "Heads":
        """The same heads, whose K and V travel."""
        return replace(self, latent=())

    @property
    def row_bytes(self) -> int:
        """Bytes in 16 bits of a row that travels: one token's K and V, or its latent vector."""
        return 2 * (sum(self.latent) or self.num_heads_kv * (self.head_dim + self.value_dim))

    @property
    def expansion(self) -> int:
        """Products that make K and V of a row that has arrived: 0 where it is K and V."""
        if not self.latent:
            return 0
        rank, rotated = self.latent
        return rank * self.num_heads_kv * (self.head_dim - rotated + self.value_dim)

    @property
    def out_elements(self) -> int:
        """Elements of one token's attention output."""
        return self.num_heads_q * self.value_dim

    @property
    def query_elements(self) -> int:
        """Elements of one token's queries."""
        return self.num_heads_q * self.head_dim


LLAMA_HEADS = Heads(num_heads_q=64, num_heads_kv=8, head_dim=128)  # of Llama 3.1 70B


@dataclass(frozen=True)
class KernelCost:
    """Seconds per kernel call: `launch`, and for each query head what its pairs and its rows cost.

    A (query, key) pair costs pair + pair_dim * dim, dim = Heads.mean_dim, times a factor where heads have more than 128
    columns: wide of q, k and v, wide_queries of q and k alone. A row (a query token with any key) costs row + row_dim *
    dim, for blocks that are filled only in part, prologue and epilogue. So short documents run slowly.
    """

    launch: float  # s
    pair: float  # s
    pair_dim: float  # s per element
    row: float  # s
    row_dim: float  # s per element
    wide: float = 1.0
    wide_queries: float = 1.0

    def pair_seconds(self, heads: Heads) -> float:
        """Seconds per (query, key) pair, all query heads."""
        factor = 1.0 if not heads.is_wide else self.wide if heads.value_dim > 128 else self.wide_queries
        return heads.num_heads_q * (self.pair + self.pair_dim * heads.mean_dim) * factor

    def expansion_seconds(self, heads: Heads) -> float:
        """Seconds to make K and V of one latent row, at the speed of attention's own two products a pair."""
        return heads.expansion * self.pair_seconds(heads) / (2 * heads.num_heads_q * heads.mean_dim)

    def seconds(self, pairs: FloatArray, rows: FloatArray, heads: Heads) -> FloatArray:
        """Seconds of a call on each rank, float64 [ranks], by its (query, key) pairs and its rows."""
        of_rows = heads.num_heads_q * (self.row + self.row_dim * heads.mean_dim)
        return self.launch + pairs * self.pair_seconds(heads) + rows * of_rows


@dataclass(frozen=True)
class Link:
    """An all-to-all: every GPU sends and receives at once."""

    latency: float  # s
    bandwidth: float  # bytes/s that a GPU sends, and receives
    per_peer: float = 0.0  # s for each GPU that a GPU sends to or receives from: NCCL posts a message for each

    def seconds(self, num_bytes: FloatArray, peers: FloatArray | float = 0.0) -> FloatArray:
        """float64 like num_bytes: the bytes that each GPU sends or receives, from so many others."""
        return self.latency + self.per_peer * peers + num_bytes / self.bandwidth


@dataclass(frozen=True)
class CostModel:
    """What one layer's attention and communication cost on a kind of machine."""

    forward: KernelCost
    backward: KernelCost
    merge: float  # s per element of out: added to the forward of each of several stages, the mean of first and last
    stage: float  # s per stage that communicates: gathering its rows, starting its exchange
    memory: float  # bytes/s of element-wise passes
    slowdown: float  # fraction of the kernel's speed that communication takes while both run
    inside: Link  # between GPUs of a node
    across: Link  # between nodes

    @classmethod
    def load(cls, path: str | Path) -> "CostModel":
        """Reads the JSON file that `save` or torchtitan_magi.calibrate wrote.

        Raises:
            ValueError: the file is missing, or holds no cost model.
        """
        try:
            values = json.loads(read_text(path))["cost_model"]
            costs = {f.name: f.type(**values[f.name]) if f.type in _COMPOUND else values[f.name] for f in fields(cls)}
            if any(type(value) not in (int, float) or not 0 <= float(value) < math.inf for value in _figures(costs)):
                raise ValueError("its figures must be numbers of at least 0")
            pairs = [costs[name].pair + costs[name].pair_dim for name in ("forward", "backward")]
            if not min(costs["memory"], costs["inside"].bandwidth, costs["across"].bandwidth, *pairs) > 0:
                raise ValueError("bandwidths, and what a pair costs, must be above 0")
            if costs["slowdown"] > 1:
                raise ValueError("slowdown must be at most 1")
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            reason = one_line(f"{type(error).__name__}: {error}")
            raise ValueError(
                lack(error, shown(path))
                or f"{shown(path)} is no cost model ({reason}); make one by torchrun -m torchtitan_magi.calibrate"
            ) from None
        return cls(**costs)

    def save(self, path: Path, **notes: Any) -> None:
        """Writes JSON, with notes on where the values come from."""
        path.write_text(json.dumps({**notes, "cost_model": asdict(self)}, indent=1) + "\n")


_COMPOUND = (KernelCost, Link)


def _figures(costs: dict[str, Any]) -> list[float]:
    return [value for cost in costs.values() for value in (vars(cost).values() if type(cost) in _COMPOUND else (cost,))]


# Kernel: `calibrate --fit` with single calls of the kernel of commit 16ed43a; what a pair takes with head_dim 64, and
# the factors of wide heads, by kernel_h200.json and variants_h200.json. They predict the former to -12% and +11%
# forward (single short documents; 6% else), -6% and +7% backward, and dense rows of wide heads within 7%.
# The rest: calibrate.py on four at 27e378a, rows fetched through peer memory; slowdown is of a backward, the forward
# showed 0.03. cost_h200x4.json, of a later run, has 81 us and 353 GB/s and predicts layers no better. `across` is not
# measured: it assumes one 400 Gb/s adapter per GPU, and 2 us for each peer's message.
H200 = CostModel(
    forward=KernelCost(launch=9.3e-6, pair=1.54e-13, pair_dim=4.47e-15, row=1.20e-10, row_dim=0.0, wide=1.02),
    backward=KernelCost(
        launch=22.6e-6, pair=3.10e-13, pair_dim=1.325e-14, row=1.72e-10, row_dim=4.89e-12, wide=1.63, wide_queries=1.3
    ),
    merge=6.0e-13,
    stage=12e-6,
    memory=4.2e12,
    slowdown=0.1,
    inside=Link(latency=45e-6, bandwidth=3.8e11),
    across=Link(latency=60e-6, bandwidth=4.5e10, per_peer=2e-6),
)
