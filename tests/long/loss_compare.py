#!/usr/bin/env python3
"""Trains the same few steps under many layouts, from one seed checkpoint, and compares every loss and gradient norm.

    python tests/long/loss_compare.py [config.toml] [--steps 5] [--layouts cp2,cp4] [torchtitan overrides ...]

Prints a Markdown table; exits with 1 if a layout differs from its reference by more than --tolerance (relative, any
step). Runs on GPUs if the largest layout finds enough of them, else on CPU. Weights and communication are float32
unless an override says otherwise: for bf16 add --training.mixed_precision_param bfloat16 and a larger --tolerance.
Without a config file it takes train_configs/debug.toml with 256 tokens per pack, and adds rows for qwen3.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from runner import DEBUG_TOML, Run, TrainingError, at_root, save_nothing, take_gpus, train

TOLERANCE = 1e-4

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
        overrides = ["--training.seq_len", "256", *overrides]
        layouts |= QWEN3_LAYOUTS
        if options.layouts == parser.get_default("layouts"):
            names += _compared(QWEN3_LAYOUTS)
    if unknown := set(names) - set(_compared(layouts)):
        parser.error(f"unknown layouts {', '.join(sorted(unknown))}; use some of {', '.join(_compared(layouts))}")
    config = str(Path(options.config or DEBUG_TOML).resolve())
    take_gpus(max(layouts[name].processes for name in names))
    with tempfile.TemporaryDirectory() as folder:
        trained = _Runs(config, overrides, options.steps, Path(folder))
        failed = print_table({name: layouts[name] for name in names}, layouts, trained, options.tolerance)
    sys.exit(1 if failed else 0)


def print_table(chosen: dict[str, Layout], layouts: dict[str, Layout], trained: "_Runs", tolerance: float) -> bool:
    """Trains and prints row by row; whether a layout failed or differs."""
    print(
        "| layout | against | processes | max rel diff loss | max rel diff grad_norm | verdict |\n"
        "| --- | --- | --- | --- | --- | --- |"
    )
    failed = False
    for name, layout in chosen.items():
        try:
            against = trained.of(layout.against, layouts[layout.against])
            ours = trained.of(name, layout)
        except TrainingError as error:
            print(f"| {name} | {layout.against} | {layout.processes} | | | failed |", flush=True)
            print(error, *error.__notes__, sep="\n", file=sys.stderr)
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

    def __init__(self, config: str, overrides: list[str], steps: int, folder: Path) -> None:
        self.config, self.overrides, self.steps, self.folder = config, overrides, steps, folder
        self.done: dict[str, dict[str, list[float]]] = {}

    def of(self, name: str, layout: Layout) -> dict[str, list[float]]:
        """ "loss" and "grad_norm" of each step."""
        if name not in self.done:
            seed = self.folder / f"seed_{layout.model.replace(' ', '_')}"
            if not seed.exists():
                create = ["--checkpoint.create_seed_checkpoint", "--job.dump_folder", str(seed)]
                self._run(Layout({}, model=layout.model), create, at_root)
            load = ["--checkpoint.initial_load_path", f"{seed}/checkpoint/step-0"]
            run = self._run(layout, ["--training.steps", str(self.steps), *load], save_nothing)
            self.done[name] = {"loss": run.losses, "grad_norm": run.grad_norms}
        return self.done[name]

    def _run(self, layout: Layout, arguments: list[str], setup: Callable[..., None]) -> Run:
        arguments = [*layout.arguments, "--checkpoint.enable", *arguments, *self.overrides]
        return train(layout.processes, arguments, toml=self.config, setup=setup)


if __name__ == "__main__":
    main()
