"""Varlen context parallelism for torchtitan: packed documents over the ranks of a context-parallel mesh."""

from torchtitan_magi.attention.api import clear_caches, cp_varlen_attn, flex_flash_attn
from torchtitan_magi.attention.dispatch import dispatch, undispatch
from torchtitan_magi.masks.builders import block_causal, shared_prompt, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import CostModel, Heads
from torchtitan_magi.planning.plan import AttnPlan, make_plan, make_plans

__all__ = [
    "AttnPlan",
    "AttnSlices",
    "CostModel",
    "Heads",
    "block_causal",
    "clear_caches",
    "cp_varlen_attn",
    "dispatch",
    "flex_flash_attn",
    "make_plan",
    "make_plans",
    "shared_prompt",
    "sliding_window",
    "undispatch",
    "varlen_causal",
    "varlen_full",
]
