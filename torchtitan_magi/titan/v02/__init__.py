"""The adapter of torchtitan 0.2.2. Importing it registers our train specs and installs our hooks."""

from torchtitan_magi.titan.v02.attention import VarlenAttentionWrapper
from torchtitan_magi.titan.v02.config import JobConfig
from torchtitan_magi.titan.v02.spec import register
from torchtitan_magi.training.settings.options import Magi

__all__ = ["JobConfig", "Magi", "VarlenAttentionWrapper"]

register()
