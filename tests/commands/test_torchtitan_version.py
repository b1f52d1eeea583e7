"""Another torchtitan than the adapter's, or none, is one line with the remedy."""

import os

import pytest
from support.processes import python
from support.runs import ROOT

METADATA = "Metadata-Version: 2.1\nName: torchtitan\nVersion: 0.4.0\n"
HIDDEN = """
from importlib import metadata

def version(name, stock=metadata.version):
    if name == "torchtitan":
        raise metadata.PackageNotFoundError(name)
    return stock(name)

metadata.version = version
"""
REMEDY = "torchtitan_magi needs 0.3 or 0.2.2: pip install torchtitan==0.3.0"
# what is installed, by a file that Python finds before anything else -> what is said
CASES = {
    "torchtitan-0.4.0.dist-info/METADATA": (METADATA, f"torchtitan 0.4.0 is installed, {REMEDY}"),
    "sitecustomize.py": (HIDDEN, f"torchtitan is not installed, {REMEDY}"),
}


def said(folder, file, *arguments):
    """What Python prints with these arguments before it fails, with the case's file in the folder."""
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(CASES[file][0])
    result = python(*arguments, cwd=folder, PYTHONPATH=f"{folder}{os.pathsep}{ROOT}")
    assert result.returncode == 1
    return result.stdout + result.stderr


@pytest.mark.parametrize("file", CASES)
def test_the_entry_point_and_the_import_name_the_remedy(file, tmp_path):
    message = CASES[file][1]
    assert said(tmp_path, file, "-m", "torchtitan_magi.train") == f"{message}\n"
    assert said(tmp_path, file, "-c", "import torchtitan_magi.titan").endswith(f"\nImportError: {message}\n")


def test_torchrun_names_it_last(tmp_path):
    file, (_, message) = next(iter(CASES.items()))
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    *_, last, line = said(tmp_path, file, *torchrun, "-m", "torchtitan_magi.train").splitlines()
    assert last.endswith(message)
    assert set(line) == {"="}
