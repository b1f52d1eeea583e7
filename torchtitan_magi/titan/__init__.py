"""The adapter of the installed torchtitan; a TOML file names this module in ``[job] custom_config_module``.

Importing it raises ImportError, one line with the remedy, where no torchtitan is installed that has an adapter.
"""

import importlib

from torchtitan_magi.machine import version_of

ADAPTERS = {"0.3": "v03", "0.2.2": "v02"}  # version, or its beginning -> folder

installed = version_of("torchtitan")
folder = ADAPTERS.get(installed) or ADAPTERS.get(installed.rpartition(".")[0])
if folder is None:
    found = f"torchtitan {installed} is installed" if installed else "torchtitan is not installed"
    raise ImportError(f"{found}, torchtitan_magi needs 0.3 or 0.2.2: pip install torchtitan==0.3.0", name="torchtitan")

adapter = importlib.import_module(f"torchtitan_magi.titan.{folder}")
__all__ = list(adapter.__all__)
globals().update({name: getattr(adapter, name) for name in __all__})
