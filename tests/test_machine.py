"""What the machine lacks is named with its remedy, and no file or record is blamed for it."""

import errno
import os
import re
import resource

import pytest

from torchtitan_magi import machine


def of(number):
    return OSError(number, os.strerror(number), "/some/file")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (of(errno.EMFILE), r"a: Too many open files; raise the limit of open files, ulimit -n, which is [\d,]+"),
        (of(errno.ENFILE), r"a: Too many open files in system; end other programs, or .* fs.file-max"),
        (of(errno.ENOMEM), "a: Cannot allocate memory; free memory"),
        (of(errno.EAGAIN), r"a: Resource temporarily unavailable; raise the limit of processes, ulimit -u, .*"),
        (Exception("Too many open files (os error 24)"), "a: Too many open files .*; raise .* ulimit -n.*"),
        (OSError("Failed to open: [errno 24] Too many open files"), "a: Failed to open: .*; raise .* ulimit -n.*"),
        (MemoryError("malloc of 9 failed"), "a: malloc of 9 failed; free memory"),
        (MemoryError(), "a: MemoryError; free memory"),
        (of(errno.ENOENT), ""),
        (of(errno.ENOSPC), ""),
        (ValueError("24"), ""),
    ],
)
def test_a_lack_has_its_remedy_and_nothing_else_is_one(error, line):
    assert re.fullmatch(line, machine.lack(error, "a"))


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.ENOSPC, "make room there"), (errno.EDQUOT, "in your quota there"), (errno.EROFS, "that can be written")],
)
def test_a_disk_has_its_remedy_where_the_caller_has_none(number, remedy):
    assert machine.lack(of(number), "a", disk=True).endswith(remedy)


def test_the_limit_of_memory_is_named(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (450 * 2**20, -1))
    assert machine.memory_remedy() == "raise the limit of memory, ulimit -v, which is 450 MiB"


def test_more_memory_than_there_is_is_not_to_be_had():
    assert machine.has_memory(2**20)
    assert not machine.has_memory(2**60)


def test_as_many_files_can_be_opened_as_the_hard_limit_lets():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        machine.raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


GIB = 2**30
GROUPS = {  # lines of /proc/self/cgroup -> folder of the limit, and its files
    "0::/job/step": ("job", "memory.max", "memory.current", "inactive_file"),
    "4:memory:/job/step\n0::/": ("memory/job", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "0::/a/path/of/the/host": ("", "memory.max", "memory.current", "inactive_file"),  # seen from inside of a container
}


@pytest.mark.parametrize("lines", GROUPS)
def test_memory_is_that_of_the_machine_or_of_the_container(tmp_path, lines):
    folder, limit, usage, cache = GROUPS[lines]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:  {1 << 30} kB\nMemAvailable:  {100 << 20} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(lines)
    assert machine.available_memory(tmp_path) == 100 * GIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert machine.available_memory(tmp_path) == 100 * GIB  # a kernel without control groups
    (tmp_path / "proc/self/cgroup").write_text(lines)
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (group / usage).write_text(f"{30 * GIB}\n")
    (group / "memory.stat").write_text(f"anon 1\n{cache} {10 * GIB}\n")
    for value, expected in (("max", 100), (str(2**63 - 4096), 100), (str(60 * GIB), 40), (str(10 * GIB), 0)):
        (group / limit).write_text(f"{value}\n")
        assert machine.available_memory(tmp_path) == expected * GIB
