"""How an adapter's hooks replace what torchtitan calls by name."""

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Puts a replacement in place of a function of torchtitan's, which it gets as its first argument.

    Args:
        owner: the module or class that has the function by that name.
    """
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(stock, *args, **kwargs)

    setattr(owner, name, call)
