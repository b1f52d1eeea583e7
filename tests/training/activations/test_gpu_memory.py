"""What a run may take of GPUs whose memory others have a part of."""

import logging

import pytest
import torch

from torchtitan_magi.sizing.memory import GIB, Prediction
from torchtitan_magi.training.activations import gpu_memory
from torchtitan_magi.training.activations.decide import beyond_of_last
from torchtitan_magi.training.activations.gpu_memory import GpuMemory
from torchtitan_magi.training.memory_log import MeasuredMemory

from test_decide import SETUP  # isort: skip


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "share", "capacity", "taken"),
    [
        (79, 0, 0, 1.0, 80, 0),  # a context of this process's own
        (77, 0, 0, 1.0, 80, 0),  # and communicators
        (40, 0, 0, 1.0, 41.5, 38.5),  # another process
        (39, 40, 0, 1.0, 80, 0),  # memory that the allocator has free
        (39, 40, 36, 1.0, 44, 36),  # an engine in this process
        (79, 0, 0, 0.5, 40, 0),  # PYTORCH_ALLOC_CONF with per_process_memory_fraction
        (40, 0, 0, 0.5, 40, 38.5),  # beside another process, which leaves more
        (39, 40, 30, 0.5, 10, 30),
    ],
)
def test_what_others_have_and_what_pytorch_is_told_is_not_there(
    monkeypatch, free, reserved, allocated, share, capacity, taken
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: allocated * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda: share)
    assert gpu_memory.of_this_gpu() == GpuMemory(int(capacity * GIB), int(taken * GIB))


def test_all_ranks_take_the_least_and_say_whose_it_is(monkeypatch, caplog):
    monkeypatch.setattr(gpu_memory, "of_this_gpu", lambda: GpuMemory(80 * GIB))
    of_ranks = [GpuMemory(80 * GIB), GpuMemory(49 * GIB, 31 * GIB), GpuMemory(79 * GIB, GIB)]
    monkeypatch.setattr(gpu_memory, "gathered", lambda mine: of_ranks)
    assert gpu_memory.of_all_gpus() == GpuMemory(49 * GIB, 31 * GIB)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("31.0 GiB of the memory of rank 1's GPU were taken before the run, by other ")
    monkeypatch.setattr(gpu_memory, "gathered", lambda mine: [mine] * 3)
    assert gpu_memory.of_all_gpus() == GpuMemory(80 * GIB)
    assert len(caplog.records) == 1


def test_memory_of_others_does_not_correct_later_decisions(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    predicted = Prediction("a moment", {"parameters": 40 * GIB})
    measured = MeasuredMemory(SETUP, predicted, "cpu", tmp_path, GpuMemory(49 * GIB, 31 * GIB))
    measured._say_measured(39 * GIB, 40 * GIB, 33 * GIB, 0)
    assert " and 33.0 GiB outside it, of which 31.0 were taken before the run; predicted 40.0 in all" in caplog.text
    assert beyond_of_last(SETUP, tmp_path) == GIB
