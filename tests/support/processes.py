"""Other processes: Python on a CPU, with the package and nothing else to be found."""

import os
import subprocess
import sys

from support.runs import ROOT


def environment_of(**variables):
    """The environment of a process without GPUs that finds the package; variables: more of it, or others."""
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables


def run(*command, cwd=ROOT, **variables):
    """The process of a command that has ended, with what it printed; variables: of its environment."""
    environment = environment_of(**variables)
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )


def python(*arguments, **options):
    """The same for this Python."""
    return run(sys.executable, *arguments, **options)


def torchrun(*arguments, **options):
    """The same for torchrun on this machine."""
    return python("-m", "torch.distributed.run", "--standalone", *arguments, **options)
