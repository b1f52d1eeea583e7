"""Stands in for flash-linear-attention, whose kernels torchtitan 0.3's Qwen3.5 imports and we do not call."""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

FLA = {  # what is imported
    "fla.modules.conv.triton.ops": ("CausalConv1dFunction",),
    "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"),
    "fla.ops.gated_delta_rule.chunk": ("ChunkGatedDeltaRuleFunction",),
    "fla.ops.gated_delta_rule.fused_recurrent": ("FusedRecurrentFunction",),
}


@contextmanager
def fla_stands_in() -> Iterator[None]:
    """Modules by the names of flash-linear-attention while it lasts, where it is not installed."""
    modules: dict[str, ModuleType] = {}
    if importlib.util.find_spec("fla") is None:
        for path, names in FLA.items():
            parts = path.split(".")
            for package in (".".join(parts[: length + 1]) for length in range(len(parts))):
                modules.setdefault(package, ModuleType(package))
            vars(modules[path]).update({name: type(name, (torch.autograd.Function,), {}) for name in names})
    sys.modules.update(modules)
    try:
        yield
    finally:
        for package in modules:
            del sys.modules[package]
