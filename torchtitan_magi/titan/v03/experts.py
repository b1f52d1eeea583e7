"""Experts that compute in the precision that was asked for."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.moe import GroupedExperts


class MagiExperts(GroupedExperts):
    """torchtitan's experts, which compute in bfloat16 whatever arrives; in float32, one expert after the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """x_RD: rows by expert, and rows without one after them, whose result is 0."""
        if x_RD.dtype != torch.float32:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = local(self.w1_EFD, self.w2_EDF, self.w3_EFD)
        return by_expert(
            x_RD, num_tokens_per_expert_E, weights, lambda x, w1, w2, w3: (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
        )


def local(*weights: Tensor) -> list[Tensor]:
    """This rank's part of each."""
    return [w.to_local() if isinstance(w, DTensor) else w for w in weights]


def by_expert(x_RD: Tensor, counts_E: Tensor, weights: list[Tensor], run: Callable[..., Tensor]) -> Tensor:
    """run(rows of an expert, its slice of each of weights) for all of them, and 0 for rows without an expert."""
    counts = counts_E.tolist()
    *rows, others = x_RD.split([*counts, len(x_RD) - sum(counts)])
    outs = [run(x, *of_expert) for x, *of_expert in zip(rows, *weights, strict=True)]
    return torch.cat([*outs, torch.zeros_like(others)])
