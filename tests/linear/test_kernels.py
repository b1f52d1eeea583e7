"""What kernels do not take is named; their results are checked on GPUs by test_kernels_gpu.py."""

import re
from unittest import mock

import pytest
import torch
from support.errors import one_line
from support.recurrence import layer_inputs

from torchtitan_magi.linear import kernels
from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.linear.choose import choose_backend
from torchtitan_magi.linear.chunked import Chunked


def tokens_of(dims=(128, 128), dtype=torch.bfloat16):
    *inputs, _ = layer_inputs(3, dims=dims, dtype=dtype)
    return Tokens(*inputs)


def check_on(capability, dims=(128, 128)):
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        kernels.check_kernels(tokens_of(dims))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cpus_run_plain_torch(dtype):
    assert isinstance(choose_backend(tokens_of(dtype=dtype)), Chunked)


def test_heads_gpus_and_packages_that_do_not_fit_are_named(monkeypatch):
    with one_line("q, k, v are torch.bfloat16 on a GPU, with heads of 128 and 64; the kernels take heads of 128"):
        check_on((9, 0), (128, 64))
    with one_line(re.escape("a GPU of compute capability 8.0; the kernels need 9.0 (Hopper) or later, give float32")):
        check_on((8, 0))
    missing = mock.Mock(side_effect=ImportError("none", name="flash_qla"))
    monkeypatch.setattr(kernels, "_library", missing)
    with one_line(re.escape("needs the package flash_qla; pip install torchtitan_magi[linear], or give float32")):
        check_on((9, 0))
    monkeypatch.setattr(kernels, "_library", lambda: None)
    monkeypatch.setattr(kernels, "_finds_compiler", lambda: False)
    with one_line(re.escape("nvcc compiles, which is not there; pip install torchtitan_magi[linear]")):
        check_on((9, 0))
    monkeypatch.setattr(kernels, "_finds_compiler", lambda: True)
    check_on((9, 0))
