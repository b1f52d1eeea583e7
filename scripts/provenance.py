"""Which commit a figure is of."""

import subprocess
from pathlib import Path


def commit_of(given: str | None) -> str:
    """`given`, or the commit of this tree; empty where git does not know."""
    root = Path(__file__).resolve().parent.parent
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=root, check=False)
    return given or head.stdout.strip()
