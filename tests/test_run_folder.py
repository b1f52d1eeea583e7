"""One run at a time saves in a folder; what a killed run has left locks nothing."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from torchtitan_magi.training.run_folder import LOCK, check_writable, lock_folder

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


@pytest.fixture
def other_run(tmp_path):
    """The process of another run that has locked tmp_path."""
    with subprocess.Popen([sys.executable, "-c", HOLDER, f"{tmp_path}/{LOCK}"], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"locked\n"
        yield process
        process.kill()


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


@pytest.mark.parametrize("path", ["/dev/null/run", "/proc/run"])
def test_a_folder_that_cannot_be_written_is_one_line(path):
    with pytest.raises(
        ValueError, match=rf"^job.dump_folder is '{path}', which cannot be written \(.*\); give a folder"
    ):
        check_writable(path)
