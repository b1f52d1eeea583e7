#!/usr/bin/env python3
"""Times training steps on records with common beginnings, flat and as trees (magi.share_prefixes).

    python benchmarks/bench_trees.py [--gpus 2] [--layers 8] --output benchmarks/results/trees_h200.json
    python benchmarks/bench_trees.py --count --output benchmarks/results/trees_count.json

The model has the layer shapes of Llama 3 8B, random weights and few layers. The texts are the sources of Python's
standard library. Flat and shared runs read the same records in packs of the same length, with context parallelism over
all GPUs, by turns; a row has the median milliseconds per step, the first ones not counted, and the records that a step
takes on average, so that records per second compare the two. --count only counts tokens, on any machine. The docs have
a table of trees_count.json, and one of each trees_h200*.json that is there.

Data
  answers   prompts of 8k tokens, each with 8 answers of 1k
  system    conversations of 1k tokens behind one system message of 3k
  distinct  conversations of 1k tokens that share nothing: what looking for common beginnings costs
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import bench_models
from bench_models import LLAMA, Case
from bench_train import CHARACTERS, RECORD, TOKENIZER, copy_tokenizer, documents, torchrun
from figures import Row, part, parts, recording_parser, save, side_by_side, table, thousands

from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.data import PackedSFTDataset
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer

TOKENS = 32768  # per pack and GPU
TIMEOUT = 600  # seconds per run


def words(source: Iterator[str], tokens: int) -> str:
    """The next characters of the source, about so many tokens."""
    return "".join(next(source) for _ in range(tokens * CHARACTERS))


def turns(*contents: str) -> list[dict[str, str]]:
    """Messages of system, user and assistant, or of the last two."""
    roles = ("system", "user", "assistant")[3 - len(contents) :]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def answers(source: Iterator[str]) -> Iterator[dict[str, Any]]:
    """48 prompts with 8 answers each."""
    for _ in range(48):
        prompt = words(source, 8_000)
        yield from ({"messages": turns(prompt, words(source, 1_000))} for _ in range(8))


def system(source: Iterator[str]) -> Iterator[dict[str, Any]]:
    """800 conversations."""
    common = words(source, 3_000)
    for _ in range(800):
        yield {"messages": turns(common, words(source, 400), words(source, 600))}


def distinct(source: Iterator[str]) -> Iterator[dict[str, Any]]:
    """800 conversations."""
    for _ in range(800):
        yield {"messages": turns(words(source, 400), words(source, 600))}


DATA = {"answers": answers, "system": system, "distinct": distinct}
IN_WORDS = {
    "answers": "prompts of 8k, each with 8 answers of 1k",
    "system": "conversations of 1k behind a system message of 3k",
    "distinct": "conversations of 1k that share nothing",
}


def write(name: str, path: Path) -> None:
    """Writes the records of DATA."""
    source = (letter for row in documents(2**20) for letter in row["text"])
    path.write_text("".join(json.dumps(record) + "\n" for record in DATA[name](source)))


def counted(path: Path, shared: bool, seq_len: int) -> PackingCounts:
    """What an epoch's packs hold."""
    packs = PackedSFTDataset(path, load_chat_tokenizer(TOKENIZER), seq_len, epochs=1, share_prefixes=shared)
    for _ in packs:
        pass
    return packs.counts


def run(path: Path, shared: bool, gpus: int, layers: int, steps: int) -> dict[str, Any]:
    """What the run's process recorded, see bench_models.py; what was printed, if it failed."""
    with tempfile.TemporaryDirectory() as name:
        copy_tokenizer(Path(name))
        Case("llama3", LLAMA, layers, TOKENS * gpus).write(Path(name))
        command = [*torchrun(gpus), bench_models.__file__, RECORD, name, "--job.config_file", f"{name}/bench.toml"]
        command += ["--training.dataset_path", str(path), "--training.steps", str(steps)]
        command += ["--parallelism.context_parallel_degree", str(gpus)] + ["--magi.share_prefixes"] * shared
        return bench_models.recorded(command, Path(name), TIMEOUT)


def row_of(name: str, path: Path, shared: bool, arguments: Any) -> Row:
    """Tokens and records of a step."""
    counts = counted(path, shared, TOKENS * arguments.gpus)
    row = {"data": name, "shared": shared, "seq_len": TOKENS * arguments.gpus}
    return row | {"tokens": counts.tokens, "packs": counts.packs, "records_per_step": counts.pieces / counts.packs}


def timed(rows: list[Row], path: Path, arguments: Any) -> Iterator[Row]:
    """The rows with how long a step takes: the median of runs by turns."""
    turns = [[run(path, row["shared"], arguments.gpus, arguments.layers, arguments.steps) for row in rows]
             for _ in range(arguments.turns)]  # fmt: skip
    for row, runs in zip(rows, zip(*turns, strict=True), strict=True):
        if errors := [found["error"] for found in runs if "error" in found]:
            print(f"{row['data']} FAILED\n{errors[0]}", flush=True)
            continue
        row |= {"gpus": arguments.gpus, "layers": arguments.layers} | runs[0]
        yield row | {"step_ms": median(of := [found["step_ms"] for found in runs]), "step_ms_of_turns": of}


def both(found: dict[str, Any]) -> Iterator[tuple[str, int, Row, Row]]:
    """Data in words, tokens of a pack, and the rows of flat packs and of trees, where both are there."""
    for (name, seq_len), by in side_by_side(found["rows"], "shared", "data", "seq_len").items():
        if len(by) == 2:
            yield IN_WORDS[name], seq_len, by[False], by[True]


def count_table(found: dict[str, Any]) -> str:
    """Tokens of an epoch and records of a step, a line for each kind of data."""
    lines = []
    for name, seq_len, flat, trees in both(found):
        tokens = (f"{row['tokens']:,}" for row in (flat, trees))
        records = (f"{row['records_per_step']:.1f}" for row in (flat, trees))
        lines.append([name, thousands(seq_len), *tokens, f"{trees['tokens'] / flat['tokens']:.0%}", *records])
    columns = ["data", "pack", "tokens of an epoch: flat", "as trees", "share", "records of a pack: flat", "as trees"]
    return table(columns, lines)


def speed_table(found: dict[str, Any]) -> str:
    """Time of a step and records per second, a line for each kind of data."""
    lines = []
    for name, seq_len, flat, trees in both(found):
        steps = (f"{row['step_ms']:,.0f}" for row in (flat, trees))
        speeds = [1e3 * row["records_per_step"] / row["step_ms"] for row in (flat, trees)]
        speed = (f"{each:.1f}" for each in speeds)
        lines.append([name, flat["gpus"], thousands(seq_len), *steps, *speed, f"{speeds[1] / speeds[0]:.2f}"])
    columns = ["data", "GPUs", "pack", "step, ms: flat", "as trees", "records/s: flat", "as trees", "times"]
    return table(columns, lines)


PARTS = {"trees-count": part(count_table, "trees_count"), "trees-speed": parts(speed_table, "trees_h200*")}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--data", nargs="+", default=list(DATA), choices=DATA, help="to train on")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs, which share each pack")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--turns", type=int, default=1, help="runs of each, of which a row has the median")
    parser.add_argument("--count", action="store_true", help="count tokens only")
    arguments = parser.parse_args()
    found: dict[str, Any] = facts_of_run(arguments.commit) | {"num_gpus": arguments.gpus, "rows": []}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.data:
            write(name, path := Path(folder, f"{name}.jsonl"))
            rows = [row_of(name, path, shared, arguments) for shared in (False, True)]
            found["rows"] += rows if arguments.count else timed(rows, path, arguments)
            save(found, arguments.output)
    print((count_table if arguments.count else speed_table)(found))


if __name__ == "__main__":
    main()
