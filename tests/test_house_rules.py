"""What holds the house together: which file may import which, what an import pulls in, what a wheel contains."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "torchtitan_magi"

# file -> what it may import of the package; dependencies run one way
MAY_IMPORT = {
    "slices": set(),
    "ranges": {"slices"},
    "traffic": {"slices", "ranges"},
    "placement_pool": {"slices", "ranges"},
    "placement_swaps": {"ranges", "placement_pool"},
    "placement_documents": {"ranges", "placement_pool", "placement_swaps"},
    "placement_pairs": {"slices", "ranges", "placement_pool"},
    "placement_nodes": {"slices", "traffic"},
    "placement": {"slices", "traffic", "placement_pool", "placement_documents", "placement_pairs", "placement_nodes"},
    "routes": {"ranges"},
    "stages": {"ranges", "slices", "worklists"},
    "plan": {"slices", "ranges", "traffic", "placement", "routes", "stages"},
    "dispatch": {"plan", "comm"},
    "memory": set(),
    "transport": {"plan", "memory"},
    "driver": set(),
    "peer": {"plan", "transport", "driver", "memory"},
    "comm": {"plan", "transport", "peer", "memory"},
    "merge": set(),
    "jit": set(),
    "segments": set(),
    "worklists": {"slices", "segments"},
    "rows": {"plan", "launch", "transport", "memory"},
    "launch": {"driver", "jit", "segments", "worklists", "memory"},
    "ffa": {"slices", "jit", "launch", "segments", "worklists", "rows", "transport", "memory"},
    "reference": {"slices", "merge", "comm", "transport"},
    "bind": {"slices", "plan", "comm", "ffa", "reference", "transport"},
    "attention": {"slices", "plan", "comm", "bind", "stages", "transport", "memory"},
    "agreement": {"plan"},
    "histogram": set(),
    "packs": {"data", "histogram"},
    "outcome": {"slices", "ranges", "traffic", "worklists", "stages", "plan"},
    "baselines": {"slices", "stages", "plan", "outcome"},  # for comparison only
    "sizing": {"slices", "stages", "plan", "packs", "outcome", "baselines"},
    "report_text": {"packs", "baselines", "sizing"},
    "report_picture": {"traffic", "stages", "plan", "sizing", "report_text"},
    "report": {"stages", "plan", "packs", "sizing", "report_text", "report_picture"},
    "logprobs": set(),
    "preference": set(),
    "token_weights": set(),
    "train": {"titan"},
    "__init__": {"attention", "dispatch", "plan", "slices", "stages"},
}


def imports_of(path):
    """Names of modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_modules(path):
    """Modules of the package that a file imports, as 'plan' or 'data'."""
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("torchtitan_magi.")}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_dependencies_run_one_way(path):
    modules = {file.stem for file in PACKAGE.glob("*.py")} | {"data", "titan", "kernels"}
    extra = (own_modules(path) & modules) - MAY_IMPORT[path.stem]
    assert not extra, f"{path.name} imports {extra}"


def test_only_titan_imports_torchtitan_and_data_stands_alone():
    for path in PACKAGE.rglob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert "torchtitan" not in roots or path.parent.name == "titan", path
        if path.parent.name == "data":
            assert {name for name in own_modules(path)} <= {"data"}, path


def test_the_reference_and_the_kernel_are_imported_only_by_the_choice_of_backend():
    tree = ast.parse((PACKAGE / "bind.py").read_text())
    at_top = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not at_top & {"torchtitan_magi.reference", "torchtitan_magi.ffa"}
    users = [path.stem for path in PACKAGE.rglob("*.py") if "reference" in own_modules(path)]
    assert users == ["bind"]


def test_importing_the_package_pulls_in_neither_torchtitan_nor_cuda():
    code = (
        "import sys, torch.distributed.tensor; before = set(sys.modules)  # torch itself looks for cuda.bindings\n"
        "import torchtitan_magi; new = set(sys.modules) - before\n"
        "print([m for m in new if m.split('.')[0] in ('torchtitan', 'cuda') or m.endswith(('.ffa', '.reference'))])"
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
    assert "torchtitan_magi/titan/spec.py" in names
    assert not [name for name in names if name.startswith(("tests", "scripts", "assets"))]


def test_every_public_name_has_a_docstring():
    import torchtitan_magi

    for name in torchtitan_magi.__all__:
        assert getattr(torchtitan_magi, name).__doc__, name
