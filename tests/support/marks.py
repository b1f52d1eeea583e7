"""Marks of parametrized tests."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def marked_long(names: Iterable[str], long: Collection[str]) -> list[Any]:
    """Parameters of which some are marked ``long``: layouts whose parts others have, too."""
    return [pytest.param(name, marks=pytest.mark.long if name in long else ()) for name in names]
