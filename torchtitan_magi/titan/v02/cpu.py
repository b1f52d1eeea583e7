"""Models of torchtitan 0.2.2 on a machine without an accelerator; see ``training.process.cpu``."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts


def prepare_model(model: nn.Module) -> None:
    """Fits a parallelized model to a CPU, which has no grouped matrix product."""
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False


class TorchOfExperts(ModuleType):
    """Stands in for torch where experts count their tokens: torch's histc takes integers on CUDA only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def histc(x: Tensor, bins: int, min: int, max: int) -> Tensor:
        """How often each of 0 .. bins - 1 is among the integers x [n]; int64 [bins]."""
        return x.new_zeros(bins).index_add_(0, x, torch.ones_like(x))
