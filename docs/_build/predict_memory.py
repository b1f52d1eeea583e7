"""Predicts the memory of training on each GPU, or compares the prediction with what benchmarks/bench_train.py measured.

    python docs/_build/predict_memory.py [--shapes 8B] [--gpus 8] [--tokens 65536 131072] [--checkpointing none full]
    python docs/_build/predict_memory.py --measured benchmarks/results/train_h200x2.json [...]

Each pack is spread over all GPUs, compiled, without accumulation, in bfloat16 with float32 parameters and states.
Comparisons are of GiB that PyTorch's allocator has given out on the fullest GPU: without rows in flight, the CUDA
context and NCCL.
"""

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.sizing.memory import GIB, OUTSIDE_PYTORCH, Setup, describe, predict

STRATEGIES = ("ours", "ours, dp 2", "ours, tp 2", "flex")  # "flex" has torchtitan's own loss, over all logits
MODES = ("none", "selective", "full")


def shapes_of(model: str, flavor: str) -> ModelConfig:
    """The model of a flavor of torchtitan's."""
    from torchtitan.protocols.train_spec import get_train_spec

    from torchtitan_magi.titan.v02.models import config_of

    return config_of(get_train_spec(model).model_args[flavor])


def comparisons(facts: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """The rows of bench_train.py's file that can be predicted, and the GiB predicted for each."""
    shapes = shapes_of(facts.get("model", "llama3"), facts.get("shapes", "8B"))
    model, compiled, found = replace(shapes, num_layers=facts["layers"]), "--compile.enable" in facts["options"], []
    for row in facts["rows"]:
        if row["strategy"] not in STRATEGIES:
            continue
        setup = Setup(
            model,
            row["tokens_per_gpu"] * row["cp"] * row["tp"],
            dp_shard=row["dp_shard"],
            cp=row["cp"],
            tp=row["tp"],
            ep=facts.get("expert_parallel", 1),
            checkpointing=row.get("checkpointing", "none"),
            compiled=compiled,
            compiled_loss=compiled,
            whole_logits=row["strategy"] == "flex",
        )
        parts = predict(setup).parts
        found.append((row, sum(size for part, size in parts.items() if part not in OUTSIDE_PYTORCH) / GIB))
    return found


def compare(paths: list[Path]) -> None:
    print("| file | layers | strategy | checkpointing | predicted | measured | error |\n|" + " --- |" * 7)
    for path in paths:
        facts = json.loads(path.read_text())
        for row, predicted in comparisons(facts):
            measured, mode = row["peak_memory_gib"], row.get("checkpointing", "none")
            print(
                f"| `{path.name}` | {facts['layers']} | {row['strategy']}, cp {row['cp']} | {mode} "
                f"| {predicted:.1f} | {measured:.1f} | {predicted / measured - 1:+.1%} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=Path, nargs="+", help="JSON files of bench_train.py")
    parser.add_argument(
        "--model", default="llama3", choices=("llama3", "qwen3"), help="architecture (default: %(default)s)"
    )
    parser.add_argument("--shapes", default="8B", help="flavor of the model (default: %(default)s)")
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[8],
        help="GPUs that share a pack; several numbers are compared (default: %(default)s)",
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16384, 32768, 65536, 131072], help="per GPU (default: %(default)s)"
    )
    parser.add_argument(
        "--checkpointing",
        nargs="+",
        default=MODES,
        choices=MODES,
        help="of activations; selective: by operation (default: %(default)s)",
    )
    parser.add_argument("--offload", action="store_true", help="with training.enable_cpu_offload")
    arguments = parser.parse_args()
    if arguments.measured:
        return compare(arguments.measured)
    setup = Setup(shapes_of(arguments.model, arguments.shapes), 1, compiled=True, compiled_loss=True)
    setup = replace(setup, offload=arguments.offload)
    print(f"| GPUs | tokens per GPU | {' | '.join(arguments.checkpointing)} |")
    print("|" + " --- |" * (2 + len(arguments.checkpointing)))
    for gpus, tokens in itertools.product(arguments.gpus, arguments.tokens):
        setups = [
            replace(setup, seq_len=tokens * gpus, cp=gpus, checkpointing=mode) for mode in arguments.checkpointing
        ]
        totals = " | ".join(f"{predict(each).total / GIB:.0f}" for each in setups)
        print(f"| {gpus} | {tokens:,} | {totals} |")
    print(describe(predict(setups[-1]), None))  # the last of them, by parts


if __name__ == "__main__":
    main()
