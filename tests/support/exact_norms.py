"""Gradient norms that do not hide or feign a difference between layouts."""

from typing import Any

import torch


def exact_gradient_norms() -> None:
    """Makes torchtitan report norms summed in float64 on CPU, where torch sums float32 squares one after the other:
    the rounding errors of large tensors, up to 1e-4, would hide or feign a difference between layouts."""
    from torch.distributed.tensor import DTensor, Partial
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def clip_and_report_exactly(parameters, *args, **kwargs):  # type: ignore[no-untyped-def]
        parameters = list(parameters)
        if kwargs.get("pp_mesh") is not None:  # other ranks have more of them
            return clip(parameters, *args, **kwargs)
        squares: dict[Any, torch.Tensor] = {}  # by sharding: one sum over ranks for each
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                sharding = None
                if isinstance(gradient, DTensor):
                    gradient = gradient.redistribute(placements=parameter.placements)
                    sharding = gradient.device_mesh, gradient.placements
                    gradient = gradient.to_local()
                squares[sharding] = squares.get(sharding, 0) + gradient.double().square().sum()
        for sharding in filter(None, squares):
            parts = [placement if placement.is_replicate() else Partial() for placement in sharding[1]]
            squares[sharding] = DTensor.from_local(squares[sharding], sharding[0], parts).full_tensor()
        clip(parameters, *args, **kwargs)
        return torch.stack(list(squares.values())).sum().sqrt()

    if not torch.cuda.is_available():
        utils.clip_grad_norm_ = clip_and_report_exactly
