"""The ranks of a killed launcher do not go on."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Starts a rank, as torchrun does, and waits for it.
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
RANK = "import torchtitan_magi.titan, time; print('ready', flush=True); time.sleep(100000)"


def test_a_rank_ends_when_its_torchrun_is_killed():
    """With torchtitan's entry point, too, which imports this module first."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TORCHELASTIC_RUN_ID": "run"}
    command = [sys.executable, "-c", LAUNCHER, RANK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.kill()
        assert launcher.stdout.read() == ""  # the pipe ends with its last writer
