"""Checks that checkpoints are whole: compares every byte with the digests that were written beside them.

Prints one line for each checkpoint; the exit code is 1 if one is not whole.
Nothing is unpickled before its bytes are known to be right.

example:
  python -m torchtitan_magi.verify outputs/checkpoint/step-*
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from torchtitan_magi.commands.parser import CommandParser
from torchtitan_magi.training.checkpoints.digests import check_digests, check_sizes
from torchtitan_magi.wording import shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line for each folder; returns 1 if one of them is not whole, else 0."""
    parser = CommandParser("verify", "%(prog)s FOLDER [FOLDER ...]", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder of one checkpoint: step-N")
    return max([_verify(folder) for folder in parser.parse_args(arguments).folders])


def _verify(folder: Path) -> int:
    try:
        num_bytes = check_digests(folder)  # first, as what does not match is not unpickled
        check_sizes(folder)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{shown(folder)} is whole: {num_bytes / 2**30:.2f} GiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
