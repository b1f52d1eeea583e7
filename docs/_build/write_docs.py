#!/usr/bin/env python3
"""Writes the generated parts of the docs: python docs/_build/write_docs.py [--check]

A part stands between `<!-- generated: NAME -->` and `<!-- end -->` in README.md or a page of docs/. Its text is made by
the function of that name in docs_reference.py (options, commands, functions), docs_figures.py (figures, from
benchmarks/results/*.json), docs_memory.py (memory, predicted and measured) or here (the table of contents). `--check`
writes nothing and names the pages that are older than what they are made from; it exits with 1 if there are any.
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path

import docs_figures
import docs_memory
import docs_reference

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDERS = {"concepts": "Concepts", "reference": "Reference", "performance": "Performance", "internals": "Internals"}


def contents() -> str:
    """A list of the pages of each folder of docs/, by their titles; docs/README.md has that of how-to/ by hand."""
    sections = []
    for folder, title in FOLDERS.items():
        found = sorted((ROOT / "docs" / folder).glob("*.md"))
        links = [f"- [{page.read_text().partition(chr(10))[0].strip('# ')}]({folder}/{page.name})" for page in found]
        sections.append("\n".join([f"## {title}\n", *links]) if links else "")
    return "\n\n".join(filter(None, sections))


PARTS: dict[str, Callable[[], str]] = {
    **docs_reference.PARTS, **docs_figures.PARTS, **docs_memory.PARTS, "contents": contents
}  # fmt: skip


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written(text: str) -> str:
    """The page with its generated parts made anew. Raises KeyError for a name that no function has."""
    return PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]().strip()}\n{part[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is out of date")
    check = parser.parse_args().check
    stale = [(page, text) for page in pages() if (text := written(page.read_text())) != page.read_text()]
    for page, text in stale:
        print(
            f"{page.relative_to(ROOT)} {'is out of date; run python docs/_build/write_docs.py' if check else 'written'}"
        )
        if not check:
            page.write_text(text)
    sys.exit(check and bool(stale))


if __name__ == "__main__":
    main()
