"""torchtitan's configurations, made from others."""

from dataclasses import fields
from typing import Any


def copied(kind: Any, config: Any, **others: Any) -> Any:
    """A configuration of that kind with the values that another one, or a section of a TOML file, has of the same
    names, and others."""
    names = [option.name for option in fields(kind) if option.init and hasattr(config, option.name)]
    return kind(**{name: getattr(config, name) for name in names} | others)
