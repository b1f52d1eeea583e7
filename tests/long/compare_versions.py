#!/usr/bin/env python3
"""Losses of the same layouts with torchtitan 0.2.2 and 0.3, from the same weights (safetensors of tiny models).

    python tests/long/compare_versions.py --weights outputs/versions     # once in the environment of each torchtitan

Trains a few steps under every layout that the installed torchtitan has, on the CPU in float32, and writes losses and
gradient norms to benchmarks/results/versions_TORCHTITAN.json. The same weights are there for both: transformers writes
them the first time. Prints each layout's largest relative difference from one process, and from the other torchtitan's
file, if there is one; exits with 1 if one is above TOLERANCE.
"""

import json
import math
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from runner import TITAN, TOMLS, VERSIONS, on_model, overrides_of, train, write_models

from torchtitan_magi.calibrate import facts_of_run

from figures import RESULTS, parser, result, save, sources, table  # isort: skip

STEPS = 5
PACKS = 4  # per step
TOLERANCE = {"losses": 1e-5, "grad_norms": 1e-4}  # relative; Adam goes by the signs of tiny gradients
DEGREES = {
    "dp": "data_parallel_shard", "replicate": "data_parallel_replicate", "cp": "context_parallel",
    "tp": "tensor_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel",
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One way to train the same packs. degrees: by DEGREES. options: of the TOML file. only: the torchtitan."""

    model: str
    degrees: dict[str, int] = field(default_factory=dict)
    options: str = ""
    task: str = "SFT"
    only: str = ""

    def __str__(self) -> str:
        layout = " x ".join(f"{name.upper()} {degree}" for name, degree in self.degrees.items()) or "one process"
        return ", ".join(filter(None, [self.model, self.task, layout, self.options.replace("--", "")]))

    @property
    def one_process(self) -> "Layout":
        """What it must equal: the same loss."""
        return Layout(self.model, {}, self.options if self.options in LOSSES else "", self.task)

    @property
    def processes(self) -> int:
        return math.prod(degree for name, degree in self.degrees.items() if name != "ep")

    def arguments(self, weights: Path) -> list[str]:
        """Overrides of debug.toml or dpo_debug.toml. In a pipeline each pack is a microbatch."""
        degrees = {"dp": 1, "cp": 1} | self.degrees
        local = PACKS // (degrees["dp"] * degrees.get("replicate", 1)) if "pp" in degrees else 1
        options = (
            "--checkpoint.load_only --checkpoint.enable --checkpoint.initial_load_in_hf "
            "--training.mixed_precision_param float32 --magi.backend flex "
            f"--training.local_batch_size {local} --training.global_batch_size {PACKS} "
            "--optimizer.lr 1e-3 --optimizer.eps 1e-5 --lr_scheduler.warmup_steps 2 --validation.no-enable "
            f"{self.options}"
        )
        model = on_model(self.model, weights, self.task, seq_len=256, steps=STEPS)
        return [*overrides_of({DEGREES[name]: degree for name, degree in degrees.items()}), *model, *options.split()]


LOSSES = ("--magi.positions pack", "--magi.loss_per document")  # options that change the loss
DENSE: tuple[dict[str, int], ...] = (
    {}, {"dp": 2}, {"replicate": 2}, {"cp": 2}, {"cp": 4}, {"tp": 2}, {"cp": 2, "tp": 2}, {"dp": 2, "cp": 2},
    {"dp": 2, "cp": 2, "tp": 2},
)  # fmt: skip
EXPERTS: tuple[dict[str, int], ...] = ({}, {"cp": 2}, {"cp": 2, "ep": 2}, {"dp": 2, "ep": 2}, {"tp": 2})
PIPELINES: tuple[dict[str, int], ...] = (
    {"pp": 2}, {"pp": 2, "cp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "cp": 2, "tp": 2},
    {"pp": 2, "dp": 2, "cp": 2}, {"pp": 2, "dp": 2, "cp": 2, "tp": 2},
)  # fmt: skip
LAYOUTS = [
    *(Layout("llama3", degrees) for degrees in DENSE),
    *(Layout("llama3", {"cp": 2}, f"--activation_checkpoint.mode {mode}") for mode in ("none", "full")),
    Layout("llama3", {"cp": 2}, "--compile.enable --compile.backend aot_eager"),
    Layout("llama3", {"cp": 2}, "--magi.overlap_stages 0"),
    Layout("llama3", {"cp": 4}, "--magi.overlap_stages 2"),
    *(Layout("llama3", degrees, options) for options in LOSSES for degrees in ({}, {"cp": 2})),
    *(Layout("llama3", degrees, task="DPO") for degrees in ({}, {"cp": 2}, {"cp": 2, "tp": 2})),
    *(Layout("qwen3", degrees) for degrees in ({}, {"cp": 2}, {"tp": 2}, {"cp": 2, "tp": 2})),
    *(Layout("qwen3 MoE", degrees) for degrees in EXPERTS),
    *(Layout("llama3", degrees, only="0.3.0") for degrees in PIPELINES),
    Layout("llama3", {"pp": 2, "cp": 2}, "--parallelism.pipeline_parallel_schedule GPipe", only="0.3.0"),
    Layout("llama3", {"pp": 2}, "--parallelism.pipeline_parallel_schedule Interleaved1F1B", only="0.3.0"),
    Layout("qwen3", {"pp": 2, "cp": 2}, only="0.3.0"),
]


def train_layout(layout: Layout, weights: Path) -> dict[str, list[float]]:
    """Losses and gradient norms by step."""
    run = train(layout.processes, layout.arguments(weights), toml=TOMLS[layout.task])
    steps = [values for _, values in run.of("metrics", rank=layout.processes - 1) if "grad_norm" in values]
    return {
        "losses": [values["loss_metrics/global_avg_loss"] for values in steps],
        "grad_norms": [values["grad_norm"] for values in steps],
    }


def difference(found: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, float]:
    """Largest relative difference over the steps, by what is compared."""
    return {name: max(abs(a - b) / abs(b) for a, b in zip(found[name], other[name], strict=True)) for name in TOLERANCE}


def shown(differences: dict[str, float]) -> str:
    return ", ".join(f"{value:.1e}" for value in differences.values())


# -------------------------------------------------------------------------------------------------------------- tables


def versions() -> str:
    """The largest difference of losses and gradient norms of each layout from one process, and between torchtitans."""
    files = {version: f"versions_{version}" for version in VERSIONS}
    found = {version: result(name)["layouts"] for version, name in files.items()}
    rows = []
    for layout in LAYOUTS:
        name, alone = str(layout), str(layout.one_process)
        runs = {version: of.get(name) for version, of in found.items()}
        pairs = [(run, found[version].get(alone)) for version, run in runs.items()]
        told = (max(difference(*pair).values()) if all(pair) else None for pair in (*pairs, runs.values()))
        rows.append([name, *(None if worst is None else f"{worst:.1e}" for worst in told)])
    columns = ["layout", *(f"{version}, from its one process" for version in VERSIONS), "0.3 from 0.2.2"]
    return f"{table(columns, rows)}\n\n{sources(*files.values())}"


def v03_gpu(name: str, on: str) -> str:
    """The largest relative difference of losses with torchtitan 0.3 on GPUs from those on a CPU."""
    found = result(name)
    rows = [
        [task, f"{max(abs(a - b) / abs(b) for a, b in zip(of['gpu'], of['cpu'], strict=True)):.1%}"]
        for task, of in found["losses"].items()
    ]
    note = f"; {found['note']}" if "note" in found else ""
    columns = ["run", f"{on}: largest difference from the CPU"]
    return f"{table(columns, rows)}\n\n{found['date']}, torch {found['torch']}{note}."


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "versions": versions,
    "v03-gpu": partial(v03_gpu, "v03_h200", "one H200"),
    "v03-two-gpus": partial(v03_gpu, "v03_h200x2", "two H200"),
}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--weights", type=Path, required=True, help="folder of the models; written if there are none")
    weights = command.parse_args().weights.resolve()
    write_models(weights, lambda model: {"num_hidden_layers": 4})
    files = {version: RESULTS / f"versions_{version}.json" for version in VERSIONS}
    others = [
        json.loads(file.read_text())["layouts"] for version, file in files.items() if version != TITAN and file.exists()
    ]
    layouts: dict[str, Any] = {}
    found = facts_of_run(None) | {
        "processor": platform.processor() or platform.machine(),
        "layouts": layouts,
    }
    failed = False
    for layout in LAYOUTS:
        if layout.only not in ("", TITAN):
            continue
        name = str(layout)
        layouts[name] = train_layout(layout, weights)
        compared = [layouts[str(layout.one_process)], *(other[name] for other in others if name in other)]
        differences = [difference(layouts[name], other) for other in compared]
        failed |= any(each[key] > TOLERANCE[key] for each in differences for key in TOLERANCE)
        print(f"{name}: {'; '.join(map(shown, differences))}", flush=True)
        save(found, files[TITAN])  # each time: the next may fail
    sys.exit(failed)


if __name__ == "__main__":
    main()
