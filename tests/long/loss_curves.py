#!/usr/bin/env python3
"""Trains 200 steps in bfloat16 under several layouts on the GPUs of this machine and compares their loss curves.

    python tests/long/loss_curves.py [config.toml] [--steps 200] [--output FILE.json]

All runs start from one seed checkpoint, see the same data and shard the model by FSDP2. Three runs without context
parallelism differ only in the order of summation (packs one after the other, or on more ranks): the spread is their
largest difference. Every layout's loss must stay within three times the spread of the first of them. Compiled runs,
whose fused kernels round in other places, are compared with a compiled one, and must not compile again after their
first steps. Layouts that need more GPUs than there are, are left out. Runs go side by side, each on GPUs of its own
unless --per_gpu says otherwise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from loss_compare import DEBUG_TOML, RECORD, ROOT, Layout

from torchtitan_magi.calibrate import facts_of_run

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


class Gpus:
    """The GPUs of this machine, each for `per_gpu` runs at a time; on a machine without any, four places on its CPU."""

    def __init__(self, per_gpu: int) -> None:
        self.on_cpu = not torch.cuda.is_available()
        self.count = torch.cuda.device_count() or 4
        self.free = list(range(self.count)) * per_gpu
        self.returned = threading.Condition()

    def take(self, count: int) -> list[int]:
        with self.returned:
            self.returned.wait_for(lambda: len(set(self.free)) >= count)
            taken = sorted(set(self.free), key=self.free.count)[-count:]  # those with the most room
            for gpu in taken:
                self.free.remove(gpu)
        return taken

    def give(self, taken: list[int]) -> None:
        with self.returned:
            self.free += taken
            self.returned.notify_all()


def train(config: Path, layout: Layout, folder: Path, arguments: list[str], gpus: Gpus) -> list[dict]:
    """Runs one layout. Returns "loss", "grad_norm" and "graphs" (compiled so far) of each step."""
    folder.mkdir()
    taken = gpus.take(layout.processes)
    record = folder / "record.jsonl"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={layout.processes}"]
    command += [str(ROOT / "tests" / "long" / "loss_compare.py"), RECORD, str(record), "--job.config_file", str(config)]
    batch = ["--training.global_batch_size", str(PACKS)]
    batch += ["--training.local_batch_size", str(PACKS // layout.degrees.get("dp", 1)), *layout.options.split()]
    command += [*layout.arguments, *TRAINING.split(), *batch, "--job.dump_folder", str(folder), "--checkpoint.enable"]
    command += arguments
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, taken)), "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(command, env={**os.environ, **visible}, cwd=ROOT, capture_output=True, text=True)
    finally:
        gpus.give(taken)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{(result.stdout + result.stderr)[-5000:]}")
    return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []


def largest_difference(curve: list[float], reference: list[float]) -> float:
    assert len(curve) == len(reference)
    return max(abs(a - b) for a, b in zip(curve, reference, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        default=DEBUG_TOML,
        help="torchtitan TOML file, SFT or DPO (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--seq_len", type=int, default=8192, help="tokens per pack (default: %(default)s)")
    parser.add_argument("--layouts", help=f"comma-separated, of {','.join(LAYOUTS)} (default: all that fit)")
    parser.add_argument("--per_gpu", type=int, default=1, help="runs that share a GPU at a time (default: %(default)s)")
    parser.add_argument("--commit", help="commit of the tree, where git is missing")
    parser.add_argument("--output", type=Path, help="JSON file to write; benchmarks/plot_results.py draws it")
    options = parser.parse_args()
    gpus = Gpus(options.per_gpu)
    fitting = [name for name in LAYOUTS if LAYOUTS[name].processes <= gpus.count]
    chosen = options.layouts.split(",") if options.layouts else fitting
    if missing := [name for name in (REFERENCE, *chosen) if name not in fitting]:
        sys.exit(f"{gpus.count} GPUs are too few for {', '.join(missing)}; choose --layouts that fit")
    reordered = [name for name in REORDERED if name in fitting]
    against = [LAYOUTS[name].against or REFERENCE for name in chosen]
    names = list(dict.fromkeys([REFERENCE, *reordered, *against, *chosen]))
    subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_data.py"], check=True, cwd=ROOT)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        start = ["--training.steps", str(options.steps), "--training.seq_len", str(options.seq_len)]
        config = options.config.resolve()
        train(config, Layout({}), folder / "seed", ["--checkpoint.create_seed_checkpoint", *start], gpus)
        start += ["--checkpoint.initial_load_path", f"{folder}/seed/checkpoint/step-0"]
        with ThreadPoolExecutor(len(names)) as threads:
            runs = {name: threads.submit(train, config, LAYOUTS[name], folder / name, start, gpus) for name in names}
            records = {name: run.result() for name, run in runs.items()}

    curves = {name: [step["loss"] for step in record] for name, record in records.items()}
    spread = max(largest_difference(curves[name], curves[REFERENCE]) for name in reordered)
    failed = []
    print(f"| layout | loss of step 1, {options.steps} | max difference of loss | of the spread | graphs |")
    print("| --- | --- | --- | --- | --- |")
    for name, record in records.items():
        difference = largest_difference(curves[name], curves[LAYOUTS[name].against or name])
        graphs = [step["graphs"] for step in record]
        ends = f"{curves[name][0]:.4f}, {curves[name][-1]:.4f}"
        print(f"| {name} | {ends} | {difference:.2e} | {difference / spread:.2f} | {graphs[-1]} |")
        if difference > TIMES_SPREAD * spread:
            failed.append(f"{name}: loss differs by {difference:.2e}, more than {TIMES_SPREAD} x {spread:.2e}")
        if graphs[-1] != graphs[min(SETTLED, len(graphs)) - 1]:
            failed.append(f"{name}: {graphs[-1]} graphs at the end, {graphs[SETTLED - 1]} after step {SETTLED}")
    if options.output:
        against = {name: LAYOUTS[name].against for name in records}
        found = {"num_gpus": torch.cuda.device_count(), "spread": spread, "against": against, "runs": records}
        options.output.write_text(json.dumps(facts_of_run(options.commit) | found, indent=1))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
