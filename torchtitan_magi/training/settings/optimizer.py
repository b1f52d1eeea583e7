"""Checks of the section [optimizer]."""

from collections.abc import Iterable
from typing import Any

import torch

from torchtitan_magi.training.settings.values import check_number


def check_groups(groups: Iterable[Any]) -> None:
    """Checks the numbers of torchtitan 0.3's groups of parameters, which may come from a program.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    for group in groups:
        options = dict(group.optimizer_kwargs)
        options |= dict(zip(("beta1", "beta2"), options.pop("betas", ()), strict=False))
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay"):
            if name in options:
                check_number(f"optimizer.{name}", options[name])


def learning_rates(section: Any) -> set[float]:
    """Those of [optimizer], or of torchtitan 0.3's groups of parameters; a group without one is left out."""
    if not hasattr(section, "param_groups"):
        return {section.lr}
    return {group.optimizer_kwargs["lr"] for group in section.param_groups if "lr" in group.optimizer_kwargs}


def check_states(implementation: str, training: Any, device_type: str) -> None:
    """Checks that the optimizer takes the states which an implementation of it makes. Of 16 bits beside weights of 32
    they are for GPUs, and not in every torch.

    Args:
        implementation: of [optimizer].
        training: the section.
        device_type: that of torchtitan's tools.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    if implementation != "fused_opt_states_bf16":
        return
    device = "cpu" if training.enable_cpu_offload else device_type
    weight = torch.nn.Parameter(torch.ones(1, dtype=getattr(torch, training.dtype), device=device))
    moments = {name: torch.zeros(1, dtype=torch.bfloat16, device=device) for name in ("exp_avg", "exp_avg_sq")}
    weight.grad, optimizer = torch.ones_like(weight), torch.optim.AdamW([weight], fused=True)
    optimizer.state[weight] = {"step": torch.zeros((), device=device), **moments}
    try:
        optimizer.step()
    except RuntimeError:
        where = "the CPU, where the optimizer runs" if device == "cpu" else "GPUs"
        raise ValueError(
            f'optimizer.implementation is "{implementation}", which torch {torch.__version__} does not have on '
            f'{where}; set it to "fused"'
        ) from None
