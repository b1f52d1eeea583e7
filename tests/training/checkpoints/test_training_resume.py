"""Save, kill, resume: the steps after it are the steps of a run that was never interrupted."""

import shutil

import numpy as np
import pytest
from support.faults import report_saved
from support.runs import IS_0_3, new_folder, train, watch

from layouts import LAYOUTS, TOLERANCE, max_relative_difference  # isort: skip

STEPS, SAVED = 8, 4
TIMEOUT, AT_START = 1077, 1300  # s


def saved_on_all_ranks(run):
    return all(run.of("saved", rank) == [(SAVED,)] for rank in range(len(run.events)))


def run(name, folder, **kwargs):
    arguments = [*LAYOUTS[name].arguments, "--training.steps", f"{STEPS}", "--checkpoint.enable"]
    arguments += ["--checkpoint.interval", f"{SAVED}", "--job.dump_folder", folder]
    arguments += [f"--comm.train_timeout_seconds={TIMEOUT}", f"--comm.init_timeout_seconds={AT_START}"]
    return train(LAYOUTS[name].processes, arguments, setup=report_saved, **kwargs)


@pytest.fixture(scope="module")
def uninterrupted():
    return run("cp2", new_folder())


@pytest.fixture(scope="module")
def killed():
    folder = new_folder()
    part = run("cp2", folder, until=saved_on_all_ranks)
    assert SAVED <= len(part.losses) < STEPS
    return folder


@pytest.mark.parametrize("name", ["cp2", "cp4", "dp2"])
def test_a_killed_run_continues(name, uninterrupted, killed, tmp_path):
    """At the same degree with the same numbers, at another one with equal ones; at another data-parallel degree in our
    own trainer with as many tokens."""
    shutil.copytree(killed, tmp_path / "killed")
    resumed = run(name, f"{tmp_path}/killed", entry="torchtitan_magi.train" if name == "dp2" else "torchtitan.train")
    assert [metrics["step"] for metrics in resumed.metrics] == list(range(SAVED + 1, STEPS + 1))
    first = {AT_START if IS_0_3 else TIMEOUT}  # 0.3 shortens timeouts after the first step of each start
    steps = range(SAVED + 1, STEPS + 1)
    assert resumed.of("timeouts") == [(step, first if step == SAVED + 1 else {TIMEOUT}) for step in steps]
    rest = uninterrupted.metrics[SAVED:]
    tokens, of_rest = ([m["n_tokens_seen"] for m in metrics] for metrics in (resumed.metrics, rest))
    if name == "dp2" and not IS_0_3:  # ours goes on from torchtitan's number, and leaves out the padding that it counts
        before = uninterrupted.metrics[SAVED - 1]["n_tokens_seen"]
        parts = [np.diff([before, *seen]) for seen in (tokens, of_rest)]
        assert (parts[0] <= parts[1]).all()
        assert (parts[0] > 0.9 * parts[1]).all()
    else:
        assert tokens == of_rest
    if name == "cp2":
        assert resumed.losses == uninterrupted.losses[SAVED:]
        assert resumed.grad_norms == uninterrupted.grad_norms[SAVED:]
    if name != "dp2":
        assert max_relative_difference(resumed.losses, uninterrupted.losses[SAVED:]) <= TOLERANCE
        assert max_relative_difference(resumed.grad_norms, uninterrupted.grad_norms[SAVED:]) <= TOLERANCE


def report_batches_ahead(report):
    from torchtitan_magi.training.trainer import ObjectiveTrainer

    watch(ObjectiveTrainer, "train_step", lambda _, trainer, *batches: report("at once", trainer.dataloader.at_once))


def test_batches_planned_ahead_of_a_step_are_not_lost(tmp_path):
    """A step of three microbatches, while those of the next are there already."""
    arguments = ["--training.global_batch_size", "6", "--training.steps", "4", "--checkpoint.enable"]
    arguments += ["--checkpoint.interval", "2", "--checkpoint.keep_latest_k", "0", "--job.dump_folder", f"{tmp_path}"]
    whole = train(1, arguments, entry="torchtitan_magi.train", setup=report_batches_ahead)
    assert whole.of("at once") == [(3,)] * 4
    shutil.rmtree(tmp_path / "checkpoint" / "step-4")
    resumed = train(1, arguments, entry="torchtitan_magi.train")
    assert resumed.losses == whole.losses[2:]
    assert resumed.grad_norms == whole.grad_norms[2:]
