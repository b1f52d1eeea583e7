"""What the machine has and lacks: memory, descriptors, processes, room, packages. No record is to blame for it."""

import errno
import mmap
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torchtitan_magi.wording import one_line

_NUMBER = re.compile(r"\((?:os error|errno) (\d+)\)|\[errno (\d+)\]", re.IGNORECASE)  # in texts of other libraries


def cause(error: BaseException) -> str:
    """Why something failed, in one line without a number or path."""
    return (error.strerror if isinstance(error, OSError) else None) or one_line(error)


def lack(error: BaseException, what: str, disk: bool = False) -> str:
    """`what: cause; remedy`, one line, where an error says what the machine lacks; "" for any other error."""
    found = remedy(error, disk)
    return f"{what}: {cause(error) or type(error).__name__}; {found}" if found else ""


def remedy(error: BaseException, disk: bool = False) -> str:
    """What to do where an error says what the machine lacks; "" for any other error.

    disk: also for a disk without room, or that cannot be written; others have a remedy of their own for it.
    """
    if isinstance(error, MemoryError):
        return memory_remedy()
    return (_remedies() | (_DISK if disk else {})).get(_number(error), "")


_DISK = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room in your quota there",
    errno.EROFS: "name a place that can be written",
}


def _remedies() -> dict[int | None, str]:
    open_files, processes = (f"{resource.getrlimit(kind)[0]:,}" for kind in (resource.RLIMIT_NOFILE, _PROCESSES))
    return {
        errno.EMFILE: f"raise the limit of open files, ulimit -n, which is {open_files}",
        errno.ENFILE: "end other programs, or raise the machine's limit of open files, fs.file-max",
        errno.EAGAIN: f"raise the limit of processes, ulimit -u, which is {processes}",
        errno.ENOMEM: memory_remedy(),
    }


_PROCESSES = resource.RLIMIT_NPROC


def _number(error: BaseException) -> int | None:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    found = _NUMBER.search(str(error))
    return int(found[1] or found[2]) if found else None


def memory_remedy() -> str:
    """What to do where memory does not suffice."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return "free memory"
    return f"raise the limit of memory, ulimit -v, which is {limit / 2**20:,.0f} MiB"


def has_memory(num_bytes: int) -> bool:
    """Whether this process could have so much more address space."""
    try:
        mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True


def raise_open_files() -> None:
    """Lets this process, and those that it starts, open as many files as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # a hard limit that the kernel does not take
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def version_of(package: str) -> str:
    """The version of an installed package, as pip names it; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes of the host's memory that can be taken without swapping: those of the machine, or fewer where this process
    is in a container or a job of a cluster that may have no more.

    Args:
        root: of the file system.
    """
    lines = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    found = int(lines["MemAvailable"].split()[0]) * 1024
    for folder, limit, usage, cache in _memory_groups(root):
        with suppress(OSError, ValueError):  # not there from inside of a container; or no limit
            stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
            used = int((folder / usage).read_text()) - int(stat.get(cache, 0))  # pages of files can be dropped
            found = min(found, int((folder / limit).read_text()) - used)
    return max(0, found)


def _memory_groups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The control groups that this process is in, of either version: the folder, its files of the limit and of what is
    used, and the name of pages of files in memory.stat."""
    listed = root / "proc/self/cgroup"
    groups = listed.read_text().splitlines() if listed.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in groups):
        if controllers in ("", "memory"):
            base = root / "sys/fs/cgroup" / controllers
            names = ("memory.max", "memory.current", "inactive_file")
            if controllers:
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            folder = base / path.strip("/")
            yield from ((each, *names) for each in (folder, *folder.parents) if each.is_relative_to(base))
