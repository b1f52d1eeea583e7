#!/usr/bin/env python3
"""Draws what `python -m torchtitan_magi.data` prints in a terminal, as an SVG.

python docs/_build/plot_inspection.py OUT.svg SOURCE --tokenizer DIR ...       (the command's own arguments)
"""

import os
import pty
import re
import subprocess
import sys
import unicodedata
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 7.7, 17, 14  # pixels of a character and around all
NO_BREAK = "\u00a0"  # a space that is not collapsed
PAPER, INK = "#14191e", "#dde4ea"
STYLES = {  # SGR parameters -> (ink, background, attributes), on a dark terminal
    "1": (INK, "", 'font-weight="bold"'),
    "2": ("#8895a1", "", ""),
    "34": ("#6f9fd2", "", ""),
    "1;31": ("#ff8a80", "", 'font-weight="bold"'),
    "1;33": ("#f0c060", "", 'font-weight="bold"'),
    "1;35": ("#e0a3ee", "", 'font-weight="bold"'),
    "30;42": ("#06210f", "#67c280", ""),
    "1;4;30;42": ("#06210f", "#67c280", 'font-weight="bold" text-decoration="underline"'),
}


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


def columns_of(text: str) -> int:
    """Cells of a terminal."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def draw(printed: str) -> str:
    """The SVG of a terminal with these lines."""
    shapes, widest, lines = [], 0, printed.rstrip("\n").split("\n")
    for row, line in enumerate(lines):
        column, style = 0, ""
        for number, piece in enumerate(re.split(r"\x1b\[([\d;]*)m", line)):
            if number % 2:
                style = "" if piece == "0" else piece
                continue
            ink, background, attributes = STYLES.get(style, (INK, "", ""))
            left, top, width = MARGIN + column * WIDTH, MARGIN + row * HEIGHT, columns_of(piece) * WIDTH
            if background:
                size = f'width="{width:.1f}" height="{HEIGHT}"'
                shapes.append(f'<rect x="{left:.1f}" y="{top}" {size} fill="{background}"/>')
            if piece.strip():
                where = f'x="{left:.1f}" y="{top + 13}" textLength="{width:.1f}"'
                shapes.append(f'<text {where} fill="{ink}" {attributes}>{escape(piece).replace(" ", NO_BREAK)}</text>')
            column += columns_of(piece)
        widest = max(widest, column)
    width, height = 2 * MARGIN + widest * WIDTH, 2 * MARGIN + len(lines) * HEIGHT
    font = 'font-family="DejaVu Sans Mono, Menlo, monospace" font-size="12.8"'
    paper = f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" {font}>'
    return "\n".join([head, paper, *shapes, "</svg>\n"])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    Path(sys.argv[1]).write_text(draw(printed_by(sys.argv[2:])))
