"""Whether ranks of one machine reach each other's memory although a rank does not see all of their GPUs.

Launchers hide GPUs (Slurm's ``--gpus-per-task``, Ray). The driver tells nothing of a GPU that it hides, but maps memory
of it all the same where the machine allows that. So the ranks try: they map a little of each other's memory by torch's
symmetric memory, write to it and read it.
"""

import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.exchange.transport import gathered
from torchtitan_magi.wording import one_line, shown

logger = logging.getLogger(__name__)

# torch refuses ranks whose devices have the same number, as they do where each rank sees one; it takes no multicast.
_SAME_NUMBERS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # where torch looks for the folder of its sockets, in this order
_WORDS = 1 << 16  # that a rank writes in each way
_PATIENCE = timedelta(seconds=60)  # with a rank that fails while the others wait for it


def hidden_gpus_are_reached(group: dist.ProcessGroup) -> bool:
    """Tries it, and warns if not. A collective of an NCCL group in one machine, with one result on all ranks."""
    is_given = _SAME_NUMBERS in os.environ
    os.environ.setdefault(_SAME_NUMBERS, "1")  # and it stays, as memory that grows is mapped anew
    problem = Trial(dist.get_rank(group), functools.partial(gathered, group=group), _memory, _mapped_in(group)).run()
    if problem and not is_given:
        del os.environ[_SAME_NUMBERS]
    if problem and dist.get_rank(group) == 0:
        logger.warning(
            f"Ranks of this machine do not see each other's GPUs and cannot use their memory ({problem}), so rows go "
            "by NCCL, with which attention takes up to 1.4 times as long; let every rank see all GPUs of its machine: "
            "srun --gpus-per-node and --gpu-bind=none instead of --gpus-per-task, "
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1 in Ray, or CUDA_VISIBLE_DEVICES with all of them"
        )
    return not problem


class Trial:
    """The steps on one rank. After each of them all ranks hear whether it failed on one, so they go on or end together.

    Args:
        gather: what each rank gives, by rank. A collective.
        allocate: memory of a shape, int32, that can be mapped.
        mapped: this rank's memory -> the memory of each rank. A collective.
    """

    def __init__(
        self,
        rank: int,
        gather: Callable[[Any], list[Any]],
        allocate: Callable[[tuple[int, ...]], Tensor],
        mapped: Callable[[Tensor], list[Tensor]],
    ) -> None:
        self.rank, self.gather, self.allocate, self.mapped = rank, gather, allocate, mapped
        self.folder = Path(next((os.environ[name] for name in _TEMPORARY if name in os.environ), "/tmp"))
        found = gather((os.getpid(), secrets.randbits(30)))
        self.processes, self.number = [process for process, _ in found], found[0][1]

    def run(self) -> str:
        """Why it failed; empty if it did not. The same on all ranks."""
        try:
            for step in (self._leave_mark, self._find_marks, self._take_memory, self._map, self._write, self._read):
                problems = [problem for problem in self.gather(_problem_of(step)) if problem]
                if problems:
                    return str(problems[0])
            return ""
        finally:
            with contextlib.suppress(OSError):
                self._mark(self.rank).unlink()

    def _mark(self, rank: int) -> Path:
        return self.folder / f"torchtitan_magi-{self.number}-{self.processes[rank]}"

    def _leave_mark(self) -> None:
        self._mark(self.rank).touch()

    def _find_marks(self) -> None:
        """Torch hands memory over by sockets in this folder, named by processes, and would wait for one for ever."""
        ranks = range(len(self.processes))
        if len(set(self.processes)) < len(ranks) or not all(self._mark(rank).exists() for rank in ranks):
            raise RuntimeError(f"their containers do not share {shown(self.folder)}")

    def _take_memory(self) -> None:
        self.own = self.allocate((2, len(self.processes), _WORDS))  # way of writing, rank that writes, words
        self.own.zero_()
        _synchronize(self.own)

    def _map(self) -> None:
        self.memories = self.mapped(self.own)

    def _write(self) -> None:
        words = torch.full_like(self.own[0, self.rank], self._word(self.rank))
        for memory in self.memories:
            memory[0, self.rank].fill_(self._word(self.rank))  # by a kernel
            memory[1, self.rank].copy_(words)  # by the driver
        _synchronize(self.own)

    def _read(self) -> None:
        for memory in [self.own, *self.memories]:
            found = memory.clone()
            if not all(bool((found[:, rank] == self._word(rank)).all()) for rank in range(len(self.processes))):
                raise RuntimeError("what they write there does not arrive")

    def _word(self, rank: int) -> int:
        return self.number + rank


def _problem_of(step: Callable[[], None]) -> str:
    try:
        step()
    except (RuntimeError, OSError) as error:
        return one_line(error) or type(error).__name__
    return ""


def _synchronize(memory: Tensor) -> None:
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)


def _memory(shape: tuple[int, ...]) -> Tensor:
    from torch._C._distributed_c10d import _SymmetricMemory

    strides = torch.empty(shape, device="meta").stride()
    device = torch.device("cuda", torch.cuda.current_device())
    memory: Tensor = _SymmetricMemory.empty_strided_p2p(shape, strides, torch.int32, device)
    return memory


def _mapped_in(group: dist.ProcessGroup) -> Callable[[Tensor], list[Tensor]]:
    from torch._C._distributed_c10d import _SymmetricMemory

    def mapped(memory: Tensor) -> list[Tensor]:
        with _little_patience(group):
            handle = _SymmetricMemory.rendezvous(memory, group.group_name)
        return [handle.get_buffer(rank, memory.shape, memory.dtype) for rank in range(dist.get_world_size(group))]

    return mapped


@contextlib.contextmanager
def _little_patience(group: dist.ProcessGroup) -> Iterator[None]:
    """Lets waits in the group's store end after _PATIENCE."""
    store = group.get_group_store()
    before = store.timeout
    store.set_timeout(_PATIENCE)
    try:
        yield
    finally:
        store.set_timeout(before)
