"""Checks that checkpoints are whole: compares every byte with the digests that were written beside them.

Prints one line for each checkpoint; the exit code is 1 if one is not whole.
Nothing is unpickled before its bytes are known to be right.

With --generate the folders are exports, or adapters of LoRA: each model is
loaded by transformers, asked the question, and says whether it stops by itself.

examples:
  torchtitan-magi verify outputs/checkpoint/step-*
  torchtitan-magi verify outputs/checkpoint/step-1000 --generate
  torchtitan-magi verify outputs/checkpoint/step-1000 --generate "Why is the sky blue?"
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from torchtitan_magi.commands.generation import ADAPTER_CONFIG, MAX_NEW_TOKENS, QUESTION, answer_of
from torchtitan_magi.commands.parser import CommandParser
from torchtitan_magi.training.checkpoints.digests import check_digests, check_finished, check_sizes, is_export
from torchtitan_magi.training.checkpoints.export import CONFIG, UNFINISHED
from torchtitan_magi.training.checkpoints.hf_weights import INDEX, check_files
from torchtitan_magi.wording import shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what each folder is, or what its model answers; returns 1 where one is not whole or gives no answer."""
    parser = CommandParser("verify", "%(prog)s FOLDER [FOLDER ...] [--generate [TEXT]]", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folder of one checkpoint: step-N")
    asked = f'question to the model of an export, answered in at most {MAX_NEW_TOKENS} tokens (default: "{QUESTION}")'
    parser.add_argument("--generate", nargs="?", const=QUESTION, metavar="TEXT", help=asked)
    options = parser.parse_args(arguments)
    several = len(options.folders) > 1
    said = _whole if options.generate is None else partial(_answer, question=options.generate, is_named=several)
    return max([_told(said, folder) for folder in options.folders])


def _told(said: Callable[[Path], str], folder: Path) -> int:
    try:
        print(said(folder))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _answer(folder: Path, question: str, is_named: bool) -> str:
    """What the folder's model answers, after its name if others are asked, too."""
    return f"{shown(folder)}\n" * is_named + answer_of(folder, question)


def _whole(folder: Path) -> str:
    if not folder.is_dir():
        raise ValueError(f"{shown(folder)} is no folder; give that of a checkpoint, step-N, or of an export")
    if _is_cut_off(folder):
        raise ValueError(
            f"{shown(folder)} is an export that was cut off, or copied in part; copy it again, or start its run again, "
            "which exports once more"
        )
    if is_export(folder):
        _check_indexed(folder)
        return f"{shown(folder)} is an export, which has no digests; ask its model with --generate"
    if steps := sorted(folder.glob("step-*")) or sorted(folder.glob("*/step-*")):  # of a run's folder, too
        where, names = shown(steps[0].parent), ", ".join(path.name for path in steps)
        raise ValueError(f"{where} has the checkpoints {names}; give one of them, or {where}/step-*")
    check_finished(folder)
    num_bytes = check_digests(folder)  # first, as what does not match is not unpickled
    check_sizes(folder)
    return f"{shown(folder)} is whole: {num_bytes / 2**30:.2f} GiB"


def _is_cut_off(folder: Path) -> bool:
    """Whether what is written last of an export, of a model or of adapters, is not there."""
    if (folder / UNFINISHED).is_dir():
        return not (folder / INDEX).exists()
    return is_export(folder) and not any((folder / name).exists() for name in (CONFIG, ADAPTER_CONFIG))


def _check_indexed(folder: Path) -> None:
    """Raises ValueError, one line, where a file of weights is missing or broken, or none has what the index names."""
    index, headers = check_files(folder)
    if missing := sorted(index.keys() - headers.state_dict_metadata.keys()):
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ValueError(f"{shown(folder / INDEX)} names {shown(missing[0])}{more}, which no file has; copy them again")


if __name__ == "__main__":
    sys.exit(main())
