"""Refuses second derivatives: a layer's backward has exchanges of its own, through which no graph leads."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def once(backward: Backward) -> Backward:
    """A backward that raises RuntimeError where a graph of it is asked for, in place of leaving its part out."""

    @functools.wraps(backward)
    def checked(ctx: Any, *douts: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("linear attention has no second derivatives; take its gradients without create_graph")
        return backward(ctx, *douts)

    return checked
