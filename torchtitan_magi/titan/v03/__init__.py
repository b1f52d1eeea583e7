"""The adapter of torchtitan 0.3. Importing it installs our hooks."""

from torchtitan_magi.titan.v03 import hooks
from torchtitan_magi.training.process.launcher import end_with_launcher
from torchtitan_magi.training.settings.options import Magi

__all__ = ["Magi", "llama3_debug", "qwen3_debug", "with_magi"]

end_with_launcher()
hooks.install()

from torchtitan_magi.titan.v03.config_registry import llama3_debug, qwen3_debug, with_magi  # noqa: E402  hooks are first
