"""Compares what benchmarks/bench_cp.py measured with the cost model's predictions for the same packs.

    python benchmarks/check_prediction.py benchmarks/results/cp_h200x4.json [--cost FILE]

"Of ideal" is the ideal's time over the strategy's, forward and backward together: measured over measured, predicted
over predicted.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from bench_cp import HEAD_DIM, histogram_pack

from torchtitan_magi.planning.cost_model import H200, CostModel, Heads
from torchtitan_magi.sizing.size import size_pack
from torchtitan_magi.sizing.strategies import Case

# Name in bench_cp -> name in the report; bench_cp's other strategies have no counterpart there.
STRATEGIES = {"ours": "ours", "all-gather": "all-gather", "ulysses": "Ulysses"}


def case_of(row: dict, cost: CostModel) -> Case:
    """The pack of a row of bench_cp's file, on GPUs of one node."""
    cp_size, total = row["cp"], row["tokens_per_gpu"] * row["cp"]
    cu = histogram_pack(total, row["seed"]) if row["pack"] == "histogram" else np.array([0, total])
    heads = Heads(*map(int, row["heads"].split(":")), HEAD_DIM)
    return Case(np.diff(cu), total, cp_size, cp_size, heads, cost)


def comparisons(rows: list[dict], cost: CostModel) -> list[tuple[str, float, float, float, float]]:
    """Per pack and strategy: a label; ms, measured and predicted; ratio to the ideal, measured and predicted."""
    packs: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("pack", "tokens_per_gpu", "heads", "seed", "cp"))
        packs.setdefault(key, {})[row["strategy"]] = row
    found = []
    for (pack, tokens, heads, seed, _), measured in packs.items():
        case = case_of(measured["ideal"], cost)
        outcomes = size_pack(case).outcomes
        ideal_ms = _ms(measured["ideal"])
        for theirs, name in STRATEGIES.items():
            outcome = outcomes[name]
            if theirs in measured and outcome is not None:
                seconds = sum(outcome.seconds)
                of_ideal = ideal_ms / _ms(measured[theirs]), sum(case.ideal_seconds) / seconds
                label = f"{pack:10} {tokens:7,} {heads:6} {seed:4}  {name:10}"
                found.append((label, _ms(measured[theirs]), 1e3 * seconds, *of_ideal))
    return found


def _ms(row: dict) -> float:
    return row["fwd_ms"] + row["bwd_ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, help="JSON file of bench_cp.py")
    parser.add_argument("--cost", type=Path, help="cost model of that machine; default: H200")
    arguments = parser.parse_args()
    cost = CostModel.load(arguments.cost) if arguments.cost else H200
    found = comparisons(json.loads(arguments.measured.read_text())["rows"], cost)
    print(f"{'pack':10} {'T':>7} {'heads':6} seed  strategy    ms measured, predicted  error   of ideal, predicted")
    for label, measured, predicted, ratio, predicted_ratio in found:
        error = predicted / measured - 1
        print(f"{label}  {measured:11.2f} {predicted:10.2f}  {error:+5.0%}   {ratio:8.0%} {predicted_ratio:10.0%}")
    errors = {name: [] for name in STRATEGIES.values()}
    for label, _, _, ratio, predicted_ratio in found:
        errors[label.split()[-1]].append(predicted_ratio - ratio)
    for name, values in errors.items():
        if values:
            text = f"{np.mean(values):+.1%} in the mean, {np.min(values):+.1%} to {np.max(values):+.1%}"
            print(f"{name}: predicted share of ideal less measured {text}")


if __name__ == "__main__":
    main()
