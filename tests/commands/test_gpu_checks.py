"""scripts/test_gpu.sh with stand-ins for Python and NVIDIA's tools: what runs where, and how it ends."""

import json
import os
import re
import subprocess
import sys

import pytest
from support.runs import ROOT
from support.workers import share_out_gpus

PYTHON = """
import json, os, sys, time
arguments = " ".join(sys.argv[1:])
if "scripts/check_python.py" in arguments:
    sys.exit()
seen = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "GPUS_ALONE")}
with open(os.environ["STARTED"], "a") as file:
    file.write(json.dumps({"arguments": arguments, **seen}) + "\\n")
print("the last line")
for words, code in json.loads(os.environ["CODES"]).items():
    if words in arguments:
        if code != "never":
            sys.exit(code)
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("what had failed until then")
"""
STAND_INS = {
    "nvidia-smi": '(($GPUS)) && for ((i = 0; i < $GPUS; i++)); do echo "GPU $i: NVIDIA H100"; done',
    "compute-sanitizer": 'while [[ $1 != *python* ]]; do shift; done; exec "$@"',
    "nproc": "echo 64",
}


@pytest.fixture
def check(tmp_path):
    """Runs the script where there are so many GPUs: its lines by part, its exit code, and what it started.

    codes: words of a command -> its exit code, or "never" for one that ends by SIGINT only.
    """
    (tmp_path / "python.py").write_text(PYTHON)
    for name, text in (STAND_INS | {"python3": f'exec {sys.executable} {tmp_path}/python.py "$@"'}).items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)

    def run(gpus, codes=None, parts=(), **variables):
        (tmp_path / "started").write_text("")
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "STARTED": f"{tmp_path}/started"}
        environment |= {"CODES": json.dumps(codes or {}), "GPUS": str(gpus), "TITAN": "0.3"} | variables
        script = [ROOT / "scripts" / "test_gpu.sh", tmp_path / "logs", *parts]
        ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=120, check=False)
        lines = dict(line.split(": ", 1) for line in ended.stdout.splitlines())
        return lines, ended.returncode, [json.loads(line) for line in (tmp_path / "started").read_text().splitlines()]

    return run


SANITIZED = ("memcheck-attention", "memcheck-rows", "racecheck-attention", "racecheck-rows")
PARTS = {*SANITIZED, "fp64", "tests", "tests-on-two", "tests-on-more"}


@pytest.mark.parametrize(("gpus", "processes", "pairs"), [(1, 6, 1), (2, 12, 1), (4, 16, 2)])
def test_parts_are_spread_over_the_gpus(check, gpus, processes, pairs):
    lines, code, started = check(gpus)
    assert lines == dict.fromkeys(PARTS, "passed; the last line")
    assert code == 0
    every = ",".join(map(str, range(gpus)))
    alone = [one["CUDA_VISIBLE_DEVICES"] for one in started if one["CUDA_VISIBLE_DEVICES"] != every]
    assert sorted(alone) == (sorted(str(n % gpus) for n in range(4)) if gpus > 1 else [])
    found = [re.search(r"--numprocesses (\d+) .* -m (gpu.*?) tests/", one["arguments"]) for one in started]
    tests = {words[2]: (words[1], one["GPUS_ALONE"]) for words, one in zip(found, started, strict=True) if words}
    assert tests == {
        "gpu and not alone": (str(processes), None),
        "gpu and alone(gpus=2)": (str(pairs), "2"),
        "gpu and alone and not alone(gpus=2)": ("1", None),
    }
    assert all("tests/titan_v03/test_gpu.py" in words.string for words in found if words)


def test_what_fails_or_does_not_end_fails_the_whole(check):
    codes = {"--cases 2000": 3, "gpu and alone(gpus=2)": "never"}
    lines, code, started = check(2, codes, PART_SECONDS="15")
    assert code == 1
    assert lines.pop("fp64") == "FAILED with exit code 3; the last line"
    assert lines.pop("tests-on-two") == "FAILED, stopped after 15 s; what had failed until then"
    assert lines == dict.fromkeys(PARTS - {"fp64", "tests-on-two"}, "passed; the last line")
    assert len(started) == len(PARTS)


def test_the_parts_that_are_named_run(check):
    lines, code, started = check(4, parts=["tests-on-two", "memcheck-rows"])
    assert lines == dict.fromkeys(["tests-on-two", "memcheck-rows"], "passed; the last line")
    assert (code, len(started)) == (0, 2)
    lines, code, started = check(4, parts=["fp64", "test"])
    assert (lines, code, started) == ({}, 1, [])


def test_the_gpus_that_are_named_are_taken(check):
    _, code, started = check(4, CUDA_VISIBLE_DEVICES="2,3")
    assert code == 0
    assert {one["CUDA_VISIBLE_DEVICES"] for one in started} == {"2", "3", "2,3"}


@pytest.mark.parametrize("variables", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_without_a_gpu_the_tests_alone_run(check, variables):
    lines, code, started = check(0, **variables)
    assert (lines, code) == ({"tests": "passed; the last line"}, 0)
    assert " -m gpu tests/" in started[0]["arguments"]


def seen_by(worker, gpus, **variables):
    environment = {"PYTEST_XDIST_WORKER": worker, "CUDA_VISIBLE_DEVICES": gpus} | variables
    share_out_gpus(environment)
    return environment["CUDA_VISIBLE_DEVICES"]


def test_each_worker_begins_with_another_gpu_or_has_its_own():
    assert [seen_by(f"gw{n}", "0,1,2") for n in range(4)] == ["0,1,2", "1,2,0", "2,0,1", "0,1,2"]
    assert [seen_by(f"gw{n}", "4,5,6,7", GPUS_ALONE="2") for n in range(2)] == ["4,5", "6,7"]
    assert seen_by("gw0", "5", GPUS_ALONE="2") == "5"
    assert seen_by("gw3", "") == ""
    environment = {"CUDA_VISIBLE_DEVICES": "0,1", "GPUS_ALONE": "2"}  # no worker
    share_out_gpus(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
