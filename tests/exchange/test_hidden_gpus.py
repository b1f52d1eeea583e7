"""Ranks that each see their own GPU only: peer memory where the machine allows it, else NCCL, which a line says."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.cp_case import CASES_ON_GPUS, check, run_case
from support.gpus import needs_hopper, needs_two_gpus

from torchtitan_magi.exchange import hidden_gpus
from torchtitan_magi.exchange import peer_memory as peer
from torchtitan_magi.exchange.hidden_gpus import Trial


class Ranks:
    """Threads in place of ranks."""

    def __init__(self, size):
        self.size, self.barrier, self.given = size, threading.Barrier(size, timeout=60), [None] * size

    def gather(self, rank, mine):
        self.given[rank] = mine
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found

    def run(self, job):
        """job(rank) of all, by rank."""
        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(job, range(self.size)))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def try_it(monkeypatch, folder, size=3, *, mapped=None, allocate=torch.empty, processes=None):
    """What the ranks of a trial return. mapped: (rank, all ranks' memories) -> as the rank sees them."""
    ranks = Ranks(size)

    def run(rank):
        def share(memory):
            memories = ranks.gather(rank, memory)
            return memories if mapped is None else mapped(rank, memories)

        take = partial(allocate, dtype=torch.int32)
        trial = Trial(rank, partial(ranks.gather, rank), take, share)
        return trial.run()

    numbers = iter(processes or range(size))
    monkeypatch.setattr(hidden_gpus.os, "getpid", lambda: next(numbers))
    monkeypatch.setattr(hidden_gpus, "_WORDS", 4)
    found = ranks.run(run)
    assert not list(folder.iterdir())
    return found


@pytest.mark.parametrize("size", [2, 3, 8])
def test_memory_that_can_be_written_and_read_is_reached(monkeypatch, folder, size):
    assert try_it(monkeypatch, folder, size) == [""] * size


def test_memory_that_only_seems_to_be_mapped_is_found_out(monkeypatch, folder):
    """As where processes of two containers have the same number, and each gets its own memory for the other's."""
    found = try_it(monkeypatch, folder, mapped=lambda rank, memories: [memories[rank]] * 3)
    assert found == ["what they write there does not arrive"] * 3


def test_a_rank_that_cannot_map_memory_ends_the_trial_of_all(monkeypatch, folder):
    def mapped(rank, memories):
        if rank == 1:
            raise RuntimeError("CUDA driver error:\n invalid device ordinal")
        return memories

    assert try_it(monkeypatch, folder, mapped=mapped) == ["CUDA driver error: invalid device ordinal"] * 3


def test_a_rank_without_memory_ends_the_trial_of_all(monkeypatch, folder):
    calls = iter([False, True, False])

    def allocate(shape, dtype):
        if next(calls):
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(shape, dtype=dtype)

    assert try_it(monkeypatch, folder, allocate=allocate) == ["CUDA driver error: out of memory"] * 3


def never(rank, memories):
    raise AssertionError("torch would wait for ever")


def test_processes_of_containers_that_share_no_folder_are_not_waited_for(monkeypatch, folder):
    found = try_it(monkeypatch, folder, processes=[7, 7, 8], mapped=never)
    assert found == [f"their containers do not share {folder}"] * 3
    mark = Trial._mark
    monkeypatch.setattr(Trial, "_mark", lambda self, rank: mark(self, rank).with_suffix(f".{self.rank}"))
    found = try_it(monkeypatch, folder, mapped=never)
    assert found == [f"their containers do not share {folder}"] * 3


GPUS = ["gpu 0", "gpu 1"]


@pytest.mark.parametrize(
    ("seen", "machines", "access", "tried", "result"),
    [
        ([GPUS, GPUS], "aa", True, None, True),
        ([GPUS, GPUS], "aa", False, None, False),
        ([["gpu 0"], ["gpu 1"]], "aa", True, True, True),
        ([["gpu 0"], ["gpu 1"]], "aa", True, False, False),
        ([GPUS, ["gpu 1"]], "aa", True, True, True),
        ([GPUS, ["gpu 1"]], "aa", False, None, False),
        ([["gpu 0"], ["gpu 1"]], "ab", True, None, False),
    ],
)
def test_only_gpus_that_are_hidden_are_tried(monkeypatch, seen, machines, access, tried, result):
    ranks, here, trials = Ranks(2), threading.local(), []

    def gather(found, mine, group):
        found[:] = ranks.gather(here.rank, mine)

    def try_(group):
        trials.append(here.rank)
        return tried

    monkeypatch.setattr(dist, "all_gather_object", gather)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: seen[here.rank].index(GPUS[here.rank]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen[here.rank]))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(uuid=seen[here.rank][i]))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: access)
    monkeypatch.setattr(peer, "machine", lambda: machines[here.rank])
    monkeypatch.setattr(peer, "_has_stream_operations", lambda: True)
    monkeypatch.setattr(peer, "hidden_gpus_are_reached", try_)

    def run(rank):
        here.rank = rank
        return peer.can_reach_each_other("the group")

    assert ranks.run(run) == [result] * 2
    assert sorted(trials) == ([] if tried is None else [0, 1])


@pytest.mark.parametrize("problem", ["", "CUDA driver error: operation not supported"])
@pytest.mark.parametrize("given", [None, "0"])
def test_a_failure_is_a_line_with_the_remedy_and_the_cost(monkeypatch, caplog, problem, given):
    name = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
    monkeypatch.setenv(name, "") if given is None else monkeypatch.setenv(name, given)
    if given is None:
        monkeypatch.delenv(name)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(Trial, "__init__", lambda self, *args: None)
    monkeypatch.setattr(Trial, "run", lambda self: problem)
    caplog.set_level(logging.INFO)
    assert hidden_gpus.hidden_gpus_are_reached(None) == (not problem)
    assert os.environ.get(name) == (given if given or problem else "1")
    if not problem:
        assert not caplog.messages
        return
    (line,) = caplog.messages
    assert line.startswith(
        f"Ranks of this machine do not see each other's GPUs and cannot use their memory ({problem}),"
    )
    for words in ("--gpus-per-task", "RAY_EXPERIMENTAL_NOSET", "CUDA_VISIBLE_DEVICES"):
        assert words in line


# --------------------------------------------------------------------------------------------------------- on two GPUs


def main(rank, folder):
    """A rank: its results of all cases, and by what rows travelled."""
    from torchtitan_magi.exchange.mesh import process_group_transport

    logging.basicConfig()
    torch.cuda.set_device(0)
    assert torch.cuda.device_count() == 1
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    transport, results = process_group_transport(dist.group.WORLD), {}
    for written in (peer.WRITTEN_BYTES, 0):  # 0: all rows are fetched
        peer.WRITTEN_BYTES = written
        for name, case in CASES_ON_GPUS.items():
            found = run_case(case, 2, dist.group.WORLD, "cuda")
            results[name, written] = {key: value.cpu() for key, value in found.items()}
        if transport.way == "peer memory":
            transport.prepared.cache_clear()
    torch.save((results, transport.way), f"{folder}/{rank}")
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.alone(gpus=2)
@needs_hopper
@needs_two_gpus
@pytest.mark.parametrize("given", [{}, {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "0"}], ids=["tried", "refused"])
def test_ranks_that_each_see_one_gpu(given, tmp_path):
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here, here.parent, here.parents[1])))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", f"import test_hidden_gpus as t; t.main({rank}, {str(tmp_path)!r})"],
            env=os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": gpus[rank]} | given,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=600)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    print(*outputs, sep="\n")
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    (first, way), (second, other_way) = (torch.load(tmp_path / f"{rank}", weights_only=False) for rank in range(2))
    assert way == other_way == ("nccl" if given else "peer memory"), outputs
    assert ("so rows go by NCCL" in outputs[0]) == bool(given)
    assert len(first) == 2 * len(CASES_ON_GPUS)
    for name, written in first:
        check(CASES_ON_GPUS[name], [first[name, written], second[name, written]], "cuda")
