"""Multi-head latent attention between nodes: narrow latent rows travel, and become K and V where they arrive.

Shapes: n rows, H heads, D head_dim of q and k, Dv of v, R width of the latent vector, P rotated columns of k, which all
heads share (arXiv 2405.04434).

    k = [latent Wk, rotated], v = latent Wv

A row has R + P elements in place of H (D + Dv): 576 for 40,960 in DeepSeek V3. A rank's own K and V are the model's.
The gradient of the weights here is that of rows which arrived; the model's own, and all ranks', are added to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.exchange.in_flight import KeysAndValues, RowShape, keys_and_values
from torchtitan_magi.products import add_product


class Latents(NamedTuple):
    """What K and V of one layer come from."""

    rows: Tensor  # [T, R + P]: the latent vector, and the rotated columns of k
    weight: Tensor  # [H (D - P + Dv), R]: by head its rows of Wk, then of Wv; the dtype of `rows`

    @property
    def travelling(self) -> tuple[Tensor, Tensor]:
        """The two parts of the rows as K and V of one head: [T, 1, R] and [T, 1, P]."""
        rank = self.weight.shape[1]
        return self.rows[:, None, :rank], self.rows[:, None, rank:]

    def expand(self, latent: Tensor, rotated: Tensor, shape: RowShape) -> tuple[Tensor, Tensor]:
        """K [n, H, D] and V [n, H, Dv] of rows that have arrived, [n, 1, R] and [n, 1, P]; shape: of k and v."""
        both = (latent[:, 0] @ self.weight.T).unflatten(1, (shape.num_heads, -1))
        plain, v = both.split([shape.head_dim - rotated.shape[2], shape.value_dim], 2)
        return torch.cat([plain, rotated.expand(-1, shape.num_heads, -1)], 2), v

    def reduce(self, latent: Tensor, dkv: KeysAndValues, shape: RowShape, drows: Tensor, dweight: Tensor) -> None:
        """The reverse of ``expand``.

        Args:
            dkv: gradients of its results, the dtype of `rows`.
            drows: [n, R + P], gets the gradients of the rows.
            dweight: like `weight`, float32 or wider; the weight's gradient is added to it.
        """
        rank = self.weight.shape[1]
        dk, dv = keys_and_values(dkv, shape)
        plain, rotated = dk.split([shape.head_dim - (drows.shape[1] - rank), drows.shape[1] - rank], 2)
        both = torch.cat([plain, dv], 2).flatten(1)
        drows[:, :rank] = both @ self.weight
        drows[:, rank:] = rotated.sum(1, dtype=dweight.dtype)
        add_product(dweight, both.T, latent[:, 0])
