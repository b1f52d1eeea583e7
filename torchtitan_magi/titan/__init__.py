"""The adapters of torchtitan; a TOML file names this module in ``[job] custom_config_module``."""

from torchtitan_magi.titan.v02 import JobConfig, Magi, VarlenAttentionWrapper

__all__ = ["JobConfig", "Magi", "VarlenAttentionWrapper"]
