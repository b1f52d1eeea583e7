#!/usr/bin/env python3
"""Trains 200 steps in bfloat16 under several layouts on the GPUs of this machine and compares their loss curves.

    python tests/long/loss_curves.py [config.toml] [--steps 200] [--output FILE.json]

All runs start from one seed checkpoint, see the same data and shard the model by FSDP2. Three runs without context
parallelism differ only in the order of summation (packs one after the other, or on more ranks): the spread is their
largest difference. Every layout's loss must stay within three times the spread of the first of them. Compiled runs,
whose fused kernels round in other places, are compared with a compiled one, and must not compile again after their
first steps. Layouts that need more GPUs than there are, are left out; on a machine without any there are four places on
its CPU.
"""

import importlib
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from layouts import Layout
from runner import DEBUG_TOML, ROOT, TITAN, runs, train

from torchtitan_magi.calibrate import facts_of_run

from figures import part, recording_parser, save, table  # isort: skip

PACKS = 4  # per step
REFERENCE, REORDERED = "dp2", ("dp2_accumulation", "dp4")
TIMES_SPREAD = 3
SETTLED = 20  # steps until a compiled run has all its graphs
SELECTIVE = "--compile.enable --activation_checkpoint.selective_ac_option op"
LAYOUTS = {
    "dp2": Layout({"dp": 2}, None),
    "dp2_accumulation": Layout({"dp": 2}, "dp2", "--training.local_batch_size 1"),
    "dp4": Layout({"dp": 4}, "dp2"),
    "dp2_compile": Layout({"dp": 2}, None, "--compile.enable"),
    "cp2": Layout({"cp": 2}, "dp2"),
    "cp4": Layout({"cp": 4}, "dp2"),
    "cp2_tp2": Layout({"cp": 2, "tp": 2}, "dp2"),
    "dp2_cp2": Layout({"dp": 2, "cp": 2}, "dp2"),
    "cp2_compile": Layout({"cp": 2}, "dp2_compile", "--compile.enable"),
    "cp4_compile_ac_selective": Layout({"cp": 4}, "dp2_compile", SELECTIVE),
    "cp2_ac_full": Layout({"cp": 2}, "dp2", "--activation_checkpoint.mode full"),
}
TRAINING = "--magi.backend auto --training.mixed_precision_param bfloat16 --lr_scheduler.warmup_steps 10"


def at_root(report: Callable[..., None]) -> None:
    """A ``setup`` of runs: paths in a TOML file are relative to the checkout."""
    os.chdir(ROOT)


def count_graphs(report: Callable[..., None]) -> None:
    """The same; it saves nothing and reports at every step ("graphs", how many torch.compile has made so far)."""
    from torch._dynamo.utils import counters

    from torchtitan_magi.training.metrics import PlanMetrics

    at_root(report)
    name = "checkpoint" if TITAN.startswith("0.2.") else "checkpointer"
    importlib.import_module(f"torchtitan.components.{name}").CheckpointManager.save = lambda *_, **__: None
    runs.watch(PlanMetrics, "log", lambda *_, **__: report("graphs", counters["stats"]["unique_graphs"]))


def train_layout(config: str, layout: Layout, arguments: list[str]) -> list[dict[str, float]]:
    """Returns "step", "loss", "grad_norm" and "graphs" (compiled so far) of each step."""
    local = PACKS // layout.degrees.get("dp", 1)
    batch = f"--training.global_batch_size {PACKS} --training.local_batch_size {local} {layout.options}"
    arguments = [*layout.arguments, *TRAINING.split(), *batch.split(), "--checkpoint.enable", *arguments]
    run = train(layout.processes, arguments, toml=config, setup=count_graphs)
    steps = zip(run.losses, run.grad_norms, run.of("graphs"), strict=True)
    return [
        {"step": step, "loss": loss, "grad_norm": norm, "graphs": graphs}
        for step, (loss, norm, (graphs,)) in enumerate(steps, 1)
    ]


def largest_difference(curve: list[float], reference: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(curve, reference, strict=True))


def curves_of(found: dict[str, Any]) -> dict[str, list[float]]:
    return {layout: [step["loss"] for step in steps] for layout, steps in found["runs"].items()}


def losses_table(*files: dict[str, Any]) -> str:
    """Of layouts with context parallelism, how far each is from the run without that it is compared with."""
    lines = []
    for found in files:
        curves, spread = curves_of(found), found["spread"]
        for layout, against in found["against"].items():
            if against and layout.startswith(("cp", "dp2_cp")):
                far = largest_difference(curves[layout], curves[against])
                task = "DPO" if "dpo" in found["command"] else "SFT"
                figures = f"{far:.4f}", f"{spread:.4f}", f"{far / spread:.2f}"
                lines.append([task, found["num_gpus"], layout, len(curves[layout]), *figures])
    columns = ["task", "GPUs", "layout", "steps", "largest difference", "spread", "difference / spread"]
    return table(columns, lines)


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "losses": part(losses_table, "loss_curves_h200x4", "loss_curves_h200x2", "dpo_curves_h200x4", "dpo_curves_h200x2")
}


def failures(found: dict[str, Any]) -> list[str]:
    curves, limit, failed = curves_of(found), TIMES_SPREAD * found["spread"], []
    for name, steps in found["runs"].items():
        difference = largest_difference(curves[name], curves[found["against"][name] or name])
        graphs = [step["graphs"] for step in steps]
        if difference > limit:
            failed.append(f"{name}: loss differs by {difference:.2e}, more than {TIMES_SPREAD} x {found['spread']:.2e}")
        if graphs[-1] != graphs[min(SETTLED, len(graphs)) - 1]:
            failed.append(f"{name}: {graphs[-1]} graphs at the end, {graphs[SETTLED - 1]} after step {SETTLED}")
    return failed


def main() -> None:
    command = recording_parser(__doc__)
    command.add_argument("config", type=Path, nargs="?", default=DEBUG_TOML, help="torchtitan TOML file, SFT or DPO")
    command.add_argument("--steps", type=int, default=200, help="optimizer steps of each run")
    command.add_argument("--seq_len", type=int, default=8192, help="tokens per pack")
    command.add_argument("--layouts", help=f"comma-separated, of {','.join(LAYOUTS)} (default: all that fit)")
    command.add_argument("--per_gpu", type=int, default=1, help="runs at a time, which share the GPUs")
    options = command.parse_args()
    count = torch.cuda.device_count() or 4
    fitting = [name for name in LAYOUTS if LAYOUTS[name].processes <= count]
    chosen = options.layouts.split(",") if options.layouts else fitting
    if missing := [name for name in (REFERENCE, *chosen) if name not in fitting]:
        sys.exit(f"{count} GPUs are too few for {', '.join(missing)}; choose --layouts that fit")
    reordered = [name for name in REORDERED if name in fitting]
    against = [LAYOUTS[name].against or REFERENCE for name in chosen]
    names = list(dict.fromkeys([REFERENCE, *reordered, *against, *chosen]))
    runs.ON_GPUS, runs.TIMEOUT = torch.cuda.device_count() > 0, 24 * 3600

    with tempfile.TemporaryDirectory() as folder:
        start = ["--training.steps", str(options.steps), "--training.seq_len", str(options.seq_len)]
        config = str(options.config.resolve())
        create = ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--job.dump_folder", folder]
        train(1, [*Layout({}).arguments, *TRAINING.split(), *start, *create], toml=config, setup=at_root)
        start += ["--checkpoint.initial_load_path", f"{folder}/checkpoint/step-0"]
        with ThreadPoolExecutor(options.per_gpu if runs.ON_GPUS else 1) as threads:
            records = threads.map(lambda name: train_layout(config, LAYOUTS[name], start), names)
            trained = dict(zip(names, records, strict=True))

    curves = curves_of({"runs": trained})
    found = facts_of_run(options.commit) | {
        "num_gpus": torch.cuda.device_count(),
        "spread": max(largest_difference(curves[name], curves[REFERENCE]) for name in reordered),
        "against": {name: LAYOUTS[name].against for name in names},
        "runs": trained,
    }
    save(found, options.output)
    print(losses_table(found))
    sys.exit("\n".join(failures(found)) or None)


if __name__ == "__main__":
    main()
