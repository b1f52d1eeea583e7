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
