"""How tables come to a device, and for which of its streams they are kept."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor

import torchtitan_magi
from torchtitan_magi.cuda.tables import stream_of, uploaded

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)
PACKAGE = Path(torchtitan_magi.__file__).parent
PINS = {  # other files that copy without a wait: their memory is pinned, or a single number
    "cuda/tables.py",
    "attention/bound_plan.py",
    "training/activations/host_memory.py",
    "training/finite.py",
}


def test_what_goes_to_a_gpu_leaves_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    x, pinned, sent = torch.arange(3), torch.arange(3), []

    def to(x: Tensor, device: torch.device, non_blocking: bool) -> Tensor:
        sent.append((x, device, non_blocking))
        return x

    monkeypatch.setattr(Tensor, "pin_memory", lambda _: pinned)
    monkeypatch.setattr(Tensor, "to", to)
    assert uploaded(x, GPU) is pinned
    assert uploaded(x, CPU) is x
    assert uploaded(away := torch.empty(3, device="meta"), GPU) is away  # a tensor of torch's default device
    assert [each[1:] for each in sent] == [(GPU, True), (CPU, True), (GPU, True)]


def test_no_copy_that_shall_not_wait_leaves_from_other_memory() -> None:
    """Linear layers and ``dispatch`` copy tables in every microbatch, while the GPU has work."""
    copying = re.compile(r"non_blocking=True|from_numpy\(.*\.to\(")
    folders = (PACKAGE / name for name in ("attention", "backends", "cuda", "exchange", "linear", "training"))
    files = [path for folder in folders for path in folder.rglob("*.py") if "non_blocking=True" in path.read_text()]
    assert {path.relative_to(PACKAGE).as_posix() for path in files} == PINS
    assert not [path for path in (PACKAGE / "linear").rglob("*.py") if copying.search(path.read_text())]


def test_gpus_have_streams_and_the_cpu_has_none() -> None:
    stream = SimpleNamespace(cuda_stream=7)
    with mock.patch.object(torch.cuda, "current_stream", return_value=stream) as current:
        assert stream_of(GPU) == 7
        assert stream_of(CPU) == 0
    current.assert_called_once_with(GPU)
