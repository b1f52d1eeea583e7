"""Data sets that the `datasets` library loads: by their name on the hub, or from a folder that it saved.

They stay in files, by whose content tokens are named; HF_DATASETS_IN_MEMORY_MAX_SIZE may want them in memory.
"""

import os
import threading
from typing import TYPE_CHECKING

from torchtitan_magi.data.records.record_file import sha256
from torchtitan_magi.wording import one_line, quoted, quoted_path

if TYPE_CHECKING:
    from datasets import Dataset

_one_at_a_time = threading.Lock()  # between processes `datasets` has locks of its own: one downloads, the others wait
DEFAULT_SPLIT = "train"


def load_hub(name: str, subset: str | None, split: str) -> "Dataset":
    """A split of a data set on the hub, or of a folder of the same layout.

    Raises ValueError: one line with the remedy.
    """
    import datasets
    import pyarrow

    try:
        with _one_at_a_time:
            return datasets.load_dataset(name, subset, split=split, cache_dir=_cache_of(name), keep_in_memory=False)
    except ConnectionError as error:
        remedy = "load it once where there is a network, with the same HF_HOME, and unset HF_HUB_OFFLINE there"
        reason = _line_of(error)
    except (datasets.exceptions.DatasetGenerationError, UnicodeError, pyarrow.ArrowException) as error:
        remedy, reason = "correct its files", _line_of(_cause_of(error))
    except Exception as error:  # of many libraries
        # Also broken JSON: of it `datasets` 4 keeps neither the file nor a type of its own.
        remedy = "check its name, subset and split, as in hf://org/name?subset=x&split=train, and its files"
        reason = _line_of(error)
    of = f", subset {quoted(subset)}" if subset else ""
    raise ValueError(f"cannot load {quoted(name)}{of}, split {quoted(split)}: {reason}; {remedy}")


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` of `datasets` wrote a folder."""
    return any(os.path.exists(os.path.join(folder, name)) for name in ("state.json", "dataset_dict.json"))


def load_saved(folder: str, split: str | None) -> tuple[str, "Dataset"]:
    """A folder saved by `datasets`, or a split of it, after its name. Raises ValueError: one line with the remedy."""
    import datasets

    try:
        loaded = datasets.load_from_disk(folder, keep_in_memory=False)
    except Exception as error:  # whatever a damaged folder leads to
        raise ValueError(
            f"cannot read {quoted_path(folder)}, saved by datasets: {_line_of(error)}; save it again"
        ) from None
    if isinstance(loaded, datasets.Dataset):
        if split:
            raise ValueError(f"{quoted_path(folder)} has no splits, but split is {quoted(split)}; leave it out")
        return folder, loaded
    split = split or DEFAULT_SPLIT
    if split not in loaded:
        raise ValueError(
            f"{quoted_path(folder)} has the splits {quoted([*loaded])}, not {quoted(split)}; name one, as in "
            f"?split={next(iter(loaded))}"
        )
    return f"{folder}@{split}", loaded[split]


def _cache_of(name: str) -> str | None:
    """Where `datasets` keeps what it makes of a folder: by itself it does not tell apart two folders of one name, or
    one folder before and after a change. A name on the hub is known by its commit."""
    import datasets

    if not os.path.isdir(name):
        return None
    found = [os.path.join(root, file) for root, _, files in os.walk(name) for file in files]
    state = [(os.path.realpath(path), os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in sorted(found)]
    return os.path.join(datasets.config.HF_DATASETS_CACHE, sha256(repr(state).encode())[:32])


def _cause_of(error: BaseException) -> BaseException:
    """What went wrong, of an error of `datasets` that says only that something did."""
    import datasets

    while type(error) is datasets.exceptions.DatasetGenerationError and error.__cause__:
        error = error.__cause__
    return error


def _line_of(error: BaseException) -> str:
    return one_line(str(error).split("Example of usage")[0]) or type(error).__name__
