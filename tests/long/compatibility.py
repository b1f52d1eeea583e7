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
docs/reference/compatibility.md; with --gpu to the Markdown file --output.

It runs on the CPU, where torch.compile traces but generates no code; what needs GPUs is left to --gpu. The models have
two layers, of width 64 on the CPU and 256 on GPUs, and come from config.json (flavor "hf"), as the tests' models do.
transformers writes them; a machine without it can take those of another (--models).
"""

import argparse
import datetime
import functools
import itertools
import json
import random
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # tiny models, and runs in processes that have imported everything

STEPS = 3
SEQ_LEN = 256
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # largest relative difference of a loss
GPU_EXTRAS = ("CPU offload", "float8", "async TP")

OF_LOW_PRECISION = """
## Precision

float8 needs `quantize.linear.float8.filter_fqns = ["output"]`, and says so otherwise: log-probabilities are made from a
plain output layer. It changes losses of DPO by several percent, also on one rank: take bfloat16 for DPO. Under FSDP
without `torch.compile`, losses are those of the plain run in every digit. Under CP and TP each rank scales its own
tokens or features, so other bits are rounded. With torchao's recipe `rowwise_with_gw_hp`, which scales each token by
itself, DPO of llama3 at CP 2 has the losses of one rank in every digit, and at TP 2 they differ by 3.2e-02 (float32,
emulated, on a CPU, 2026-11-23).

CPU offload and asynchronous TP also ran on two H200 with NVLink (2026-11-23, at ten times this learning rate): 11 runs
of SFT differed by at most 1.4e-03, 10 of DPO by at most 6.9e-02.
"""


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
        precision = "fp32" if is_plain_tp and version("torchtitan").startswith("0.2.") else self.precision
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
        degrees = {"data_parallel_replicate": 1, "data_parallel_shard": 1} | self.degrees
        options = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
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


Rows = list[tuple[int, Cell, str, str]]  # number, combination, verdict, detail

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
        from support import runs as training
        from support.hf_models import make_hf_folder
        from support.preference import data

        training.ON_GPUS = self.on_gpus = on_gpus
        # the kernel for GPUs takes heads of 64
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4} if on_gpus else {}
        kinds = {"llama3": "llama", "qwen3": "qwen3", "qwen3 MoE": "qwen3_moe"}
        self.folders = {model: folder / kinds[model] for model in LAYOUTS}
        for model, kind in kinds.items():
            if not self.folders[model].exists():
                heads = {"head_dim": 64} if on_gpus and model != "llama3" else {}
                make_hf_folder(kind, folder=self.folders[model], **sizes, **heads)
        self.pairs = data()
        self.of = functools.cache(self._of)

    def _of(self, cell: Cell) -> Outcome:
        from support.runs import DEBUG_TOML, ROOT, TrainingError, corpus, train

        is_dpo = cell.task == "DPO"
        folder, names = (self.pairs, ("pairs", "validation")) if is_dpo else (corpus(), ("train", "validation"))
        options = (
            f"--model.name {cell.model.split()[0]} --model.flavor hf --model.hf_assets_path {self.folders[cell.model]} "
        )
        options += f"--checkpoint.enable --checkpoint.initial_load_in_hf --training.steps {STEPS} "
        options += (
            f"--checkpoint.load_only --training.seq_len {SEQ_LEN} --training.dataset_path {folder}/{names[0]}.jsonl "
        )
        options += f"--validation.dataset {cell.task.lower()} --validation.dataset_path {folder}/{names[1]}.jsonl "
        # Adam's first steps go by the signs of gradients, which in bfloat16 are noise where they are near zero.
        rate = "1e-4" if self.on_gpus else "1e-3"
        options += (
            f"--validation.freq {STEPS} --validation.steps=2 --validation.seq_len {SEQ_LEN} --optimizer.lr {rate}"
        )
        if self.on_gpus and cell.precision == "fp32":
            options += " --magi.backend flex"  # the kernel takes no float32
        toml = ROOT / "train_configs" / "dpo_debug.toml" if is_dpo else DEBUG_TOML
        arguments = [*options.split(), "--parallelism.context_parallel_degree", "1", *cell.arguments]
        try:
            run = train(cell.processes, arguments, toml=toml, defaults=(), layers=None, entry="torchtitan_magi.train")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, nargs="+", help="only those, by their number in the table")
    parser.add_argument("--gpu", action="store_true", help="the combinations that need GPUs, two of them")
    parser.add_argument("--jobs", type=int, default=1, help="cells at the same time (default: %(default)s)")
    parser.add_argument("--models", type=Path, help="folder of the models; written there if there are none")
    parser.add_argument("--output", type=Path, help="Markdown file to write, of --gpu")
    arguments = parser.parse_args()
    chosen = list(enumerate(gpu_cells() if arguments.gpu else cells()))
    chosen = [(number, cell) for number, cell in chosen if not arguments.cells or number in arguments.cells]
    rows, failed = [], 0
    with tempfile.TemporaryDirectory() as scratch:
        Runs(arguments.models or Path(scratch), arguments.gpu)  # writes the models
        verdict = functools.partial(_verdict, arguments.models or Path(scratch), arguments.gpu)
        with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
            verdicts = pool.map(verdict, [cell for _, cell in chosen])
            for (number, cell), (verdict, detail) in zip(chosen, verdicts, strict=True):
                failed += verdict == "FAILS"
                rows.append((number, cell, verdict, detail))
                line = detail.splitlines()[0][:200] if detail else ""
                print(f"{number:3} {verdict:8} {cell}: {line}", flush=True)
    if arguments.output and arguments.gpu:
        arguments.output.write_text(page(rows))
    elif len(rows) == len(cells()) and not arguments.gpu:
        write_verdicts(rows)
    sys.exit(1 if failed else 0)


_runs = functools.cache(Runs)


def _verdict(models: Path, on_gpus: bool, cell: Cell) -> tuple[str, str]:
    return _runs(models, on_gpus).verdict(cell)


def place() -> str:
    """GPUs, date and version."""
    import torch

    count, shared = torch.cuda.device_count(), ""
    if count == 1:
        shared = ", which the ranks share, with NCCL over sockets"
    return f"{count} {torch.cuda.get_device_name()}{shared} ({datetime.date.today()}, torch {torch.__version__})"


def write_verdicts(rows: Rows) -> None:
    """benchmarks/results/compatibility_TORCHTITAN.json, of all combinations on the CPU."""
    from support.runs import TITAN

    from torchtitan_magi.calibrate import facts_of_run

    found = facts_of_run(None) | {
        "command": "python tests/long/compatibility.py",
        "torchtitan": TITAN,
        "cells": [
            {"number": number, "verdict": verdict, "detail": detail} | asdict(cell)
            for number, cell, verdict, detail in rows
        ],
    }
    file = ROOT / "benchmarks" / "results" / f"compatibility_{TITAN}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")


def page(rows: Rows) -> str:
    """docs/reference/compatibility_gpu.md."""
    works = sum(verdict == "works" for _, _, verdict, _ in rows)
    refused = {(f"{cell.model}, {cell.layout}", detail): 0 for _, cell, verdict, detail in rows if verdict == "refused"}
    columns = ["#", "model", "task", "layout", "precision", "packs", "accumulation", "checkpointing", "compile"]
    columns += ["validation", "extra", "verdict"]
    text = (
        f"Made by `tests/long/compatibility.py` on {place()}, with torchtitan 0.2.2: {len(rows)} combinations. For "
        f"each model every two values of two options meet. {works} train with the losses of the plain run (the same "
        "packs and precision, one rank or plain data parallelism, no options): the largest relative difference over "
        f"{STEPS} steps and a validation is at most {TOLERANCE['bf16']:g}. The others are refused before the first "
        "step. Runs with float8 are compared with a plain run in float8 (`quantize.linear.float8`, the output layer "
        "left out), CPU offload and asynchronous TP with bfloat16. Where the difference is larger, the run may differ "
        "from the plain one in the next higher precision (bfloat16, float32) by twice as much as that in its own."
    )
    lines = ["# What goes together on GPUs", "", *textwrap.wrap(text, 118), ""]
    lines += [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns)]
    for number, cell, verdict, detail in rows:
        on = {True: "yes", False: ""}
        values = (
            number, cell.model, cell.task, cell.layout, cell.precision, cell.packs, cell.accumulation,
            cell.checkpointing, on[cell.compile], on[cell.validation], cell.extra,
        )  # fmt: skip
        verdict = f"{verdict}, {detail}" if verdict == "works" else f"**{verdict}**"
        lines.append(f"| {' | '.join(map(str, values))} | {verdict} |")
    if refused:
        lines += ["", "Refused:", "", *(f"* {who}: {detail}" for who, detail in refused)]
    return "\n".join(lines) + "\n" + OF_LOW_PRECISION


if __name__ == "__main__":
    main()
