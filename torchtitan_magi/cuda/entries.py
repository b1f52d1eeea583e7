"""The folder of compiled kernels: no machine code is loaded from it that another user could have written.

Folder and entries must belong to the user or to root, and nobody else may write to them. All names are looked up in the
open folder, so it cannot be exchanged after the check, and no symbolic link in it is followed.
"""

import contextlib
import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from torchtitan_magi.files import open_lock, take_lock, write_whole
from torchtitan_magi.wording import shown

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32
PATIENCE = 60.0  # seconds; compiling takes a few
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Descriptor of the folder, which is made, for this user alone, if it is not there.

    Raises:
        OSError: it cannot be made or opened.
        ValueError: another user could write to it.
    """
    _make_private(path)
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if reason := others_can_write(os.fstat(folder)):
            raise ValueError(
                f"kernels are not loaded from {shown(path)}, as it {reason}; run chmod 700 on it if it is yours "
                "alone, or set TORCHTITAN_MAGI_CACHE to a folder of your own"
            )
        yield folder
    finally:
        os.close(folder)


def _make_private(path: Path) -> None:
    if not path.exists():
        _make_private(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def others_can_write(status: os.stat_result) -> str:
    """Why another user than root could write to a file or folder; empty if none could."""
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written to by other users (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def read_entry(folder: int, name: str) -> bytes | None:
    """The machine code of an entry; None if there is none, it is damaged, or another user could have written it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe is not waited for
    try:
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or others_can_write(status):
                return None
            data = file.read()
    except OSError:
        return None
    code = data[DIGEST_BYTES:]
    return code if code and hashlib.sha256(code).digest() == data[:DIGEST_BYTES] else None


def write_entry(folder: int, name: str, code: bytes) -> None:
    """Keeps machine code for other processes. On a full disk it is only used by this one, which is logged."""
    try:
        write_whole(name, hashlib.sha256(code).digest() + code, 0o600, folder)
    except OSError as error:
        if error.errno not in FULL:
            raise
        logger.warning(
            f"{name} is not kept in {shown(os.readlink(f'/proc/self/fd/{folder}'))} ({error.strerror}) and is "
            "compiled again by every process; make room there, or set TORCHTITAN_MAGI_CACHE to another folder"
        )


@contextlib.contextmanager
def locked(folder: int, name: str) -> Iterator[None]:
    """Waits while another process holds the lock, but not for long: one that was stopped must not stop all others.

    The lock spares work; entries are whole without it. So it may be missing where the disk is full.
    """
    try:
        lock = open_lock(name, 0o600, folder)
    except OSError as error:
        if error.errno not in FULL:
            raise
        yield
        return
    try:
        _wait(lock, name)
        yield
    finally:
        os.close(lock)


def _wait(lock: int, name: str) -> None:
    """Takes the lock and leaves the process's id in it, or names its holder after PATIENCE seconds."""
    start = time.monotonic()
    while True:
        try:
            take_lock(lock)
            return
        except BlockingIOError as holder:
            if time.monotonic() - start > PATIENCE:
                logger.warning(
                    f"{holder} has held the lock {name} for {PATIENCE:.0f} s; this process goes on without it "
                    "and compiles the kernel itself; if the other one is stopped, end it with kill -9"
                )
                return
            time.sleep(0.05)
