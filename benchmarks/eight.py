#!/usr/bin/env python3
"""What a machine of eight GPUs does: whole models, packs of 32k to 1M tokens, every degree of context parallelism.

    python benchmarks/eight.py --predict --gpu H100 --output benchmarks/results/eight_predicted_h100.json
    python benchmarks/eight.py --output benchmarks/results/eight_h100x8.json
    python benchmarks/eight.py --gpus 2 --layers 2 --output trial.json

Each row is a run of its own by the package's command with random weights and activation checkpointing "auto", compiled:
context parallelism over some GPUs, FSDP2 over all. Rows that a file has already are not run again, so a run that was
cut short goes on. A row has the milliseconds of a step, tokens per second of a GPU, MFU, and the memory that PyTorch
allocated, beside what `torchtitan-magi size` predicts on packs of the histogram; --predict writes that alone, on any
machine. torchtitan's own context parallelism on the same documents is timed by bench_train.py, one layer's attention by
bench_cp.py. Rows predicted not to fit are not run. --layers and --gpus are for a trial of every row: fewer layers, and
packs that are as much shorter as the GPUs are fewer. --rows are run in the order in which they are given.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench_models import LLAMA, QWEN, QWEN3_5, QWEN_MOE, Case, predicted, run
from figures import Row, parts, recording_parser, save, table, thousands

from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.sizing.keeping.kinds import as_option, parse
from torchtitan_magi.sizing.memory import GIB, host_memory
from torchtitan_magi.sizing.predicted_run import PredictedRun

GPUS = 8
TIMEOUT = 480  # seconds per row
RATE = "--optimizer.lr", "1e-5"  # of fine-tuning: torchtitan's own, reached in a few steps, makes losses jump
EVERY = 4  # layers of Qwen3.5 until one with full attention


@dataclass(frozen=True)
class Run:
    """A row: its case, and how many steps are timed."""

    case: Case
    steps: int = 12

    @property
    def data(self) -> str:
        """In words."""
        kind = "one document" if self.case.one_document else "pairs" if self.case.dataset == "dpo" else "packs"
        return f"{kind} of {thousands(self.case.tokens)}"


def rows() -> Iterator[tuple[str, Run]]:
    """Name and run of every row, for eight GPUs."""
    whole = {"Llama 3.1 8B": ("llama3", LLAMA, 32), "Qwen3 8B": ("qwen3", QWEN, 36)}

    def case(model: str, config: Any, layers: int, tokens: int, cp: int, **fields: Any) -> Case:
        return Case(model, config, layers, tokens, "auto", packs=GPUS // cp, gpus=GPUS, cp=cp, **fields)

    for name, model in whole.items():
        for tokens, degrees in ((32768, (1, 2, 4, 8)), (131072, (2, 4, 8)), (262144, (4, 8))):
            for cp in degrees:
                yield f"{name}, {thousands(tokens)}, CP {cp}", Run(case(*model, tokens, cp))
    llama = whole["Llama 3.1 8B"]
    yield "Llama 3.1 8B, DPO", Run(case(*llama, 65536, 8, dataset="dpo"))
    yield "Llama 3.1 8B, LoRA", Run(case(*llama, 131072, 8, rank=16))
    for tokens in (32768, 131072):
        moe = case("qwen3", QWEN_MOE, 48, tokens, 8, ep=8)
        yield f"Qwen3 30B-A3B, {thousands(tokens)}, EP 8", Run(moe)
    yield "Qwen3.5 9B", Run(case("qwen3_5", QWEN3_5, 32, 65536, 8))
    yield "Llama 3.1 8B, 1M", Run(case(*llama, 1 << 20, 8, one_document=True), 2)


def smaller(case: Case, gpus: int, layers: int | None) -> Case:
    """The case on fewer GPUs, as many tokens on each, with fewer layers."""
    share = GPUS // gpus
    cp = max(1, case.cp // share)
    ep = max(1, case.ep // share)
    some = replace(case, gpus=gpus, cp=cp, ep=ep, packs=gpus // cp, tokens=case.tokens * cp // case.cp)
    fewest = EVERY if case.model == "qwen3_5" else 1
    return replace(some, layers=min(case.layers, max(layers or case.layers, fewest)))


def as_row(expected: PredictedRun) -> Row:
    """What is predicted."""
    return {
        "predicted_ms": 1e3 * expected.time.total,
        "predicted_tokens": expected.tokens_per_second,
        "predicted_mfu": expected.mfu,
        "predicted_gib": expected.memory.allocated / GIB,
        "predicted_total_gib": expected.memory.total / GIB,
        "predicted_host_gib": host_memory(expected.setup) / GIB,
        "predicted_kept": as_option(expected.setup.keepings),
    }


def timed(one: Run, expected: PredictedRun) -> Row:
    """What the run took; with the prediction of what its layers kept."""
    row: Row = run(one.case, one.steps, RATE, TIMEOUT)
    if "error" in row:
        return row
    seconds = row["step_ms"] / 1e3
    speeds = {"tokens_per_s": expected.tokens / seconds / one.case.gpus}
    return row | speeds | {"mfu": expected.time.flops / seconds / expected.place.gpu.peak}


def eight_table(found: dict[str, Any]) -> str:
    """Predicted and measured, a line for each row."""
    lines = []
    for row in found["rows"]:
        line = [row["row"], row["data"], row["predicted_kept"], f"{row['predicted_ms'] / 1e3:.2f}"]
        line += [f"{row['predicted_tokens']:,.0f}", f"{row['predicted_mfu']:.0%}", f"{row['predicted_total_gib']:.0f}"]
        line += [f"{row['predicted_host_gib']:.0f}"]
        if "step_ms" in row:
            line += [f"{row['step_ms'] / 1e3:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.0%}"]
            line += [f"{row['peak_gib']:.0f}", f"{row['predicted_gib'] / row['peak_gib'] - 1:+.0%}"]
        lines.append(line)
    columns = ["run", "data", "layers keep", "predicted: step, s", "tokens/s per GPU", "MFU", "GiB", "of the host's"]
    if lines and len(lines[0]) > len(columns):
        columns += ["measured: step, s", "tokens/s per GPU", "MFU", "GiB of PyTorch", "error"]
    return table(columns, lines)


PARTS = {"eight": parts(eight_table, "eight_*")}


def main() -> None:
    known = dict(rows())
    parser = recording_parser(__doc__)
    parser.add_argument("--rows", nargs="+", default=list(known), choices=known, metavar="ROW", help="to run")
    parser.add_argument("--gpus", type=int, default=GPUS, choices=(2, 4, 8), help="of this machine")
    parser.add_argument("--layers", type=int, help="of each model, in place of all")
    parser.add_argument("--steps", type=int, help="of each run, in place of 12; those of one document have 2")
    parser.add_argument("--gpu", default="H100", help="kind of GPU of --predict")
    parser.add_argument("--predict", action="store_true", help="predict only")
    arguments = parser.parse_args()
    facts = facts_of_run(arguments.commit)
    found: dict[str, Any] = facts | {"gpus": arguments.gpus, "rows": []}
    if arguments.output and Path(arguments.output).exists():
        found["rows"] = json.loads(Path(arguments.output).read_text())["rows"]
    device = arguments.gpu if arguments.predict else facts["device"]
    for name in arguments.rows:
        if any(row["row"] == name for row in found["rows"]):
            continue
        one = replace(known[name], case=smaller(known[name].case, arguments.gpus, arguments.layers))
        one = replace(one, steps=min(one.steps, arguments.steps or one.steps))
        expected = predicted(one.case, device)
        row = {"row": name, "data": one.data} | as_row(expected)
        if not arguments.predict:
            if not expected.fits:
                print(f"{name}: predicted not to fit", flush=True)
                continue
            measured = timed(one, expected)
            if "error" in measured:
                print(f"{name} FAILED\n{measured['error']}", flush=True)
                continue
            expected = predicted(one.case, device, parse(measured["kept"], one.case.layers))
            row |= as_row(expected) | measured
        print(f"{name}: {row.get('step_ms', row['predicted_ms']):,.0f} ms", flush=True)
        found["rows"].append(row)
        save(found, arguments.output)
    print(eight_table(found))


if __name__ == "__main__":
    main()
