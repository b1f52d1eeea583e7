"""What ranks and their launcher know of one another's end."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
from support.processes import environment_of, python, torchrun
from torch.distributed import TCPStore

from torchtitan_magi.training.process.last_words import LastWords

# Starts a rank, as torchrun does, and waits for it.
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
RANK = "import torchtitan_magi.titan, time; print('ready', flush=True); time.sleep(100000)"


def test_a_rank_ends_when_its_torchrun_is_killed():
    """With torchtitan's entry point, too, which imports this module first."""
    command, environment = [sys.executable, "-c", LAUNCHER, RANK], environment_of(TORCHELASTIC_RUN_ID="run")
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.read() == ""  # the pipe ends with its last writer


def test_a_rank_whose_torchrun_was_killed_while_it_imported_ends():
    """It has no parent that could end any more, but nobody listens at the address of the store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{store.port}", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    variables |= {"TORCHELASTIC_RUN_ID": "run"}
    code = "from torchtitan_magi.training.process.launcher import end_with_launcher; end_with_launcher()"
    assert python("-c", code, **variables).returncode == 0
    store.set("key", "value")  # it still works
    del store
    assert python("-c", code, **variables).returncode == -signal.SIGKILL


STUCK = """
import os, sys, time
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan_magi.training.process.last_words import LastWords

@record
def main():
    with LastWords(600, 0.4) as words:
        words.note_step(3)
        while not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"]):
            time.sleep(0.05)
        if sys.argv[1] == "again":
            words.timeout = 600
            words.note_step(4)
            assert not os.path.exists(os.environ["TORCHELASTIC_ERROR_FILE"])
        elif sys.argv[1] == "raises":
            raise OSError("the disk is full")
        else:
            os.abort()  # as NCCL's watchdog does
main()
"""


@pytest.mark.parametrize(
    ("end", "want"),
    [
        ("aborts", r"rank 0 failed: this rank was killed \d+ s after step 3 ended, .* comm.train_timeout_seconds"),
        ("raises", "rank 0 failed: OSError: the disk is full"),
        ("again", None),
    ],
)
def test_a_rank_that_is_ended_while_no_step_ends_says_so(end, want, tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    launching = "import sys; from torchtitan_magi.launch import launch; launch(sys.argv[1:])"
    job = python("-c", launching, "--standalone", "--role=rank", "--tee=3", tmp_path / "stuck.py", end)
    assert (job.returncode != 0) == (want is not None), job.stderr
    if want:
        assert re.fullmatch(want, job.stderr.splitlines()[-1])


def test_torchrun_itself_prints_the_last_words(tmp_path):
    (tmp_path / "stuck.py").write_text(STUCK)
    job = torchrun(tmp_path / "stuck.py", "aborts")
    assert job.returncode
    assert re.search(r"this rank was killed \d+ s after step 3 ended, without another: ", job.stderr.splitlines()[-2])


def test_without_torchrun_nothing_is_written(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with LastWords(0.01, 0.01) as words:
        words.note_step(1)
    assert words.written == 0


def test_words_stand_only_while_no_step_ends(monkeypatch, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with LastWords(0.1, 1000) as words:
        while not file.exists():
            time.sleep(0.01)
        text = json.loads(file.read_text())["message"]
        assert re.fullmatch(
            r"this rank was killed \d+ s before the first step ended, without another: .* comm.init_timeout_seconds",
            text,
        )
        words.note_step(1)
        assert not file.exists()
    assert not list(tmp_path.iterdir())
