"""A step whose loss or gradient is not a number ends the run by its name, before it changes or saves anything."""

import functools
import os
import re
from pathlib import Path

import pytest
import torch
from support.corpus import chat_tokenizer
from support.errors import run_ends
from support.gpus import needs_hopper
from support.poisoned import GRADIENTS, LOSSES, WORD, poison, write_records
from support.processes import python
from support.runs import DEBUG_TOML, IS_0_3, ROOT, SMALL, TrainingError, corpus, new_folder, on_corpus, train

from torchtitan_magi.training.finite import StepGuard

ONLY_0_3 = pytest.mark.skipif(not IS_0_3, reason="torchtitan 0.2.2 has no pipelines here")
LATE = ["--metrics.log_freq", "100", "--training.local_batch_size", "1", "--magi.no-shuffle", "--training.steps", "8"]


@functools.cache
def token():
    return chat_tokenizer(corpus()).tokenizer.token_to_id(WORD)


def records(folder, poisoned, **options):
    write_records(Path(folder, "train.jsonl"), poisoned, **options)
    return ["--training.dataset_path", f"{folder}/train.jsonl", "--job.dump_folder", folder]


def test_the_last_line_names_step_and_document_and_good_checkpoints_stay():
    folder = new_folder()
    saved = ["--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2"]
    arguments = [*on_corpus(), *SMALL, *LATE, *records(folder, 5), *saved, "--magi.imports", "support.poisoned"]
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), f"{ROOT}/tests"]), "POISON": f"{LOSSES} {token()}"}
    run = python("-P", ROOT / "torchtitan_magi" / "launch.py", DEBUG_TOML, *arguments, **paths)
    assert run.returncode != 0
    *_, last = (run.stdout + run.stderr).splitlines()
    where = re.escape(f"{folder}/train.jsonl:5")
    reason = f"step 5: the loss is not finite in 1 of 1 documents: {where}; nothing of this step is saved: .*"
    assert re.fullmatch(f"rank [01] failed: FloatingPointError: {reason}", last)
    assert sorted(path.name for path in Path(folder, "checkpoint").glob("step-*")) == ["step-3", "step-4"]


def poisoned_and_watched(what, unwanted, report):
    """Reports of each step whether it left weights, moments and counts as they were."""
    poison(what, unwanted)
    stock = StepGuard.step

    def step(guard):
        before = state_of(guard)
        stock(guard)
        after = state_of(guard)
        report("unchanged", before.keys() == after.keys() and all(torch.equal(before[x], after[x]) for x in before))

    StepGuard.step = step


def state_of(guard):
    """What of weights and optimizer this rank has, by name."""
    parts = {
        (n, name): x for n, part in enumerate(guard.optimizers.model_parts) for name, x in part.state_dict().items()
    }
    for n, optimizer in enumerate(guard.optimizers):
        for at, state in enumerate(optimizer.state.values()):
            parts |= {(n, at, name): x for name, x in state.items()}
    return {name: getattr(x, "to_local", lambda x=x: x)().clone() for name, x in parts.items()}


@pytest.mark.parametrize("axis", ["context", pytest.param("pipeline", marks=ONLY_0_3)])
def test_an_update_of_pairs_is_left_out_on_all_ranks(axis):
    folder = new_folder()
    arguments = [*LATE, *records(folder, 6, pairs=True), f"--parallelism.{axis}_parallel_degree", "2"]
    arguments += ["--training.dataset", "dpo", "--training.global_batch_size", "2"]
    if axis == "pipeline":  # whose microbatches are packs
        arguments += ["--training.local_batch_size", "2"]
    events = []

    def see(run):
        events[:] = run.events
        return False

    setup = functools.partial(poisoned_and_watched, GRADIENTS, token())
    with pytest.raises(TrainingError) as caught:
        train(2, arguments, entry="torchtitan_magi.train", setup=setup, until=see)
    assert caught.value.type == "FloatingPointError"
    pairs = [re.escape(f"{folder}/train.jsonl:{line}") + r" \(0\.\d+\)" for line in (5, 6)]
    start = "step 3: the gradient norm is not finite; the highest losses are those of "
    assert re.match(f"{start}({', '.join(pairs)}|{', '.join(reversed(pairs))}); nothing", str(caught.value))
    for of_rank in events:
        assert [event[1] for event in of_rank if event[0] == "unchanged"] == [False, False, True]


@pytest.mark.parametrize("saves", [True, False])
def test_weights_that_an_update_broke_are_not_saved_by_torchtitans_own_entry_point_either(saves):
    folder = new_folder()
    arguments = [*LATE, "--job.dump_folder", folder, "--optimizer.lr", "1e38", "--lr_scheduler.warmup_steps", "0"]
    arguments += ["--checkpoint.enable", "--checkpoint.interval", "1"] if saves else []
    reason = "^after step 1 tok_embeddings.weight and " if saves else "^step 2: the loss is not finite"
    with pytest.raises(TrainingError, match=reason):
        train(1, arguments)
    assert not list(Path(folder).glob("checkpoint/*"))


def poisoned_and_timed(unwanted, report):
    """Any wait for the GPU inside an update is an error, until the run ends."""
    poison(LOSSES, unwanted)
    stock, stock_reason = StepGuard.step, StepGuard._reason

    def reason(guard, *args):
        torch.cuda.set_sync_debug_mode("default")
        return stock_reason(guard, *args)

    def step(guard):
        torch.cuda.set_sync_debug_mode("error")
        stock(guard)
        torch.cuda.set_sync_debug_mode("default")
        report("updated")

    StepGuard.step, StepGuard._reason = step, reason


@pytest.mark.gpu
@needs_hopper
def test_no_update_of_a_run_waits_for_the_gpu():
    folder, updates = new_folder(), []
    arguments = [*LATE, *records(folder, 5), "--training.mixed_precision_param", "bfloat16"]
    setup = functools.partial(poisoned_and_timed, token())
    options = {"setup": setup, "entry": "torchtitan_magi.train", "until": lambda run: updates.append(run) or False}
    with run_ends(r"^step 5: the loss is not finite in 1 of 1 documents: .*:5; ", "FloatingPointError"):
        train(1, arguments, on_gpus=True, **options)
    assert len(updates[-1].of("updated")) == 5
