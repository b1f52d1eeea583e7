"""Links lead somewhere, generated parts are up to date, and a reader of the README reaches a run early."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_anchors_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert "://" in link or target.exists(), link
        assert "://" in link or not anchor or anchor in anchors(target), link


def test_the_readme_is_short_and_begins_with_a_run():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 200
    assert "train.sh" in lines[lines.index("```bash", 0, 39) + 1]


def test_generated_parts_are_up_to_date():
    check = [sys.executable, ROOT / "scripts" / "write_docs.py", "--check"]
    ended = subprocess.run(check, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
