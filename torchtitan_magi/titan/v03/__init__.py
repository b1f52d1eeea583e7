"""The adapter of torchtitan 0.3. Importing it prepares torchtitan for a machine without an accelerator."""

from typing import Any

import torch

from torchtitan_magi.titan.v03.cpu import run_on_cpu
from torchtitan_magi.training.process.launcher import end_with_launcher
from torchtitan_magi.training.settings.options import Magi

__all__ = ["Magi", "llama3_debug", "qwen3_debug", "with_magi"]

end_with_launcher()
if not torch.accelerator.is_available():
    run_on_cpu()


def with_magi(config: Any, magi: Magi | None = None) -> Any:
    """A configuration of torchtitan's Trainer for ours, of a model that is served, with attention "flex".

    Args:
        magi: the [magi] options.
    """
    from torchtitan_magi.titan.v03 import config_registry  # torchtitan's Trainer is imported after run_on_cpu

    return config_registry.with_magi(config, magi)


def llama3_debug() -> Any:
    """For ``--module torchtitan_magi.titan --config llama3_debug``: torchtitan's debug model, with our attention."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return with_magi(llama3_debugmodel())


def qwen3_debug() -> Any:
    """The same for qwen3."""
    from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

    return with_magi(qwen3_debugmodel())
