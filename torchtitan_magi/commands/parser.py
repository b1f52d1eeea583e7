"""What commands have in common: a parser, numbers of tokens, and files that they write at their end."""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from torchtitan_magi.machine import cause, lack
from torchtitan_magi.wording import quoted, shown


class CommandParser(argparse.ArgumentParser):
    """The parser of a command, whose errors are one line.

    Args:
        name: NAME of ``torchtitan-magi NAME``, which is told by the program's name, and of ``python -m
            torchtitan_magi.NAME``.
        usage: its line, in which %(prog)s is the command. doc: the module's docstring.
    """

    def __init__(self, name: str, usage: str, doc: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        program = sys.argv[0] if sys.argv[0].startswith("torchtitan-magi ") else f"python -m torchtitan_magi.{name}"
        super().__init__(program, usage, doc, formatter_class=form)

    def error(self, message: str) -> NoReturn:
        """Ends the process with code 2 and the message, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def count_of_tokens(text: str, option: str) -> int:
    """'512k' -> 524288; k is 1024 and M 1024 k. Raises ValueError for anything else, which names the option."""
    unit = {"k": 1 << 10, "K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isdecimal() and len(digits) < 12):
        raise ValueError(f"{option} is {quoted(text)}; write tokens as 300000, 512k or 1M")
    return int(digits) * unit


def print_text(text: str) -> None:
    """Prints, whatever the terminal's encoding is, until the reader of a pipe has seen enough."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # of head, say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def check_output(path: Path) -> None:
    """Raises ValueError for a file that cannot be written: before the work is done."""
    target = path if path.exists() else path.parent
    if not path.parent.is_dir() or path.is_dir() or not os.access(target, os.W_OK):
        raise ValueError(f"cannot write {shown(path)}; give a file in a folder that exists")


def write_output(path: Path, content: bytes) -> None:
    """Writes a file. Raises ValueError, one line with the remedy, where that fails."""
    try:
        path.write_bytes(content)
    except OSError as error:
        what = f"cannot write {shown(path)}"
        raise ValueError(lack(error, what, disk=True) or f"{what}: {cause(error)}; give another file") from None
