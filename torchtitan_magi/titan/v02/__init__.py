"""torchtitan_magi for torchtitan 0.2.2: the only part that knows it.

Importing it registers everything; a TOML file does so by naming it in ``[job] custom_config_module`` and in
``[experimental] custom_import``.
"""

from torchtitan_magi.titan.v02.job_config import JobConfig, Magi
from torchtitan_magi.titan.v02.spec import register
from torchtitan_magi.titan.v02.wrapper import VarlenAttentionWrapper

__all__ = ["JobConfig", "Magi", "VarlenAttentionWrapper"]

register()
