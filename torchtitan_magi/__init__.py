"""Varlen context parallelism for torchtitan: packed documents over the ranks of a context-parallel mesh."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchtitan_magi.attention.api import clear_caches, cp_varlen_attn, flex_flash_attn
    from torchtitan_magi.attention.dispatch import dispatch, undispatch
    from torchtitan_magi.linear.api import cp_causal_conv1d, cp_gated_delta_rule, gated_delta_rule
    from torchtitan_magi.masks.builders import (
        block_causal,
        shared_prompt,
        sliding_window,
        tree_causal,
        varlen_causal,
        varlen_full,
    )
    from torchtitan_magi.masks.slices import AttnSlices
    from torchtitan_magi.planning.cost_model import CostModel, Heads
    from torchtitan_magi.planning.plan import AttnPlan, make_plan, make_plans
    from torchtitan_magi.train import open_trainer

__all__ = [
    "AttnPlan",
    "AttnSlices",
    "CostModel",
    "Heads",
    "block_causal",
    "clear_caches",
    "cp_causal_conv1d",
    "cp_gated_delta_rule",
    "cp_varlen_attn",
    "dispatch",
    "flex_flash_attn",
    "gated_delta_rule",
    "make_plan",
    "make_plans",
    "open_trainer",
    "shared_prompt",
    "sliding_window",
    "tree_causal",
    "undispatch",
    "varlen_causal",
    "varlen_full",
]

_HOMES = (
    "masks.builders",
    "masks.slices",
    "planning.cost_model",
    "planning.plan",
    "attention.dispatch",
    "attention.api",
    "linear.api",
    "train",
)


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: a command that needs no torch starts without it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (importlib.import_module(f"{__name__}.{home}") for home in _HOMES)
    globals()[name] = value = next(getattr(home, name) for home in homes if hasattr(home, name))
    return value


def __dir__() -> list[str]:
    return __all__
