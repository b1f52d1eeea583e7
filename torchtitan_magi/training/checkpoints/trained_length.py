"""How long the documents were that a run has trained on, over all its starts."""

import logging
from pathlib import Path
from typing import Any

from torchtitan_magi.files import read_text, write_whole
from torchtitan_magi.training.process.all_ranks import gathered, is_first_rank
from torchtitan_magi.wording import one_line, shown

logger = logging.getLogger(__name__)

NAME = "trained_length"  # of the file in the folder of checkpoints


def trained_length(checkpointer: Any) -> int:
    """Rotary positions up to which the run has trained, also before it was resumed. A collective of all ranks.

    Args:
        checkpointer: torchtitan's CheckpointManager.
    """
    longest = getattr(checkpointer.states["dataloader"], "longest", 0)
    return max(gathered(max(longest, _kept(Path(checkpointer.folder)) if is_first_rank() else 0)))


def keep_trained_length(checkpointer: Any, length: int) -> None:
    """Leaves it beside the checkpoints for later starts of the run. Does something on rank 0 only."""
    folder = Path(checkpointer.folder)
    if not is_first_rank() or length <= _kept(folder):
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
    """The length kept in a folder; 0 where there is none, as in one of an earlier version."""
    try:
        return int(read_text(folder / NAME))
    except (OSError, ValueError):
        return 0
