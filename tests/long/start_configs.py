#!/usr/bin/env python3
"""Starts every file of train_configs/ with the installed torchtitan, on the CPU: two steps at debug sizes, an export.

    python tests/long/start_configs.py     # once in the environment of each torchtitan

The model becomes a tiny one of its kind, data the tests' corpus, packs 256 tokens, and degrees above 2 become 2; all
else stays as the file has it. Writes losses and the date to benchmarks/results/start_configs_TORCHTITAN.json; exits
with 1 if a file does not start.
"""

import json
import math
import sys
import tempfile
import tomllib
from pathlib import Path

from compare_versions import RESULTS, ROOT

DEGREES = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
STEPS, SEQ_LEN = 2, 256


def start(path: Path, models: Path) -> list[float]:
    """Losses of the steps."""
    from support.hf_models import make_hf_folder
    from support.preference import data
    from support.runs import corpus, train

    values = tomllib.loads(path.read_text())
    kind = "llama" if values["model"]["name"] == "llama3" else "qwen3"
    if not (models / kind).exists():
        make_hf_folder(kind, folder=models / kind)
    is_dpo = values["training"]["dataset"] == "dpo"
    folder, names = (data(), ("pairs", "validation")) if is_dpo else (corpus(), ("train", "validation"))
    degrees = {name: min(2, values["parallelism"].get(f"{name}_degree", 1)) for name in DEGREES}
    packs = degrees["data_parallel_replicate"] * degrees["data_parallel_shard"]
    arguments = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    arguments += f"--model.flavor hf --model.hf_assets_path {models / kind} --training.steps {STEPS}".split()
    arguments += f"--training.seq_len {SEQ_LEN} --training.local_batch_size 1".split()
    arguments += f"--training.global_batch_size {packs} --training.dataset_path {folder}/{names[0]}.jsonl".split()
    arguments += f"--validation.dataset_path {folder}/{names[1]}.jsonl --validation.seq_len {SEQ_LEN}".split()
    arguments += ["--compile.backend", "aot_eager", "--metrics.log_freq", "1"]
    arguments += [] if "checkpoint" in values else ["--magi.random_weights"]  # and of no folder, as the file has it
    processes, entry = math.prod(degrees.values()), "torchtitan_magi.train"
    return train(processes, arguments, toml=path, defaults=(), layers=None, entry=entry).losses


def main() -> None:
    from support.runs import TITAN, TrainingError

    from torchtitan_magi.calibrate import facts_of_run

    started, failed = {}, False
    with tempfile.TemporaryDirectory() as models:
        for path in sorted((ROOT / "train_configs").glob("*.toml")):
            try:
                started[path.name] = start(path, Path(models))
                print(f"{path.name}: {started[path.name]}", flush=True)
            except TrainingError as error:
                failed = True
                print(f"{path.name} FAILED: {error}", flush=True)
    found = facts_of_run(None) | {"torchtitan": TITAN, "losses": started}
    (RESULTS / f"start_configs_{TITAN}.json").write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
