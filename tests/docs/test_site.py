"""The site of these pages is built without a warning: every page is in its menu, links and anchors lead somewhere."""

import re
import subprocess
import sys

import pytest
from support.runs import ROOT

import torchtitan_magi
import torchtitan_magi.data

pytest.importorskip("mkdocstrings", reason="the extra docs of pyproject.toml is not installed")
import site_hooks  # isort: skip

CONFIG = ROOT / "docs" / "_build" / "mkdocs.yml"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", CONFIG, "-d", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page):
    """What a reader sees of it, without the menu."""
    article = re.search(r"<article.*?</article>", page.read_text(), re.DOTALL)[0]
    return re.sub(r"<[^>]*>", "", article)


def test_the_readme_is_the_first_page(site):
    assert "It is varlen\ncontext parallelism" in text_of(site / "index.html")
    assert 'src="pictures/idea.png"' in (site / "index.html").read_text()


def test_files_outside_of_the_docs_come_along(site):
    for name in ("benchmarks/results/kernel_h200.json", "benchmarks/results/kernel_h200.png", "examples/own_mask.py"):
        assert (site / "files" / name).read_bytes() == (ROOT / name).read_bytes()
    assert not (site / "_build" / "mkdocs.yml").exists()


@pytest.mark.parametrize("module", [torchtitan_magi, torchtitan_magi.data], ids=lambda module: module.__name__)
def test_the_api_has_every_public_name_with_its_docstring(site, module):
    page = (site / "reference" / "python-api.html").read_text()
    assert [name for name in module.__all__ if f'id="{module.__name__}.{name}"' not in page] == []
    assert "reversed or negative range" in text_of(site / "reference" / "python-api.html")  # AttnSlices raises


def test_marks_for_tests_are_not_shown(site):
    assert not re.search(r"<!-- (?:ran|not run|generated|site)", (site / "quickstart.html").read_text())


def test_anchors_are_those_of_github():
    assert site_hooks.anchor("`python -m a.b`: X & Y", "-") == "python--m-ab-x--y"
