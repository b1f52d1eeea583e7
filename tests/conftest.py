"""Shared set-up of the tests."""

import importlib.metadata
import os
import tempfile

import hypothesis
import pytest
import torch
from support.workers import share_out_gpus

os.environ.setdefault("OMP_NUM_THREADS", "1")
share_out_gpus(os.environ)  # before anything asks for a GPU
if not torch.cuda.is_available():  # with GPUs, compiled kernels are kept from run to run
    CACHE = tempfile.TemporaryDirectory(prefix="magi-cache-")
    os.environ["TORCHTITAN_MAGI_CACHE"] = CACHE.name
torch.set_num_threads(1)
# Left out: the tests of the other torchtitan's adapter.
collect_ignore = ["titan_v02" if importlib.metadata.version("torchtitan").startswith("0.3.") else "titan_v03"]
hypothesis.settings.register_profile("default", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")


def pytest_collection_modifyitems(items):
    """What takes longest first: what several processes share out should end with short ones."""
    items.sort(
        key=lambda item: not {"training", "titan_v02", "titan_v03", "test_kernel_compile.py"} & {*item.path.parts}
    )


@pytest.fixture(scope="session")
def three_ranks():
    from support.pool import RankPool

    with RankPool(3) as pool:
        yield pool
