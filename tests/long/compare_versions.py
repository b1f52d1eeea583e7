#!/usr/bin/env python3
"""Losses of the same layouts with torchtitan 0.2.2 and 0.3, from the same weights (safetensors of tiny models).

    python tests/long/compare_versions.py --weights outputs/versions     # once in the environment of each torchtitan

Trains a few steps under every layout that the installed torchtitan has, on the CPU in float32, and writes losses and
gradient norms to benchmarks/results/versions_TORCHTITAN.json. The same weights are there for both: transformers writes
them the first time. Prints each layout's largest relative difference from one process, and from the other torchtitan's
file, if there is one; exits with 1 if one is above TOLERANCE.
"""

import argparse
import json
import math
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "tests"))  # tiny models, and runs in processes that have imported everything

STEPS = 5
PACKS = 4  # per step
TOLERANCE = {"losses": 1e-5, "grad_norms": 1e-4}  # relative; Adam goes by the signs of tiny gradients
DEGREES = {
    "dp": "data_parallel_shard", "replicate": "data_parallel_replicate", "cp": "context_parallel",
    "tp": "tensor_parallel", "pp": "pipeline_parallel", "ep": "expert_parallel",
}  # fmt: skip
KINDS = {"llama3": "llama", "qwen3": "qwen3", "qwen3 MoE": "qwen3_moe"}
VERSIONS = ("0.2.2", "0.3.0")


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
        from support.preference import data
        from support.runs import corpus

        path = corpus() / "train.jsonl" if self.task == "SFT" else data() / "pairs.jsonl"
        degrees = {"dp": 1, "cp": 1} | self.degrees
        local = PACKS // (degrees["dp"] * degrees.get("replicate", 1)) if "pp" in degrees else 1
        return [
            *(f"--parallelism.{DEGREES[name]}_degree={degree}" for name, degree in degrees.items()),
            *f"--model.name {self.model.split()[0]} --model.flavor hf --checkpoint.load_only".split(),
            *f"--model.hf_assets_path {weights / KINDS[self.model]} --training.dataset_path {path}".split(),
            *f"--checkpoint.enable --checkpoint.initial_load_in_hf --training.steps {STEPS}".split(),
            *["--training.seq_len", "256", "--training.mixed_precision_param", "float32", "--magi.backend", "flex"],
            *f"--training.local_batch_size {local} --training.global_batch_size {PACKS}".split(),
            *["--optimizer.lr", "1e-3", "--optimizer.eps", "1e-5", "--lr_scheduler.warmup_steps", "2"],
            "--validation.no-enable",
            *self.options.split(),
        ]  # fmt: skip


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


def train(layout: Layout, weights: Path) -> dict[str, list[float]]:
    """Losses and gradient norms by step."""
    from support.runs import ROOT, train

    toml = ROOT / "train_configs" / ("debug.toml" if layout.task == "SFT" else "dpo_debug.toml")
    arguments, last = layout.arguments(weights), layout.processes - 1
    run = train(layout.processes, arguments, toml=toml, defaults=(), layers=None, entry="torchtitan_magi.train")
    steps = [values for _, values in run.of("metrics", rank=last) if "grad_norm" in values]
    return {
        "losses": [values["loss_metrics/global_avg_loss"] for values in steps],
        "grad_norms": [values["grad_norm"] for values in steps],
    }


def difference(found: dict[str, list[float]], other: dict[str, list[float]]) -> dict[str, float]:
    """Largest relative difference over the steps, by what is compared."""
    return {name: max(abs(a - b) / abs(b) for a, b in zip(found[name], other[name], strict=True)) for name in TOLERANCE}


def shown(differences: dict[str, float]) -> str:
    return ", ".join(f"{value:.1e}" for value in differences.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder of the models; written if there are none")
    weights = parser.parse_args().weights.resolve()

    from support.hf_models import make_hf_folder
    from support.runs import TITAN

    for kind in KINDS.values():
        if not (weights / kind).exists():
            make_hf_folder(kind, folder=weights / kind, num_hidden_layers=4)
    files = {version: RESULTS / f"versions_{version}.json" for version in VERSIONS}
    others = [json.loads(file.read_text()) for version, file in files.items() if version != TITAN and file.exists()]
    others = [other["layouts"] for other in others]
    from torchtitan_magi.calibrate import facts_of_run

    layouts: dict[str, Any] = {}
    found = facts_of_run(None) | {
        "processor": platform.processor() or platform.machine(),
        "torchtitan": TITAN,
        "layouts": layouts,
    }
    failed = False
    for layout in LAYOUTS:
        if layout.only not in ("", TITAN):
            continue
        name = str(layout)
        layouts[name] = train(layout, weights)
        compared = [layouts[str(layout.one_process)], *(other[name] for other in others if name in other)]
        differences = [difference(layouts[name], other) for other in compared]
        failed |= any(each[key] > TOLERANCE[key] for each in differences for key in TOLERANCE)
        print(f"{name}: {'; '.join(map(shown, differences))}", flush=True)
        files[TITAN].write_text(json.dumps(found, indent=1) + "\n")  # each time: the next may fail
    sys.exit(failed)


if __name__ == "__main__":
    main()
