"""Experts that compute in the precision that was asked for."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.moe import GroupedExperts

from torchtitan_magi.training.experts import by_expert, local


class MagiExperts(GroupedExperts):
    """torchtitan's experts, which compute in bfloat16 whatever arrives; in float32, one expert after the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """The experts' results of x_RD [rows, dim]: rows by expert, then rows without one, whose result is 0.

        Args:
            num_tokens_per_expert_E: int [experts].
        """
        if x_RD.dtype != torch.float32:
            return super().forward(x_RD, num_tokens_per_expert_E)
        weights = local(self.w1_EFD, self.w2_EDF, self.w3_EFD)
        return by_expert(
            x_RD, num_tokens_per_expert_E, weights, lambda x, w1, w2, w3: (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
        )
