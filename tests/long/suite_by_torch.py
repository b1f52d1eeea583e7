#!/usr/bin/env python3
"""Notes what the suite said with the torch that is installed, from the reports that pytest wrote of it.

    python -m pytest -n 2 --dist loadfile --junitxml suite.xml
    python tests/long/suite_by_torch.py suite.xml     # or the reports of its parts, in their order

Its entry in benchmarks/results/suite_TORCHTITAN.json is written anew, the others stay; exits with 1 if a test failed.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from runner import TITAN, VERSIONS

from torchtitan_magi.calibrate import facts_of_run

from figures import RESULTS, result, save, table  # isort: skip


def counted(reports: Iterable[Path]) -> dict[str, int]:
    """How many files of tests there were, and how many tests passed, were skipped, and failed, in all reports together.

    A file counts once, by the last report that has it.
    """
    files: dict[str, list[set[str]]] = {}
    for report in reports:
        files |= ends_by_file(ElementTree.parse(report).iter("testcase"))
    ends = [end for of_file in files.values() for end in of_file]
    failed, skipped = sum(bool(end & {"failure", "error"}) for end in ends), sum("skipped" in end for end in ends)
    return {"files": len(files), "passed": len(ends) - failed - skipped, "skipped": skipped, "failed": failed}


def ends_by_file(cases: Iterable[ElementTree.Element]) -> dict[str, list[set[str]]]:
    """What the tests of each file ended with: nothing for those that passed."""
    files: dict[str, list[set[str]]] = {}
    for case in cases:
        files.setdefault(case.attrib["classname"], []).append({child.tag for child in case})
    return files


def recorded() -> list[tuple[str, dict[str, Any]]]:
    """The version of torchtitan and the entry of each torch, the newest first."""
    found = [
        (version, run)
        for version in VERSIONS
        if (RESULTS / f"suite_{version}.json").exists()
        for run in result(f"suite_{version}")["runs"]
    ]
    return sorted(found, key=lambda each: ([*map(int, each[1]["torch"].partition("+")[0].split("."))], each[0]))[::-1]


def by_torch() -> str:
    """When the suite ran last on a CPU with each torch, and what it said."""
    columns = ("torch", "torchtitan", "files", "passed", "skipped", "failed", "date")
    rows = [(run["torch"], version, *(run[name] for name in columns[2:])) for version, run in recorded()]
    names = sorted({f"suite_{version}.json" for version, _ in recorded()})
    files = [f"- [{name}](../../benchmarks/results/{name})" for name in names]
    return "\n".join([table(columns, rows), "", *files])


PARTS = {"suite-by-torch": by_torch}  # of the docs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="a file of pytest's --junitxml")
    parser.add_argument("--commit", help="commit of the tree that ran, if it is not this one")
    arguments = parser.parse_args()
    run = facts_of_run(arguments.commit) | counted(arguments.reports) | {"command": "python -m pytest"}
    path = RESULTS / f"suite_{TITAN}.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    save({"runs": [*(other for other in runs if other["torch"] != run["torch"]), run]}, path)
    sys.exit(run["failed"] > 0)


if __name__ == "__main__":
    main()
