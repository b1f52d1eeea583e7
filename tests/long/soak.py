#!/usr/bin/env python3
"""Trains tiny models on the CPU for a given time, kills and stops their processes, resumes, and compares every step.

    python tests/long/soak.py [--minutes 10] [--seed 0] [--cases 3 7]

Each case draws at random: documents or preference pairs of random lengths, a layout (dp, cp and tp of 1 or 2 each),
options, whether it validates and exports, a number of steps, and blows. It trains once without interruption. Then it
trains again and is struck: a rank is killed, stopped for a moment, or stopped for good, in the forward, in the
backward, in the frozen model of preference training, within a validation pass, or while it writes a checkpoint or the
export at the end, or all ranks are killed at once. After each end it is started again, until it has taken all steps.
Required:

- every step of every start has the loss and the gradient norm of the uninterrupted run, bit for bit, and every
  validation pass its loss;
- an export that was cut off has no file that a loader of models would take; the next start makes it whole, with the
  bytes of the uninterrupted run's;
- a run resumed at another layout has them within the bound of tests/long/layouts.py, over COMPARED steps;
- what is stopped for a moment goes on; what is stopped for good ends within a minute after the timeout, which is
  SLOWEST_STEPS steps of the uninterrupted run, so that little of a case is waiting;
- memory, descriptors and threads of each rank of the uninterrupted run are flat once it has settled.

Prints a Markdown table of what was run; exits with 1 if a case fails. A seed and a case's number make the case again.
"""

import argparse
import itertools
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layouts import COMMON, DEGREES, TOLERANCE, max_relative_difference
from runner import DEBUG_TOML, TrainingError, train

METADATA, INDEX = ".metadata", "model.safetensors.index.json"  # written last: a folder without is no finished one

COMPARED = 5  # steps at another layout: rounding grows from step to step
TIMEOUT = 40  # seconds that ranks wait for one that is stopped for good, at most
LEAST_TIMEOUT, SLOWEST_STEPS = 4, 8  # seconds; or so many times the slowest step of the uninterrupted run
PAUSE = 1.0  # seconds for which a rank is stopped otherwise
MAX_GROWTH = 8 * 1024  # KiB of resident memory per rank, from the middle third of a run to its last
VALIDATION_PACKS = 2  # in a pass, of each data-parallel rank
AT_END = ("export", "merge")  # phases of the export
SETTLED = 60  # steps of a run whose first third is enough to settle
USED = ("growth of memory in KiB", "descriptors", "threads")
COLUMNS = ("case", "task", "layout", "tokens per pack", "options", "steps", "blows", "bit-equal steps", "other layout")
COLUMNS += ("equal validations", "export", *USED, "verdict")


@dataclass(frozen=True)
class Case:
    """What is trained, and what befalls it."""

    number: int
    task: str  # "sft" or "dpo"
    degrees: dict[str, int]
    other_degrees: dict[str, int]
    seq_len: int
    options: str
    accumulated: bool  # microbatches of one pack, where there is one data-parallel rank
    steps: int
    interval: int  # steps between checkpoints
    blows: list[tuple[str, int, int, str]]  # phase, step, rank, kind
    validates: int = 0  # steps between validation passes; 0: none
    exports: bool = False  # at its end, instead of a last checkpoint

    def arguments(self, degrees: dict[str, int], folder: Path, dump_folder: Path) -> list[str]:
        """torchtitan overrides."""
        layout = [f"--parallelism.{DEGREES[name]} {degree}" for name, degree in degrees.items()]
        local = 1 if self.accumulated else 2 // degrees["dp"]
        options = (
            f"{COMMON} {' '.join(layout)} --training.local_batch_size {local} {self.options} "
            f"--job.dump_folder {dump_folder} --training.steps {self.steps} --training.seq_len {self.seq_len} "
            f"--training.dataset {self.task} --training.dataset_path {folder}/records.jsonl --model.flavor hf "
            f"--checkpoint.enable --checkpoint.initial_load_in_hf --checkpoint.interval {self.interval} "
            "--checkpoint.keep_latest_k 2 --optimizer.lr 1e-3 "
        )
        options += "--checkpoint.last_save_in_hf" if self.exports else "--checkpoint.no-last_save_model_only"
        if self.validates:
            options += (
                f" --validation.enable --validation.freq {self.validates} --validation.steps {VALIDATION_PACKS} "
                f"--validation.dataset {self.task} --validation.dataset_path {folder}/validation.jsonl "
                f"--validation.seq_len {self.seq_len} --validation.local_batch_size 1"
            )
        return options.split()


@dataclass
class Outcome:
    """What a case did."""

    failures: list[str] = field(default_factory=list)
    equal_steps: int = 0  # of interrupted starts, bit for bit
    equal_validations: int = 0
    export: str = ""  # what became of it
    starts: int = 0
    struck: Counter = field(default_factory=Counter)  # (phase, kind)
    difference: float | None = None  # at another layout
    resumed_at: int = 0
    used: tuple[int, ...] = (0, 0, 0)  # USED, the most of any rank
    steps: int = 0  # of all starts


def make_case(seed: int, number: int, steps: int | None = None) -> Case:
    """The case of that number; ``steps`` instead of what would be drawn."""
    rng = random.Random(f"{seed} {number}")
    degrees, other = ({name: rng.choice((1, 2)) for name in DEGREES} for _ in range(2))
    while other == degrees:
        other = {name: rng.choice((1, 2)) for name in DEGREES}
    task = rng.choice(("sft", "dpo"))
    options = [
        f"--activation_checkpoint.mode {rng.choice(('none', 'selective', 'full'))}",
        f"--magi.overlap_stages={rng.choice((-1, -1, 0, 2))}",
        f"--checkpoint.async_mode {rng.choice(('disabled', 'async'))}",
    ]
    if task == "sft":
        options += [f"--magi.loss_per {rng.choice(('token', 'document'))}"]
        options += [f"--magi.long_documents {rng.choice(('truncate', 'split'))}"]
    else:
        options += [f"--magi.dpo.reference {rng.choice(('model', 'file'))}"]
    drawn = rng.choice((60, 60, 120, 480))
    steps = steps or drawn
    validates, exports = rng.choice((0, rng.randint(2, 7))), rng.random() < 0.5
    phases = ["forward", "backward", "write", "finish", "any"]
    phases += ["validation"] * bool(validates) + ["reference"] * ("reference model" in " ".join(options))
    blows = [_make_blow(rng, degrees, phases, step) for step in rng.sample(range(2, steps), rng.randint(2, 4))]
    if exports:
        blows.append(_make_blow(rng, degrees, AT_END, steps))
    blows.sort(key=lambda blow: (blow[-1] == "paused", blow[1]))  # which does not end the run
    seq_len, accumulated, interval = 8 * rng.randint(12, 40), rng.random() < 0.5, max(2, steps // 8)
    return Case(
        number, task, degrees, other, seq_len, " ".join(options), accumulated, steps, interval, blows, validates,
        exports,
    )  # fmt: skip


def _make_blow(
    rng: random.Random, degrees: dict[str, int], phases: Sequence[str], step: int
) -> tuple[str, int, int, str]:
    phase = rng.choice(phases)
    ranks = degrees["dp"] * degrees["cp"] * degrees["tp"]
    kind = rng.choice(("killed", "killed", "paused", "stopped" if ranks > 1 else "paused"))
    rank = 0 if phase in ("finish", "merge") else rng.randrange(ranks)
    return phase, step, rank, "killed" if phase == "any" else kind


def write_records(path: Path, task: str, seq_len: int, rng: random.Random, number: int = 300) -> None:
    """So many, of random lengths, from a word to more than a pack; pairs are shorter than a pack."""
    from support.corpus import WORDS

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=min(most, 1 + int(rng.lognormvariate(2.5, 1.2)))))

    lines = []
    for _ in range(number):
        if task == "dpo":
            record: dict[str, Any] = {name: text(seq_len // 16) for name in ("prompt", "chosen", "rejected")}
        else:
            answers = [{"role": "user", "content": text(40)}, {"role": "assistant", "content": text(seq_len)}]
            record = {"messages": answers} if rng.random() < 0.7 else {"text": text(seq_len)}
        lines.append(json.dumps(record) + "\n")
    path.write_text("".join(lines))


class Watcher:
    """Follows a run from outside: sends stopped ranks on, and ends the run after so many steps."""

    def __init__(self, paused: bool = False, max_steps: int | None = None) -> None:
        self.paused, self.max_steps = paused, max_steps
        self.events: list[list[tuple]] = []
        self.struck_at = 0.0
        self.slowest_step = 0.0  # seconds; the first, which begins with the start, is not counted
        self._num_seen, self._stepped_at = 0, math.inf  # events of rank 0, and when the last step came

    def __call__(self, run: Any) -> bool:
        self.events = run.events
        new, self._num_seen = run.events[0][self._num_seen :], len(run.events[0])
        if any(event[0] == "metrics" for event in new):
            now = time.monotonic()
            self.slowest_step, self._stepped_at = max(self.slowest_step, now - self._stepped_at), now
        for process in [event[1] for events in run.events for event in events[-1:] if event[0] == "struck"]:
            if not self.struck_at:
                self.struck_at = time.monotonic()
                if self.paused:
                    time.sleep(PAUSE)
                    os.kill(process, signal.SIGCONT)
        return self.max_steps is not None and len(self.steps) >= self.max_steps

    @property
    def _logged(self) -> list[tuple[int, dict[str, float]]]:
        return [event[1:] for event in self.events[0] if event[0] == "metrics"] if self.events else []

    @property
    def steps(self) -> dict[int, tuple[float, float]]:
        """step -> loss and gradient norm, as far as rank 0 came."""
        norms = {step: metrics for step, metrics in self._logged if "grad_norm" in metrics}
        return {step: (found["loss_metrics/global_avg_loss"], found["grad_norm"]) for step, found in norms.items()}

    @property
    def validations(self) -> dict[int, float]:
        """step -> loss of the validation pass after it."""
        key = "validation_metrics/loss"
        return {step: metrics[key] for step, metrics in self._logged if key in metrics}


class Soak:
    """Runs a case in a folder of its own."""

    def __init__(self, case: Case, folder: Path, model: Path) -> None:
        self.case, self.folder, self.model, self.outcome = case, folder, model, Outcome()
        self.whole: dict[int, tuple[float, float]] = {}
        self.validations: dict[int, float] = {}
        self.timeout = TIMEOUT

    def run(self) -> Outcome:
        case = self.case
        rng = random.Random(case.number)
        write_records(self.folder / "records.jsonl", case.task, case.seq_len, rng)
        write_records(self.folder / "validation.jsonl", case.task, case.seq_len, rng, 60)
        whole = self._start("uninterrupted", case.degrees, ("none", 0, 0, ""))
        self.whole, self.validations = whole.steps, whole.validations
        self.timeout = min(TIMEOUT, LEAST_TIMEOUT + math.ceil(SLOWEST_STEPS * whole.slowest_step))
        if sorted(self.whole) != list(range(1, case.steps + 1)):
            return self._fail(f"the uninterrupted run has {len(self.whole)} steps of {case.steps}")
        if case.validates and not self.validations:
            return self._fail("the uninterrupted run has no validation loss")
        self._check_resources(whole)
        saved = None
        for blow in case.blows:
            self._strike(blow)
            if self._has_ended():
                break
            if self._last_saved():
                saved = shutil.copytree(self.folder / "struck", self.folder / "copy", dirs_exist_ok=True)
        if not self._has_ended() or not case.exports:  # which cannot be continued
            self._compare(self._start("struck", case.degrees, ("none", 0, 0, "")), blow=None)
        if case.exports:
            self._compare_exports()
        if saved:
            self._resume_elsewhere()
        return self.outcome

    def _fail(self, reason: str) -> Outcome:
        self.outcome.failures.append(reason)
        return self.outcome

    def _start(
        self, name: str, degrees: dict[str, int], blow: tuple[str, int, int, str], max_steps: int | None = None
    ) -> Watcher:
        """One start of a run, to its end, whatever the end is."""
        from support.faults import Fault

        phase, step, rank, kind = blow
        watcher = Watcher(kind == "paused", step if phase == "any" else max_steps)
        fault = Fault(phase, step, rank, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        arguments = [*self.case.arguments(degrees, self.folder, self.folder / name), "--model.hf_assets_path"]
        arguments += [str(self.model), f"--comm.init_timeout_seconds={TIMEOUT}"]
        arguments += [f"--comm.train_timeout_seconds={self.timeout}"]
        processes = degrees["dp"] * degrees["cp"] * degrees["tp"]
        try:
            train(processes, arguments, toml=DEBUG_TOML, setup=fault, until=watcher)
        except TrainingError as error:
            took = time.monotonic() - watcher.struck_at
            if not watcher.struck_at or kind == "paused":
                self._fail(f"{blow}: {error.type}: {error}\n{error.__notes__[-1]}")
            elif kind == "stopped" and took > self.timeout + 60:
                self._fail(f"{blow}: the other ranks took {took:.0f} s to end")
        else:
            if watcher.struck_at and kind in ("killed", "stopped"):
                self._fail(f"{blow}: no rank said so")
        self.outcome.starts += 1
        self.outcome.steps += len(watcher.steps)
        return watcher

    def _strike(self, blow: tuple[str, int, int, str]) -> None:
        watcher = self._start("struck", self.case.degrees, blow)
        if watcher.struck_at or blow[0] == "any":
            self.outcome.struck[blow[0], blow[3]] += 1
        self._compare(watcher, blow)
        checkpoints = self.folder / "struck" / "checkpoint"
        if checkpoints.exists() and not self._last_saved():
            shutil.rmtree(checkpoints)  # as the message says that refuses to start beside it
        if self.case.exports and not self._has_ended():
            self._check_unfinished_export()

    def _export(self, name: str) -> Path:
        return self.folder / name / "checkpoint" / f"step-{self.case.steps}"

    def _has_ended(self) -> bool:
        """Whether its last checkpoint is finished."""
        last = self._export("struck")
        return (last / (INDEX if self.case.exports else METADATA)).is_file()

    def _check_unfinished_export(self) -> None:
        found = [path.name for path in self._export("struck").glob("*") if path.suffix in (".json", ".safetensors")]
        if found:
            self._fail(f"an export that was cut off has {', '.join(sorted(found))}")

    def _compare_exports(self) -> None:
        whole, struck = (_contents(self._export(name)) for name in ("uninterrupted", "struck"))
        odd = sorted(name for name in whole.keys() | struck.keys() if whole.get(name) != struck.get(name))
        self.outcome.export = f"{len(whole) - len(odd)} files equal"
        if odd or INDEX not in whole:
            self._fail(f"the export differs in {', '.join(odd) or INDEX}")

    def _last_saved(self) -> int:
        """The step of the last finished checkpoint that a run can continue from; 0 if there is none."""
        finished = (self.folder / "struck" / "checkpoint").glob(f"step-*/{METADATA}")
        return max((int(path.parent.name.removeprefix("step-")) for path in finished), default=0)

    def _compare(self, watcher: Watcher, blow: tuple[str, int, int, str] | None) -> None:
        for step, found in watcher.steps.items():
            if found != self.whole[step]:
                self._fail(f"step {step} is {found}, uninterrupted {self.whole[step]} (start with blow {blow})")
                return
        for step, loss in watcher.validations.items():
            if loss != self.validations[step]:
                self._fail(f"validation after step {step} is {loss}, uninterrupted {self.validations[step]} ({blow=})")
                return
        self.outcome.equal_steps += len(watcher.steps)
        self.outcome.equal_validations += len(watcher.validations)

    def _resume_elsewhere(self) -> None:
        found = self._start("copy", self.case.other_degrees, ("none", 0, 0, ""), COMPARED).steps
        self.outcome.resumed_at = min(found, default=0)
        pairs = [(found[step], self.whole[step]) for step in found]
        differences = [max_relative_difference([a[i] for a, _ in pairs], [b[i] for _, b in pairs]) for i in range(2)]
        self.outcome.difference = max(differences)
        if self.outcome.difference > TOLERANCE:
            self._fail(f"at {self.case.other_degrees} from step {self.outcome.resumed_at}: {found} differs")

    def _check_resources(self, whole: Watcher) -> None:
        for rank, events in enumerate(whole.events):
            used = [event[1:] for event in events if event[0] == "resources"]
            third = len(used) // 3
            before, after = (list(zip(*part, strict=True)) for part in (used[third : 2 * third], used[2 * third :]))
            growth = int(statistics.median(after[0]) - statistics.median(before[0]))
            # Medians: a checkpoint that is being written has a thread and files of its own.
            now = (growth, int(statistics.median(after[1])), int(statistics.median(after[2])))
            self.outcome.used = tuple(map(max, self.outcome.used, now))
            for name, found, limit in zip(USED, now, (MAX_GROWTH, max(before[1]), max(before[2])), strict=True):
                if self.case.steps >= SETTLED and found > limit:
                    self._fail(f"rank {rank}: {name} {found} in the last third of the run, at most {limit} is flat")


def _contents(folder: Path) -> dict[str, bytes]:
    """Of all files, by path in the folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def row(case: Case, outcome: Outcome) -> str:
    """Of the table."""
    layout, other = (
        " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "one rank"
        for degrees in (case.degrees, case.other_degrees)
    )
    options = case.options.replace("--activation_checkpoint.mode", "checkpointing")
    options = " ".join(word.rpartition(".")[2].lstrip("-") for word in options.split())
    options += " accumulated" * case.accumulated + f" validates every {case.validates}" * bool(case.validates)
    blows = ", ".join(f"{phase} {kind} x {n}" for (phase, kind), n in outcome.struck.items())
    compared = "" if outcome.difference is None else f"{other} from {outcome.resumed_at}: {outcome.difference:.1e}"
    values = (
        case.number, case.task, layout, case.seq_len, options, case.steps, blows, outcome.equal_steps, compared,
        outcome.equal_validations, outcome.export, *outcome.used, "FAILS" if outcome.failures else "equal",
    )  # fmt: skip
    return f"| {' | '.join(map(str, values))} |"


def run_case(case: Case, model: Path) -> Outcome:
    """Runs it in a folder that is deleted."""
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        return Soak(case, Path(folder), model).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="no case begins later than this (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    parser.add_argument("--cases", type=int, nargs="+", help="only those, by their number in the table")
    arguments = parser.parse_args()
    from support.hf_models import make_hf_folder

    model, start, outcomes = make_hf_folder("llama"), time.monotonic(), []
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for number in arguments.cases or itertools.count():
        if not arguments.cases and time.monotonic() - start > 60 * arguments.minutes:
            break
        case = make_case(arguments.seed, number)
        outcomes.append(run_case(case, model))
        print(row(case, outcomes[-1]), flush=True)
        for failure in outcomes[-1].failures:
            print(f"case {number}: {failure}", file=sys.stderr, flush=True)
    struck = sum((outcome.struck for outcome in outcomes), Counter())
    failed = sum(bool(outcome.failures) for outcome in outcomes)
    names = ("starts", "steps", "equal_steps", "equal_validations")
    starts, steps, equal, validations = (sum(getattr(outcome, name) for outcome in outcomes) for name in names)
    print(
        f"\n{len(outcomes)} cases, {failed} failed; {starts} starts, {steps} steps, {equal} of them in interrupted "
        f"runs and bit-equal, as are {validations} validation passes; "
        f"{sum(bool(outcome.export) for outcome in outcomes)} exports compared; "
        f"{', '.join(f'{phase} {kind} {n}' for (phase, kind), n in sorted(struck.items()))}; "
        f"{(time.monotonic() - start) / 60:.1f} minutes"
    )
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
