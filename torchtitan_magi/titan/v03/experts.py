"""Experts that compute in the precision that was asked for, and are read and written under HSDP."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.utils import MoEStateDictAdapter

from torchtitan_magi.models.model_config import Experts
from torchtitan_magi.training.experts import (
    by_expert,
    check_expert_degree,
    check_files_of_experts,
    local,
    own_experts,
)

_stock = MoEStateDictAdapter._caculate_indices_from_placements
MoEStateDictAdapter._caculate_indices_from_placements = lambda adapter, **axes: own_experts(_stock, adapter, **axes)


def check_experts(job_config: Any, dims: Any, experts: Experts | None) -> None:
    """Checks whether the model's experts can be spread as the configuration says.

    Args:
        dims: torchtitan's ``ParallelDims``.
        experts: None for a dense model.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    check_expert_degree(dims.ep, experts, job_config.model.flavor)
    if experts is None or job_config.model.name == "gpt_oss":  # whose files have all experts of a layer in one tensor
        return
    ranks = dims.dp_shard * dims.cp * (dims.tp if dims.ep > 1 else 1)
    if ranks <= experts.num_experts:  # else FSDP shards each expert's rows
        check_files_of_experts(job_config.checkpoint, experts.num_experts, ranks)


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
