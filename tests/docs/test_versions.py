"""The versions of torch that the project allows are those of which its pages say that they ran."""

import re
import tomllib

from support.runs import ROOT

from suite_by_torch import recorded  # isort: skip


def minor(version):
    """2.15.0+cu132 -> (2, 15)."""
    return tuple(map(int, version.split(".")[:2]))


def test_torch_is_allowed_as_far_as_the_suite_ran():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (allowed,) = (line for line in dependencies if re.match(r"torch\b", line))
    lowest, beyond = map(minor, re.fullmatch(r"torch>=([\d.]+),<([\d.]+)", allowed).groups())
    readme = (ROOT / "README.md").read_text()
    said = re.search(r"\[([\d.]+) to ([\d.]+)\]\(docs/reference/compatibility\.md#by-torch\)", readme)
    assert tuple(map(minor, said.groups())) == (lowest, (beyond[0], beyond[1] - 1))
    assert max(minor(run["torch"]) for _, run in recorded() if not run["failed"]) == minor(said[2])
