"""docs/internals/private-names.md has every private name of torch that the package takes."""

import ast
import re

from support.runs import ROOT

PAGE = ROOT / "docs" / "internals" / "private-names.md"
OWNERS = ("torch", "dist", "forward_ad", "DTensor", "profiler", "schedule", "stage", "scheduler")


def private_parts(dotted):
    return [part for part in dotted.split(".") if part.startswith("_") and not part.startswith("__")]


def private_names(source):
    """What a module imports from torch's private modules, or takes as a private attribute of an owner."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (each.name for each in node.names if private_parts(f"{node.module}.{each.name}"))
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node).removeprefix("self.")
            yield from private_parts(dotted)[-1:] if dotted.split(".")[0] in OWNERS else []


def test_private_names_of_a_module_are_found():
    source = "from torch._a import B, c\nfrom torch.d import _e, f\ndist._g.h, self.schedule._i(1), torch.j._k._l, x._m"
    assert sorted(set(private_names(source))) == ["B", "_e", "_g", "_i", "_k", "_l", "c"]


def test_the_page_names_all_of_them_and_where():
    page = PAGE.read_text()
    for path in (ROOT / "torchtitan_magi").rglob("*.py"):
        for name in private_names(path.read_text()):
            rows = [row for row in page.splitlines() if re.search(rf"\b{name}\b", row)]
            file = str(path.relative_to(ROOT / "torchtitan_magi"))
            assert any(file in row for row in rows), f"{file}: {name}"
