"""Parts of the docs that are made from the code: options, commands, functions. See write_docs.py."""

from collections.abc import Callable

PARTS: dict[str, Callable[[], str]] = {}
