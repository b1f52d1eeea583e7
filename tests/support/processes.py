"""Other processes: Python on a CPU, with the package and nothing else to be found; forked ones that do the same."""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from support.runs import ROOT

from torchtitan_magi.data.records.kept_files import kept


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


def at_once(number, function, *arguments):
    """function(*arguments, n) in forked processes n = 0, 1, ..., which must all end well."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=(*arguments, n)) for n in range(number)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * number


def keep_at_once(cache, source):
    """How often a file of ``cache`` is made that four processes want at the same time. source: what it is made of."""
    start, log = multiprocessing.get_context("fork").Barrier(4), source.parent / "log"

    def make(path):
        with open(log, "a") as file:
            file.write("made\n")
        path.write_text("made of it")

    def use(_):
        start.wait()
        assert kept(cache, str(source), "kind", make, Path.read_text) == "made of it"

    at_once(4, use)
    assert [path.suffix for path in cache.iterdir()] == [".kind"]
    return log.read_text().count("made\n")
