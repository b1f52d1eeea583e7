"""How many steps a run has: those of ``magi.epochs``, for the end of the run and for the learning rate."""

import logging
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.training.batches.pack_loader import PackLoader
from torchtitan_magi.training.process.all_ranks import agreed, is_first_rank
from torchtitan_magi.training.settings.options import DEFAULT_STEPS, check_schedule
from torchtitan_magi.wording import amount

logger = logging.getLogger(__name__)

DEFAULT_WARMUP = 200  # torchtitan's; it counts as not given
MANY_EPOCHS = 10  # in a run that did not ask for them
FEW_RECORDS = 200_000  # are packed in a second or two


@dataclass(frozen=True)
class Passes:
    """What was counted, over all ranks.

    packs: up to the last epoch, or as many as the run needs; per_epoch: those of the first; counts: of what was counted
    in the first; is_whole, is_exact: whether all packs and those of the first epoch were counted.
    """

    packs: int
    per_epoch: float
    counts: PackingCounts
    is_whole: bool = False
    is_exact: bool = False


class RunLength:
    """Sets training.steps and lr_scheduler.warmup_steps of a run on our data, and says what they come to.

    Args:
        sections: has ``training`` and ``lr_scheduler``, which torchtitan reads afterwards.
        epochs: magi.epochs.
        loader: of the training data. Its states keep what the learning rate follows.
    """

    def __init__(self, sections: Any, epochs: int, loader: PackLoader) -> None:
        self.sections, self.epochs, self.loader = sections, epochs, loader
        self.steps_given, self.warmup_given = sections.training.steps, sections.lr_scheduler.warmup_steps
        self.packs_per_step = loader.batch_size * loader.batches_per_step * loader.dataset.dp_world_size
        self.passes: Passes | None = None  # where packs have not been counted
        self.begun_at = self.packs_before = 0  # step, and packs, at which this process begins

    def epoch_at(self, step: int) -> float | None:
        """How often the data have been gone through after a step; None where their packs have not been counted."""
        return None if self.passes is None else self._epochs(self.passes, step)

    def begin(self, continues: bool = False) -> None:
        """Sets the length of a run from the first pack on. With ``magi.epochs`` a collective of all ranks, which waits
        without a time-out until each of them has the plans of all packs.

        Args:
            continues: whether a checkpoint is to be loaded, by which ``resume`` sets it again.

        Raises:
            ValueError: on all ranks, for a bad record that is found meanwhile, ranks that count differently, or more
                steps than lr_scheduler.total_steps.
        """
        if self.epochs == -1:
            self._set(self.steps_given)
            self._say_epochs()
        else:
            path = self.loader.dataset.records.paths
            passes = agreed(path, self._count, lambda found: f"{found.packs:,} packs")
            self._set(self._steps(passes.packs))
            self._say_steps(passes)
        if not continues:
            self.check()
        if is_first_rank():
            self._say_warmup()

    def check(self) -> None:
        """Raises ValueError, one line, for more steps than lr_scheduler.total_steps."""
        check_schedule(self.sections.lr_scheduler.total_steps, self.sections.training.steps)

    def resume(self, step: int, schedulers: Any, build: Callable[[Any, int], Any]) -> None:
        """Sets the length of a run that continues after that step. With ``magi.epochs`` it has what is left of the
        data: a step may take another number of packs than before.

        Args:
            schedulers: torchtitan's container of the schedulers of the learning rate, which go on by this run's length.
            build: (optimizers, steps) -> such a container.

        Raises:
            ValueError: more steps than lr_scheduler.total_steps.
        """
        before, saved = self.loader.schedule, self.loader.saved_schedule
        self.begun_at, self.packs_before = step, self.loader.dataset.packs_before(self.loader.position)
        if self.epochs != -1:
            counts = self.loader.dataset.count_packs(self.loader.position)
            self._set(self._steps(sum(count.packs for count in counts), step))
        self.check()
        now = self.loader.schedule
        if saved and saved != now:
            logger.warning(
                f"From step {step + 1} on the learning rate follows {_schedule(now)}, before it followed "
                f"{_schedule(saved)}; set training.steps and lr_scheduler.warmup_steps to these to keep it"
            )
        if now != before:
            logger.info(f"The data end after step {self.sections.training.steps:,}")
        if now != before or (saved and saved != now):
            _follow(schedulers, build, self.sections.training.steps)

    def _steps(self, packs: int, after: int = 0) -> int:
        """The last step of a run with so many packs to come."""
        steps = after + math.ceil(packs / self.packs_per_step)
        return steps if self.steps_given == DEFAULT_STEPS else min(steps, self.steps_given)

    def _set(self, steps: int) -> None:
        scheduler = self.sections.lr_scheduler
        self.sections.training.steps = steps
        length = scheduler.total_steps or steps
        is_left = self.warmup_given == DEFAULT_WARMUP and length <= DEFAULT_WARMUP
        scheduler.warmup_steps = length // 5 if is_left else self.warmup_given
        self.loader.schedule = {"steps": length, "warmup": min(scheduler.warmup_steps, length)}

    def _say_warmup(self) -> None:
        length, warmup = self.loader.schedule["steps"], self.sections.lr_scheduler.warmup_steps
        if warmup != self.warmup_given:
            logger.info(
                f"Warm-up takes {amount(warmup, 'step')}, a fifth of the run: lr_scheduler.warmup_steps is left at "
                f"{DEFAULT_WARMUP}"
            )
        elif warmup >= length:
            logger.warning(
                f"lr_scheduler.warmup_steps is {warmup:,}, but the learning rate follows {amount(length, 'step')}: "
                "the run never leaves warm-up; set fewer"
            )

    def _count(self) -> Passes:
        """Counts the packs of all epochs, or as many as training.steps need."""
        dataset, most = self.loader.dataset, math.inf
        if self.steps_given != DEFAULT_STEPS:
            most = self.steps_given * self.packs_per_step
        if not dataset.has_tokens and is_first_rank():
            logger.info("magi.epochs: making the tokens and counting the packs, by which the run's steps are set")
        total, packs, counts, first, is_exact = dataset.records_per_epoch, 0, PackingCounts(), 0.0, False
        with _bar(self.epochs * total) as bar:
            for window in dataset.count_packs():
                packs += window.packs
                bar.update(window.counts.documents)
                if window.epoch == 0:
                    counts += window.counts
                    first, is_exact = packs * total / counts.documents, window.last
                if packs >= most:
                    return Passes(packs, first, counts, is_exact=is_exact)
        return Passes(packs, first, counts, is_whole=True, is_exact=True)

    def _say_steps(self, passes: Passes) -> None:
        """What ends a run with ``magi.epochs``."""
        given, steps, epochs = self.steps_given, self.sections.training.steps, f"magi.epochs = {self.epochs}"
        if given == DEFAULT_STEPS:
            text = f"as magi.epochs says, with training.steps left at {given:,}"
        elif passes.is_whole and steps < given:
            text = f"{epochs} ends the run before training.steps = {given:,}"
        else:
            text = f"training.steps ends the run, within {epochs}"
        self._say(passes, text)

    def _say_epochs(self) -> None:
        """What the steps of a run without ``magi.epochs`` come to: at once if that takes no time, else when the first
        packs are there."""
        dataset = self.loader.dataset
        if not dataset.has_tokens or dataset.records_per_epoch > FEW_RECORDS:
            self.loader.tell_counts = lambda counts: self._say_fewer(self._estimate(counts))
            return
        counts = PackingCounts()
        for window in dataset.count_packs():
            counts += window.counts
            if window.last:
                break
        self._say_fewer(Passes(counts.packs, counts.packs, counts, is_exact=True))

    def _estimate(self, counts: PackingCounts) -> Passes:
        return Passes(counts.packs, self.loader.dataset.packs_per_epoch(counts), counts)

    def _say_fewer(self, passes: Passes) -> None:
        if self._epochs(passes, self.sections.training.steps) > MANY_EPOCHS:
            self._say(passes, "set magi.epochs for fewer", logging.WARNING)
        else:
            self._say(passes, "")

    def _say(self, passes: Passes, text: str, level: int = logging.INFO) -> None:
        steps, self.passes = self.sections.training.steps, passes
        about = "" if passes.is_exact else "about "
        epoch = (round(passes.per_epoch), "pack"), (passes.per_epoch / self.packs_per_step, "step")
        per_epoch = " and ".join(amount(number, noun) for number, noun in epoch)
        epochs = amount(self._epochs(passes, steps), "epoch")
        run = f"{amount(steps, 'step')} {'is' if steps == 1 else 'are'} {about}{epochs}{f': {text}' if text else ''}"
        if is_first_rank():
            logger.log(level, f"The data are {about}{per_epoch} per epoch; {run}")
            if self.loader.dataset.options.share_prefixes:
                shared = passes.counts.sharing(self.packs_per_step, passes.per_epoch)
                logger.info(f"magi.share_prefixes: {shared}")

    def _epochs(self, passes: Passes, step: int) -> float:
        """How many epochs have been gone through after a step. Steps before this process may have had other packs."""
        packs = self.packs_before + (step - self.begun_at) * self.packs_per_step
        if passes.is_whole and packs >= passes.packs:  # the last step may be filled up
            return self.epochs
        return packs / passes.per_epoch


def set_run_length(sections: Any, job_config: Any, loader: PackLoader, continues: bool) -> None:
    """See ``RunLength``; nothing for a seed checkpoint, which has no steps."""
    if not job_config.checkpoint.create_seed_checkpoint:
        loader.run_length = RunLength(sections, job_config.magi.epochs, loader)
        loader.run_length.begin(continues)


def resume(states: dict[str, Any], build: Callable[[Any, int], Any]) -> None:
    """See ``RunLength.resume``; to be called when torchtitan has loaded a checkpoint, if there is one.

    Args:
        states: the CheckpointManager's.
    """
    loader = getattr(states["dataloader"], "loader", None)
    if isinstance(loader, PackLoader) and loader.run_length is not None:
        if (step := states["train_state"].step) > 0:
            loader.run_length.resume(step, states["lr_scheduler"], build)
        else:
            loader.run_length.check()


def _follow(schedulers: Any, build: Callable[[Any, int], Any], steps: int) -> None:
    """Has schedulers go on, from the step at which they are, by the factors of a run of so many steps."""
    (built,) = build([torch.optim.SGD([torch.zeros(1)], lr=1.0)], steps)
    (factor,) = built.lr_lambdas
    for scheduler in schedulers:
        scheduler.lr_lambdas = [factor] * len(scheduler.base_lrs)
        set_rates(scheduler)


def set_rates(scheduler: Any) -> None:
    """Sets the learning rates of the step at which a scheduler is, by its own base and factors."""
    factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
    scheduler._last_lr = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


def _schedule(schedule: dict[str, int]) -> str:
    return f"{amount(schedule['steps'], 'step')} with {schedule['warmup']:,} of warm-up"


def _bar(num_records: int) -> Any:
    """A progress bar on a terminal, once counting has taken some seconds."""
    shows = is_first_rank() and sys.stderr.isatty()
    return tqdm(total=num_records, desc="counting packs", unit=" records", leave=False, delay=2, disable=not shows)
