"""What a backend is: the attention of one stage, what it reads and what it fills."""

import functools
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.exchange.in_flight import KeysAndValues, LateKeys
from torchtitan_magi.exchange.rows import RowMover
from torchtitan_magi.masks.geometry import Int64Array, slice_layers
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads, KernelCost
from torchtitan_magi.tiles import KEYS
from torchtitan_magi.wording import quoted

MOST = torch.finfo(torch.float32).max  # of a factor of scores, which are float32
LATE_MARGIN = 1.25  # how much longer than predicted an exchange may take before a kernel that hides it waits


@dataclass(frozen=True, eq=False)
class StageMask:
    """The mask of one stage, and what is known of the layers and of the machine that run it.

    Attributes:
        slices: the mask; its rows index [0, num_q), its keys [0, num_k).
        forward, backward: whether calls in that direction will be made.
        late_from: keys from this one on come as `late`, while the kernel runs; work on the others is done first. No
            canonical slice has keys on both sides.
        head_dim: columns of q and k; with `cost`, it tells how much work hides the wait for late keys.
        value_dim: columns of v and out; 0: head_dim.
        cost: predicts when late keys arrive and what the kernel does until then.
    """

    slices: AttnSlices
    num_q: int
    num_k: int
    num_heads_q: int
    num_heads_kv: int
    forward: bool = True
    backward: bool = True
    late_from: int | None = None
    head_dim: int = 128
    value_dim: int = 0
    cost: CostModel = H200

    def __post_init__(self) -> None:
        if self.value_dim == 0:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def num_own(self) -> int:
        """Keys that are there from the start; the others come late."""
        return self.num_k if self.late_from is None else self.late_from

    @property
    def group(self) -> int:
        """Query heads of a K/V head."""
        return self.num_heads_q // self.num_heads_kv

    @property
    def heads(self) -> Heads:
        """Shape of the layers on this rank."""
        return Heads(self.num_heads_q, self.num_heads_kv, self.head_dim, self.value_dim)

    @functools.cached_property
    def rows(self) -> Int64Array:
        """Canonical slices, int64 [n, 5]."""
        return self.slices.canonical().table.astype(np.int64)

    @functools.cached_property
    def layer(self) -> Int64Array:
        """Mask layer of each canonical slice, int64 [n]."""
        return slice_layers(self.rows)

    def blocks_until_late(self, kernel: KernelCost, block_rows: int, heads_per_tile: int, busy: float = 0.0) -> float:
        """Blocks of block_rows x KEYS, each with all groups of heads_per_tile heads, that the GPU does until late keys
        come; busy: seconds that it spends on other things."""
        late_bytes = np.array((self.num_k - self.num_own) * self.heads.row_bytes, np.float64)
        seconds = LATE_MARGIN * (self.cost.stage + float(self.cost.inside.seconds(late_bytes))) - busy
        blocks_seconds = kernel.pair_seconds(self.heads) * block_rows * KEYS / heads_per_tile
        return seconds / blocks_seconds


class StageInputs(NamedTuple):
    """What the attention of one stage reads. Tensors have one dtype; strided views are read in place."""

    q: Tensor  # [Tq, Hq, D]
    k: Tensor  # [Tk, H, D]
    v: Tensor  # [Tk, H, Dv]
    mask: Any  # from BlockAttn.prepare(...).to(words on the device)
    softmax_scale: float  # > 0
    late: LateKeys | None = None  # K/V rows that follow k and v; the attention settles their arrival
    softcap: float = 0.0  # scores s become softcap * tanh(s / softcap); 0: they stay as they are
    sinks: Tensor | None = None  # [Hq]: a score without a value in the softmax of each row


class OutGrads(NamedTuple):
    """What the backward of every stage reads of the layer's result."""

    dout: Tensor  # [Tq, Hq, Dv], the dtype of q
    lse: Tensor  # [Tq, Hq], float32 or wider, contiguous, final over all stages
    delta: Tensor  # [Tq, Hq], rowsum(out * dout) - dlse, like lse


class Gradients(NamedTuple):
    """What the backward of a stage fills."""

    dq: Tensor  # [Tq, Hq, D], float32 or wider, contiguous; added to, in the layout that RowMover.round reads
    dkv: KeysAndValues  # [Tk + late rows, width], overwritten; float32 or wider, or the dtype of k
    zeroed: bool = False  # dkv holds zeros
    marks: Tensor | None = None  # of BlockAttn.marks, zeros: then dq holds nothing yet


class BlockAttn(Protocol):
    """Attention of one stage's queries over its K/V rows."""

    name: str

    def check(self, head_dim: int, dtype: torch.dtype, value_dim: int | None = None) -> None:
        """Raises ValueError for a dtype of q, k and v, a head_dim of q and k, or one of v, that it does not take.

        Args:
            value_dim: head_dim of v; default: that of q and k.
        """

    def row_mover(self) -> RowMover:
        """What gathers K/V rows for other ranks and adds returned gradients."""

    def prepare(self, mask: StageMask) -> Any:
        """Index data on the host for the calls that will be made, as ``.words`` (int32 [n]); its
        ``.to(words_on_device)`` is the mask of a call."""

    def forward(
        self, inputs: StageInputs, earlier: tuple[Tensor, Tensor] | None = None, more: bool = False
    ) -> tuple[Tensor, Tensor]:
        """out [Tq, Hq, Dv] and lse [Tq, Hq] over the keys of this stage and of earlier ones.

        Args:
            earlier: result of the stages before, called with `more`; overwritten.
            more: further stages follow. Without them, sinks are added.
        """

    def backward(self, inputs: StageInputs, out_grads: OutGrads, grads: Gradients) -> None:
        """Fills the gradients of one stage."""

    def marks(self, mask: Any, k: Tensor, v: Tensor) -> Tensor | None:
        """Memory for marks of what of dq is written, float32 [n], n a multiple of 8; None: dq starts from zeros."""

    def adds_keys(self, mask: Any) -> bool:
        """Whether the backward sums dk and dv up, from zeros."""

    def key_sums(self, mask: Any, k: Tensor, v: Tensor, spare: Tensor) -> Tensor | None:
        """Memory for those sums, [Tk, width] in float32, inside `spare` where they fit; None without sums."""


def check_scale(softmax_scale: float) -> None:
    """Raises ValueError for a scale of the scores that is no positive number, or one beyond float32."""
    if not isinstance(softmax_scale, Real) or not 0 < softmax_scale <= MOST:
        raise ValueError(
            f"softmax_scale is {quoted(softmax_scale)}; it must be a positive number of Python or NumPy that float32 "
            "holds, D ** -0.5 by default"
        )


def check_softcap(softcap: float) -> None:
    """Raises ValueError for a softcap that is no number of at least 0, or one beyond float32."""
    if not isinstance(softcap, Real) or not 0 <= softcap <= MOST:
        raise ValueError(
            f"softcap is {quoted(softcap)}; it must be a positive number of Python or NumPy that float32 holds, or 0 "
            "for none"
        )
