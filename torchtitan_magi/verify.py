"""Compares checkpoints with the digests beside them: ``python -m torchtitan_magi.verify outputs/checkpoint/step-*``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_magi.training.checkpoint_files import check_digests, check_sizes


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each folder; returns 1 if one of them is not whole, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_magi.verify",
        description="Reads every byte of checkpoints and compares it with the digests that were written beside them.",
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="of one checkpoint, step-*")
    return max([_verify(folder) for folder in parser.parse_args(arguments).folders])


def _verify(folder: Path) -> int:
    try:
        num_bytes = check_digests(folder)  # first, as what does not match is not unpickled
        check_sizes(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{folder} is whole: {num_bytes / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
