#!/usr/bin/env python3
"""Which options go together: trains tiny models under combinations of them and compares losses with the plain run.

    python tests/long/compatibility.py [--cells 0 7 12]        # in the environment of each torchtitan
    python tests/long/compatibility.py --gpu --jobs 8          # on two GPUs: the options that need them

For each model, every two values of two options meet in at least one combination (pairwise coverage), and one run has
everything on. A combination works if the losses of all steps, and of validation, are those of the plain run (the same
packs and precision, without the parallelism and the options), or it is refused before the first step in one line that
names the remedy. Anything else fails, and the exit code is 1. On GPUs a run may also differ from the plain run in the
next higher precision by twice as much as the plain run in its own does: losses of DPO are differences of two models,
and with float8 each rank scales its own tokens.

Verdicts go to benchmarks/results/compatibility_TORCHTITAN.json, of which write_docs.py makes the table of
docs/reference/compatibility.md; with --gpu the table of compatibility_gpu.md beside it goes to the file --output.

It runs on the CPU, where torch.compile traces but generates no code; what needs GPUs is left to --gpu. The models have
two layers, of width 64 on the CPU and 256 on GPUs, and come from config.json (flavor "hf"), as the tests' models do.
transformers writes them; a machine without it can take those of another (--models).
"""

import functools
import itertools
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from runner import TITAN, TOMLS, VERSIONS, TrainingError, on_model, overrides_of, runs, train, write_models

from torchtitan_magi.calibrate import facts_of_run

from figures import RESULTS, grouped, parser, result, save, sources, table  # isort: skip

STEPS = 3
SEQ_LEN = 256
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # largest relative difference of a loss
GPU_EXTRAS = ("CPU offload", "float8", "async TP")


@dataclass(frozen=True)
class Cell:
    """A combination; the first value of each axis is the plain one."""

    model: str = "llama3"
    layout: str = "one rank"
    checkpointing: str = "none"
    compile: bool = False
    precision: str = "fp32"
    packs: int = 1  # per data-parallel rank and microbatch
    accumulation: int = 1  # microbatches per step
    validation: bool = False
    extra: str = "none"
    task: str = "SFT"

    @property
    def degrees(self) -> dict[str, int]:
        """Parallel degrees by torchtitan's names."""
        return {
            "one rank": {},
            "FSDP": {"data_parallel_shard": 2},
            "HSDP": {"data_parallel_replicate": 2, "data_parallel_shard": 2},
            "TP": {"tensor_parallel": 2},
            "CP": {"context_parallel": 2},
            "EP": {"data_parallel_shard": 2, "expert_parallel": 2},
            "CP + EP": {"context_parallel": 2, "expert_parallel": 2},
            "FSDP + TP + CP": {"data_parallel_shard": 2, "tensor_parallel": 2, "context_parallel": 2},
            "FSDP + TP + CP + EP": {
                "data_parallel_shard": 2, "tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2
            },
        }[self.layout]  # fmt: skip

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.degrees.get("data_parallel_replicate", 1) * self.degrees.get("data_parallel_shard", 1)

    @property
    def processes(self) -> int:
        return self.dp * self.degrees.get("tensor_parallel", 1) * self.degrees.get("context_parallel", 1)

    @property
    def plain(self) -> "Cell":
        """The same packs, precision and task, and a validation: data-parallel ranks read packs of their own.

        torchtitan 0.2.2 has no mixed precision for tensor parallelism alone.
        """
        layout = {1: "one rank", 2: "FSDP", 4: "HSDP"}[self.dp]
        is_plain_tp = self.layout == "TP" and self.extra not in GPU_EXTRAS
        precision = "fp32" if is_plain_tp and TITAN.startswith("0.2.") else self.precision
        return Cell(
            self.model, layout, precision=precision, packs=self.packs, accumulation=self.accumulation,
            validation=True, task=self.task, extra="float8" if self.extra == "float8" else "none",
        )  # fmt: skip

    @property
    def exact(self) -> "Cell":
        """The same in the next higher precision."""
        return replace(self, extra="none") if self.extra == "float8" else replace(self, precision="fp32")

    @property
    def arguments(self) -> list[str]:
        """torchtitan overrides, without the model and the data."""
        plain = {"data_parallel_replicate": 1, "data_parallel_shard": 1, "context_parallel": 1}
        options = overrides_of(plain | self.degrees)
        options += [f"--training.local_batch_size={self.packs}"]
        options += [f"--training.global_batch_size={self.packs * self.accumulation * self.dp}"]
        mode = {"selective": "selective --activation_checkpoint.selective_ac_option op"}
        options += [f"--activation_checkpoint.mode {mode.get(self.checkpointing, self.checkpointing)}"]
        backend = "inductor" if self.extra in GPU_EXTRAS else "aot_eager"
        options += [f"--compile.enable --compile.backend {backend}"] if self.compile else ["--compile.no-enable"]
        options += ["--training.mixed_precision_param", {"fp32": "float32", "bf16": "bfloat16"}[self.precision]]
        options += ["--validation.enable" if self.validation else "--validation.no-enable"]
        options += {
            "none": [],
            "CPU offload": ["--training.enable_cpu_offload"],
            "float8": ["--model.converters=quantize.linear.float8 --quantize.linear.float8.filter_fqns output"],
            "async TP": ["--parallelism.enable_async_tensor_parallel"],
        }[self.extra]
        return " ".join(options).split()

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        named = [str(values.pop(name)) for name in ("model", "task", "layout", "precision")]
        return ", ".join([*named, f"{self.packs} x {self.accumulation} packs", *(
            text for text, on in (
                (f"{self.checkpointing} checkpointing", self.checkpointing != "none"),
                ("compile", self.compile), ("validation", self.validation), (self.extra, self.extra != "none"),
            ) if on
        )])  # fmt: skip


DENSE = ("FSDP", "HSDP", "TP", "CP", "FSDP + TP + CP")
LAYOUTS = {
    "llama3": DENSE,
    "qwen3": DENSE,
    "qwen3 MoE": ("FSDP", "HSDP", "TP", "CP", "EP", "CP + EP", "FSDP + TP + CP + EP"),
}
AXES: dict[str, tuple] = {
    "checkpointing": ("none", "selective", "full"),
    "compile": (False, True),
    "precision": ("fp32", "bf16"),
    "packs": (1, 2),
    "accumulation": (1, 2),
    "validation": (False, True),
    "task": ("SFT", "DPO"),
}
EVERYTHING = {
    "checkpointing": "full", "compile": True, "precision": "bf16", "packs": 2, "accumulation": 2, "validation": True
}  # fmt: skip


def cells() -> list[Cell]:
    """The combinations that run on the CPU."""
    chosen = []
    for model, layouts in LAYOUTS.items():
        everything = [Cell(model, layouts[-1], task=task, **EVERYTHING) for task in ("SFT", "DPO")]
        chosen += everything + cover({"model": (model,), "layout": layouts} | AXES, everything)
    return chosen + [Cell(model, "EP") for model in ("llama3", "qwen3")]  # refused


def gpu_cells() -> list[Cell]:
    """Those that need GPUs, two of them: each extra of theirs with every value of every other option."""
    layouts = {"CPU offload": ("FSDP", "TP", "CP"), "float8": ("FSDP", "TP", "CP"), "async TP": ("TP",)}
    chosen = []
    for extra in GPU_EXTRAS:
        axes = {"model": tuple(LAYOUTS), "layout": layouts[extra], "extra": (extra,)} | AXES | {"precision": ("bf16",)}
        if extra == "async TP":
            axes["compile"] = (True,)
        chosen += cover(axes, [])
    return chosen


def cover(axes: dict[str, tuple], chosen: Iterable[Cell]) -> list[Cell]:
    """Cells in which every two values of two axes meet, besides those of `chosen`: greedy, of random candidates."""
    rng, names, found = random.Random(0), list(axes), []
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]}
    missing -= {pair for cell in chosen for pair in _pairs(cell, names)}
    while missing:
        must = min(missing, key=str)  # so that each new cell has at least one
        candidates = [
            Cell(**{name: rng.choice(values) for name, values in axes.items()} | dict(must)) for _ in range(200)
        ]
        best = max(candidates, key=lambda cell: len(missing.intersection(_pairs(cell, names))))
        found.append(best)
        missing.difference_update(_pairs(best, names))
    return found


def _pairs(cell: Cell, names: list[str]) -> Iterator[tuple]:
    return itertools.combinations([(name, getattr(cell, name)) for name in names], 2)


@dataclass
class Outcome:
    """What a cell did: losses of all steps and of validation; or the line that refused it; or what went wrong."""

    losses: tuple[float, ...] = ()
    refused: str = ""
    failed: str = ""

    def farthest(self, other: "Outcome") -> float:
        """The largest relative difference of a loss from that of another run, which may have more of them."""
        return max(abs(a - b) / abs(b) for a, b in zip(self.losses, other.losses, strict=False))


class Runs:
    """Runs of cells, each once. folder: has the models, or is where they are written."""

    def __init__(self, folder: Path, on_gpus: bool) -> None:
        self.folder = folder
        runs.ON_GPUS = self.on_gpus = on_gpus
        write_models(folder, sizes_on_gpus if on_gpus else lambda model: {})
        self.of = functools.cache(self._of)

    def _of(self, cell: Cell) -> Outcome:
        # Adam's first steps go by the signs of gradients, which in bfloat16 are noise where they are near zero.
        options = (
            "--checkpoint.enable --checkpoint.initial_load_in_hf --checkpoint.load_only "
            f"--optimizer.lr {'1e-4' if self.on_gpus else '1e-3'} "
            f"--validation.dataset {cell.task.lower()} --validation.freq {STEPS} --validation.steps=2"
        )
        if self.on_gpus and cell.precision == "fp32":
            options += " --magi.backend flex"  # the kernel takes no float32
        model = on_model(cell.model, self.folder, cell.task, SEQ_LEN, STEPS)
        try:
            run = train(cell.processes, [*model, *options.split(), *cell.arguments], toml=TOMLS[cell.task])
        except TrainingError as error:
            if error.type == "ValueError" and "\n" not in str(error):
                return Outcome(refused=str(error))
            return Outcome(failed=f"{error.type}: {error}")
        return Outcome(tuple(run.losses + run.validation_losses))

    def verdict(self, cell: Cell) -> tuple[str, str]:
        """ "works", "refused" or "FAILS", and the largest relative difference or the reason."""
        outcome = self.of(cell)
        if outcome.refused:
            return "refused", outcome.refused
        plain = self.of(cell.plain)
        if outcome.failed or not plain.losses:
            return "FAILS", outcome.failed or f"the plain run: {plain.failed or plain.refused}"
        expected = len(plain.losses) if cell.validation else STEPS
        if len(outcome.losses) != expected:
            return "FAILS", f"{len(outcome.losses)} losses, not {expected}"
        worst = outcome.farthest(plain)
        if worst <= TOLERANCE[cell.plain.precision] or not self.on_gpus:
            return ("works" if worst <= TOLERANCE[cell.plain.precision] else "FAILS"), f"{worst:.1e}"
        exact = self.of(cell.plain.exact)
        error, of_plain = outcome.farthest(exact), plain.farthest(exact)
        detail = f"{error:.1e} from {cell.plain.exact.precision}, plain {of_plain:.1e}"
        return ("works" if error <= 2 * of_plain else "FAILS"), detail


def sizes_on_gpus(model: str) -> dict[str, int]:
    """The kernel takes heads of 64 there."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    return sizes if model == "llama3" else sizes | {"head_dim": 64}


_runs = functools.cache(Runs)


def _verdict(models: Path, on_gpus: bool, cell: Cell) -> tuple[str, str]:
    return _runs(models, on_gpus).verdict(cell)


# -------------------------------------------------------------------------------------------------------------- tables

OPTIONS = ("model", "task", "layout", "precision", "packs", "accumulation", "checkpointing", "compile", "validation")


def verdicts_table(verdicts: dict[str, list[dict[str, Any]]], options: Iterable[str] = OPTIONS) -> str:
    """A line for each combination. verdicts: name of a column -> the same combinations."""
    yes, lines = {True: "yes", False: ""}, []
    for cells in zip(*verdicts.values(), strict=True):
        values = [yes[value] if isinstance(value := cells[0][name], bool) else value for name in options]
        told = [each["detail"] if each["verdict"] == "works" else f"**{each['verdict']}**" for each in cells]
        lines.append([cells[0]["number"], *values, *told])
    return table(["#", *options, *verdicts], lines)


def by_layout(found: dict[str, list[dict[str, Any]]]) -> str:
    """A line for each model and layout: the largest difference of its combinations in each precision."""
    groups = {version: grouped(cells, "model", "layout") for version, cells in found.items()}
    lines = []
    for setting, cells in groups[VERSIONS[0]].items():
        worst = [largest(of[setting], precision) for precision in TOLERANCE for of in groups.values()]
        lines.append([*setting, len(cells), *worst])
    columns = [f"{precision}, {version}" for precision in TOLERANCE for version in groups]
    return table(["model", "layout", "combinations", *columns], lines)


def largest(cells: Iterable[dict[str, Any]], precision: str) -> str | None:
    """Of the combinations that train in this precision."""
    told = [float(cell["detail"]) for cell in cells if (cell["precision"], cell["verdict"]) == (precision, "works")]
    return f"{max(told):.1e}" if told else None


def refusals(cells: Iterable[dict[str, Any]]) -> str:
    refused = {cell["detail"]: cell["layout"] for cell in cells if cell["verdict"] == "refused"}
    return "\n".join(["Refused:\n", *(f"- {layout}: {line}" for line, layout in refused.items())])


def compatibility() -> str:
    """With each torchtitan."""
    files = {version: f"compatibility_{version}" for version in VERSIONS}
    found = {version: result(name)["cells"] for version, name in files.items()}
    works = ", ".join(
        f"{sum(cell['verdict'] == 'works' for cell in cells)} of {len(cells)} with {version}"
        for version, cells in found.items()
    )
    parts = [f"Trained: {works}.", by_layout(found), refusals(itertools.chain(*zip(*found.values(), strict=True)))]
    return "\n\n".join([*parts, sources(*files.values())])


PARTS: dict[str, Callable[[], str]] = {"compatibility": compatibility}  # of the docs


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--cells", type=int, nargs="+", help="only those, by their number in the table")
    command.add_argument("--gpu", action="store_true", help="the combinations that need GPUs, two of them")
    command.add_argument("--jobs", type=int, default=1, help="cells at the same time")
    command.add_argument("--models", type=Path, help="folder of the models; written there if there are none")
    command.add_argument("--output", type=Path, help="Markdown file to write, of --gpu")
    arguments = command.parse_args()
    chosen = list(enumerate(gpu_cells() if arguments.gpu else cells()))
    chosen = [(number, cell) for number, cell in chosen if not arguments.cells or number in arguments.cells]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        models = arguments.models or Path(scratch)
        Runs(models, arguments.gpu)  # writes the models
        verdict = functools.partial(_verdict, models, arguments.gpu)
        with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
            verdicts = pool.map(verdict, [cell for _, cell in chosen])
            for (number, cell), (verdict, detail) in zip(chosen, verdicts, strict=True):
                rows.append({"number": number, "verdict": verdict, "detail": detail} | asdict(cell))
                line = detail.splitlines()[0][:200] if detail else ""
                print(f"{number:3} {verdict:8} {cell}: {line}", flush=True)
    if arguments.output and arguments.gpu:
        text = verdicts_table({"verdict": rows}, [*OPTIONS, "extra"])
        arguments.output.write_text(f"{text}\n\n{refusals(rows)}\n")
    elif len(rows) == len(cells()) and not arguments.gpu:
        found = {"command": "python tests/long/compatibility.py", "cells": rows}
        save(facts_of_run(None) | found, RESULTS / f"compatibility_{TITAN}.json")
    sys.exit(any(row["verdict"] == "FAILS" for row in rows))


if __name__ == "__main__":
    main()
