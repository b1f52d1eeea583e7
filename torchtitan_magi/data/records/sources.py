"""Names of sources: their text, with options and weights, and the files that they stand for."""

import glob
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torchtitan_magi.data.records.hub import DEFAULT_SPLIT, is_saved, load_hub, load_saved
from torchtitan_magi.data.records.jsonl import JsonlFile
from torchtitan_magi.data.records.record_file import KEYS, Parse, RecordFile
from torchtitan_magi.data.records.tables import DatasetFile, Footers, ParquetFile
from torchtitan_magi.wording import quoted, quoted_path

HUB = "hf://"
PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", PARQUET)  # of the files that a folder is searched for
# written by training beside the data; .unfinished.npz by earlier versions
OTHER_FILES = (".reference.npz", ".unfinished", ".unfinished.npz")

_OPTIONS = ("split", "subset", *KEYS)
_OPTION = r"\w+=[^=&?]*"
_WITH_OPTIONS = re.compile(rf"(?P<path>.*?)\?(?P<options>{_OPTION}(?:&{_OPTION})*)(?:=(?P<weight>[^=]*))?")


@dataclass(frozen=True)
class SourceName:
    """One source of a data set.

    Attributes:
        path: file, folder, pattern, or `hf://` and a name on the hub.
        weight: how many times an epoch passes over it.
        split, subset: of a data set with several.
        columns: key of a record -> column that holds its value.
    """

    path: str
    weight: float = 1.0
    split: str | None = None
    subset: str | None = None
    columns: dict[str, str] = field(default_factory=dict)

    def openers(self, parse: Parse, cache: Path | None) -> list[tuple[str, Callable[[], RecordFile]]]:
        """What opens each file of the source, after what identifies it. Raises ValueError if there is none."""
        options = {"parse": parse, "columns": self.columns, "cache": cache}
        if self.path.startswith(HUB) or is_saved(self.path):
            path = self.path if self.path.startswith(HUB) else os.path.realpath(self.path)
            identity = f"{path}@{self.split or DEFAULT_SPLIT}" + (f" of {self.subset}" if self.subset else "")
            return [(identity, partial(_open_dataset, self.path, self.subset, self.split, **options))]
        if self.split or self.subset:
            raise ValueError(
                f"source {quoted_path(self.path)} is neither a name {HUB}org/name nor a folder saved by datasets; "
                "leave out its split and subset"
            )
        files = _files_of(self.path)
        footers = Footers([name for name in files if name.endswith(PARQUET)])
        return [(os.path.realpath(name), partial(_open_file, name, footers, **options)) for name in files]


def parse_sources(text: str) -> list[SourceName]:
    """The sources of a data set, see `Corpus`. Raises ValueError: one line with the remedy."""
    if "\0" in text:
        raise ValueError(f"the data set is {quoted(text)}, with a NUL character; remove it from the path")
    if os.path.exists(text):
        return [SourceName(text)]
    sources = [_source(entry) for entry in map(str.strip, text.split(",")) if entry]
    if not sources:
        raise ValueError(f"{quoted(text)} names no source; give a JSONL file")
    return sources


def _source(entry: str) -> SourceName:
    if os.path.exists(entry):
        return SourceName(entry)
    found = _WITH_OPTIONS.fullmatch(entry)
    if found:
        options = _options(entry, found["options"])
        return SourceName(found["path"], _weight(entry, found["weight"]), **options)
    path, equals, weight = entry.rpartition("=")
    return SourceName(path, _weight(entry, weight)) if equals and "/" not in weight else SourceName(entry)


def _options(entry: str, text: str) -> dict[str, Any]:
    """The text after the question mark -> arguments of a SourceName."""
    given = dict[str, str]()
    for name, value in (option.split("=") for option in text.split("&")):
        if name not in _OPTIONS:
            raise ValueError(
                f"source {quoted_path(entry)}: {quoted(name)} is no option; use one of {', '.join(_OPTIONS)}"
            )
        if not value or name in given:
            problem = "comes twice" if value else "is empty"
            raise ValueError(f"source {quoted_path(entry)}: {name} {problem}; give it one value, or leave it out")
        given[name] = value
    columns = {key: given.pop(key) for key in KEYS if key in given}
    return {**given, "columns": columns}


def _weight(entry: str, text: str | None) -> float:
    if text is None:
        return 1.0
    named = f"source {quoted_path(entry)}: weight {quoted(text)}"
    try:
        weight = float(text)
    except ValueError:
        raise ValueError(f"{named} is not a number; write path=0.5") from None
    if not 0 < weight < 1e6:
        raise ValueError(f"{named} is out of range; give a number above 0, or leave it out")
    return weight


def _open_dataset(path: str, subset: str | None, split: str | None, **options: Any) -> RecordFile:
    if path.startswith(HUB):
        split = split or DEFAULT_SPLIT
        dataset = load_hub(path.removeprefix(HUB), subset, split)
        return DatasetFile(f"{path}@{split}", dataset, split, **options)
    name, dataset = load_saved(path, split)
    return DatasetFile(name, dataset, **options)


def _open_file(name: str, footers: Footers, **options: Any) -> RecordFile:
    return ParquetFile(name, footers, **options) if name.endswith(PARQUET) else JsonlFile(name, **options)


def _files_of(path: str) -> list[str]:
    """The files of a source; a path that is neither folder nor pattern is returned as it is."""
    if os.path.isdir(path):
        files = [name for name in glob.glob(os.path.join(glob.escape(path), "*")) if name.endswith(SUFFIXES)]
        if not files:
            raise ValueError(
                f"folder {quoted_path(path)} holds no *{', *'.join(SUFFIXES)} file; give one that does, or a pattern "
                f"such as {quoted_path(f'{path}/**')}"
            )
        return sorted(files)
    if os.path.lexists(path) or not glob.has_magic(path):
        return [path]
    found = [name for name in glob.glob(path, recursive=True) if not name.endswith(OTHER_FILES)]
    ending = os.path.splitext(path)[1]
    wanted = (*SUFFIXES, ending) if ending else SUFFIXES  # a folder of such a name is an error when it is opened
    files = [name for name in found if name.endswith(wanted) or not (os.path.isdir(name) or path.endswith("**"))]
    files = sorted({*files, *_broken_links([path, *map(str, Path(path).parents)])})
    if not files:
        raise ValueError(f"no file matches {quoted_path(path)}; check the pattern")
    return files


def _broken_links(patterns: list[str]) -> list[str]:
    """Links that lead nowhere: each may be a file that is wanted, or a folder that holds some."""
    found = [name for pattern in patterns if glob.has_magic(pattern) for name in glob.glob(pattern, recursive=True)]
    return [name for name in found if not os.path.exists(name) and not name.endswith(OTHER_FILES)]
