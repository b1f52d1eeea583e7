"""What runs the gated delta rule over tokens: plain torch, or kernels. Layers call it in both directions.

Shapes: T tokens, HK heads of q and k, H value heads, K and V elements of a head, D sequences.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Tokens(NamedTuple):
    """The inputs of a layer: q, k [T, HK, K], v [T, H, V], g, beta [T, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def wide(self) -> torch.dtype:
        """The dtype of states: float32, or float64 if any input has it."""
        return torch.float64 if any(x.dtype == torch.float64 for x in self) else torch.float32

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[H, K, V], of a document's state."""
        return self.v.shape[1], self.k.shape[2], self.v.shape[2]

    def select(self, rows: Tensor) -> "Tokens":
        """Those of some rows."""
        return Tokens(*(x.index_select(0, rows) for x in self))


class Forward(Protocol):
    """A forward before the first states are known."""

    def maps(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The maps of the state of those sequences whose maps were asked for: S becomes matrix S + state.

        Returns:
            states [H, K, V] and matrices [H, K, K], n of each, of ``Tokens.wide`` or 16 bits.
        """

    def prepare(self, waiting: Collection[int]) -> None:
        """What waits for nobody, to be called while maps travel; where no states come it may be left out.

        Args:
            waiting: numbers of the sequences whose states ``finish`` will be given.
        """

    def finish(self, states: dict[int, Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs, and what the backward needs besides the inputs.

        Args:
            states: by number of sequence, [H, K, V] of ``Tokens.wide``: what it begins with; others with zeros.

        Returns:
            out [T, H, V] in the dtype of v, and what is kept.
        """


class Backward(Protocol):
    """A backward before the gradients of the last states are known."""

    def state_grads(self) -> Sequence[Tensor]:
        """Gradients of the first states of those sequences where they were asked for, if those of the last ones are
        zero: n of [H, K, V], of ``Tokens.wide``."""

    def prepare(self, waiting: Collection[int] = ()) -> None:
        """What waits for nobody, to be called while maps travel.

        Args:
            waiting: numbers of the sequences whose gradients ``finish`` will be given.
        """

    def finish(self, dends: dict[int, Tensor]) -> Tokens:
        """Gradients of the tokens, in their dtypes.

        Args:
            dends: by number of sequence, [H, K, V] of ``Tokens.wide``: the gradient of its last state; others have
                zeros.
        """


class Backend(Protocol):
    """The rule over sequences that lie one after another, each from its own state. Autograd tracks nothing of it."""

    def start(self, tokens: Tokens, lengths: Sequence[int], scale: float, mapped: Sequence[int] = ()) -> Forward:
        """Begins a forward.

        Args:
            tokens: of all sequences.
            lengths: tokens of each sequence; at least one sequence, and one token in each.
            scale: factor of out.
            mapped: numbers of the sequences whose maps will be asked for.
        """

    def start_backward(
        self, tokens: Tokens, lengths: Sequence[int], scale: float, states: dict[int, Tensor],
        kept: tuple[Tensor, ...], dout: Tensor, mapped: Sequence[int] = (),
    ) -> Backward:  # fmt: skip
        """Begins a backward.

        Args:
            tokens, lengths, scale: as in the forward.
            states: with which the forward was finished.
            kept: by the forward.
            dout: [T, H, V], in the dtype of v.
            mapped: numbers of the sequences the gradients of whose first states will be asked for.
        """

    def room(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """Zeros of the shapes and dtypes of what a forward keeps of these tokens; nothing is computed."""


def spread(states: dict[int, Tensor], zeros: Tensor) -> Tensor:
    """zeros [N, H, K, V] with the states [H, K, V] of some numbers, in place."""
    for number, state in states.items():
        zeros[number] = state
    return zeros
