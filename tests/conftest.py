"""Shared set-up of the tests."""

import importlib.metadata
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
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), *sorted({str(path.parent) for path in HERE.rglob("test_*.py")})]
# With torchtitan 0.3 these files, which are of the adapter of 0.2.2 or of its configuration, are left out.
OF_0_2_2 = ("titan.v02", "torchtitan.config import ConfigManager", "train_spec")
if importlib.metadata.version("torchtitan").startswith("0.3."):
    files = {path: path.read_text() for path in HERE.rglob("test_*.py") if path.parent.name != "titan_v03"}
    collect_ignore = [path for path, text in files.items() if any(word in text for word in OF_0_2_2)]
    # These compare with torchtitan's own loader, its numbers and its entry point, which are others in 0.3.
    collect_ignore += [HERE / "commands" / "test_training_commands.py", HERE / "training" / "test_training_numbers.py"]
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items):
    """What takes longest first: what several processes share out should end with short ones."""
    items.sort(key=lambda item: not item.path.name.startswith(("test_training", "test_kernel_compile")))


@pytest.fixture(scope="session")
def three_ranks():
    from support.pool import RankPool

    pool = RankPool(3)
    yield pool
    pool.close()
