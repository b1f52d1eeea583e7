"""Rotary positions that torchtitan 0.3 has not, of several families."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common import CosSinRoPE


class LinearRoPE(CosSinRoPE):
    """Rotary positions of which every frequency is divided by a factor."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        pass

    def _precompute_cache(self) -> Tensor:
        config = self.config
        inv_freq = 1.0 / (config.theta ** (torch.arange(0, config.dim, 2).float() / config.dim)) / config.rope_factor
        angles = torch.outer(torch.arange(config.max_seq_len).float(), inv_freq)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.cat([angles.cos(), angles.sin()], dim=-1)


class YarnRoPE(CosSinRoPE):
    """Rotary positions whose rotated elements are scaled, as YaRN has it; those that are not rotated are not."""

    @dataclass(kw_only=True, slots=True)
    class Config(CosSinRoPE.Config):
        attention_factor: float = 1.0

    def _precompute_cache(self) -> Tensor:
        config: Any = self.config
        return config.attention_factor * super()._precompute_cache()
