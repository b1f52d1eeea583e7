"""Files that are made once and kept in the cache folder: by one process, while the others wait for it."""

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torchtitan_magi.wording import one_line, quoted_path

_VERSION = 1  # of what is kept


def kept_file(cache: Path, source: str, kind: str, make: Callable[[Path], Any]) -> Path:
    """The file of `kind` made of a file `source`; made again when the source has changed.

    Args:
        make: writes the file at a temporary path.

    Raises:
        ValueError: one line with the remedy, when it cannot be written.
    """
    found = os.stat(source)
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    key = hashlib.sha256(repr((_VERSION, os.path.realpath(source), identity)).encode()).hexdigest()[:32]
    path = cache / f"{key}.{kind}"
    if path.exists():
        return path
    with _writing(cache), _locked(cache / f"{key}.{kind}.lock"):
        if not path.exists():
            temporary = cache / f"{key}.{kind}.{os.getpid()}.tmp"
            try:
                make(temporary)
                with open(temporary, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    return path


def digest_of_file(cache: Path | None, path: str) -> str:
    """SHA-256 of a file, hexadecimal; kept in the cache folder if there is one."""
    if cache is None:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return kept_file(cache, path, "sha256", lambda kept: kept.write_text(digest_of_file(None, path))).read_text()


@contextlib.contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise ValueError(
            f"cannot write the data cache {quoted_path(cache)}: {reason}; make room there, or name another folder in "
            "[magi] token_cache, or in TORCHTITAN_MAGI_CACHE for commands without that option"
        ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that ends with its process. Without locks on the file system, each process makes its own file."""
    with open(path, "w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
