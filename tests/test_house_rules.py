"""What holds the house together: which file may import which, what an import pulls in, what a wheel contains."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchtitan_magi"

CORE = {"attention", "bound_plan", "dispatch"}
# wing, or file beside the wings -> what it may import of the package besides itself; dependencies run one way
MAY_IMPORT = {
    "tiles": set(),
    "masks": set(),
    "losses": set(),
    "data": set(),
    "cuda": {"tiles"},
    "planning": {"masks", "tiles"},
    "exchange": {"planning", "cuda"},
    "backends": {"masks", "tiles", "cuda", "planning", "exchange"},
    "core": {"masks", "cuda", "planning", "exchange", "backends"},
    "training": {"masks", "losses", "data", "planning", "exchange", "backends", "core", "report"},
    "titan": {"data", "planning", "exchange", "backends", "core", "training"},
    "train": {"titan"},
    "report": {"tiles", "masks", "data", "planning"},
    "__init__": {"core", "masks", "planning"},
}


def wing_of(name):
    """'planning' of torchtitan_magi.planning.plan, 'core' of torchtitan_magi.attention, '__init__' of the package."""
    first = name.split(".")[1] if "." in name else "__init__"
    return "core" if first in CORE else first


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
    """The wings of the package that a file imports."""
    names = [name for name in imports_of(path) if name.split(".")[0] == "torchtitan_magi"]
    modules = [name for name in names if name != "torchtitan_magi"]
    return {wing_of(name) for name in modules}


def wing_of_file(path):
    return wing_of(".".join(["torchtitan_magi", *path.relative_to(PACKAGE).with_suffix("").parts]))


@pytest.mark.parametrize("wing", MAY_IMPORT)
def test_dependencies_run_one_way(wing):
    paths = [path for path in PACKAGE.rglob("*.py") if wing_of_file(path) == wing]
    assert paths
    for path in paths:
        extra = own_imports(path) - MAY_IMPORT[wing] - {wing}
        assert not extra, f"{path.relative_to(PACKAGE)} imports {extra}"


def test_every_file_belongs_to_a_wing():
    assert {wing_of_file(path) for path in PACKAGE.rglob("*.py")} == MAY_IMPORT.keys()


def test_only_titan_imports_torchtitan():
    for path in PACKAGE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert "torchtitan" not in roots or wing_of_file(path) == "titan", path


def test_flex_and_the_kernel_are_imported_only_by_the_choice_of_backend():
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        at_top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert not at_top & {"torchtitan_magi.backends.flex", "torchtitan_magi.backends.ffa.block_attn"}, path
    users = [path.name for path in PACKAGE.rglob("*.py") if "torchtitan_magi.backends.flex" in set(imports_of(path))]
    assert users == ["bound_plan.py"]


def test_importing_the_package_pulls_in_neither_torchtitan_nor_cuda():
    code = (
        "import sys, torch.distributed.tensor; before = set(sys.modules)  # torch itself looks for cuda.bindings\n"
        "import torchtitan_magi; new = set(sys.modules) - before\n"
        "print([m for m in new if m.split('.')[0] in ('torchtitan', 'cuda') or m.endswith(('.block_attn', '.flex'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"


def test_a_wheel_ships_the_kernels(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for source in (ROOT / "kernels").glob("*.cu*"):
        assert f"torchtitan_magi/kernels/{source.name}" in names
    assert "torchtitan_magi/titan/v02/spec.py" in names
    assert not [name for name in names if name.startswith(("tests", "scripts", "assets"))]


def test_every_public_name_has_a_docstring():
    import torchtitan_magi

    for name in torchtitan_magi.__all__:
        assert getattr(torchtitan_magi, name).__doc__, name
