#!/usr/bin/env python3
"""Times training steps with several torchtitans by turns: the same file, model and packs.

    python benchmarks/bench_versions.py --sites 0.2.2=/opt/titan-0.2.2 0.3.0=/opt/titan-0.3 [--gpus 1] [--tokens 16384]

A site is a folder of packages that comes first in PYTHONPATH, or several with colons between them; torch is this
Python's. The model has the layer shapes of Llama 3.1 8B but few layers, and random weights. Documents are those of
bench_train.py. Each turn is a run of its own of each version, the first of a run's steps not counted; the figure is the
median over steps of the seconds per step.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench_train import RECORD, ROOT, copy_tokenizer, documents, torchrun
from figures import grouped, part, recording_parser, save, table, thousands
from steps import Steps

from torchtitan_magi.calibrate import facts_of_run

WARM_UP = 8  # steps before timing
SHAPES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "max_position_embeddings": 131072, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


TOML = """
[job]
custom_config_module = "torchtitan_magi.titan"
dump_folder = "{folder}/outputs"
[experimental]
custom_import = "torchtitan_magi.titan"
[magi]
random_weights = true
[model]
name = "llama3"
flavor = "hf"
hf_assets_path = "{folder}"
[training]
dataset = "sft"
dataset_path = "{folder}/documents.jsonl"
local_batch_size = 1
seq_len = {pack}
[parallelism]
context_parallel_degree = {gpus}
[metrics]
log_freq = 1
"""


def write_inputs(folder: Path, layers: int, gpus: int, tokens: int) -> None:
    """The run's file, the model's config.json with a tokenizer, and the records. tokens: per GPU."""
    copy_tokenizer(folder)
    (folder / "bench.toml").write_text(TOML.format(folder=folder, gpus=gpus, pack=tokens * gpus))
    (folder / "config.json").write_text(json.dumps(SHAPES | {"num_hidden_layers": layers}))
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents(tokens * gpus)))


def run(site: str, folder: Path, arguments: Any) -> dict[str, Any]:
    """Seconds of each step after the first ones, and the losses, of rank 0; what was printed, if it failed."""
    record = folder / "record.json"
    record.unlink(missing_ok=True)
    command = [*torchrun(arguments.gpus), __file__, RECORD, str(record)]
    command += ["--job.config_file", str(folder / "bench.toml")]
    command += ["--training.steps", str(arguments.steps), *arguments.options.split()]
    path = os.pathsep.join(filter(None, [str(ROOT), site, os.environ.get("PYTHONPATH", "")]))
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-3000:]}
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def record_run() -> None:
    """One process of a run: the command of the package, whose steps are timed."""
    path = sys.argv[2]
    sys.argv[1:3] = []
    from torchtitan_magi.train import main
    from torchtitan_magi.training.metrics import PlanMetrics

    steps = Steps(PlanMetrics)
    main()
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps({"seconds": steps.seconds[WARM_UP:], "losses": steps.losses}))


def versions_table(*files: dict[str, Any]) -> str:
    """The median step of each version."""
    lines = []
    for found in files:
        for (version,), rows in grouped(found["rows"], "torchtitan").items():
            step = statistics.median(row["step_ms"] for row in rows)
            speed = f"{1e3 * found['tokens_per_gpu'] / step:,.0f}"
            lines.append([version, found["layers"], thousands(found["tokens_per_gpu"]), f"{step:.0f}", speed])
    return table(["torchtitan", "layers", "tokens per GPU", "step, ms", "tokens/s per GPU"], lines)


PARTS = {"training-versions": part(versions_table, "versions_train_h200")}  # of the docs


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--sites", nargs="+", required=True, help="VERSION=FOLDER, of each torchtitan")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs, all in context parallelism")
    parser.add_argument("--tokens", type=int, default=16384, help="per GPU and step")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--turns", type=int, default=2, help="runs of each version")
    parser.add_argument("--options", default="--compile.enable", help="torchtitan overrides for all")
    arguments = parser.parse_args()
    found: dict[str, Any] = facts_of_run(arguments.commit) | {"num_gpus": arguments.gpus, "layers": arguments.layers}
    found |= {"tokens_per_gpu": arguments.tokens, "options": arguments.options, "rows": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_inputs(folder, arguments.layers, arguments.gpus, arguments.tokens)
        for turn in range(arguments.turns):
            for version, site in (item.split("=", 1) for item in arguments.sites):
                row = {"torchtitan": version, "turn": turn} | run(site, folder, arguments)
                if "error" in row:
                    sys.exit(f"torchtitan {version} failed\n{row['error']}")
                row["step_ms"] = 1e3 * statistics.median(row.pop("seconds"))
                found["rows"].append(row)
                print(
                    f"{version}, turn {turn}: {row['step_ms']:.1f} ms a step, last loss {row['losses'][-1]:.4f}",
                    flush=True,
                )
                save(found, arguments.output)


if __name__ == "__main__":
    record_run() if sys.argv[1:2] == [RECORD] else main()
