#!/usr/bin/env python3
"""Trains the same few steps under many layouts, from one seed checkpoint, and compares every loss and gradient norm.

    python tests/long/loss_compare.py [config.toml] [--steps 5] [--layouts cp2,cp4] [torchtitan overrides ...]

Prints a Markdown table; exits with 1 if a layout differs from its reference by more than --tolerance (relative, any
step). Runs on GPUs if the largest layout finds enough of them, else on CPU. Weights and communication are float32
unless an override says otherwise: for bf16 add --training.mixed_precision_param bfloat16 and a larger --tolerance.
Without a config file it takes train_configs/debug.toml with 256 tokens per pack, and adds rows for qwen3.
"""

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEBUG_TOML = ROOT / "train_configs" / "debug.toml"
TOLERANCE = 1e-4
RECORD = "--record-to"  # first argument of this file as a process of a run

COMMON = (  # float32 is for flex_attention; our kernel takes 16 bits
    "--magi.backend flex --training.mixed_precision_param float32 "
    "--training.global_batch_size 2 --training.local_batch_size 2 "
    "--parallelism.data_parallel_replicate_degree 1 --parallelism.data_parallel_shard_degree 1 "
    "--parallelism.context_parallel_degree 1 --parallelism.tensor_parallel_degree 1 "
    "--activation_checkpoint.mode selective --metrics.log_freq 1 --validation.no-enable --compile.no-enable"
)
DEGREES = {"dp": "data_parallel_shard_degree", "cp": "context_parallel_degree", "tp": "tensor_parallel_degree"}


@dataclass(frozen=True)
class Layout:
    """One way to train the same two packs per step.

    Args:
        degrees: of "dp" (FSDP), "cp", "tp", as far as they are not 1.
        against: name of the layout it must equal; None for a reference.
        options: further torchtitan overrides.
        model: overrides that choose another model.
    """

    degrees: dict[str, int]
    against: str | None = "cp1"
    options: str = ""
    model: str = ""

    @property
    def processes(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def arguments(self) -> list[str]:
        """The overrides. Data-parallel ranks share the two packs."""
        degrees = [f"--parallelism.{DEGREES[name]} {degree}" for name, degree in self.degrees.items()]
        batch = f"--training.local_batch_size {2 // self.degrees.get('dp', 1)}"
        return " ".join([COMMON, *degrees, batch, self.options, self.model]).split()


QWEN3 = "--model.name qwen3 --model.flavor debugmodel_varlen"
PACK = "--magi.positions pack"
LAYOUTS = {
    "cp1": Layout({}, None),
    "dp2": Layout({"dp": 2}, None),
    "cp2": Layout({"cp": 2}),
    "cp4": Layout({"cp": 4}),
    "cp2_tp2": Layout({"cp": 2, "tp": 2}),
    "dp2_cp2": Layout({"dp": 2, "cp": 2}, "dp2"),
    "dp2_cp2_tp2": Layout({"dp": 2, "cp": 2, "tp": 2}, "dp2"),
    "cp2_accumulation": Layout({"cp": 2}, options="--training.local_batch_size 1"),
    "cp2_ac_none": Layout({"cp": 2}, options="--activation_checkpoint.mode none"),
    "cp2_ac_op": Layout({"cp": 2}, options="--activation_checkpoint.selective_ac_option op"),
    "cp2_ac_full": Layout({"cp": 2}, options="--activation_checkpoint.mode full"),
    "cp2_compile": Layout({"cp": 2}, options="--compile.enable"),
    "cp2_no_overlap": Layout({"cp": 2}, options="--magi.overlap_stages 0"),
    "cp4_overlap_2": Layout({"cp": 4}, options="--magi.overlap_stages 2"),
    "cp1_positions_pack": Layout({}, None, PACK),
    "cp2_positions_pack": Layout({"cp": 2}, "cp1_positions_pack", PACK),
}
QWEN3_LAYOUTS = {
    "qwen3_cp1": Layout({}, None, model=QWEN3),
    "qwen3_tp2": Layout({"tp": 2}, None, model=QWEN3),
    "qwen3_cp2_tp2": Layout({"cp": 2, "tp": 2}, "qwen3_cp1", model=QWEN3),
}


def max_relative_difference(values: list[float], reference: list[float]) -> float:
    """Over the steps. inf if a number is not finite or the steps are not as many."""
    if len(values) != len(reference) or not all(map(math.isfinite, [*values, *reference])) or not values:
        return math.inf
    return max(abs(a - b) / abs(b) for a, b in zip(values, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", help="torchtitan TOML file (default: the debug configuration)")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of each run (default 5)")
    parser.add_argument("--layouts", help="comma-separated, of: %(default)s", default=",".join(_compared(LAYOUTS)))
    parser.add_argument(
        "--tolerance", type=float, default=TOLERANCE, help="largest relative difference (default: %(default)s)"
    )
    options, overrides = parser.parse_known_args()

    layouts, names = dict(LAYOUTS), options.layouts.split(",")
    if options.config is None:
        subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_data.py"], check=True, cwd=ROOT)
        overrides = ["--training.seq_len", "256", *overrides]
        layouts |= QWEN3_LAYOUTS
        if options.layouts == parser.get_default("layouts"):
            names += _compared(QWEN3_LAYOUTS)
    if unknown := set(names) - set(_compared(layouts)):
        parser.error(f"unknown layouts {', '.join(sorted(unknown))}; use some of {', '.join(_compared(layouts))}")
    config = Path(options.config).resolve() if options.config else DEBUG_TOML
    with tempfile.TemporaryDirectory() as folder:
        runs = _Runs(config, overrides, options.steps, Path(folder), max(layouts[n].processes for n in names))
        failed = print_table({name: layouts[name] for name in names}, layouts, runs, options.tolerance)
    sys.exit(1 if failed else 0)


def print_table(chosen: dict[str, Layout], layouts: dict[str, Layout], runs: "_Runs", tolerance: float) -> bool:
    """Trains and prints row by row; whether a layout failed or differs."""
    print(
        "| layout | against | processes | max rel diff loss | max rel diff grad_norm | verdict |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    failed = False
    for name, layout in chosen.items():
        try:
            against = runs.of(layout.against, layouts[layout.against])
            ours = runs.of(name, layout)
        except RuntimeError as error:
            print(f"| {name} | {layout.against} | {layout.processes} | | | failed |", flush=True)
            print(error, file=sys.stderr)
            failed = True
            continue
        differences = [max_relative_difference(ours[key], against[key]) for key in ("loss", "grad_norm")]
        equal = max(differences) <= tolerance
        numbers = " | ".join(f"{difference:.1e}" for difference in differences)
        verdict = "equal" if equal else "DIFFERS"
        print(f"| {name} | {layout.against} | {layout.processes} | {numbers} | {verdict} |", flush=True)
        failed |= not equal
    return failed


def _compared(layouts: dict[str, Layout]) -> list[str]:
    return [name for name, layout in layouts.items() if layout.against]


class _Runs:
    """Runs of layouts by name, each once, all of a model from one seed checkpoint."""

    def __init__(self, config: Path, overrides: list[str], steps: int, folder: Path, processes: int) -> None:
        import torch

        self.config, self.overrides, self.steps, self.folder = config, overrides, steps, folder
        self.environment = {"OMP_NUM_THREADS": "1", **os.environ}
        if torch.cuda.device_count() < processes:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.done: dict[str, dict[str, list[float]]] = {}

    def of(self, name: str, layout: Layout) -> dict[str, list[float]]:
        """ "loss" and "grad_norm" of each step."""
        if name not in self.done:
            seed = self.folder / f"seed_{layout.model.replace(' ', '_')}"
            if not seed.exists():
                seed_arguments = [*Layout({}, model=layout.model).arguments, "--checkpoint.create_seed_checkpoint"]
                self._run(1, seed, seed_arguments)
            load = ["--checkpoint.initial_load_path", f"{seed}/checkpoint/step-0"]
            steps = ["--training.steps", str(self.steps)]
            lines = self._run(layout.processes, self.folder / name, [*steps, *load, *layout.arguments])
            self.done[name] = {key: [line[key] for line in lines] for key in ("loss", "grad_norm")}
        return self.done[name]

    def _run(self, processes: int, dump_folder: Path, arguments: list[str]) -> list[dict[str, float]]:
        dump_folder.mkdir()
        record = dump_folder / "record.jsonl"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += [__file__, RECORD, str(record), "--job.config_file", str(self.config), *arguments]
        command += ["--checkpoint.enable", "--job.dump_folder", str(dump_folder), *self.overrides]
        result = subprocess.run(
            command, env=self.environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stdout[-5000:]}")
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def exact_gradient_norms() -> None:
    """Makes torchtitan report norms summed in float64 on CPU, where torch sums float32 squares one after the other:
    the rounding errors of large tensors, up to 1e-4, would hide or feign a difference between layouts."""
    import torch
    from torch.distributed.tensor import DTensor, Partial
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def clip_and_report_exactly(parameters, *args, **kwargs):  # type: ignore[no-untyped-def]
        parameters = list(parameters)
        if kwargs.get("pp_mesh") is not None:  # other ranks have more of them
            return clip(parameters, *args, **kwargs)
        squares: dict[Any, torch.Tensor] = {}  # by sharding: one sum over ranks for each
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                sharding = None
                if isinstance(gradient, DTensor):
                    gradient = gradient.redistribute(placements=parameter.placements)
                    sharding = gradient.device_mesh, gradient.placements
                    gradient = gradient.to_local()
                squares[sharding] = squares.get(sharding, 0) + gradient.double().square().sum()
        for sharding in filter(None, squares):
            parts = [placement if placement.is_replicate() else Partial() for placement in sharding[1]]
            squares[sharding] = DTensor.from_local(squares[sharding], sharding[0], parts).full_tensor()
        clip(parameters, *args, **kwargs)
        return torch.stack(list(squares.values())).sum().sqrt()

    if not torch.cuda.is_available():
        utils.clip_grad_norm_ = clip_and_report_exactly


def record_run() -> None:
    """One process of a run: our entry, with the metrics of rank 0 in a file at full precision."""
    path = sys.argv[2]
    sys.argv[1:3] = []

    from torch._dynamo.utils import counters
    from torchtitan.components.metrics import MetricsProcessor

    from torchtitan_magi.titan import adapter

    name = "checkpoint" if adapter.__name__.endswith("v02") else "checkpointer"
    CheckpointManager = importlib.import_module(f"torchtitan.components.{name}").CheckpointManager
    log = MetricsProcessor.log

    def record_and_log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):  # type: ignore[no-untyped-def]
        if os.environ["RANK"] == "0":
            line = {"step": step, "loss": global_avg_loss, "grad_norm": grad_norm}
            line["graphs"] = counters["stats"]["unique_graphs"]
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    MetricsProcessor.log = record_and_log
    if "--checkpoint.create_seed_checkpoint" not in sys.argv:
        CheckpointManager.save = lambda *_, **__: None  # not needed, and large
    exact_gradient_norms()
    importlib.import_module(f"{adapter.__name__}.trainer").main()


if __name__ == "__main__":
    record_run() if sys.argv[1:2] == [RECORD] else main()
