"""Tests of the adapter of torchtitan 0.3."""

import importlib.metadata
from pathlib import Path

import pytest

TITAN = importlib.metadata.version("torchtitan")


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(
        reason=f"torchtitan {TITAN} is installed, not 0.3 (TITAN=0.3 ./scripts/test.sh tests/titan_v03)"
    )
    for item in items:
        if Path(__file__).parent in item.path.parents and not TITAN.startswith("0.3."):
            item.add_marker(skip)
