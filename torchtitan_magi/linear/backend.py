"""What runs the gated delta rule over tokens: plain torch, or kernels. Layers call it in both directions.

Shapes: T tokens, HK heads of q and k, H value heads, K and V elements of a head, D sequences.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

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


class Backend(Protocol):
    """The rule over sequences that lie one after another, each from its own state. Autograd tracks nothing of it."""

    def forward(
        self, tokens: Tokens, lengths: Sequence[int], scale: float, states: Tensor | None = None, with_out: bool = True
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Outputs, last states, and what ``backward`` needs besides the inputs.

        Args:
            tokens: of all sequences.
            lengths: tokens of each sequence; at least one sequence, and one token in each.
            scale: factor of out.
            states: [D, H, K, V], of ``tokens.wide``: what each begins with; None: zeros.
            with_out: whether to compute out; else it is empty, and nothing is kept.

        Returns:
            out [T, H, V] of any dtype, the last states [D, H, K, V] of ``tokens.wide``, and tensors with a row for each
            token, which depend on its own sequence only: a backward may have the sequences in other batches.
        """

    def backward(
        self, tokens: Tokens, lengths: Sequence[int], scale: float, states: Tensor | None, kept: tuple[Tensor, ...],
        dout: Tensor, dends: Tensor | None = None, with_tokens: bool = True,
    ) -> tuple[Tokens | None, Tensor | None]:  # fmt: skip
        """Gradients of the tokens, in their dtypes, and of the first states, [D, H, K, V] of ``tokens.wide``.

        Args:
            tokens, lengths, scale, states: as in the forward.
            kept: rows that the forward kept of these tokens.
            dout: [T, H, V], in the dtype of v.
            dends: [D, H, K, V], of ``tokens.wide``: gradients of the last states; None: zeros.
            with_tokens: whether to compute the gradients of the tokens; else they are None.

        Returns:
            both; that of the states is None where these are.
        """

    def room(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """Zeros [T, ...] of the shapes and dtypes of what ``forward`` keeps of these tokens; nothing is computed."""


def own_dtypes(device: torch.device) -> AbstractContextManager[Any]:
    """Within it products have the dtype of their factors: autocast would make 16 bits of states."""
    return torch.autocast(device.type, enabled=False)
