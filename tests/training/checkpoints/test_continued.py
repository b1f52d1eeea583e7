"""Runs that continue do so from the checkpoint and by the options that their own file says."""

import queue
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.hf_loop import ARGUMENTS
from support.hf_models import hf_arguments, make_hf_folder
from support.runs import corpus, new_folder, train, watch

from torchtitan_magi.training.checkpoints.digests import METADATA
from torchtitan_magi.training.continued import purge_stale
from torchtitan_magi.training.settings.resume import finished_steps

SAVED, STEPS = 3, 6


def report_options(report):
    import torch

    def reported(_, optimizer, **of_loading):  # which makes states by a step of its own
        group = optimizer.param_groups[0]
        if not of_loading:
            report("options", group["lr"], group["weight_decay"], tuple(group["betas"]), group["fused"])

    watch(torch.optim.AdamW, "step", reported)


@pytest.mark.either
def test_options_of_the_optimizer_are_those_of_the_file_not_of_the_checkpoint():
    folder = new_folder()
    arguments = ["--job.dump_folder", folder, "--training.steps", f"{STEPS}", "--lr_scheduler.warmup_steps", "1"]
    arguments += ["--checkpoint.enable", "--checkpoint.interval", f"{SAVED}", "--checkpoint.no-last_save_model_only"]
    run = {"entry": "torchtitan_magi.train", "setup": report_options}
    before = [*arguments, "--optimizer.lr", "3e-3", "--optimizer.implementation", "foreach"]
    first = train(1, before, **run).of("options")
    checkpoints = Path(folder, "checkpoint")
    shutil.move(checkpoints / f"step-{STEPS}", checkpoints / f"step-{STEPS}.best")  # no name of torchtitan's
    now = ["--optimizer.lr", "1e-5", "--optimizer.weight_decay", "0.0", "--optimizer.beta2", "0.999"]
    resumed = train(1, [*arguments, *now, "--optimizer.implementation", "fused"], **run)
    assert [metrics["step"] for metrics in resumed.metrics] == list(range(SAVED + 1, STEPS + 1))
    rates, *others = zip(*resumed.of("options"), strict=True)
    assert rates == pytest.approx([rate / 3e-3 * 1e-5 for rate, *_ in first[SAVED:]])
    assert [set(each) for each in others] == [{0.0}, {(0.9, 0.999)}, {True}]
    assert f"From step {SAVED + 1} on the optimizer has other options than the checkpoint: " in resumed.output
    for changed in ("lr: 0.003 -> 1e-05", "betas: (0.9, 0.95) -> (0.9, 0.999)", "weight_decay: 0.1 -> 0.0"):
        assert changed in resumed.output


@pytest.mark.either
def test_steps_that_take_more_packs_than_before_continue_at_a_constant_rate(tmp_path):
    """Until the data that are left are counted, the schedule is that of a run which began with such steps."""
    (tmp_path / "few.jsonl").write_text("".join((corpus() / "train.jsonl").open().readlines()[:12]))
    arguments = ["--job.dump_folder", str(tmp_path), "--training.dataset_path", str(tmp_path / "few.jsonl")]
    arguments += ["--magi.epochs", "1", "--training.steps", "10000", "--training.local_batch_size", "1"]
    arguments += ["--lr_scheduler.warmup_steps", "1", "--lr_scheduler.decay_ratio", "0"]
    arguments += ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.no-last_save_model_only"]
    first = train(1, arguments, entry="torchtitan_magi.train").metrics
    before = len(first) - 2
    more = ["--checkpoint.load_step", f"{before}", "--training.global_batch_size", "4"]
    resumed = train(1, [*arguments, *more], entry="torchtitan_magi.train").metrics
    assert [(metrics["step"], metrics["lr"]) for metrics in resumed] == [(before + 1, first[-1]["lr"])]


def test_only_folders_with_a_number_are_steps(tmp_path):
    for name in ("step-3", "step-²", "step-3.best", "step-"):
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).touch()
    assert finished_steps(tmp_path) == [3]


@pytest.mark.either
@pytest.mark.parametrize(("kept", "stale"), [(0, []), (2, [0, 1, 2]), (3, [0, 1]), (4, [0]), (5, [])])
def test_only_finished_checkpoints_before_a_step_count_as_kept(kept, stale, tmp_path):
    """While step 6 is being written. Those of steps 0 and 4 were cut off; later ones and a copy are others'."""
    for name in ("step-0", "step-1", "step-2", "step-3", "step-4", "step-6", "step-8", "step-9", "step-1.best"):
        (tmp_path / name).mkdir()
        if name not in ("step-0", "step-4", "step-6"):
            (tmp_path / name / METADATA).touch()
    trainer = SimpleNamespace(step=6)
    manager = SimpleNamespace(folder=tmp_path, keep_latest_k=kept, purge_queue=queue.Queue())
    manager.states = {"train_state": trainer}
    purge_stale(manager)
    assert sorted(manager.purge_queue.queue) == [f"{tmp_path}/step-{number}" for number in stale]


@pytest.mark.either
def test_a_run_whose_first_save_was_cut_off_begins_anew_with_its_weights():
    folder, dump = make_hf_folder("llama"), Path(new_folder())
    arguments = [*hf_arguments(folder), *ARGUMENTS, "--training.steps", "1", "--checkpoint.enable"]
    arguments += ["--checkpoint.initial_load_in_hf", "--parallelism.context_parallel_degree", "1"]
    run = {"layers": None, "entry": "torchtitan_magi.train"}
    expected = train(1, arguments, **run)
    for name in ("step-1", "step-5.best"):
        (dump / "checkpoint" / name).mkdir(parents=True)
    (dump / "checkpoint" / "step-5.best" / METADATA).touch()
    found = train(1, [*arguments, "--job.dump_folder", str(dump)], **run)
    assert found.losses == expected.losses
    assert f"{dump}/checkpoint has no finished checkpoint, as a save was cut off: the run begins anew" in found.output
    assert finished_steps(dump / "checkpoint") == [1]
