"""Parts of the docs that are made from benchmarks/results/*.json: tables of figures. See write_docs.py."""

from collections.abc import Callable

PARTS: dict[str, Callable[[], str]] = {}
