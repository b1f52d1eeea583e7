"""Compares the memory that scripts/bench_train.py measured with the prediction for the same runs.

    python scripts/check_memory.py benchmarks/results/train_h200x2.json [...]

GiB of PyTorch's allocator on the fullest GPU, allocated: without rows in flight, the CUDA context and NCCL.
"""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

from torchtitan_magi.training.memory import GIB, Setup, predict
from torchtitan_magi.training.model_config import ModelConfig

OUTSIDE = ("rows in flight", "CUDA and NCCL")
STRATEGIES = ("ours", "ours, dp 2", "ours, tp 2", "flex")  # "flex" has torchtitan's own loss, over all logits


def shapes_of(facts: dict[str, Any]) -> ModelConfig:
    """The model that a file of bench_train.py was measured with."""
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_magi.titan  # noqa: F401  (its flavors)
    from torchtitan_magi.titan.v02.models import config_of

    args = get_train_spec(facts.get("model", "llama3")).model_args[facts.get("shapes", "8B")]
    return config_of(type(args)(**{**vars(args), "n_layers": facts["layers"]}))


def comparisons(facts: dict[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """The rows of a file that can be predicted, and the GiB predicted for each."""
    model, compiled, found = shapes_of(facts), "--compile.enable" in shlex.split(facts["options"]), []
    for row in facts["rows"]:
        if row["strategy"] not in STRATEGIES:
            continue
        setup = Setup(
            model,
            row["tokens_per_gpu"] * row["cp"] * row["tp"],
            dp_shard=row["dp_shard"],
            cp=row["cp"],
            tp=row["tp"],
            checkpointing=row.get("checkpointing", "none"),
            compiled=compiled,
            compiled_loss=compiled,
            whole_logits=row["strategy"] == "flex",
        )
        parts = predict(setup).parts
        found.append((row, sum(size for part, size in parts.items() if part not in OUTSIDE) / GIB))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+", help="JSON files of bench_train.py")
    print("| file | layers | strategy | checkpointing | predicted | measured | error |\n|" + " --- |" * 7)
    for path in parser.parse_args().measured:
        facts = json.loads(path.read_text())
        for row, predicted in comparisons(facts):
            measured, mode = row["peak_memory_gib"], row.get("checkpointing", "none")
            print(
                f"| `{path.name}` | {facts['layers']} | {row['strategy']}, cp {row['cp']} | {mode} "
                f"| {predicted:.1f} | {measured:.1f} | {predicted / measured - 1:+.1%} |"
            )


if __name__ == "__main__":
    main()
