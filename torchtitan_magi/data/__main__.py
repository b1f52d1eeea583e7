"""The command line: what training would learn of a data set.

python -m torchtitan_magi.data SOURCE --tokenizer DIR [--dataset dpo] [--seq-len N] [--html FILE]
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torchtitan_magi.data.inspection.page import html_page
from torchtitan_magi.data.inspection.summary import inspect_data
from torchtitan_magi.data.inspection.terminal import Painter, report


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a report, and writes the page if one is asked for."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
        inspection = inspect_data(
            options.source, options.tokenizer, options.dataset == "dpo", options.seq_len, options.records, options.all
        )
        if options.html:
            _write(options.html, html_page(inspection))
    except ValueError as error:
        parser.error(" ".join(str(error).split()))
    except KeyboardInterrupt:
        parser.exit(130)
    _print(report(inspection, Painter(_has_color(), options.boundaries)))


def _check(options: argparse.Namespace) -> None:
    for name, least in (("seq_len", 1), ("records", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give at least {least}")
    if options.html and not _is_writable(options.html):  # before the work
        raise ValueError(f"cannot write {options.html}; give a file in a folder that exists")


def _is_writable(path: Path) -> bool:
    target = path if path.exists() else path.parent
    return path.parent.is_dir() and not path.is_dir() and os.access(target, os.W_OK)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path} ({error.strerror}); give a file in a folder that exists") from None


def _has_color() -> bool:
    """Whether the output is a terminal and colours are not unwanted: no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _print(text: str) -> None:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m torchtitan_magi.data",
        description="Shows what training would learn of a data set: records with what is learned in colour, lengths,"
        " and what looks wrong.",
    )
    add = parser.add_argument
    add("source", help="as dataset_path: a file, a folder, a pattern, or several with weights")
    add("--tokenizer", required=True, metavar="DIR", help="Hugging Face tokenizer.json and chat template")
    add("--dataset", choices=("sft", "dpo"), default="sft", help="dpo: preference pairs; default: sft")
    add("--seq-len", type=int, metavar="N", help="tokens per pack, to see truncation and fill")
    add("--records", type=int, default=3, metavar="N", help="records to show; default: 3")
    add("--all", action="store_true", help="read all records instead of a random sample of 2,000")
    add("--boundaries", action="store_true", help="mark where each token begins (the page always can)")
    add("--html", type=Path, metavar="FILE", help="write a page that needs nothing else")
    return parser


if __name__ == "__main__":
    main()
