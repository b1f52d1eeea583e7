"""How long the documents were that a run has trained on, over all its starts."""

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan_magi.files import read_text, write_whole
from torchtitan_magi.wording import one_line, shown

logger = logging.getLogger(__name__)

NAME = "trained_length"  # of the file in the folder of checkpoints


def trained_length(checkpointer: Any) -> int:
    """Rotary positions up to which the run has trained, also before it was resumed. A collective of all ranks.

    Args:
        checkpointer: torchtitan's CheckpointManager.
    """
    lengths: list[Any] = [getattr(checkpointer.states["dataloader"], "longest", 0)]
    if not dist.is_initialized() or dist.get_rank() == 0:
        lengths.append(_kept(Path(checkpointer.folder)))
    lengths = [max(lengths)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        mine, lengths = lengths[0], [None] * dist.get_world_size()
        dist.all_gather_object(lengths, mine)
    return max(lengths)


def keep_trained_length(checkpointer: Any, length: int) -> None:
    """Leaves it beside the checkpoints for later starts of the run. Does something on rank 0 only."""
    folder = Path(checkpointer.folder)
    if (dist.is_initialized() and dist.get_rank()) or length <= _kept(folder):
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)  # an asynchronous save may not have begun
        write_whole(folder / NAME, f"{length}\n".encode())
    except OSError as error:
        logger.warning(
            f"{shown(folder / NAME)} cannot be written ({one_line(error)}); an export of a later start may lack "
            f"{length}"
        )


def _kept(folder: Path) -> int:
    """0 where there is none, as in a folder of an earlier program."""
    try:
        return int(read_text(folder / NAME))
    except (OSError, ValueError):
        return 0
