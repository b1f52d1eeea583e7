"""Compares what scripts/bench_cp.py measured with what the cost model predicts for the same packs.

    python scripts/check_prediction.py benchmarks/results/cp_h200x4.json [--cost FILE]

Share of the ideal is the ideal's time over the strategy's, forward and backward together: measured with the measured
ideal, predicted with the predicted one.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from bench_cp import HEAD_DIM, histogram_pack

from torchtitan_magi.planning.stages import H200, CostModel, Heads
from torchtitan_magi.report.strategies import Case
from torchtitan_magi.report.sizing import size_pack

# In bench_cp -> in the report; its other strategies have no counterpart there.
STRATEGIES = {"ours": "ours", "all-gather": "all-gather", "ulysses": "Ulysses"}


def case_of(row: dict, cost: CostModel) -> Case:
    """The pack that a row of bench_cp's file is about, on GPUs of one node."""
    cp_size, total = row["cp"], row["tokens_per_gpu"] * row["cp"]
    cu = histogram_pack(total, row["seed"]) if row["pack"] == "histogram" else np.array([0, total])
    heads = Heads(*map(int, row["heads"].split(":")), HEAD_DIM)
    return Case(np.diff(cu), total, cp_size, cp_size, heads, cost)


def comparisons(rows: list[dict], cost: CostModel) -> list[tuple[str, float, float, float, float]]:
    """Per strategy and pack: its name, measured and predicted ms, measured and predicted share of the ideal."""
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
                shares = ideal_ms / _ms(measured[theirs]), sum(case.ideal_seconds) / seconds
                label = f"{pack:10} {tokens:7,} {heads:6} {seed:4}  {name:10}"
                found.append((label, _ms(measured[theirs]), 1e3 * seconds, *shares))
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
    for label, measured, predicted, share, predicted_share in found:
        error = predicted / measured - 1
        print(f"{label}  {measured:11.2f} {predicted:10.2f}  {error:+5.0%}   {share:8.0%} {predicted_share:10.0%}")
    errors = {name: [] for name in STRATEGIES.values()}
    for label, _, _, share, predicted_share in found:
        errors[label.split()[-1]].append(predicted_share - share)
    for name, values in errors.items():
        if values:
            text = f"{np.mean(values):+.1%} in the mean, {np.min(values):+.1%} to {np.max(values):+.1%}"
            print(f"{name}: predicted share of ideal less measured {text}")


if __name__ == "__main__":
    main()
