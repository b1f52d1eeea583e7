"""Experts that compute in the precision that was asked for."""

from dataclasses import dataclass, fields
from typing import Any

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
        weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        local = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        counts = num_tokens_per_expert_E.tolist()
        *rows, others = x_RD.split([*counts, len(x_RD) - sum(counts)])
        outs = [(F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T for x, w1, w2, w3 in zip(rows, *local, strict=True)]
        return torch.cat([*outs, torch.zeros_like(others)])


def use_our_experts(model: Any) -> None:
    """Replaces torchtitan's in a model's configuration."""
    for _, config, parent, name in list(model.traverse(GroupedExperts.Config)):
        values = {option.name: getattr(config, option.name) for option in fields(config) if option.init}
        setattr(parent, name, MagiExperts.Config(**values))
