"""Whether this interpreter has the modules that are named, in versions that pyproject.toml allows.

    python scripts/check_python.py torch torchtitan ...

torchtitan must be of the version that $TITAN names: 0.3, if it is not set.

Exit code 0: it has. 1: one does not import. 2: one has another version; the line printed says which. 3: the same, and
it comes by PYTHONPATH, so that no other interpreter helps.
"""

import importlib
import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement


def main() -> None:
    needs, project = sys.argv[1:], Path(__file__).resolve().parent.parent / "pyproject.toml"
    for line in tomllib.loads(project.read_text())["project"]["dependencies"]:
        wanted = Requirement(line)
        if wanted.name == "torchtitan":
            wanted = Requirement(f"torchtitan=={os.environ.get('TITAN', '0.3').replace('0.3', '0.3.*')}")
        found = next(iter(importlib.metadata.distributions(name=wanted.name)), None)
        if wanted.name not in needs or found is None or wanted.specifier.contains(found.version, prereleases=True):
            continue
        folder = Path(str(found.locate_file("."))).resolve()
        print(f"{wanted.name} {found.version} in {folder}, but {wanted} is needed")
        on_path = {Path(entry).resolve() for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
        sys.exit(3 if folder in on_path else 2)
    for name in needs:
        importlib.import_module(name)


if __name__ == "__main__":
    main()
