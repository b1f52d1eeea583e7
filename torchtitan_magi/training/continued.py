"""Continues from torchtitan's checkpoints: which one, and by whose options; which of them stay."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_magi.training.batches import run_length
from torchtitan_magi.training.process.all_ranks import is_first_rank
from torchtitan_magi.training.settings.resume import finished_steps

logger = logging.getLogger(__name__)

CONSTANT = partial(pow, 1.0)  # a partial, as torchtitan's factors by step, of which 0.2.2 saves what state they have
NO_OPTIONS = {"params", "param_names", "lr"}  # of an optimizer's group; lr follows the schedule of initial_lr
SAME_RESULT = {"foreach", "fused", "capturable", "differentiable"}  # options by which only the way there differs


def load_checkpoint(manager: Any, step: int, load: Callable[[int], bool], build: Callable[[Any, int], Any]) -> bool:
    """Loads what torchtitan would, but no folder of another name than ``step-<number>``, and has the run go on by the
    options of its own file. Without a finished checkpoint it begins anew, with the initial weights.

    Args:
        manager: torchtitan's CheckpointManager.
        step: that of the checkpoint; -1 for the latest.
        load: torchtitan's own.
        build: (optimizers, steps) -> torchtitan's schedulers of the learning rate.
    """
    if step == -1 and manager.enable:
        step = max(finished_steps(Path(manager.folder)), default=-1)
    with _own_options(manager.states):
        with _rates_without_end(manager.states), _nothing_saved(manager, step):
            loaded = load(step)
        run_length.resume(manager.states, build)
    return loaded


def purge_stale(manager: Any) -> None:
    """In place of the CheckpointManager's ``_purge_stale_checkpoints``: has those removed that ``keep_latest_k`` leaves
    out, with that of this step and finished ones before it. torchtitan counts unfinished ones as well, which no run can
    go on from, those of later steps, and folders of other names, such as copies.
    """
    if manager.keep_latest_k == 0 or not is_first_rank():
        return
    folder, step = Path(manager.folder), manager.states["train_state"].step
    earlier = [other for other in finished_steps(folder) if other < step]
    for oldest in earlier[manager.keep_latest_k - 2 :][:1]:
        stale = [path for path in folder.glob("step-*") if (name := path.name[5:]).isdecimal() and int(name) < oldest]
        for path in stale:
            manager.purge_queue.put(str(path))


@contextmanager
def _nothing_saved(manager: Any, step: int) -> Iterator[None]:
    """Hides what a cut-off save has left, if there is no step to go on from: torchtitan 0.2.2 loads no initial weights
    while the folder is there, and both look for ``step-<number>`` anywhere in names."""
    if step != -1 or not manager.enable:
        yield
        return
    folder, manager.folder = manager.folder, manager._create_checkpoint_id(step)
    yield
    manager.folder = folder


@contextmanager
def _rates_without_end(states: dict[str, Any]) -> Iterator[None]:
    """Lets schedulers of the learning rate load any step: with ``magi.epochs`` it is only counted afterwards how many
    steps the run has, and behind its last one torchtitan may end in an assertion."""
    schedulers = list(states.get("lr_scheduler", ()))
    factors = [scheduler.lr_lambdas for scheduler in schedulers]
    for scheduler in schedulers:
        scheduler.lr_lambdas = [CONSTANT] * len(scheduler.base_lrs)
    yield
    for scheduler, own in zip(schedulers, factors, strict=True):
        scheduler.lr_lambdas = own


@contextmanager
def _own_options(states: dict[str, Any]) -> Iterator[None]:
    """Gives optimizers their options back, which torchtitan loads with their states, and says which ones differed."""
    if not {"optimizer", "lr_scheduler"} <= states.keys():
        yield
        return
    schedulers = list(states["lr_scheduler"])
    mine, rates = _options(states["optimizer"]), [scheduler.base_lrs for scheduler in schedulers]
    yield
    loaded = _options(states["optimizer"])
    for optimizer_options, optimizer in zip(mine, states["optimizer"], strict=True):
        for options, group in zip(optimizer_options, optimizer.param_groups, strict=True):
            group.update(options)
    for scheduler, base in zip(schedulers, rates, strict=True):
        scheduler.base_lrs = base
        run_length.set_rates(scheduler)
    changed = {
        name.replace("initial_lr", "lr"): (before[name], value)
        for of_optimizer, of_loaded in zip(mine, loaded, strict=True)
        for options, before in zip(of_optimizer, of_loaded, strict=True)
        for name, value in options.items()
        if name not in SAME_RESULT and before.get(name, value) != value
    }
    if changed:
        step, listed = states["train_state"].step, "; ".join(f"{x}: {a} -> {b}" for x, (a, b) in changed.items())
        logger.warning(f"From step {step + 1} on the optimizer has other options than the checkpoint: {listed}")


def _options(optimizers: Any) -> list[list[dict[str, Any]]]:
    """The options of each group of each optimizer."""
    return [
        [{name: value for name, value in group.items() if name not in NO_OPTIONS} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
