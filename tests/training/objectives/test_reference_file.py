"""The stored reference of DPO: whole or not there, and never another's or a damaged one without a word."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from support.errors import one_line
from support.full_disk import full_disk
from support.processes import at_once

from torchtitan_magi.training.objectives import reference_file
from torchtitan_magi.training.objectives.reference_file import (
    ReferenceData,
    ReferenceFile,
    check_writable,
    read_logprobs,
    write_logprobs,
)

FINGERPRINTS = {"model": "0123456789abcdef", "configuration": "76543210", "data": "records, tokenizer, layout"}
LOGPROBS = -np.arange(10.0).reshape(5, 2)
REMEDY = "do this"


def read(path, fingerprints=FINGERPRINTS, num_records=5):
    return read_logprobs(path, fingerprints, num_records, REMEDY)


def error_of(path, **kwargs):
    """The message, which must be one line that names the path and ends with the remedy."""
    with one_line("") as caught:
        read(path, **kwargs)
    message = str(caught.value)
    assert message.startswith(f"reference file {path} ")
    assert message.endswith(f"; {REMEDY}")
    return message


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "pairs.jsonl.reference.npz"
    write_logprobs(path, FINGERPRINTS, LOGPROBS)
    return path


def test_what_is_written_is_read(path):
    assert (read(path) == LOGPROBS).all()
    assert read(path.with_name("other")) is None
    assert os.listdir(path.parent) == [path.name]


def test_a_file_of_an_earlier_version_says_nothing_of_the_configuration(path):
    earlier = {name: text for name, text in FINGERPRINTS.items() if name != "configuration"}
    assert "made with the configuration [76543210], this run has [other]" in error_of(
        path, fingerprints=FINGERPRINTS | {"configuration": "other"}
    )
    write_logprobs(path, earlier, LOGPROBS)
    assert (read(path) == LOGPROBS).all()


# ------------------------------------------------------------------------------------------------ files that are wrong


def test_a_file_of_any_other_length_is_named(path):
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert "is damaged" in error_of(path)


def test_a_flipped_bit_is_named_or_changes_nothing(path):
    content, rng, num_errors = path.read_bytes(), random.Random(0), 0
    for position in range(len(content)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            assert (read(path) == LOGPROBS).all()
        except ValueError:
            error_of(path)
            num_errors += 1
    assert num_errors > len(content) // 2


OTHER = np.random.default_rng(0).normal(size=(5, 2))
WRONG_ENTRIES = {
    "no logprobs": ({"logprobs": None}, "its entries are configuration, data, digest, model"),
    "no model": ({"model": None}, "its entries are configuration, data, digest, logprobs"),
    "one more": ({"more": 3}, "its entries are configuration, data, digest, logprobs, model, more"),
    "other numbers": ({"logprobs": OTHER}, "its digest is not that of its content"),
    "other shape": ({"logprobs": LOGPROBS.reshape(2, 5)}, "its digest is not that of its content"),
    "other model": ({"model": "another"}, "its digest is not that of its content"),
    "float32": ({"logprobs": LOGPROBS.astype(np.float32)}, "log-probabilities are float32"),
    "objects": ({"logprobs": LOGPROBS.astype(object)}, "Object arrays cannot be loaded"),
    "two models": ({"model": ["a", "b"]}, "entry model is no text"),
    "a number": ({"data": 3}, "entry data is no text"),
    "wrong shape": ({"logprobs": LOGPROBS.reshape(2, 5), "digest": None}, "log-probabilities (2, 5) for 5 records"),
    "half a pair": ({"logprobs": np.zeros((5, 3)), "digest": None}, "log-probabilities (5, 3) for 5 records"),
    "no pair": ({"logprobs": np.zeros((5, 0)), "digest": None}, "log-probabilities (5, 0) for 5 records"),
    "no numbers": ({"logprobs": LOGPROBS * np.nan, "digest": None}, "log-probabilities that are not finite"),
    "too few": ({"logprobs": LOGPROBS[:3], "digest": None}, "log-probabilities (3, 2) for 5 records"),
}


@pytest.mark.parametrize("name", WRONG_ENTRIES)
def test_wrong_entries_are_named(name, path):
    changes, message = WRONG_ENTRIES[name]
    with np.load(path) as file:
        entries = {name: value for name, value in (dict(file) | changes).items() if value is not None}
    np.savez(path, **entries)
    assert message in error_of(path)


@pytest.mark.parametrize("content", [b"garbage", b"PK\3\4" + bytes(100), b"PK\5\6" + bytes(18), b"\x93NUMPY"])
def test_what_is_no_such_file_is_named(content, path):
    path.write_bytes(content)
    assert "is damaged" in error_of(path)


def test_an_array_alone_is_named(path):
    with path.open("wb") as file:
        np.save(file, LOGPROBS)
    assert "is damaged" in error_of(path)


def test_a_folder_and_a_pipe_are_named(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        assert "is no file but a folder, pipe or device" in error_of(path)


def test_a_file_without_a_digest_is_one_of_an_earlier_version(path):
    np.savez(path, logprobs=LOGPROBS, **FINGERPRINTS)
    assert (read(path) == LOGPROBS).all()


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_another_model_and_other_data_are_named(name, path):
    message = error_of(path, fingerprints=FINGERPRINTS | {name: "another"})
    assert f"was made with the {name} [{FINGERPRINTS[name]}], this run has [another]" in message


# ------------------------------------------------------------------------------------------------------------- writing


def write_and_read(path, times, writer):
    for i in range(times):
        logprobs = np.full((5, 2), float(1000 * writer + i))
        write_logprobs(path, FINGERPRINTS, logprobs)
        found = read(path)
        assert len(np.unique(found)) == 1


def test_two_processes_write_the_same_file(path):
    """150 writes, of which with one temporary name 13 failed, and 16 files could not be read."""
    at_once(2, write_and_read, path, 75)
    assert read(path)[0, 0] in (74, 1074)
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    "write", [lambda path: check_writable(path, 5), lambda path: write_logprobs(path, FINGERPRINTS, OTHER)]
)
def test_a_full_disk_is_named_and_nothing_is_left(write, path):
    with full_disk(), one_line(r"cannot be written .*set magi\.dpo\.reference_path") as error:
        write(path)
    assert str(error.value).startswith(f"reference file {path} ")
    assert os.listdir(path.parent) == [path.name]
    assert (read(path) == LOGPROBS).all()


def test_numbers_that_are_not_finite_are_not_written(path):
    logprobs = LOGPROBS.copy()
    logprobs[3, 1] = np.nan
    path.unlink()
    words = "is not made: the initial model has no finite log-probability for 1 of 5 records, the first of them record"
    with pytest.raises(ValueError, match=f"^reference file {path} {words}"):
        write_logprobs(path, FINGERPRINTS, logprobs)
    assert not path.exists()


def test_where_no_file_can_be_is_named():
    with pytest.raises(ValueError, match=r"^reference file /proc/nowhere/x\.npz cannot be written \(No such file or"):
        check_writable(Path("/proc/nowhere/x.npz"), 5)


# -------------------------------------------------------------------------------------------------------------- a run


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(reference_file, "on_first_rank", lambda function: function())


def prepared(path, step=0, model="0123456789abcdef", compute=lambda: torch.from_numpy(LOGPROBS)):
    data = ReferenceData(path, FINGERPRINTS["data"], 5, compute)
    reference = ReferenceFile(lambda: model, FINGERPRINTS["configuration"], lambda: data, torch.device("cpu"))
    reference.model_fingerprint = model
    reference.prepare(step)
    return reference.logprobs_of_records.numpy()


def test_a_new_run_makes_the_file_and_its_folder(one_rank, tmp_path):
    path = tmp_path / "some" / "folder" / "llama.npz"
    assert (prepared(path) == LOGPROBS).all()
    assert (read(path) == LOGPROBS).all()
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("content", [b"", None])
def test_a_resumed_run_wants_the_file_back(content, one_rank, path):
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r" a run resumed at step 7 cannot make it; put it back, or start a new"):
        prepared(path, step=7)


def test_a_file_that_another_run_made_meanwhile_is_used_or_refused(one_rank, path):
    path.unlink()

    def compute():
        write_logprobs(path, FINGERPRINTS, LOGPROBS)
        return torch.from_numpy(OTHER)

    assert (prepared(path, compute=compute) == LOGPROBS).all()
    path.unlink()
    with pytest.raises(ValueError, match=r"made with the model .* or set magi\.dpo\.reference_path to another one$"):
        prepared(path, model="another", compute=compute)
    assert (read(path) == LOGPROBS).all()
