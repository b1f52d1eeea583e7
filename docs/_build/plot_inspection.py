#!/usr/bin/env python3
"""Draws what `python -m torchtitan_magi.data` prints in a terminal, as an SVG.

python docs/_build/plot_inspection.py OUT.svg SOURCE --tokenizer DIR ...       (the command's own arguments)
"""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text


def printed_by(arguments: list[str]) -> str:
    """What the command prints when its output is a terminal."""
    controller, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "torchtitan_magi.data", *arguments]
    process = subprocess.Popen(command, stdout=terminal, stderr=subprocess.DEVNULL, env=environment)
    os.close(terminal)
    printed = b""
    while True:
        try:
            printed += os.read(controller, 1 << 16)
        except OSError:  # the other end is closed
            break
    if process.wait():
        raise SystemExit(f"the command ended with exit code {process.returncode}")
    return printed.decode().replace("\r\n", "\n")


def draw(printed: str) -> str:
    """The SVG of a terminal with these lines, in the reader's own font: nothing is fetched."""
    text = Text.from_ansi(printed)
    width = min(130, max(map(cell_len, text.plain.split("\n"))))
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    console.print(text)
    drawn = console.export_svg(title="", theme=MONOKAI, unique_id="data")
    return re.sub(r"@font-face \{.*?\n *\}\n", "", drawn, flags=re.DOTALL)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    Path(sys.argv[1]).write_text(draw(printed_by(sys.argv[2:])))
