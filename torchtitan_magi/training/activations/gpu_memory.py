"""What a run may take of the memory of its GPUs, which others may have taken part of before it."""

import logging
from dataclasses import dataclass

import torch

from torchtitan_magi.sizing.memory import CUDA_AND_NCCL, GIB
from torchtitan_magi.training.process.all_ranks import gathered

logger = logging.getLogger(__name__)

LITTLE = 2 * GIB  # of others, or of communicators that are many: the margin of a decision holds it


@dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU, in bytes.

    Attributes:
        capacity: what a run may take.
        taken: what others had before it: other processes, or whoever else is in this one.
    """

    capacity: int
    taken: int = 0


def of_this_gpu() -> GpuMemory:
    """Memory of this process's GPU, before its model is there. PyTorch may take less than others leave: by
    per_process_memory_fraction of PYTORCH_ALLOC_CONF."""
    (free, total), allocated = torch.cuda.mem_get_info(), torch.cuda.memory_allocated()
    taken = allocated + max(0, total - free - torch.cuda.memory_reserved() - CUDA_AND_NCCL)
    taken = taken if taken > LITTLE else 0
    told = int(torch.cuda.get_per_process_memory_fraction() * total) - allocated
    return GpuMemory(min(told, total - taken), taken)


def of_all_gpus() -> GpuMemory:
    """The least that any rank's GPU has, and the most that others have of one, of which a warning says where. A
    collective of all ranks, before their model is there."""
    memories = gathered(of_this_gpu())
    rank = max(range(len(memories)), key=lambda each: memories[each].taken)
    least, most = min(memory.capacity for memory in memories), memories[rank].taken
    if most:
        logger.warning(
            f"{most / GIB:.1f} GiB of the memory of rank {rank}'s GPU were taken before the run, by other processes or "
            f"other parts of this one, which leave it {least / GIB:.1f} GiB; end what should not be there"
        )
    return GpuMemory(least, most)
