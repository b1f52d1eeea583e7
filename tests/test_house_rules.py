"""What holds the house together: which file may import which, what an import pulls in, what a wheel contains."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torchtitan_magi"

ADAPTERS = {"v02", "v03"}
OTHER_ADAPTER = "titan.v02" if version("torchtitan").startswith("0.3.") else "titan.v03"  # than that which is used here
# wing, room in a wing ("data.records") or file beside them -> what it may import of the package besides itself,
# `wording` and `machine`. The most specific row counts; one that is named stands for its rooms, too.
# Dependencies run one way.
MAY_IMPORT = {
    **dict.fromkeys(["wording", "machine", "commands", "tiles", "files", "products", "masks"], ""),
    "losses": "products",
    "models": "files planning",
    "data": "commands",
    "data.guard": "",
    "data.records": "files data.guard",
    "data.tokens": "files data.guard data.records",
    "data.packs": "files data.records data.tokens",
    "data.datasets": "data.records data.tokens data.packs",
    "data.inspection": "data.guard data.records data.tokens data.packs data.datasets",
    "cuda": "tiles files",
    "planning": "tiles files masks",
    "exchange": "masks cuda planning",
    "backends": "tiles masks cuda planning exchange",
    "attention": "tiles products masks cuda planning exchange backends",
    "linear": "products cuda masks planning exchange attention",
    "sizing": "commands tiles files masks planning exchange losses models data training.settings.options",
    "training.settings.options": "",
    "training.process": "files models exchange",
    "training.experts": "exchange training.process",
    "training.batches": "files data losses masks models planning exchange backends attention "
    "training.settings.options training.process",
    "training.objectives": "files losses models exchange training.settings.options training.process training.experts "
    "training.batches",
    "training.checkpoints": "files data models training.settings.options training.process",
    "training.settings": "files models planning training.process training.checkpoints",
    "training": "files models exchange sizing linear",
    "titan": "tiles masks data losses models cuda planning exchange backends attention linear sizing training",
    "calibrate": "commands tiles masks cuda planning exchange backends attention",
    "report": "sizing",
    "__main__": "",
    "launch": "",
    "train": "titan training",
    "verify": "commands training.checkpoints",
    "__init__": "masks planning attention linear train",
}


def row_of(name):
    """The most specific row of MAY_IMPORT for a module or a name in it: "data.records", "planning", "__init__"."""
    return next((row for row in prefixes(name.partition(".")[2] or "__init__") if row in MAY_IMPORT), name)


def prefixes(name):
    """The dotted name and what it lies in: a.b.c, a.b, a."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def imports_of(path):
    """Names of modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(path):
    """The rows of what a file imports of the package, each by its longest name."""
    names = {name for name in imports_of(path) if name.startswith("torchtitan_magi.")}
    return {row_of(name) for name in names - {shorter for name in names for shorter in [*prefixes(name)][1:]}}


def row_of_file(path):
    return row_of(".".join(["torchtitan_magi", *path.relative_to(PACKAGE).with_suffix("").parts]))


@pytest.mark.parametrize("row", MAY_IMPORT)
def test_dependencies_run_one_way(row):
    allowed = {row, "wording", "machine", *MAY_IMPORT[row].split()}
    for path in [path for path in PACKAGE.rglob("*.py") if row_of_file(path) == row]:
        extra = {other for other in own_imports(path) if not allowed & {*prefixes(other)}}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {extra}"


def test_every_file_belongs_to_a_row():
    assert {row_of_file(path) for path in PACKAGE.rglob("*.py")} == MAY_IMPORT.keys()


def test_the_most_specific_row_counts():
    rows = {
        "data.guard.apart": "data.guard",
        "data.Corpus": "data",
        "data.packs.stream": "data.packs",
        "__init__": "__init__",
    }
    assert {name: row_of(f"torchtitan_magi.{name}") for name in rows} == rows
    assert {"data.guard", "data.records"} < own_imports(PACKAGE / "data" / "tokens" / "token_cache.py") - {"data"}


def test_only_titan_imports_torchtitan():
    for path in PACKAGE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert "torchtitan" not in roots or path.is_relative_to(PACKAGE / "titan"), path


PATHS = {"path", "paths", "folder", "cache", "saved", "dump_folder", "hf_assets_path", "initial_load_path"}
SAYING = {"info", "warning", "error", "print", "Failed", "Waiting", "exit"}  # functions that show a text to the user
SHOWING = {"shown", "quoted_path", "quoted"}


def name_of(node):
    """The last name of `name` or `some.thing.name`."""
    return getattr(node, "attr", getattr(node, "id", ""))


def raw_paths(node, is_said=False):
    """What f-strings show to a user that is a path, or made of one by `/`, without a function of SHOWING."""
    if isinstance(node, ast.Call):
        if name_of(node.func) in SHOWING:
            return
        is_said |= name_of(node.func) in SAYING
    is_said |= isinstance(node, ast.Raise)
    if is_said and isinstance(node, ast.FormattedValue):
        value = node.value
        if name_of(value.left if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div) else value) in PATHS:
            yield ast.unparse(value)
    for child in ast.iter_child_nodes(node):
        yield from raw_paths(child, is_said)


def test_no_path_is_shown_as_it_is():
    """A name may hold what steers a terminal: `wording.shown` and `quoted_path` are the one place that lets it not."""
    found = {
        str(path.relative_to(PACKAGE)): [*raw_paths(ast.parse(path.read_text()))] for path in PACKAGE.rglob("*.py")
    }
    assert {path: raw for path, raw in found.items() if raw} == {}


def test_a_path_that_is_shown_as_it_is_is_found():
    source = 'raise ValueError(f"{self.path} {shown(path)} {quoted_path(folder / name)} {folder / name} {number}")'
    assert list(raw_paths(ast.parse(source))) == ["self.path", "folder / name"]


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_adapters_do_not_import_one_another(adapter):
    (other,) = ADAPTERS - {adapter}
    for path in (PACKAGE / "titan" / adapter).rglob("*.py"):
        assert not [name for name in imports_of(path) if f"titan.{other}" in name], path


def test_flex_and_the_kernel_are_imported_only_by_the_choice_of_backend():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        at_top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert not at_top & {"torchtitan_magi.backends.flex", "torchtitan_magi.backends.ffa.block_attn"}, path
    users = [path for path in PACKAGE.rglob("*.py") if "torchtitan_magi.backends.flex" in set(imports_of(path))]
    assert users == [PACKAGE / "backends" / "choose.py"]


def test_importing_the_package_pulls_in_neither_torchtitan_nor_cuda():
    code = (
        "import sys, torchtitan_magi; assert not {'torch', 'numpy'} & set(sys.modules)\n"
        "import torch.distributed.tensor; before = set(sys.modules)  # torch itself looks for cuda.bindings\n"
        "from torchtitan_magi import *; new = set(sys.modules) - before\n"
        "print([m for m in new if m.split('.')[0] in ('torchtitan', 'cuda') or m.endswith(('.block_attn', '.flex'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


IMPORT_ALL = """
import importlib, sys
folder, *names = sys.argv[1:]
sys.path.insert(0, folder)
for name in names:
    assert importlib.import_module(name).__file__.startswith(folder + "/"), name
from torchtitan_magi.cuda import jit
jit.expand_source("ffa_forward.cu")
"""

COPY_CONFIG = """
import sys
sys.path.insert(0, sys.argv[1])
sys.argv[1:] = ["configs", "copy", "debug"]
from torchtitan_magi.__main__ import main
main()
"""


def test_the_wheel_is_the_tracked_sources_and_all_of_it_imports(tmp_path):
    """Built from a copy of the tracked files, imported where the checkout is not on the path."""
    folders = ["torchtitan_magi", "kernels", "train_configs", "assets/demo"]
    listed = ["git", "ls-files", *folders, "pyproject.toml", "README.md", "LICENSE"]
    tracked = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    for name in tracked:
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, tmp_path / "source"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {name for name in tracked if "/" in name}
    moved = {"kernels/": "torchtitan_magi/kernels/", "train_configs/": "torchtitan_magi/train_configs/"}
    moved |= {"assets/demo/": "torchtitan_magi/demo/"}
    for old, new in moved.items():
        sources = {re.sub(f"^{old}", new, name) for name in sources}
    assert shipped == sources

    archive.extractall(tmp_path / "wheel")
    modules = [re.sub("(/__init__)?[.]py$", "", name).replace("/", ".") for name in shipped if name.endswith(".py")]
    modules = [name for name in modules if OTHER_ADAPTER not in name]
    command = [sys.executable, "-I", "-c", IMPORT_ALL, str(tmp_path / "wheel"), *sorted(modules)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert not result.returncode, result.stderr

    command = [sys.executable, "-I", "-c", COPY_CONFIG, str(tmp_path / "wheel")]
    subprocess.run(command, cwd=tmp_path, check=True)
    copied = tomllib.loads((tmp_path / "debug.toml").read_text())
    paths = copied["model"]["hf_assets_path"], copied["training"]["dataset_path"]
    assert all(Path(path).exists() and Path(path).is_relative_to(tmp_path / "wheel") for path in paths)


def test_every_public_name_has_a_docstring():
    import torchtitan_magi

    for name in torchtitan_magi.__all__:
        assert getattr(torchtitan_magi, name).__doc__, name


def test_no_docstring_of_the_package_is_of_something():
    """One that begins with "Of" leaves out what it is about."""
    assert [path.name for path in PACKAGE.rglob("*.py") if '"""Of ' in path.read_text()] == []


def lines_of_code(path):
    """Lines without blank ones, comments and docstrings."""
    text = path.read_text()
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    used = {number for number, line in lines if line and not line.startswith("#")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            used -= set(range(node.lineno, node.end_lineno + 1))
    return len(used)


@pytest.mark.parametrize("adapter", sorted(ADAPTERS))
def test_an_adapter_stays_small(adapter):
    """What is neutral stands once, in training/; a family of models is a short file."""
    folder = PACKAGE / "titan" / adapter
    assert sum(map(lines_of_code, folder.glob("*.py"))) <= 1190
    assert all(lines_of_code(path) <= 100 for path in folder.glob("families/*.py"))


def test_no_folder_of_the_package_holds_more_than_a_dozen_files():
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    assert {folder.name: number for folder in folders if (number := len([*folder.glob("*.py")])) > 12} == {}
