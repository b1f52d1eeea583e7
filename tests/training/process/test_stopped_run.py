"""A signal ends a run with a line that says after which step, and from which the same command goes on."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.processes import environment_of, python
from support.runs import DEBUG_TOML, ROOT, SMALL, new_folder, on_corpus

from torchtitan_magi.training.process.last_line import LAST_LINE, stopped, told_on_signal
from torchtitan_magi.training.trainer import ObjectiveTrainer

# The main thread waits in C, as for a GPU: for a mutex that it has itself.
WAITING = """
import ctypes, logging, os, signal, sys, threading, time
from torchtitan_magi.training.process.last_line import told_on_signal

logging.basicConfig(level=logging.INFO)
with told_on_signal(lambda: "this is why"):
    pass
with told_on_signal(lambda: "this is said"):
    number = int(sys.argv[1])
    for handler, code in ((None, -number), (lambda *_: os._exit(7), 7)):
        if not (child := os.fork()):
            if handler:
                signal.signal(number, handler)
            os.kill(os.getpid(), number)
            time.sleep(600)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
    time.sleep(3)
    logging.info("a forked process is another one")
    threading.Timer(1, os.kill, (os.getpid(), number)).start()
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""
STEPS = ["--training.steps", "1000000", "--lr_scheduler.decay_ratio", "0", "--parallelism.context_parallel_degree", "2"]


def wait_for(text, log, job, printed):
    while not (log.exists() and text in log.read_text()):
        assert job.poll() is None, printed.read_text()[-4000:]
        time.sleep(0.1)


@pytest.mark.parametrize(("number", "saves"), [(signal.SIGINT, True), (signal.SIGHUP, False)])
def test_a_run_that_is_stopped_says_how_it_goes_on(number, saves):
    """The first one is started by nohup, and goes on when its terminal is closed."""
    folder = new_folder()
    options = [*on_corpus(), *SMALL, *STEPS, "--metrics.log_freq", "1", "--job.dump_folder", folder]
    options += ["--checkpoint.enable", "--checkpoint.interval", "2"] if saves else ["--checkpoint.no-enable"]
    command = [*(["nohup"] if saves else []), sys.executable, "-m", "torchtitan_magi", "train", DEBUG_TOML, *options]
    with open(f"{folder}/printed", "w") as file:
        job = subprocess.Popen(
            list(map(str, command)), stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment_of()
        )
        printed, log = Path(file.name), Path(folder) / "run.log"
        wait_for("step: 3/", log, job, printed)
        if saves:
            os.kill(job.pid, signal.SIGHUP)
            wait_for(f"step: {log.read_text().count('step: ') + 2}/", log, job, printed)
        os.kill(job.pid, number)
        assert job.wait(300) == 1
    assert printed.read_text().splitlines()[-1] == f"ended by {number.name}"
    (line,) = re.findall(r"Stopped .*", log.read_text())
    assert line in printed.read_text()
    step = int(re.match(r"Stopped after step (\d+); ", line)[1])
    finished = [int(path.parent.name[5:]) for path in Path(folder).glob("checkpoint/step-*/.metadata")]
    assert step >= 3
    assert line == stopped(step, max(finished, default=-1))
    assert bool(finished) == saves


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_waits_in_c_ends_by_the_signal_too(number):
    run = python("-c", WAITING, int(number))
    assert run.returncode == -number
    assert run.stderr.splitlines() == [
        "INFO:root:a forked process is another one",
        f"INFO:{told_on_signal.__module__}:this is said",
    ]


def test_the_line_of_a_stopped_run():
    assert stopped(1050, 1000) == "Stopped after step 1,050; the same command goes on from step-1000"
    assert stopped(7, -1) == "Stopped after step 7; no checkpoint was saved: the same command begins anew"


def test_what_has_ended_but_for_a_last_validation_says_where_its_model_is(monkeypatch):
    """The same command does not go on from weights alone."""
    monkeypatch.setattr(LAST_LINE, "text", "The model is in x")
    assert ObjectiveTrainer._stopped(SimpleNamespace()) == "The model is in x"
