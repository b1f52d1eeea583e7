"""Compares what benchmarks/bench_cp.py measured with the cost model's predictions for the same packs.

    python benchmarks/check_prediction.py benchmarks/results/cp_h200x4.json [--cost FILE]

"Of ideal" is the ideal's time over the strategy's, forward and backward together: measured over measured, predicted
over predicted.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from bench_cp import FILES, HEAD_DIM, histogram_pack
from figures import RESULTS, Row, parser, result, side_by_side, sources, table, thousands, total_ms

from torchtitan_magi import make_plan
from torchtitan_magi.calibrate import recorded_samples
from torchtitan_magi.planning.cost_model import H200, CostModel, Heads
from torchtitan_magi.sizing.strategies.outcomes import Case
from torchtitan_magi.sizing.strategies.size import size_pack

# Name in bench_cp -> name in the report; bench_cp's other strategies have no counterpart there.
STRATEGIES = {"ours": "ours", "all-gather": "all-gather", "ulysses": "Ulysses"}


def case_of(row: dict, cost: CostModel) -> Case:
    """The pack of a row of bench_cp's file, on GPUs of one node."""
    cp_size, total = row["cp"], row["tokens_per_gpu"] * row["cp"]
    cu = histogram_pack(total, row["seed"]) if row["pack"] == "histogram" else np.array([0, total])
    heads = Heads(*map(int, row["heads"].split(":")), HEAD_DIM)
    return Case(np.diff(cu), total, cp_size, cp_size, heads, cost)


def comparisons(rows: list[Row], cost: CostModel) -> list[tuple[str, float, float, float, float]]:
    """Per pack and strategy: a label; ms, measured and predicted; ratio to the ideal, measured and predicted."""
    found = []
    packs = side_by_side(rows, "strategy", "pack", "tokens_per_gpu", "heads", "seed", "cp")
    for (pack, tokens, heads, seed, _), measured in packs.items():
        case = case_of(measured["ideal"], cost)
        outcomes = size_pack(case).outcomes
        ideal_ms = total_ms(measured["ideal"])
        for theirs, name in STRATEGIES.items():
            outcome = outcomes[name]
            if theirs in measured and outcome is not None:
                seconds, ms = sum(outcome.seconds), total_ms(measured[theirs])
                label = f"{pack:10} {tokens:7,} {heads:6} {seed:4}  {name:10}"
                found.append((label, ms, 1e3 * seconds, ideal_ms / ms, sum(case.ideal_seconds) / seconds))
    return found


def errors_table(*files: dict[str, Any], cost: CostModel = H200, strategy: str = "ours") -> str:
    """Share of the ideal, predicted by today's cost model and plans less measured, in points."""
    lines = []
    for found in files:
        errors = [
            100 * (predicted - measured)
            for label, *_, measured, predicted in comparisons(found["rows"], cost)
            if label.split()[-1] == strategy
        ]
        tokens = ", ".join(dict.fromkeys(thousands(row["tokens_per_gpu"]) for row in found["rows"]))
        heads = found["rows"][0]["heads"]
        summary = [f"{error:+.1f}" for error in (mean(errors), min(errors), max(errors))] if errors else [""] * 3
        lines.append([found["num_gpus"], heads, tokens, len(errors), *summary])
    return table(["GPUs", "heads", "tokens per GPU", "packs", "mean", "least", "most"], lines)


def cost_model() -> str:
    """Errors of the kernel's predicted times in the cases of its benchmark."""
    errors: dict[str, list[float]] = {"forward": [], "backward": []}
    for sample in recorded_samples(RESULTS / "kernel_h200.json"):
        predicted = make_plan(sample.slices, sample.num_tokens, 1, heads=sample.heads).predict()
        for (name, found), times in zip(errors.items(), predicted, strict=True):
            found.append(100 * (times.seconds / getattr(sample, name) - 1))
    spans = " and ".join(f"{min(found):+.0f} to {max(found):+.0f}% {name}" for name, found in errors.items())
    sentence = f"The constants predict the kernel's benchmark with errors of {spans}."
    return f"{sentence}\n\n{sources('kernel_h200', 'cost_h200x4')}"


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "prediction": lambda: errors_table(*map(result, (*FILES[2], *FILES[4]))),  # context-parallel.md names them
    "cost-model": cost_model,
}


def main() -> None:
    command = parser(__doc__)
    command.add_argument("measured", type=Path, help="JSON file of bench_cp.py")
    command.add_argument("--cost", type=Path, help="cost model of that machine; default: H200")
    arguments = command.parse_args()
    cost = CostModel.load(arguments.cost) if arguments.cost else H200
    found = json.loads(arguments.measured.read_text())
    print(f"{'pack':10} {'T':>7} {'heads':6} seed  strategy    ms measured, predicted  error   of ideal, predicted")
    for label, measured, predicted, ratio, predicted_ratio in comparisons(found["rows"], cost):
        error = predicted / measured - 1
        print(f"{label}  {measured:11.2f} {predicted:10.2f}  {error:+5.0%}   {ratio:8.0%} {predicted_ratio:10.0%}")
    for name in STRATEGIES.values():
        print(f"\n{name}, predicted share of ideal less measured:\n{errors_table(found, cost=cost, strategy=name)}")


if __name__ == "__main__":
    main()
