"""A rank's error file is whole or not there, so that torchrun can read it whenever the rank is killed."""

import json
import os

import pytest
from support.full_disk import full_disk

from torchtitan_magi.training.process.error_file import WholeErrorFile, is_message


def test_the_file_is_whole_as_soon_as_it_is_there(tmp_path, monkeypatch):
    file, seen = tmp_path / "error.json", []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    dump = json.dump
    monkeypatch.setattr(json, "dump", lambda *args: (seen.append(file.exists()), dump(*args)))
    WholeErrorFile().record_exception(ValueError("why"))
    assert seen == [False]
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: why"
    assert os.environ["TORCHELASTIC_ERROR_FILE"] == str(file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_leaves_an_empty_file(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with full_disk(), pytest.raises(OSError, match="File too large"):
        WholeErrorFile().record_exception(ValueError("why"))
    assert file.read_bytes() == b""


def test_without_torchrun_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    WholeErrorFile().record_exception(ValueError("why"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("module", "statement", "expected"),
    [
        ("torchtitan_magi.x", "raise ValueError('x is 3; use 4')", True),
        ("torchtitan_magi.x", "raise ValueError('x is 3; use 4') from None", True),
        ("torchtitan_magi.x", "int('a')", False),  # a fault, of which the traceback tells more
        ("torchtitan_magi.x", "a, b = ()", False),
        ("torchtitan.x", "raise ValueError('x is 3; use 4')", False),
    ],
)
def test_what_a_statement_of_ours_raises_is_a_message(module, statement, expected):
    with pytest.raises(ValueError) as caught:
        exec(f"def f():\n    {statement}\nf()", {"__name__": module})
    assert is_message(caught.value) == expected
    assert not is_message(ValueError("never raised"))
