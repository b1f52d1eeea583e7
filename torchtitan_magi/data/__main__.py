"""Shows what training would learn of your data, before you train.

Prints some records with what is learned in colour, the lengths of each source,
and what looks wrong. No GPU is needed.

example:
  torchtitan-magi data data/conversations.jsonl \\
      --tokenizer assets/hf/Llama-3.1-8B-Instruct --seq-len 8192
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_magi.commands.parser import CommandParser, check_output, count_of_tokens, print_text, write_output
from torchtitan_magi.data.inspection.page import html_page
from torchtitan_magi.data.inspection.summary import inspect_data
from torchtitan_magi.data.inspection.terminal import Painter, report
from torchtitan_magi.machine import raise_open_files
from torchtitan_magi.wording import one_line

KINDS = {"sft": "documents", "dpo": "pairs", "rollouts": "rollouts"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a report, and writes the page if one is asked for."""
    parser = _parser()
    options = parser.parse_args(arguments)
    raise_open_files()
    try:
        _check(options)
        inspection = inspect_data(
            options.source, options.tokenizer, KINDS[options.dataset], options.seq_len, options.records, options.all,
            options.share_prefixes,
        )  # fmt: skip
        if options.html:
            write_output(options.html, html_page(inspection).encode(errors="backslashreplace"))
    except ValueError as error:
        parser.error(one_line(error, 2000))
    except KeyboardInterrupt:
        parser.exit(130)
    print_text(report(inspection, Painter(_has_color(), options.boundaries)))


def _check(options: argparse.Namespace) -> None:
    if options.seq_len is not None:
        options.seq_len = count_of_tokens(options.seq_len, "--seq-len")
    for name, least in (("seq_len", 1), ("records", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; give at least {least}")
    if options.share_prefixes and (options.seq_len is None or options.dataset != "sft"):
        raise ValueError("--share-prefixes shows how documents are packed; give --seq-len, and --dataset sft")
    if options.html:
        check_output(options.html)


def _has_color() -> bool:
    """Whether the output is a terminal and colours are not unwanted: no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser("data", "%(prog)s SOURCE --tokenizer DIR [options]", __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="records, as in training.dataset_path: a file, a folder, a pattern, hf://org/name, or several with "
        'weights ("a.jsonl, b/=0.5")',
    )
    add("--tokenizer", required=True, metavar="DIR", help="folder of the model's tokenizer.json and chat template")
    add(
        "--dataset",
        choices=KINDS,
        default="sft",
        help="sft: conversations or texts; dpo: preference pairs; rollouts: sampled answers (default: %(default)s)",
    )
    add(
        "--seq-len",
        metavar="TOKENS",
        help="tokens per pack, as 8192 or 8k; shows truncation and fill (default: not shown)",
    )
    add(
        "--share-prefixes",
        action="store_true",
        help="show what magi.share_prefixes saves, and a tree of records that begin alike (default: not shown)",
    )
    add("--records", type=int, default=3, metavar="N", help="number of records to show (default: %(default)s)")
    add("--all", action="store_true", help="read all records (default: a random sample of 2,000)")
    add("--boundaries", action="store_true", help="mark where each token begins (default: not marked)")
    add("--html", type=Path, metavar="FILE", help="also write the report as a web page in one file")
    return parser


if __name__ == "__main__":
    main()
