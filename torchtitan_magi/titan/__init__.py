"""The adapter of the installed torchtitan; a TOML file names this module in ``[job] custom_config_module``.

Importing it raises ImportError, one line with the remedy, where no torchtitan is installed that has an adapter.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    found = f"torchtitan {version('torchtitan')} is installed"
except PackageNotFoundError:
    found = "torchtitan is not installed"
if found != "torchtitan 0.2.2 is installed":
    raise ImportError(f"{found}, torchtitan_magi needs 0.2.2: pip install torchtitan==0.2.2", name="torchtitan")

from torchtitan_magi.titan.v02 import JobConfig, Magi, VarlenAttentionWrapper

__all__ = ["JobConfig", "Magi", "VarlenAttentionWrapper"]
