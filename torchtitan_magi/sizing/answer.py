"""Whether a run fits and how long it takes, in words: a verdict, memory and time by part, what would be faster."""

import html
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.sizing.keeping.kinds import AUTO, OF_MODE, as_option, in_words
from torchtitan_magi.sizing.memory import GIB, describe, host_memory, predict, remedies
from torchtitan_magi.sizing.predicted_run import PredictedRun
from torchtitan_magi.sizing.run_setup import Setup
from torchtitan_magi.wording import amount

WIDTH = 120


@dataclass(frozen=True)
class Answer:
    """A predicted run and how long it is.

    Attributes:
        faster: options to set, and the run with them.
        steps: None where they are not known.
        per_epoch: packs of an epoch; None where the data are not there.
        counts: of records that are packed as trees; None where none are.
        notes: what was not there, what it was sized by instead, and what is not counted.
    """

    run: PredictedRun
    faster: list[tuple[str, PredictedRun]]
    steps: int | None
    per_epoch: float | None
    counts: PackingCounts | None
    notes: list[str]

    @property
    def hours(self) -> float | None:
        """Hours of the whole run, without checkpoints and validation."""
        return None if self.steps is None else self.steps * self.run.time.total / 3600

    @property
    def epochs(self) -> float | None:
        """Passes over the data."""
        packs = self.run.setup.packs_per_step
        return self.steps * packs / self.per_epoch if self.steps and self.per_epoch else None


def answer_lines(answer: Answer) -> list[str]:
    """The answer for a terminal."""
    run = answer.run
    lines = [*(f"Note: {said}." for said in answer.notes), *verdict(answer)]
    lines = [line for text in lines for line in textwrap.wrap(text, WIDTH)]
    memory = [(part, f"{size / GIB:.1f}") for part, size in run.memory.parts.items()]
    memory.append((f"in {run.memory.moment}", f"{run.memory.total / GIB:.1f}"))
    times = [(part, _seconds(size), f"{size / run.time.total:.0%}") for part, size in run.time.parts.items()]
    times.append(("a step", _seconds(run.time.total), ""))
    lines += ["", *_beside(_table("memory of a GPU, GiB", memory), _table("time of a step, s", times))]
    return [*lines, "", *_faster_lines(answer)]


def verdict(answer: Answer) -> list[str]:
    """Sentences: whether it fits and what layers keep, how fast it is, how long it takes, what trees save."""
    run, setup, gpu = answer.run, answer.run.setup, answer.run.place.gpu
    taken = f"{run.memory.total / GIB:.0f} of {gpu.capacity / GIB:.0f} GiB"
    where = f"one {gpu.name}" if setup.world_size == 1 else f"each of {setup.world_size:,} {gpu.name}"
    if run.fits:
        fits = f"Fits: {taken} on {where}."
    elif run.memory.total > gpu.capacity:
        fits = f"Does not fit: {taken} on {where}."
    elif (offloaded := host_memory(setup)) > run.place.host:
        fits = f"May not fit: {taken} on {where}, and {offloaded / GIB:.0f} GiB of the host's memory for each, where "
        fits += f"{run.place.host / GIB:.0f} are taken to be there."
    else:
        fits = f"Just fits: {taken} on {where}; a prediction is off by up to 8%."
    packs = amount(setup.packs_per_step, "pack")
    step = f"A step of {packs} ({run.tokens:,.0f} tokens) takes {_seconds(run.time.total)} s: "
    step += (
        f"{run.tokens_per_second:,.0f} tokens/s per GPU, MFU {run.mfu:.0%}, attention at {run.efficiency:.0%} of ideal."
    )
    return [fits, *_keeping(setup), step, _length(answer), *_sharing(answer)]


def _keeping(setup: Setup) -> Iterator[str]:
    """What layers were chosen to keep."""
    if setup.checkpointing == AUTO:
        of_host = host_memory(setup) / GIB
        beside = f", {of_host:.0f} GiB of the host's memory for each GPU" if of_host else ""
        yield f"For the backward {in_words(setup.keepings)}{beside}."


def _sharing(answer: Answer) -> Iterator[str]:
    if answer.counts is not None and answer.per_epoch is not None:
        yield f"magi.share_prefixes: {answer.counts.sharing(answer.run.setup.packs_per_step, answer.per_epoch)}."


def _length(answer: Answer) -> str:
    if answer.steps is None or answer.hours is None:
        return "How many steps magi.epochs comes to, the data will say."
    text = f"{amount(answer.steps, 'step')} = {_hours(answer.hours)}"
    return text + (f"; {amount(answer.epochs, 'epoch')}." if answer.epochs else ".")


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.0f} min"
    return f"{hours:.1f} h" if hours < 100 else f"{hours / 24:.1f} days"


def _seconds(seconds: float) -> str:
    """With three digits."""
    return f"{seconds:.{max(0, 2 - math.floor(math.log10(max(seconds, 1e-3))))}f}"


def _faster_lines(answer: Answer) -> Iterator[str]:
    run = answer.run
    if not run.fits:
        yield from textwrap.wrap(f"Takes less memory: {remedies(run.setup)}.", WIDTH)
    if answer.faster:
        yield "Faster on the same GPUs:" if run.fits else "Would fit on the same GPUs:"
    elif run.fits:
        yield "No other degrees or checkpointing are faster on the same GPUs."
    for words, other in answer.faster:
        gain = f"{1 - other.time.total / run.time.total:.0%} less time, " if run.fits else ""
        yield f"  {words}: {gain}{_seconds(other.time.total)} s a step, {other.memory.total / GIB:.0f} GiB"


def _table(title: str, rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of equal width: a title, and rows whose last is a sum."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    width = max(map(len, [title, *lines]))
    return [title.ljust(width), *(line.ljust(width) for line in [*lines[:-1], "-" * len(lines[0]), lines[-1]])]


def _beside(left: list[str], right: list[str]) -> list[str]:
    """Two tables side by side, both with their sums at the bottom."""
    height = max(len(left), len(right))
    padded = [[*table[:-2], *[" " * len(table[0])] * (height - len(table)), *table[-2:]] for table in (left, right)]
    return [f"{one}    {two}".rstrip() for one, two in zip(*padded, strict=True)]


def memory_lines(setups: list[Setup]) -> list[str]:
    """Predicted memory under several layouts: a table by activation checkpointing, and the parts for the run's own."""
    title = "GiB on each GPU as predicted, by activation_checkpoint.mode (selective: by operation)"
    lines = [title, "", f"GPUs  T, tokens  {'  '.join(OF_MODE)}"]
    for setup in setups:
        by_mode = (predict(replace(setup, checkpointing=mode, every=0)).total / GIB for mode in OF_MODE)
        cells = "  ".join(f"{gib:{len(mode)}.0f}" for mode, gib in zip(OF_MODE, by_mode, strict=True))
        lines.append(f"{setup.cp:4}  {setup.tokens:9,}  {cells}")
    own = (". ".join([f"{amount(setup.cp, 'GPU')}: {describe(predict(setup))}", *_keeping(setup)]) for setup in setups)
    return [*lines, "", *(textwrap.fill(text, WIDTH) for text in own)]


def answer_html(answer: Answer) -> str:
    """The answer as a part of a web page."""
    first, *others = verdict(answer)
    lines, paragraphs = answer_lines(answer), "".join(f"<p>{html.escape(text)}</p>" for text in others)
    tables = html.escape("\n".join(lines[lines.index("") + 1 :]))
    notes = "".join(f"<p>Note: {html.escape(said)}.</p>" for said in answer.notes)
    kind = "fits" if answer.run.fits else "large"
    return f'<div class="answer {kind}"><h2>{html.escape(first)}</h2>{paragraphs}{notes}<pre>{tables}</pre></div>'


def answer_json(answer: Answer) -> dict[str, Any]:
    """The answer as JSON has it: bytes, seconds."""
    run = answer.run
    return {
        "gpu": run.place.gpu.name,
        "gpus": run.setup.world_size,
        "fits": run.fits,
        "memory": run.memory.parts,
        "memory_total": run.memory.total,
        "host_memory": host_memory(run.setup),
        "keep": as_option(run.setup.keepings) if run.setup.checkpointing == AUTO else None,
        "capacity": run.place.gpu.capacity,
        "step": run.time.parts,
        "step_total": run.time.total,
        "tokens_per_step": run.tokens,
        "tokens_per_second_per_gpu": run.tokens_per_second,
        "mfu": run.mfu,
        "attention_efficiency": run.efficiency,
        "steps": answer.steps,
        "hours": answer.hours,
        "epochs": answer.epochs,
        "sharing": _sharing_json(answer),
        "faster": [{"options": words, "step_total": other.time.total} for words, other in answer.faster],
    }


def _sharing_json(answer: Answer) -> dict[str, float] | None:
    """What sharing saves of the records that were packed as trees; None where none are."""
    if (counts := answer.counts) is None or answer.per_epoch is None:
        return None
    return {
        "records": counts.documents,
        "tokens": counts.tokens,
        "tokens_flat": counts.tokens + counts.shared_tokens,
        "records_per_step": answer.run.setup.packs_per_step * counts.pieces / counts.packs,
        "steps_per_epoch": answer.per_epoch / answer.run.setup.packs_per_step,
    }
