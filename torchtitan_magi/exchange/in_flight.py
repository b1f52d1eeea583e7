"""The life of rows in flight: K/V rows on their way to a stage, and their gradients on the way back.

K/V rows, from ``group_cast`` to the attention that reads them::

    gathered --- begin ----> under way ----- flag / wait ----> arrived ----- settle ----> settled

    gathered    a kernel is queued that copies the rows to where they leave from, or straight to their receivers
    under way   the host has issued its part of the exchange (``Arrival.begin``); collectives are born in this state
    arrived     ``Arrival.wait`` makes the stream wait for it; a kernel may await ``Arrival.flag`` by itself instead
    settled     something on the stream has waited: the memory of the exchange may be used again

Gradients of those rows, from ``group_reduce`` to their sum::

    [unsent --- finish --->] under way ----- flag / wait ----> arrived ----- add, finish ----> added

    unsent      the gradients still lie where the backward left them; ``RowMover.finish`` sends them in its own launch
    added       each token's gradients are summed in rank order into those of the rank's own rows

Gradients are sums in float32 where more is to be added to them in memory. Where a backward has each row in one piece it
rounds it to the dtype in which rows travel, and only rows to which something returns are read again.

Inside a machine rows travel in memory of bounded size. An exchange of more rows does so in several pieces: the stream
waits for one before the next is gathered, and only the last may still be under way when attention begins (``send``).

There are two ways to hide the way of K/V rows behind attention. Inside a machine one kernel attends to the rank's own
keys and then awaits the flag of the others (``LateKeys``). Across nodes remote keys come in several stages, whose
results are merged in float32: the rows of the next stage travel while one is attended to (``StageCasts``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchtitan_magi.planning.stage import Exchange

Wait = Callable[[], object]


class RowShape(NamedTuple):
    """The shape of a K/V row that travels, or of its gradient: a token's K of all heads, then its V."""

    num_heads: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, k: Tensor, v: Tensor) -> "RowShape":
        """The shape of rows of k [.., H, D] and v [.., H, Dv]."""
        return cls(k.shape[1], k.shape[2], v.shape[2])

    @property
    def key_width(self) -> int:
        """Elements of K."""
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        """Elements."""
        return self.num_heads * (self.head_dim + self.value_dim)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """K [rows, H, D] and V [rows, H, Dv] of rows [rows, width]: views."""
        keys = rows[:, : self.key_width].unflatten(1, (self.num_heads, self.head_dim))
        return keys, rows[:, self.key_width :].unflatten(1, (self.num_heads, self.value_dim))


KeysAndValues: TypeAlias = Tensor | tuple[Tensor, Tensor]  # [rows, width], or K and V [rows, H, ..]


def keys_and_values(both: KeysAndValues, shape: RowShape) -> tuple[Tensor, Tensor]:
    """K [rows, H, D] and V [rows, H, Dv]."""
    return both if isinstance(both, tuple) else shape.split(both)


def as_rows(both: KeysAndValues, first: int, end: int) -> Tensor:
    """Rows [first, end) as they travel, [rows, width]; of K and V by themselves, a copy."""
    if isinstance(both, tuple):
        return torch.cat([x[first:end].flatten(1) for x in both], 1)
    return both[first:end]


class Flag(NamedTuple):
    """A word in device memory: what it announces has arrived when it has reached `number`, modulo 2^32."""

    address: int
    number: int


class Arrival(NamedTuple):
    """The arrival of rows that are gathered or under way.

    Attributes:
        wait: makes the current stream wait for the rows.
        flag: the word that a kernel may await instead; None if there is none, or none any more because all arrived.
        begin: the host's part in the exchange, called once.
    """

    wait: Wait
    flag: Callable[[], Flag | None] = lambda: None
    begin: Callable[[], object] = lambda: None

    def flag_or_wait(self) -> Flag | None:
        """The flag for a kernel to await; where there is none, the stream waits now."""
        flag = self.flag()
        if flag is None:
            self.wait()
        return flag

    def settle(self, awaited: bool) -> None:
        """Begins the exchange after the launch that reads its rows. Unless that kernel awaits them, the stream does."""
        self.begin()
        if not awaited:
            self.wait()


class LateKeys(NamedTuple):
    """K/V rows that follow a rank's own. The attention that takes them settles their arrival."""

    kv: Tensor  # [rows, width], contiguous
    arrival: Arrival


MAX_PEERS = 7  # ranks that one kernel writes to


@dataclass(frozen=True, eq=False)
class Places:
    """Where a kernel gathers the rows of an exchange: in memory of the receivers, or in this rank's own."""

    ends: list[int]  # row after the last one of each place, in the order in which rows are sent; ascending
    addresses: list[int]  # per place, where row 0 would lie if it belonged there
    begin: int  # row to begin with, so that not all ranks write to the same one at once
    flags: list[int]  # addresses of int32 words to which the kernel adds one when it has gathered
    prepared: dict[Any, Any] = field(default_factory=dict)  # launches that repeat from call to call


class Piece(NamedTuple):
    """Part of an exchange, or all of it: what travels at once in the memory that the ranks have for it."""

    parts: tuple[slice, ...] | None  # of the rows that this rank sends, those of this piece, by receiver; None: all
    places: Places  # where they are gathered
    slot: Tensor | None  # [rows, ...]: these places, if they are this rank's memory, from which the others fetch
    arrival: Arrival  # of the rows that this rank gets

    def cut(self, rows: Tensor) -> list[Tensor]:
        """The piece of the rows that this rank sends, or of their numbers: views, to be concatenated."""
        return [rows] if self.parts is None else [rows[part] for part in self.parts] or [rows[:0]]


def send(pieces: list[Piece], gather: Callable[[Piece], object]) -> Arrival:
    """Sends an exchange piece by piece.

    Args:
        gather: queues the kernels that gather a piece.

    Returns:
        The arrival of the last piece, and with it of all; not begun.
    """
    *earlier, last = pieces
    for piece in earlier:
        gather(piece)
        piece.arrival.settle(awaited=False)  # then no rank is a piece ahead of what another one still fetches
    gather(last)
    return last.arrival


class RowSums(NamedTuple):
    """What precedes a backward: delta = rowsum(out * dout) - dlse, and zeros where sums are kept.

    out, dout: [T, Hq, Dv] of one dtype. delta: [T, Hq], float32 or wider. zeros: one or two, contiguous, of that dtype.
    dlse: like delta; None: zeros.
    """

    out: Tensor
    dout: Tensor
    delta: Tensor
    zeros: tuple[Tensor, ...]
    dlse: Tensor | None = None


class LeftGrads(NamedTuple):
    """What the stages of a backward have left, of which ``RowMover.finish`` makes gradients."""

    dq: Tensor  # [T, Hq, D], as the block attention left it
    dkv: KeysAndValues  # of at least T rows: sums, or dk and dv in `dtype`, which are changed
    shape: RowShape  # of k and v
    softmax_scale: float
    dtype: torch.dtype  # of the gradients


class Unsent(NamedTuple):
    """Gradients that ``RowMover.finish`` sends."""

    grad: KeysAndValues  # of the stage's rows: sums in float32, or K and V in the dtype in which they travel
    first: int  # the rows from this one on are sent
    places: Places


class Returned(NamedTuple):
    """Gradients of rows that come back from an exchange."""

    rows: Tensor  # [S, width]
    row_index: list[Tensor]  # RowMover.index of the exchange, on the device
    exchange: Exchange
    arrival: Arrival
    unsent: Unsent | None = None
