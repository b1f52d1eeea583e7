"""The folders that a run writes to: they can be written, one run at a time saves checkpoints there, and what was run
and logged is kept there."""

import errno
import fcntl
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torchtitan_magi.files import NO_LOCKS, holder_of, open_lock, sign_lock, write_whole
from torchtitan_magi.machine import cause, lack
from torchtitan_magi.training.process.all_ranks import on_first_rank
from torchtitan_magi.wording import one_line, quoted_path, shown

logger = logging.getLogger(__name__)

LOCK, LOG, CONFIG = "run.lock", "run.log", "run_config.toml"
COLOR = re.compile(r"\x1b\[[\d;]*m")
HELD = (errno.EACCES, errno.EAGAIN)


def check_local(path: str, option: str) -> None:
    """Raises ValueError, one line, for what torchtitan 0.3 takes for an address: the digests beside checkpoints, and a
    run that looks for one to go on from, know paths only."""
    if "://" in path:
        raise ValueError(f"{option} is {quoted_path(path)}, an address; mount what it names, and give the path there")


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

    Its lock lies beside it, so that the folder is there only once something was saved; and inside where nothing can be
    written beside it, or another disk begins.

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
        raise _unwritable(option, folder, f"lock {shown(path)}", error) from None


class PlainFormatter(logging.Formatter):
    """Lines without the colours of a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return COLOR.sub("", super().format(record))


def keep_log(folder: str) -> None:
    """Also writes what rank 0 logs from now on to the end of ``run.log``; makes the folder. A collective of all ranks.

    Raises:
        ValueError: on all ranks, if it cannot be written; one line with the remedy.
    """

    def open_log() -> None:
        check_writable(folder)
        try:
            file = logging.FileHandler(Path(folder) / LOG, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise _unwritable("job.dump_folder", folder, LOG, error) from None
        file.setFormatter(PlainFormatter("%(asctime)s %(levelname)s %(message)s"))
        root = logging.getLogger()
        for earlier in [handler for handler in root.handlers if isinstance(handler.formatter, PlainFormatter)]:
            root.removeHandler(earlier)  # of another run in this process
            earlier.close()
        root.addHandler(file)

    on_first_rank(open_log)


def _unwritable(option: str, folder: str, name: str, error: OSError) -> ValueError:
    return ValueError(
        f"{option} is {quoted_path(folder)}, but its {name} cannot be written ({cause(error)}); make room there, or "
        "give another folder"
    )


def save_config(job_config: Any) -> None:
    """Rank 0 writes all options as they are used, a dataclass of sections, to ``run_config.toml``: another run can be
    started with it. A collective of all ranks.

    Raises:
        ValueError: on all ranks, if it cannot be written; one line with the remedy.
    """
    folder = job_config.job.dump_folder

    def write() -> None:
        text = "\n".join(toml_lines(asdict(job_config))) + "\n"
        try:
            write_whole(Path(folder) / CONFIG, text.encode(errors="backslashreplace"))
        except OSError as error:
            raise _unwritable("job.dump_folder", folder, CONFIG, error) from None

    on_first_rank(write)


def toml_lines(options: dict[str, Any], section: str = "") -> Iterator[str]:
    """TOML of nested options; what is None is left out, as TOML has no word for it."""
    plain = {name: value for name, value in options.items() if value is not None and not isinstance(value, dict)}
    if plain and section:
        yield f"[{section}]"
    for name, value in plain.items():
        text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
        yield f"{name} = {text}"
    for name, value in options.items():
        if isinstance(value, dict):
            yield from toml_lines(value, f"{section}.{name}".lstrip("."))
