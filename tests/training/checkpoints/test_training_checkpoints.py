"""Checkpoints of runs: saved with digests, also asynchronously; what is damaged or does not fit ends in one line."""

import os
import shutil
from pathlib import Path

import pytest
from support.errors import assert_one_line, assert_says, error_of
from support.runs import new_folder, train

from torchtitan_magi import verify
from torchtitan_magi.training.process.run_folder import lock_checkpoints, lock_folder

ARGUMENTS = ["--parallelism.context_parallel_degree", "2", "--checkpoint.enable", "--checkpoint.interval", "1"]
ARGUMENTS += ["--training.steps", "3"]


@pytest.fixture(scope="module")
def saved():
    """The dump folder of a run of three steps: the first two saved asynchronously, with all states."""
    folder = new_folder()
    train(2, [*ARGUMENTS, "--checkpoint.async_mode", "async", "--job.dump_folder", folder])
    return Path(folder)


@pytest.fixture
def copied(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def resume(folder, *arguments):
    """The error of a run that goes on from step 2."""
    return error_of([*ARGUMENTS, "--checkpoint.load_step", "2", "--job.dump_folder", str(folder), *arguments], 2)


def test_every_checkpoint_has_digests_that_fit(saved):
    steps = sorted((saved / "checkpoint").glob("step-*"))
    assert [step.name for step in steps] == ["step-1", "step-2", "step-3"]
    assert verify.main(list(map(str, steps))) == 0


def test_two_flipped_bytes_are_named_on_all_ranks(copied):
    shard = copied / "checkpoint" / "step-2" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 0xFF
    content[len(content) // 3] ^= 0xFF
    shard.write_bytes(content)
    assert_one_line(resume(copied), [f"{shard} is damaged", "load another checkpoint"])


def test_a_checkpoint_of_another_model_is_one_line(copied):
    initial = f"{copied}/checkpoint/step-3"
    error = error_of([*ARGUMENTS, "--checkpoint.initial_load_path", initial], 2, layers=3)
    assert_one_line(error, [f"{initial} cannot be loaded into this run", "layers.2", "use the model and the options"])


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_is_one_line(mode, tmp_path):
    """That of rank 1's file; rank 0 says so, too."""
    (tmp_path / "checkpoint" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-1" / "__1_0.distcp").symlink_to("/dev/full")
    with pytest.raises(Exception) as caught:
        train(2, [*ARGUMENTS, "--checkpoint.async_mode", mode, "--job.dump_folder", str(tmp_path)])
    assert caught.value.type == "OSError"
    assert_says(caught.value, [f"{tmp_path}/checkpoint could not be saved: rank 1: ", "make room"])


def test_a_step_that_is_not_there_is_named(copied):
    error = error_of([*ARGUMENTS, "--checkpoint.load_step", "7", "--job.dump_folder", str(copied)], 2)
    assert_one_line(error, ["checkpoint.load_step is 7", "has the steps 3, 2, 1; use one of them"])


def test_two_runs_in_one_folder_are_refused(tmp_path):
    lock_folder(str(tmp_path))  # this process is the other run
    error = error_of([*ARGUMENTS, "--job.dump_folder", str(tmp_path)], 2)
    assert_one_line(error, [f"'{tmp_path}', where another run is training (process {os.getpid()} on", "of its own"])


def test_two_runs_with_one_folder_of_checkpoints_are_refused(tmp_path):
    lock_checkpoints(f"{tmp_path}/saved")
    error = error_of([*ARGUMENTS, "--checkpoint.folder", f"{tmp_path}/saved"], 2)
    assert_one_line(error, [f"checkpoint.folder is '{tmp_path}/saved', where another run is training", "of its own"])
