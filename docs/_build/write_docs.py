#!/usr/bin/env python3
"""Writes the generated parts of the docs: python docs/_build/write_docs.py [--check]

A part stands between `<!-- generated: NAME -->` and `<!-- end -->` in README.md or a page of docs/. Its text is made by
the function of that name in docs_reference.py (options, commands, functions), docs_figures.py (figures, from
benchmarks/results/*.json), docs_memory.py (memory, predicted and measured) or here (the list of pages, by mkdocs.yml).
`--check` writes nothing and names the pages that are older than what they are made from; it exits with 1 if there are
any.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docs_figures
import docs_memory
import docs_reference
import yaml

ROOT = Path(__file__).resolve().parents[2]
PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
SITE = Path(__file__).with_name("mkdocs.yml")


def contents() -> str:
    """The pages in the order of the site, each with its first sentence."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(listed(yaml.safe_load(SITE.read_text())["nav"], "##")))


def listed(nav: list[Any], level: str) -> Iterator[str]:
    """Lines of Markdown for a part of mkdocs.yml's nav: pages first, then each section under a heading."""
    entries = [next(iter(entry.items())) if isinstance(entry, dict) else ("", entry) for entry in nav]
    pages_here = [ROOT / "docs" / content for _, content in entries if isinstance(content, str)]
    yield from (item(page) for page in pages_here if page.is_file())  # others are made of files elsewhere
    for title, content in entries:
        if isinstance(content, list):
            yield f"\n{level} {title}\n"
            yield from listed(content, f"{level}#")


def item(page: Path) -> str:
    """A page's title, and the first sentence below it."""
    title, paragraph = page.read_text().split("\n\n")[:2]
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    sentence = re.split(r"(?<=[\w)`])\. ", plain)[0].rstrip(".")
    return f"- [{title.strip('# ')}]({page.relative_to(ROOT / 'docs')}): {sentence}."


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
