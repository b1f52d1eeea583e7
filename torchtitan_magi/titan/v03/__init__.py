"""The adapter of torchtitan 0.3."""

import torch

from torchtitan_magi.titan.v03.attention import varlen
from torchtitan_magi.titan.v03.cpu import run_on_cpu
from torchtitan_magi.training.launcher import end_with_launcher
from torchtitan_magi.training.options import Magi

__all__ = ["Magi", "varlen"]

end_with_launcher()
if not torch.accelerator.is_available():
    run_on_cpu()
