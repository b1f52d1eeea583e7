#!/usr/bin/env python3
"""Starts every file of train_configs/ with the installed torchtitan, on the CPU: two steps at debug sizes, an export.

    python tests/long/start_configs.py     # once in the environment of each torchtitan

The model becomes a tiny one of its kind, data the tests' corpus, packs 256 tokens, and degrees above 2 become 2; all
else stays as the file has it. With torchtitan 0.2.2 files that need 0.3 are left out. Writes losses and the date to
benchmarks/results/start_configs_TORCHTITAN.json; exits with 1 if a file does not start.
"""

import math
import sys
import tempfile
import tomllib
from pathlib import Path

from runner import KINDS, ROOT, TITAN, VERSIONS, TrainingError, on_model, overrides_of, train, write_models

from torchtitan_magi.calibrate import facts_of_run

from figures import RESULTS, result, save  # isort: skip
from support.published import needs_0_3, shipped_model  # isort: skip
from support.runs import IS_0_3  # isort: skip

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel", "expert_parallel")
STEPS, SEQ_LEN = 2, 256


def start(path: Path, models: Path) -> list[float]:
    """Losses of the steps."""
    values = tomllib.loads(path.read_text())
    published = shipped_model(values) or {"model_type": "llama"}
    (name,) = (name for name, kind in KINDS.items() if kind == published["model_type"])
    degrees = {name: min(2, values["parallelism"].get(f"{name}_degree", 1)) for name in DEGREES}
    packs = degrees["data_parallel_replicate"] * degrees["data_parallel_shard"]
    options = (
        f"--training.local_batch_size 1 --training.global_batch_size {packs} --compile.backend aot_eager "
        "--metrics.log_freq 1"
    )
    if "checkpoint" not in values:
        options += " --magi.random_weights"  # and of no folder, as the file has it
    model = on_model(name, models, values["training"]["dataset"].upper(), SEQ_LEN, STEPS)
    processes = math.prod(degrees.values()) // degrees["expert_parallel"]  # experts take no ranks of their own
    return train(processes, [*overrides_of(degrees), *model, *options.split()], toml=path).losses


def shipped() -> list[Path]:
    """The files that the installed torchtitan trains."""
    files = sorted((ROOT / "train_configs").glob("*.toml"))
    return [path for path in files if IS_0_3 or not needs_0_3(tomllib.loads(path.read_text()))]


def started() -> str:
    """When this ran last with each torchtitan."""
    said = []
    for version in VERSIONS:
        run, path = result(f"start_configs_{version}"), f"../../benchmarks/results/start_configs_{version}.json"
        said.append(f"[{run['date']}]({path}) with {version}, {len(run['losses'])} files")
    return "; ".join(said) + "."


PARTS = {"started": started}  # of the docs


def main() -> None:
    losses, failed = {}, False
    with tempfile.TemporaryDirectory() as models:
        write_models(Path(models))
        for path in shipped():
            try:
                losses[path.name] = start(path, Path(models))
                print(f"{path.name}: {losses[path.name]}", flush=True)
            except TrainingError as error:
                failed = True
                print(f"{path.name} FAILED: {error}", flush=True)
    save(facts_of_run(None) | {"losses": losses}, RESULTS / f"start_configs_{TITAN}.json")
    sys.exit(failed)


if __name__ == "__main__":
    main()
