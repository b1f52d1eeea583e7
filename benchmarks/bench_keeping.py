#!/usr/bin/env python3
"""Times training steps by what layers keep for their backward (magi.keep), beside what is decided for "auto".

    python benchmarks/bench_keeping.py [--cases "packs of 64k"] --output benchmarks/results/keeping_h200.json

Each row is a run of its own on one GPU by the package's command, with the layer shapes of Llama 3.1 8B, few layers and
random weights, compiled; those of a case follow one another. It has the median over steps of the milliseconds per step,
the first ones not counted, the most memory that PyTorch allocated, and the most of the host's memory that the process
had; both as predicted, too.
"""

from typing import Any

from bench_models import LLAMA, Case, memory_cells, predicted, run
from figures import part, recording_parser, save, table

from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.sizing.keeping.kinds import parse
from torchtitan_magi.sizing.memory import GIB, host_memory

AUTO = "auto"
CASES = {
    "packs of 64k": (
        Case("llama3", LLAMA, 8, 65536, "auto"),
        ("all", "products", "inputs", "attention offloaded", "all offloaded", AUTO),
    ),
    "packs of 64k, 16 layers": (Case("llama3", LLAMA, 16, 65536, "auto"), (AUTO, "inputs", "products")),
    "one document of 128k": (
        Case("llama3", LLAMA, 4, 131072, "auto", one_document=True),
        ("inputs", "attention", "attention offloaded"),
    ),
}


def keeping_table(found: dict[str, Any]) -> str:
    """Steps and memory of each run, measured and predicted."""
    lines = []
    for row in found["rows"]:
        case = CASES[row["case"]][0]
        expected = predicted(case, found["device"], parse(row["kept"], case.layers))
        step = 1e3 * expected.time.total
        lines.append([
            row["case"], case.layers, row["kept"] + f" ({AUTO})" * (row["keep"] == AUTO),
            f"{row['step_ms']:,.0f}", f"{1e3 * case.tokens / row['step_ms']:,.0f}", f"{step:,.0f}",
            *memory_cells(row, expected), f"{host_memory(expected.setup) / GIB:.1f}",
        ])  # fmt: skip
    columns = ["data", "layers", "kept", "step, ms", "tokens/s", "predicted, ms", "GiB", "predicted", "error"]
    return table([*columns, "offloaded GiB"], lines)


PARTS = {"keeping": part(keeping_table, "keeping_h200")}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE", help="to run")
    parser.add_argument("--steps", type=int, default=9, help="of each run")
    arguments = parser.parse_args()
    found: dict[str, Any] = facts_of_run(arguments.commit) | {"rows": []}
    for name in arguments.cases:
        case, keeps = CASES[name]
        for keep in keeps:
            row = run(case, arguments.steps, [] if keep == AUTO else ["--magi.keep", keep])
            if "error" in row:
                print(f"{name}, {keep} FAILED\n{row['error']}", flush=True)
                continue
            print(f"{name}, {keep}: {row['step_ms']:,.0f} ms, {row['peak_gib']:.1f} GiB", flush=True)
            found["rows"].append({"case": name, "keep": keep} | row)
            save(found, arguments.output)
    print(keeping_table(found))


if __name__ == "__main__":
    main()
