"""Files that are made once and kept in the cache folder: by one process, while the others wait for it."""

import contextlib
import hashlib
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torchtitan_magi.files import Waiting, making, open_lock, regular_file, remove_abandoned, take_lock
from torchtitan_magi.machine import cause, lack
from torchtitan_magi.wording import quoted_path, shown

T = TypeVar("T")

logger = logging.getLogger(__name__)

_VERSION = 2  # of what is kept
_POLL = 0.02  # seconds between looks for a lock

_cleaned: set[Path] = set()  # folders, by this process


def kept(cache: Path, source: str, kind: str, make: Callable[[Path], Any], load: Callable[[Path], T | None]) -> T:
    """What a file of `kind`, made of a file `source`, holds. Made again when the source has changed or it is damaged.

    Args:
        make: writes the file at a temporary path.
        load: reads the file at its path; None if it is damaged.

    Raises:
        ValueError: one line with the remedy, when it cannot be written.
    """
    found = os.stat(source)
    identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    key = hashlib.sha256(repr((_VERSION, os.path.realpath(source), identity)).encode()).hexdigest()[:32]
    path = cache / f"{key}.{kind}"
    content = _loaded(path, load)
    if content is None:
        with _writing(cache), _locked(cache / f"{key}.{kind}.lock"):
            content = _loaded(path, load)
            if content is None:
                if path.exists():
                    logger.warning("%s is damaged and is made again", shown(path))
                content = _make(path, make, load)
    return content


def digest_of_file(cache: Path | None, path: str) -> str:
    """SHA-256 of a file, hexadecimal; kept in the cache folder if there is one."""
    if cache is None:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    return kept(cache, path, "sha256", lambda to: to.write_text(_sealed(digest_of_file(None, path))), _unsealed)


def _sealed(digest: str) -> str:
    """A digest and its checksum."""
    return f"{digest} {zlib.crc32(digest.encode()):08x}"


def _unsealed(path: Path) -> str | None:
    regular_file(path)
    text = path.read_text(errors="replace")
    digest = text.partition(" ")[0]
    return digest if text == _sealed(digest) else None


def _loaded(path: Path, load: Callable[[Path], T | None]) -> T | None:
    with contextlib.suppress(OSError):
        return load(path)
    return None


def _make(path: Path, make: Callable[[Path], Any], load: Callable[[Path], T | None]) -> T:
    """Makes the file, which appears whole or not at all, and loads it.

    Removes first what stopped processes have left of others, which may fill the disk.
    """
    if path.parent not in _cleaned:
        _cleaned.add(path.parent)
        remove_abandoned(path.parent)
    with making(path) as unfinished:
        make(unfinished)
        if load(unfinished) is None:
            raise OSError("what is read there is not what was written")
    content = load(path)
    if content is None:
        raise OSError("what is written there does not stay")
    return content


@contextlib.contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        cache.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ValueError(
            lack(error, f"cannot write the data cache {quoted_path(cache)}")
            or f"cannot write the data cache {quoted_path(cache)}: {cause(error)}; make room there, or name another "
            "folder in [magi] token_cache, or in TORCHTITAN_MAGI_CACHE for commands without that option"
        ) from None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock that ends with its process. Where it cannot be locked, each process makes its own file."""
    lock, waiting = open_lock(path), Waiting(shown(path.with_suffix("")))
    try:
        while True:
            try:
                take_lock(lock)
                break
            except BlockingIOError as error:
                waiting.note(error)
                time.sleep(_POLL)
            except OSError:
                break
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(lock)
