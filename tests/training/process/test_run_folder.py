"""One run at a time saves in a folder; what a killed run has left locks nothing."""

import contextlib
import errno
import fcntl
import os
import re
import subprocess
import sys

import pytest
from support.errors import one_line
from support.full_disk import full_disk

from torchtitan_magi.training.process.run_folder import LOCK, check_writable, lock_checkpoints, lock_folder

# Another run, as far as the lock is concerned.
HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
file.write("process 7 on elsewhere since yesterday\\n")
file.flush()
print("locked", flush=True)
time.sleep(1000)
"""


@contextlib.contextmanager
def run_that_holds(lock):
    """The process of another run that has the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"locked\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def other_run(tmp_path):
    with run_that_holds(tmp_path / LOCK) as process:
        yield process


def test_a_second_run_is_refused_until_the_first_is_dead(other_run, tmp_path):
    with pytest.raises(ValueError) as caught:
        lock_folder(str(tmp_path))
    assert str(caught.value) == (
        f"job.dump_folder is '{tmp_path}', where another run is training (process 7 on elsewhere since yesterday); "
        "wait for its end, or give this run a folder of its own"
    )
    other_run.kill()
    other_run.wait()
    lock_folder(str(tmp_path))
    assert f"process {os.getpid()} on " in (tmp_path / LOCK).read_text()


def test_the_lock_of_this_run_is_seen_by_others(tmp_path):
    lock_folder(str(tmp_path))
    result = subprocess.run([sys.executable, "-c", HOLDER, f"{tmp_path}/{LOCK}"], capture_output=True, text=True)
    assert "BlockingIOError" in result.stderr


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock_folder(str(tmp_path))
    assert "has no locks: see to it that no other run saves there" in caplog.text


def test_a_full_disk_is_one_line(tmp_path):
    with full_disk(0), one_line(rf"^job.dump_folder is '{tmp_path}', but its lock .*; make room"):
        lock_folder(str(tmp_path))


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(ValueError, match=rf"its lock {tmp_path}/{LOCK} cannot be written \(.*symbolic links"):
        lock_folder(str(tmp_path))
    assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("is_there", [False, True])
def test_one_run_at_a_time_saves_in_a_folder_of_checkpoints(is_there, tmp_path):
    """It may be made by the other run meanwhile, and be named through a link."""
    (tmp_path / "link").symlink_to(tmp_path)
    if is_there:
        (tmp_path / "saved").mkdir()
    lock_checkpoints(f"{tmp_path}/saved")
    assert (tmp_path / "saved").exists() == is_there  # torchtitan loads initial weights while it is not
    with run_that_holds(tmp_path / "others.lock"):
        (tmp_path / "others").mkdir()
        with pytest.raises(ValueError, match=r"^checkpoint.folder is '.*/link/others', where another run is training"):
            lock_checkpoints(f"{tmp_path}/link/others")


def test_a_folder_of_checkpoints_on_a_disk_of_its_own_holds_the_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(type(tmp_path), "is_mount", lambda path: path == tmp_path)
    lock_checkpoints(str(tmp_path))
    assert os.listdir(tmp_path) == [LOCK]


@pytest.mark.parametrize("path", ["/dev/null/saved", "/proc/saved", "/dev/null"])
def test_a_folder_of_checkpoints_that_cannot_be_written_is_one_line(path):
    with pytest.raises(ValueError, match=r"^checkpoint.folder is .* cannot be written \(.*\); ") as caught:
        lock_checkpoints(path)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("path", ["/dev/null/run", "/proc/run", "a\0b"])
def test_a_folder_that_cannot_be_written_is_one_line(path):
    with one_line(rf"^job.dump_folder is {re.escape(repr(path))}, which cannot be written \(.*\); give a folder"):
        check_writable(path)
