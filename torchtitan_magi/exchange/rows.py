"""What moves rows inside a rank: to where they are sent from, and returned gradients to where they are added.

Shapes: T tokens of this rank, S rows sent in a stage, H K/V heads, D head_dim, Dv value_dim. K and V travel fused as
[rows, width], see ``RowShape``.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchtitan_magi.exchange.in_flight import (
    KeysAndValues,
    LeftGrads,
    Piece,
    Places,
    Returned,
    RowShape,
    RowSums,
    as_rows,
)
from torchtitan_magi.planning.stage import Exchange


class RowMover(Protocol):
    """Gathers, adds and rounds rows: by torch, or by our own kernels (backends/ffa/row_kernels.py)."""

    writes_to_places: bool  # whether `gather` and `finish` write to other ranks' memory

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        """Index data of an exchange, on the host; the other methods take it from the device."""

    def gather(
        self, k: Tensor, v: Tensor, index: list[Tensor], to: Tensor | Places, sums: RowSums | None = None
    ) -> None:
        """Copies the rows of k [T, H, D] and v [T, H, Dv] that are sent, to a tensor [S, width] or to places; then
        `sums`."""

    def sum(self, sums: RowSums) -> None:
        """Does what `sums` says."""

    def sink_grads(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """The gradient of sinks [Hq]: -sum over tokens of exp(sinks - lse) * delta; lse, delta: [T, Hq], one dtype.

        That of a sink of -inf is 0, also where lse is -inf.
        """

    def round_to(self, grad: Tensor, piece: Piece) -> None:
        """Rounds the piece of gradients [S, width] of other ranks' rows to its slot, for them to fetch."""

    def add(self, returned: Returned, grad: Tensor) -> None:
        """Adds returned rows to grad [T, width], for each token in the order of the ranks, when they are there."""

    def round(
        self, dq: Tensor, dkv: KeysAndValues, shape: RowShape, softmax_scale: float, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the block attention left in dq [T, Hq, D], times the scale, to out; shape: of k and v.

        Returns:
            dk and dv, as `round_keys` makes them of dkv [T, width] unless they are given.
        """

    def round_keys(self, dkv: Tensor, shape: RowShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk [T, H, D] and dv [T, H, Dv] of dkv [T, width], in `dtype`."""

    def finish(self, returned: Returned, left: LeftGrads) -> tuple[Tensor, Tensor, Tensor]:
        """dq as `round` has it, and dk [T, H, D] and dv [T, H, Dv] of the first T rows of dkv with `returned` added to
        them, as `add` does; all in left.dtype."""


class TorchRowMover:
    """Row movement by torch's own operations, on any device."""

    writes_to_places = False

    def index(self, exchange: Exchange) -> list[npt.NDArray[np.integer]]:
        """The rows to send, int64 [S]."""
        return [exchange.send_rows]

    def gather(
        self, k: Tensor, v: Tensor, index: list[Tensor], to: Tensor | Places, sums: RowSums | None = None
    ) -> None:
        """Copies the rows that are sent to a tensor [S, width]; then `sums`."""
        assert isinstance(to, Tensor)
        for part, x in zip(RowShape.of(k, v).split(to), (k, v), strict=True):
            part.copy_(x.index_select(0, index[0]))
        if sums is not None:
            self.sum(sums)

    def sum(self, sums: RowSums) -> None:
        """Does what `sums` says."""
        wide = sums.delta.dtype
        torch.sum(sums.out.to(wide) * sums.dout.to(wide), -1, out=sums.delta)
        if sums.dlse is not None:
            sums.delta.sub_(sums.dlse)
        for zero in sums.zeros:
            zero.zero_()

    def sink_grads(self, sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
        """-sum over tokens of exp(sinks - lse) * delta, [Hq] in the dtype of lse, summed in float64."""
        dtype = lse.dtype
        sinks, lse, delta = (x.double() for x in (sinks, lse, delta))  # terms of either sign cancel
        grads = -(torch.exp(sinks - lse.masked_fill(lse == -torch.inf, 0.0)) * delta).sum(0)
        return grads.to(dtype)

    def round_to(self, grad: Tensor, piece: Piece) -> None:
        """Raises AssertionError."""
        raise AssertionError("what torch moves travels by collectives")

    def add(self, returned: Returned, grad: Tensor) -> None:
        """Adds returned rows to grad [T, width], for each token in the order of the ranks."""
        returned.arrival.wait()
        # One rank asks for a row at most once: within one rank no two rows collide, so the sums have a fixed order.
        splits = returned.exchange.send_splits
        for rows, values in zip(returned.row_index[0].split(splits), returned.rows.split(splits), strict=True):
            grad.index_add_(0, rows, values.to(grad.dtype))

    def round(
        self, dq: Tensor, dkv: KeysAndValues, shape: RowShape, softmax_scale: float, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dq [T, Hq, D] times the scale, to out; dk and dv."""
        out.copy_(dq * softmax_scale)
        return self.round_keys(dkv, shape, out.dtype) if isinstance(dkv, Tensor) else dkv

    def round_keys(self, dkv: Tensor, shape: RowShape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """dk [T, H, D] and dv [T, H, Dv], contiguous."""
        dk, dv = (
            torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format).copy_(x) for x in shape.split(dkv)
        )
        return dk, dv

    def finish(self, returned: Returned, left: LeftGrads) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, as ``RowMover`` has it."""
        dq, dkv, shape, softmax_scale, dtype = left
        dkv = as_rows(dkv, 0, len(dq)).to(dq.dtype)
        self.add(returned, dkv)
        return (dq * softmax_scale).to(dtype), *self.round_keys(dkv, shape, dtype)
