"""torchtitan on a machine without an accelerator; see ``training.cpu``. Experts need more than that here."""

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components import metrics
from torchtitan.distributed import parallel_dims
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.moe import kernels, moe
from torchtitan.models.moe import utils as moe_utils
from torchtitan.tools import profiling, utils

from torchtitan_magi.training.process.cpu import reduce_by_plain_sums, use_cpu


def run_on_cpu() -> None:
    """Makes torchtitan use the CPU. Call it before the Trainer is built."""
    use_cpu((utils, dist_utils, parallel_dims, metrics, profiling), metrics)
    moe.torch = _TorchOfExperts("torch")
    moe_utils.generate_permute_indices = partial(kernels.generate_permute_indices, use_cpu=True)


def prepare_model(model: nn.Module) -> None:
    """Leaves out of a parallelized model what a CPU does not have."""
    reduce_by_plain_sums(model)
    for module in model.modules():
        if isinstance(module, moe.GroupedExperts):
            module.use_grouped_mm = False


class _TorchOfExperts(ModuleType):
    """Stands in for torch where experts count their tokens: torch's histc takes integers on CUDA only."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def histc(x: Tensor, bins: int, min: int, max: int) -> Tensor:
        """How often each of 0 .. bins - 1 is among the integers x [n]; int64 [bins]."""
        return x.new_zeros(bins).index_add_(0, x, torch.ones_like(x))
