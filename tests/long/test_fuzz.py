"""The fuzzer finds planted faults, repeats itself, and finds nothing in a fixed number of inputs of each target."""

import os
import sys
import tempfile
import threading
from pathlib import Path

import fuzz
import pytest
from fuzz_targets import TARGETS
from support.runs import IS_0_3


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
    "two_lines": (lambda: raise_error(ValueError("size is 0;\nuse 1")), "not one line in test_fuzz.py:"),
    "no_remedy": (lambda: raise_error(ValueError("size is 0")), "no remedy in test_fuzz.py:"),
    "unprintable": (lambda: raise_error(ValueError("size is \x1b; use 1")), "not printable in test_fuzz.py:"),
    "long": (lambda: raise_error(ValueError("size is 0; " + "1" * 5000)), "too long in test_fuzz.py:"),
    "memory": (allocate, "MemoryError in test_fuzz.py"),
    "endless": (wait_for_ever, "more than 1 s of CPU time, twice"),
    "death": (lambda: os._exit(3), "the process died, exit code 3"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_it_finds_a_planted_fault_and_goes_on(name, monkeypatch):
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)
    end, kind = PLANTED[name]
    target = fuzz.Target("planted", lambda folder: lambda data: end() if data == b"bad" else None, (b"bad", b"good"))
    report = fuzz.fuzz(target, 0, lambda report: report.cases >= 2)
    if kind is None:
        assert not report.findings
        assert report.ends["success"] == (1 if name == "refused" else 2)
    else:
        ((found, data),) = report.findings.items()
        assert found.startswith(kind)
        assert data == b"bad"
        assert report.ends == {"success": 1, "finding": 1}


def test_what_takes_long_once_is_no_finding(monkeypatch):
    monkeypatch.setattr(fuzz, "CPU_SECONDS", 1)

    def make(folder):
        def check(data):
            if not (came := mark / "came").exists():
                came.touch()
                wait_for_ever()

        return check

    with tempfile.TemporaryDirectory() as folder:
        mark = Path(folder)
        report = fuzz.fuzz(fuzz.Target("planted", make, (b"slow", b"good")), 0, lambda report: report.cases >= 3)
    assert report.ends == {"success": 3}


def test_it_ends_although_an_input_waits():
    def check(data):
        if data == b"second":
            threading.Event().wait()

    target = fuzz.Target("planted", lambda folder: check, (b"first", b"second"))
    assert fuzz.fuzz(target, 0, lambda report: report.cases >= 1).ends == {"success": 1}


VALUES = ("0", "'a; b'", '["\\n]", [1]]', "{'a': 'x is \"y\"'}", "-1.5e3", "'" + "a]" * 5000 + "'")


@pytest.mark.parametrize("template", ["size is {}; use 1", "data/a.toml: sizes[3].b is {}; use one of a"])
def test_messages_that_differ_in_a_value_are_of_one_kind(template):
    kinds = {fuzz.kind_of(template.format(value)) for value in VALUES}
    assert len(kinds) == 1
    assert fuzz.kind_of("size is 0; use 1") != fuzz.kind_of("window is 0; use 1")


def test_one_seed_gives_the_same_inputs_and_another_does_not():
    def fed(seed):
        seen = []
        fuzz.feed(TARGETS["records"], seed, 50, seen.append)
        return seen

    first, again, other = map(fed, "001")
    assert first == again != other
    assert len(set(first)) == len(first) > 20


def test_what_it_keeps_is_replayed(tmp_path, capsys):
    def check(data):
        assert len(data) < 3

    target = fuzz.Target("planted", lambda folder: check, (b"[1]",))
    fuzz.show("planted", fuzz.fuzz(target, 0, lambda report: report.cases >= 1), tmp_path)
    (kept,) = tmp_path.iterdir()
    assert "FINDING 1 times: AssertionError in test_fuzz.py" in capsys.readouterr().out
    with pytest.raises(AssertionError):
        fuzz.replay(kept, {"planted": target})


CASES = {"toml": 8, "kernels": 20, "parquet": 25}


OF_0_2_2 = pytest.mark.skipif(IS_0_3, reason="it reads TOML files by torchtitan 0.2.2's own parser")


@pytest.mark.parametrize("name", [pytest.param(name, marks=OF_0_2_2 if name == "toml" else ()) for name in TARGETS])
def test_a_fixed_number_of_inputs_ends_in_success_or_one_line(name):
    cases = CASES.get(name, 100)
    report = fuzz.fuzz(TARGETS[name], 0, lambda report: report.cases >= cases)
    assert not report.findings
    assert report.ends["success"] > 0
    assert report.ends["refused"] > 0
