"""The folders that a run writes to: they can be written, and one run at a time saves checkpoints there."""

import errno
import fcntl
import logging
import os
from pathlib import Path

from torchtitan_magi.files import NO_LOCKS, holder_of, open_lock, sign_lock
from torchtitan_magi.machine import cause, lack
from torchtitan_magi.wording import one_line, quoted_path, shown

logger = logging.getLogger(__name__)

LOCK = "run.lock"
HELD = (errno.EACCES, errno.EAGAIN)


def check_writable(folder: str, option: str = "job.dump_folder") -> None:
    """Makes the folder.

    Raises:
        ValueError: it cannot be made or written; one line with the remedy.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("Permission denied")
    except (OSError, ValueError) as error:  # ValueError: a NUL
        what = f"{option} is {quoted_path(folder)}"
        other = f"{what}, which cannot be written ({one_line(error)}); give a folder of your own"
        raise ValueError(lack(error, what, disk=True) or other) from None


def lock_folder(folder: str) -> None:
    """Keeps other runs from writing to the folder while this process lives.

    The lock is the operating system's, on ``run.lock``: it ends with the process, so what a killed run has left there
    locks nothing. On shared folders it holds between machines where the file system has locks.

    Raises:
        ValueError: another run has it; one line that names that run and the remedy.
    """
    _lock(Path(folder) / LOCK, "job.dump_folder", folder)


def lock_checkpoints(folder: str) -> None:
    """Locks the folder of checkpoints, which may be anywhere, and checks that it can be written.

    Its lock lies beside it, as torchtitan loads initial weights only while that folder is not there; and inside where
    nothing can be written beside it, or another disk begins.

    Raises:
        ValueError: as ``lock_folder``, or it cannot be written.
    """
    path, option = Path(os.path.realpath(folder)), "checkpoint.folder"
    if path.exists():
        check_writable(folder, option)
    is_inside = path.is_mount() or (path.exists() and not os.access(path.parent, os.W_OK))
    _lock(path / LOCK if is_inside else path.with_name(f"{path.name}.lock"), option, folder)


def _lock(path: Path, option: str, folder: str) -> None:
    """The file stays open until this process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(path)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise ValueError(
                    f"{option} is {quoted_path(folder)}, where another run is training ({holder_of(lock)}); wait for "
                    "its end, or give this run a folder of its own"
                ) from None
            if error.errno not in NO_LOCKS:
                raise
            logger.warning(f"The file system of {shown(folder)} has no locks: see to it that no other run saves there")
        sign_lock(lock, os.getpid())
    except OSError as error:
        raise ValueError(
            f"{option} is {quoted_path(folder)}, but its lock {shown(path)} cannot be written ({cause(error)}); "
            "make room there, or give another folder"
        ) from None
