"""Shared set-up of the tests."""

import os
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not torch.cuda.is_available():  # with GPUs, compiled kernels are kept from run to run
    CACHE = tempfile.TemporaryDirectory(prefix="magi-cache-")
    os.environ["TORCHTITAN_MAGI_CACHE"] = CACHE.name
torch.set_num_threads(1)
sys.path.insert(0, str(Path(__file__).parent))
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items):
    """Runs of the trainer first: they take longest, and what several processes share out should end with short ones."""
    items.sort(key=lambda item: not item.path.name.startswith("test_training"))


@pytest.fixture(scope="session")
def three_ranks():
    from pool import RankPool

    pool = RankPool(3)
    yield pool
    pool.close()
