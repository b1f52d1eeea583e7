"""The figures in benchmarks/results/*.json: commands that write them, and Markdown tables made of them."""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"

Row = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------- writing


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_shown = action.default is not None and action.default is not False
        return super()._get_help_string(action) if is_shown else action.help


def parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """The parser of a command: its module's docstring, and in the help of each option its default."""
    return argparse.ArgumentParser(description=doc, formatter_class=_Help, **options)


def recording_parser(doc: str | None) -> argparse.ArgumentParser:
    """The same for a benchmark, with the options that all of them have: --commit and --output."""
    made = parser(doc)
    made.add_argument("--commit", help="commit of the tree, where git is missing")
    made.add_argument("--output", "--json", type=Path, help="JSON file to write")
    return made


def save(figures: dict[str, Any], path: Path | None) -> None:
    """Writes a benchmark's file, if it is to have one."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=1))


# ------------------------------------------------------------------------------------------------------------- reading


def result(name: str) -> dict[str, Any]:
    """benchmarks/results/NAME.json."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def grouped(rows: Iterable[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Values of the fields -> the rows that have them, in the order in which they come."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups


def side_by_side(rows: Iterable[Row], column: str, *fields: str) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Values of the fields -> value of the column -> the row that has them; the last, if there are several."""
    return {case: {row[column]: row for row in found} for case, found in grouped(rows, *fields).items()}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; None is an empty cell, numbers are set to the right."""
    rows = [["" if cell is None else str(cell) for cell in row] for row in rows]
    is_number = [all(re.fullmatch(r"[-+−]?[\d.,]*%?", row[i]) for row in rows) for i in range(len(columns))]
    lines = [columns, ["---:" if numbers else "---" for numbers in is_number], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sources(*names: str) -> str:
    """A line for each file: when, on what, at which version, by which command."""
    return "\n".join(_source(name) for name in names)


def part(as_table: Callable[..., str], *names: str) -> Callable[[], str]:
    """Makes a part of the docs: the table of these files, and where they are from."""
    return lambda: f"{as_table(*map(result, names))}\n\n{sources(*names)}"


def parts(as_table: Callable[..., str], pattern: str) -> Callable[[], str]:
    """The same with a table for each file whose name fits; empty where there is none."""
    return lambda: "\n\n".join(part(as_table, path.stem)() for path in sorted(RESULTS.glob(f"{pattern}.json")))


def _source(name: str) -> str:
    found = result(name)
    gpus = int(found.get("num_gpus") or found.get("gpus") or 1)
    device = found.get("device") or found["processor"]
    versions = (f", {name} {found[name]}" for name in ("torch", "torchtitan") if found.get(name))
    what = f"{gpus} x {device}{''.join(versions)}" if "torch" in found else device
    command = re.sub(r" --(commit|output|json) \S+", "", found["command"])
    path = f"../../benchmarks/results/{name}.json"
    of_rows = (row["commit"] for row in found.get("rows", ()) if "commit" in row)
    commits = ", ".join(dict.fromkeys(commit[:7] for commit in (found["commit"], *of_rows)))
    return f"- [{name}.json]({path}): {found['date']}, {what}, commit {commits}, `{command}`"


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}k"


def total_ms(row: Row) -> float:
    """Forward and backward."""
    return float(row["fwd_ms"] + row["bwd_ms"])
