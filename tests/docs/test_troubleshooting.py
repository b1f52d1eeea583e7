"""docs/how-to/troubleshooting.md quotes messages as the source has them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "troubleshooting.md"
GROUPS = ["Set-up", "Data", "Models", "Memory", "Several ranks", "Checkpoints", "Kernels"]
OTHERS = ("PyTorch: ",)  # whose messages are described, not quoted
ANY = "…"


def texts_of(source: str) -> set[str]:
    """The strings of a Python file, with … for each expression in them."""
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    pieces = [[getattr(value, "value", ANY) if isinstance(value, ast.Constant) else ANY for value in node.values]
              for node in formatted]  # fmt: skip
    plain = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return {unified("".join(map(str, each))) for each in [*pieces, *plain]}


def unified(message: str) -> str:
    """Several expressions without text between them are one …"""
    return re.sub(f"{ANY}+", ANY, message)


def source_texts() -> set[str]:
    """All strings of the package and of what train.sh runs."""
    files = [*(ROOT / "torchtitan_magi").rglob("*.py")]
    shell = (ROOT / "scripts" / "setup.sh").read_text()
    said = re.findall(r'echo "(.*?)"', shell)
    return set().union(*(texts_of(path.read_text()) for path in files)) | {re.sub(r"\$\w+", ANY, line) for line in said}


def occurs(message: str, texts: set[str]) -> bool:
    return any(unified(message).strip() in text for text in texts)


def rows(page: str) -> list[list[str]]:
    """The cells of the tables' rows, without their heads."""
    lines = [
        line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| message"))
    ]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def messages(page: str) -> list[str]:
    """What is quoted in the first column, of rows that are not of others."""
    return [re.findall(r"`([^`]+)`", row[0])[0] for row in rows(page) if not row[0].startswith(OTHERS)]


def test_each_message_is_one_of_the_source():
    texts = source_texts()
    assert [message for message in messages(PAGE.read_text()) if not occurs(message, texts)] == []


def test_each_message_says_enough_to_be_found():
    assert all(len(message.replace(ANY, "")) >= 20 for message in messages(PAGE.read_text()))


def test_the_page_has_its_groups_and_each_row_a_cause_and_a_remedy():
    page = PAGE.read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == GROUPS
    assert 25 <= len(rows(page)) <= 40
    assert all(len(row) == 3 and all(row) for row in rows(page))


@pytest.mark.parametrize("message", ["seq_len is …; use a bigger one", "LOCAL_RANK is 0", "… GiB are missing"])
def test_a_message_that_nobody_says_is_found(message):
    assert not occurs(message, source_texts())


def test_expressions_of_a_message_are_dots():
    assert texts_of('raise ValueError(f"{a}{b} is {c!r}; " "use 2")') >= {"… is …; use 2"}
