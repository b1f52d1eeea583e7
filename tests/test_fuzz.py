"""The fuzzer finds planted faults, repeats itself, and finds nothing in a fixed number of inputs of each target."""

import itertools
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import fuzz
from fuzz_targets import TARGETS


def raise_error(error):
    raise error


def allocate():
    return bytearray(2**40)


def wait_for_ever():
    while True:
        pass


PLANTED = {
    "success": (lambda: None, None),
    "refused": (lambda: raise_error(ValueError("size is 0; use 1")), None),
    "another_exception": (lambda: raise_error(KeyError("size")), "KeyError in test_fuzz.py"),
    "exit": (lambda: sys.exit("size is 0; use 1"), "SystemExit in test_fuzz.py"),
    "two_lines": (lambda: raise_error(ValueError("size is 0;\nuse 1")), "not one line: size is _; use _"),
    "no_remedy": (lambda: raise_error(ValueError("size is 0")), "no remedy: size is _"),
    "unprintable": (lambda: raise_error(ValueError("size is \x1b; use 1")), "not printable"),
    "long": (lambda: raise_error(ValueError("size is 0; " + "1" * 5000)), "too long"),
    "memory": (allocate, "MemoryError in test_fuzz.py"),
    "endless": (wait_for_ever, "more than 1 s of CPU time"),
    "death": (lambda: os._exit(3), "the process died, exit code 3"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_finds_a_planted_fault_and_goes_on(name, monkeypatch):
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)
    end, kind = PLANTED[name]
    target = fuzz.Target("planted", lambda folder: lambda data: end() if data == b"bad" else None, (b"bad", b"good"))
    report = fuzz.fuzz(target, 0, lambda report: report.cases >= 3)
    if kind is None:
        assert not report.findings
        assert report.ends["success"] == (2 if name == "refused" else 3)
    else:
        ((found, data),) = report.findings.items()
        assert found.startswith(kind)
        assert data == b"bad"
        assert report.ends == {"success": 2, "finding": 1}


def test_one_seed_gives_the_same_inputs_and_another_does_not():
    target = TARGETS["records"]
    first, again, other = (list(itertools.islice(fuzz.inputs(target, seed, 5, []), 50)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(first)) > 40


def test_what_it_keeps_is_replayed(tmp_path, capsys):
    def check(data):
        assert len(data) < 3

    target = fuzz.Target("planted", lambda folder: check, (b"[1]",))
    fuzz.show("planted", fuzz.fuzz(target, 0, lambda report: report.cases >= 1), tmp_path)
    (kept,) = tmp_path.iterdir()
    assert "FINDING 1 times: AssertionError in test_fuzz.py" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        fuzz.replay(kept, {"planted": target})


CASES = {"toml": 8, "kernels": 20}
KNOWN = {
    "parquet": "damaged files that abort pyarrow, and with it the process",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xfail(name in KNOWN, reason=KNOWN.get(name, ""))) for name in TARGETS]
)
def test_a_fixed_number_of_inputs_ends_in_success_or_one_line(name):
    cases = CASES.get(name, 100)
    report = fuzz.fuzz(TARGETS[name], 0, lambda report: report.cases >= cases)
    assert not report.findings
    assert report.ends["success"] > 0
    assert report.ends["refused"] > 0
