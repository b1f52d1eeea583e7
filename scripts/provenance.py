"""What stands beside figures: where, with what and by which command they were made."""

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch


def facts_of_run(commit: str | None) -> dict[str, str]:
    """Device, versions, commit and command. commit: of the tree, where git does not know it."""
    if commit is None:
        root = Path(__file__).resolve().parent.parent
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=root, check=False)
        commit = head.stdout.strip()
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "command": shlex.join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
    }
