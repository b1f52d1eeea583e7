"""Tensor parallelism of experts with exact gradients.

Each tensor-parallel rank computes a part of what an MoE layer returns, and the parts are added up. So in the backward
every gradient inside the layer is a part as well, of the input's gradient and of the router's; torchtitan 0.2.2 takes
some of these parts for the whole, and adds up others on the way. Here all are parts until they leave the layer: at its
input, and at the router's weight.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, distribute_module
from torch.distributed.tensor.parallel import PrepareModuleInputOutput
from torch.distributed.tensor.parallel.style import ParallelStyle
from torchtitan.distributed.expert_parallel import ExpertParallel, ExpertTensorParallel, TensorParallel


class LayerStyle(PrepareModuleInputOutput):
    """The layer's input whole on each rank as a plain tensor, its gradient the sum over ranks; the output a sum."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "use_local_input": False})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(lambda _, inputs: (inputs[0].to_local(grad_placements=[Partial()]),))
        return module


class GateStyle(ParallelStyle):
    """The router's linear layer whole on each rank, on plain tensors; its weight's gradient the sum over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def forward(x: Tensor) -> Tensor:
            return F.linear(x, module.weight.to_local(grad_placements=[Partial()]))

        module.forward = forward
        return distribute_module(module, device_mesh)


def prepare_input(style: TensorParallel, experts: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
    """Returns inputs as they are: torchtitan's own adds up the gradient of each token's copies over the ranks."""
    return inputs


def token_dispatch(style: ExpertTensorParallel, experts: nn.Module, inputs: Any, device_mesh: DeviceMesh) -> Any:
    """Sends tokens to their experts by the "ep" axis alone, for the same reason."""
    return ExpertParallel._token_dispatch(style, experts, inputs, device_mesh["ep"])
