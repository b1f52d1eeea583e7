"""The folder that a run writes to: it can be written, and one run at a time saves checkpoints there."""

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from torchtitan_magi.wording import quoted_path

logger = logging.getLogger(__name__)

LOCK = "run.lock"
HELD = (errno.EACCES, errno.EAGAIN)
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)

_locks: list[TextIO] = []  # held until this process ends, however it ends


def check_writable(folder: str) -> None:
    """Makes the folder.

    Raises:
        ValueError: it cannot be made or written; one line with the remedy.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError("Permission denied")
    except OSError as error:
        raise ValueError(
            f"job.dump_folder is {quoted_path(folder)}, which cannot be written ({error}); give a folder of your own"
        ) from None


def lock_folder(folder: str) -> None:
    """Keeps other runs from saving checkpoints in the folder while this process lives.

    The lock is the operating system's, on ``run.lock``: it ends with the process, so what a killed run has left there
    locks nothing. On shared folders it holds between machines where the file system has locks.

    Raises:
        ValueError: another run has it; one line that names that run and the remedy.
    """
    path = Path(folder) / LOCK
    try:
        file = path.open("a+")
    except OSError as error:
        raise ValueError(
            f"job.dump_folder is {quoted_path(folder)}, where {LOCK} cannot be written ({error}); give a folder "
            "of your own"
        ) from None
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            file.seek(0)
            raise ValueError(
                f"job.dump_folder is {quoted_path(folder)}, where another run is training ({file.read().strip()}); "
                "wait for its end, or give this run a folder of its own"
            ) from None
        if error.errno not in NO_LOCKS:
            raise ValueError(f"{path} cannot be locked ({error}); give job.dump_folder another folder") from None
        logger.warning(f"The file system of {folder} has no locks: see to it that no other run saves there")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    file.flush()
    _locks.append(file)
