#!/usr/bin/env python3
"""Times training steps by what layers keep for their backward (magi.keep), beside what is decided for "auto".

    python benchmarks/bench_keeping.py [--cases "packs of 64k"] --output benchmarks/results/keeping_h200.json

Each row is a run of its own by the package's command, with the layer shapes of Llama 3.1 8B and random weights from one
seed, compiled; those of a case follow one another. It has the median over steps of the milliseconds per step, the first
ones not counted, the last loss, the most memory that PyTorch allocated on a GPU, and the most of the host's memory that
a process had; memory as predicted, too. "500 steps" has small layers of every kind that is offloaded, and its memory by
fifths of the run. Rows that the file has already are not run again, nor mixes that "auto" was found to be, nor those
predicted not to fit this kind of GPU.

A step of 8B on one document of 1M tokens over eight GPUs is derived from rows with 128k tokens on each GPU, where all
layers keep attention. Apart from attention, a layer's work depends on the tokens of a GPU alone, and attention's on the
(query, key) pairs of a GPU, T^2 / 2 / N of a document of T tokens over N GPUs: 2^33 of 128k over one, 2^34 of 256k over
two, 2^35 of 512k over four, 2^36 of 1M over eight. So

    step = rest + layers * (layer + pairs * attention)

is fitted to those rows by least squares of relative errors, and taken at 32 layers and 2^36 pairs. It leaves out what
eight GPUs add: three times as many rows of keys and values arrive at each as at one of four, while there is twice the
work behind which they travel; FSDP2 gathers layers from twice as many; eight processes copy to one host.
"""

import json
from typing import Any

import numpy as np
from bench_models import LLAMA, Case, memory_cells, predicted, run
from figures import Row, parts, recording_parser, save, table

from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.sizing.keeping.kinds import ATTENTION, AUTO, as_option, parse
from torchtitan_magi.sizing.memory import GIB, host_memory

TIMEOUT = 420  # seconds per row
MILLION = 1 << 20  # tokens of the document that is derived
SMALL = LLAMA | {"hidden_size": 1024, "intermediate_size": 3584, "num_attention_heads": 8, "num_key_value_heads": 4}


def _case(layers: int, tokens: int, gpus: int = 1, **fields: Any) -> Case:
    return Case("llama3", fields.pop("config", LLAMA), layers, tokens, AUTO, gpus=gpus, cp=gpus, **fields)


def _document(layers: int, tokens: int, gpus: int = 1) -> Case:
    return _case(layers, tokens, gpus, one_document=True)


CASES = {  # steps of each run, and what layers keep
    "packs of 64k": (
        _case(8, 65536), 9,
        ("all", "products", "inputs", "attention offloaded", "all offloaded", AUTO),
    ),
    "packs of 64k, 16 layers": (_case(16, 65536), 9, (AUTO, "inputs", "products")),
    # held to the memory of an H100: on one GPU, weights and states in 16 bits take what 32 bits take over two
    "packs of 32k, 16 layers in 16 bits, 80 GB": (
        _case(16, 32768, dtype="bfloat16", memory_of="H100"), 9,
        (AUTO, "products", "inputs", "8 products among 8 products offloaded", "8 products offloaded, 8 all"),
    ),
    "packs of 64k, 16 layers in 16 bits, 80 GB": (
        _case(16, 65536, dtype="bfloat16", memory_of="H100"), 9,
        (AUTO, "14 attention, 2 all", "inputs", "8 products among 8 products offloaded"),
    ),
    "packs of 64k over 2, 16 layers, 80 GB": (
        _case(16, 65536, 2, memory_of="H100"), 8, (AUTO, "products", "inputs", "8 products offloaded, 8 all"),
    ),
    "packs of 128k over 2, 16 layers, 80 GB": (
        _case(16, 131072, 2, memory_of="H100"), 8,
        (AUTO, "14 attention, 2 all", "inputs", "8 products among 8 products offloaded"),
    ),
    "packs of 64k over 2, 16 layers": (
        _case(16, 65536, 2), 8,
        (AUTO, "inputs", "products", "12 products, 4 all", "8 products offloaded, 8 all", "all"),
    ),
    "packs of 128k over 2, 16 layers": (
        _case(16, 131072, 2), 8,
        (AUTO, "inputs", "14 attention, 2 all", "8 products among 8 products offloaded", "13 products offloaded, 3 all",
         "4 all offloaded, 12 attention offloaded", "products",
         "2 products, 1 all offloaded, 2 products, 4 all offloaded among 7 all"),
    ),
    "packs of 128k over 2, 8B": (
        _case(32, 131072, 2), 8,
        (AUTO, "inputs", "13 attention offloaded, 18 products, 1 all", "14 inputs, 17 products, 1 all",
         "16 products among 16 products offloaded"),
    ),
    "one document of 128k": (_document(4, 131072), 4, ("attention", "attention offloaded", "inputs")),
    "one document of 256k over 2": (_document(4, 262144, 2), 4, ("attention", "attention offloaded", "inputs")),
    "one document of 256k over 2, 2 layers": (_document(2, 262144, 2), 4, ("attention",)),
    "one document of 512k over 4": (_document(4, 524288, 4), 3, ("attention",)),
    "one document of 512k over 4, 8B": (_document(32, 524288, 4), 2, ("26 attention offloaded, 6 attention",)),
    "500 steps": (
        _case(8, 16384, config=SMALL), 500,
        ("2 all offloaded, 2 products offloaded, 2 attention offloaded, 2 inputs offloaded",),
    ),
}  # fmt: skip


def keeping_table(found: dict[str, Any]) -> str:
    """Steps and memory of each run, measured and predicted."""
    lines = []
    for row in found["rows"]:
        case = CASES[row["case"]][0]
        expected = predicted(case, found["device"], parse(row["kept"], case.layers))
        step = 1e3 * expected.time.total
        lines.append([
            row["case"], case.layers, row["kept"] + f" ({AUTO})" * (row["keep"] == AUTO),
            f"{row['step_ms']:,.0f}", f"{1e3 * case.tokens / case.gpus / row['step_ms']:,.0f}", f"{step:,.0f}",
            *memory_cells(row, expected), f"{host_memory(expected.setup) / GIB:.1f}",
            f"{row['loss']:.4f}" if "loss" in row else None,
        ])  # fmt: skip
    columns = ["data", "layers", "kept", "step, ms", "tokens/s per GPU", "predicted, ms", "GiB", "predicted", "error"]
    return table([*columns, "offloaded GiB", "loss"], lines)


def fifths_table(found: dict[str, Any]) -> str:
    """The step and the most memory of each fifth of long runs, and the host's memory after them."""
    lines = []
    for row in found["rows"]:
        for name, digits in (("step_ms", 1), ("peak_gib", 3), ("outside_gib", 3), ("host_gib", 2)):
            if "fifths" in row:
                values = [f"{value:.{digits}f}" for value in row["fifths"][name]]
                lines.append([row["case"], name, *values, f"{row['host_after_gib']:.2f}" if "host" in name else None])
    return table(["run", "of each fifth", *"12345", "after the run"], lines)


def pairs_of(case: Case) -> float:
    """(query, key) pairs of a GPU, of one document."""
    return case.tokens**2 / 2 / case.gpus


def million(rows: list[Row], device: str) -> str:
    """The step of 8B on one document of 1M tokens over eight GPUs, as these rows have it; see the docstring above.
    Empty where they do not determine it."""
    goal, used = _document(32, MILLION, 8), []
    for row in rows:
        case = CASES[row["case"]][0]
        keeps_attention = {keeping.kept for keeping in parse(row["kept"], case.layers)} == {ATTENTION}
        if keeps_attention and case.one_document and case.tokens * goal.gpus == goal.tokens * case.gpus:
            used.append((case, row["step_ms"] / 1e3))
    steps = np.array([step for _, step in used])
    pairs = np.array([pairs_of(case) / pairs_of(goal) for case, _ in used])
    layers = np.array([case.layers for case, _ in used])
    terms = np.stack([np.ones(len(used)), layers, layers * pairs], axis=1)
    if np.linalg.matrix_rank(terms) < terms.shape[1]:
        return ""
    rest, layer, attention = np.linalg.lstsq(terms / steps[:, None], np.ones(len(used)))[0]
    worst = max(abs(terms @ (rest, layer, attention) / steps - 1))
    expected = predicted(goal, device)
    return (
        f"8B, one document of 1M tokens over {goal.gpus} GPUs, from {len(used)} rows: {rest:.2f} + {goal.layers} x "
        f"({layer:.3f} + {attention:.3f}) = {rest + goal.layers * (layer + attention):.0f} s a step; the rows are met "
        f"within {worst:.1%}. As predicted {expected.time.total:.0f} s, {expected.memory.total / GIB:.0f} GiB, "
        f"{goal.gpus * host_memory(expected.setup) / GIB:.0f} GiB of the host's"
    )


PARTS = {"keeping": parts(keeping_table, "keeping_*")}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES, metavar="CASE", help="to run")
    arguments = parser.parse_args()
    found: dict[str, Any] = facts_of_run(arguments.commit) | {"rows": []}
    if arguments.output and arguments.output.exists():
        found["rows"] = json.loads(arguments.output.read_text())["rows"]
    for name in arguments.cases:
        case, steps, keeps = CASES[name]
        for keep in keeps:
            mix = () if keep == AUTO else parse(keep, case.layers)
            done = [row for row in found["rows"] if row["case"] == name]
            if any(keep == row["keep"] or as_option(mix) == row["kept"] for row in done):
                continue
            if not predicted(case, found["device"], mix).fits:
                print(f"{name}, {keep}: predicted not to fit", flush=True)
                continue
            row = run(case, steps, ["--magi.keep", keep] if mix else [], TIMEOUT)
            if "error" in row:
                print(f"{name}, {keep} FAILED\n{row['error']}", flush=True)
                continue
            print(f"{name}, {keep}: {row['step_ms']:,.0f} ms, {row['peak_gib']:.1f} GiB", flush=True)
            found["rows"].append({"case": name, "keep": keep} | row)
            found["gpus"] = max(CASES[row["case"]][0].gpus for row in found["rows"])
            save(found, arguments.output)
    print(keeping_table(found), fifths_table(found), million(found["rows"], found["device"]), sep="\n\n")


if __name__ == "__main__":
    main()
