"""Files that other processes may read or write at the same time."""

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from torchtitan_magi.wording import one_line, shown

logger = logging.getLogger(__name__)

MAKING = ".making"  # end of the names of files that are not complete
ABANDONED = 3600.0  # seconds since a file that another machine made was last written to
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # a file system that cannot lock files
PATIENCE = 60.0  # seconds of waiting for another process until the log says so


def cache_folder(name: str) -> Path:
    """A folder in $TORCHTITAN_MAGI_CACHE, or in torchtitan_magi under the user's cache folder.

    Raises:
        ValueError: neither is known: the user has no home, as in some containers.
    """
    if explicit := os.environ.get("TORCHTITAN_MAGI_CACHE"):
        return Path(explicit) / name
    if not (caches := os.environ.get("XDG_CACHE_HOME")):
        try:
            caches = str(Path.home() / ".cache")
        except RuntimeError:
            raise ValueError("this user has no home folder; set TORCHTITAN_MAGI_CACHE to a folder") from None
    return Path(caches) / "torchtitan_magi" / name


def regular_file(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Size and time of modification of a file.

    Raises:
        OSError: it is none; a pipe, socket or device would be waited for, perhaps without end.
    """
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise OSError("it is a directory")
    if not stat.S_ISREG(found.st_mode):
        raise OSError("it is no regular file but a pipe, socket or device")
    return found.st_size, found.st_mtime_ns


def read_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> str:
    """The text of a file, with newlines as Python has them.

    Raises:
        OSError: as ``regular_file``.
        ValueError: it is no text.
    """
    regular_file(path)
    return Path(path).read_text(encoding=encoding)


def write_whole(path: Path | str, content: bytes, mode: int = 0o666, folder: int | None = None) -> None:
    """Writes a file whole or not at all, whoever else writes it, and returns when it is on the disk.

    Args:
        path: the file, which is replaced if it exists.
        mode: its permissions, less the umask.
        folder: descriptor of the folder that path starts from; None for the working folder.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    unfinished = f"{path}.{secrets.token_hex(8)}.unfinished"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(unfinished, flags, mode, dir_fd=folder)
    try:
        with open(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(file)
        os.replace(unfinished, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync a folder
        _sync_folder(os.path.dirname(path) or ".", folder)


@contextlib.contextmanager
def making(path: Path) -> Iterator[Path]:
    """The name of a new file beside a file, whose place it takes at the end, or nothing is left of it.

    It is locked: ``remove_abandoned`` tells by that whether somebody still makes it. Several processes may make one.

    Raises:
        OSError: it cannot be made or moved.
    """
    unfinished, file = _locked_file(path)
    try:
        yield unfinished
        os.fsync(file)
        os.replace(unfinished, path)
    finally:
        os.close(file)
        unfinished.unlink(missing_ok=True)


def _locked_file(path: Path) -> tuple[Path, int]:
    """Name and descriptor of a new file, which is still there when it is locked."""
    while True:
        name = path.with_name(f"{path.name}.{_kernel()}-{secrets.token_hex(8)}{MAKING}")
        file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):  # the file system has no locks, or another process looks at this one
            fcntl.flock(file, fcntl.LOCK_EX)
        if name.exists():
            return name, file
        os.close(file)


def remove_abandoned(folder: Path) -> None:
    """Removes the files of ``making`` whose process has died. Where there are no locks, they stay.

    Some file systems have locks within a machine only: what another has made has to be old as well.
    """
    for path in folder.glob(f"*{MAKING}"):
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if f".{_kernel()}-" in path.name or time.time() - os.fstat(file).st_mtime > ABANDONED:
                    path.unlink()
            finally:
                os.close(file)


@functools.cache
def _kernel() -> str:
    """Names the running kernel, which all processes under it have the same locks of."""
    try:
        return hashlib.sha256(Path("/proc/sys/kernel/random/boot_id").read_bytes()).hexdigest()[:8]
    except OSError:
        return "unknown"


def _sync_folder(path: str, folder: int | None) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_lock(path: Path | str, mode: int = 0o666, folder: int | None = None) -> int:
    """Descriptor of the file of a lock, which is made if it is not there. The arguments are those of ``write_whole``.

    Raises:
        OSError: it cannot be written, or is a symbolic link, which is not followed.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)


def take_lock(lock: int) -> None:
    """Takes a lock that ends with its processes, and signs it.

    Where the file system has no locks, it is one of this machine's processes only, or none. So a lock spares work, but
    what is written under it must come out right without it: whole, by a name of its own that is then changed.

    Raises:
        BlockingIOError: another process holds it; the text says which.
        OSError: it cannot be locked for another reason.
    """
    try:
        _try_lock(lock)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        path = os.readlink(f"/proc/self/fd/{lock}")
        _warn_of_missing_locks(os.path.dirname(path))
        _lock_here(lock, path)


def _try_lock(lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(holder_of(lock)) from None
    with contextlib.suppress(OSError):  # a full disk
        sign_lock(lock, os.getpid())


def _lock_here(lock: int, path: str) -> None:
    """Locks a temporary file of this machine, whose descriptor takes the place of the lock's; nothing without one."""
    name = hashlib.sha256(path.encode()).hexdigest()[:32]
    try:
        here = open_lock(Path(tempfile.gettempdir()) / f"torchtitan_magi-{os.geteuid()}-{name}.lock", 0o600)
        try:
            if os.fstat(here).st_uid == os.geteuid():
                _try_lock(here)
                os.dup2(here, lock, inheritable=False)
        finally:
            os.close(here)
    except BlockingIOError:
        raise
    except OSError:
        return


@functools.cache
def _warn_of_missing_locks(folder: str) -> None:
    logger.warning(
        f"The file system of {shown(folder)} has no locks: each machine that shares it may make the same files at the "
        "same time, which takes more work and spoils nothing; another folder is set by TORCHTITAN_MAGI_CACHE or "
        "magi.token_cache"
    )


def release_lock(lock: int) -> None:
    """Gives up a lock, also that of processes forked meanwhile."""
    with contextlib.suppress(OSError):  # the file system has no locks
        fcntl.flock(lock, fcntl.LOCK_UN)


class Waiting:
    """A wait for what another process makes, which is named in the log, once, when it takes long.

    Args:
        what: is waited for.
    """

    def __init__(self, what: str) -> None:
        self.what, self.since, self.told = what, time.monotonic(), False

    def note(self, maker: object) -> None:
        """Logs, once, that the wait is long. maker: who makes it, as it is to be named."""
        if not self.told and time.monotonic() - self.since > PATIENCE:
            self.told = True
            logger.warning(
                f"waiting for {self.what}, which {maker} makes; if that process is stopped, end it with kill -9, and "
                "another takes over"
            )


def sign_lock(lock: int, process: int) -> None:
    """Leaves in the file of a lock which process holds it."""
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {process} on {socket.gethostname()} since {since}\n".encode(), 0)


def holder_of(lock: int) -> str:
    """Who holds a lock, as its file says."""
    return one_line(os.pread(lock, 200, 0).decode(errors="replace")) or "an unknown process"
