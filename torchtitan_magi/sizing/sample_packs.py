"""Packs of documents to size a run with: of a named distribution, of lengths in a file, or of a data set."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_magi.data import PackedPairDataset, PackedRolloutDataset, PackedSFTDataset, pack_best_fit
from torchtitan_magi.data.datasets.packed_dataset import IGNORE_INDEX, PackedDataset
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer
from torchtitan_magi.data.tokens.token_cache import default_folder
from torchtitan_magi.files import regular_file
from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.sizing.strategies.pack_masks import pack_of_trees, tokens_and_parents
from torchtitan_magi.wording import one_line, quoted, shown

# Document lengths of a real corpus, as MagiAttention's benchmark has them: upper edge of each bin in tokens ->
# percentage of documents up to it; evenly inside a bin.
HISTOGRAM = {
    10: 0.22, 50: 3.13, 100: 8.33, 200: 18.56, 500: 46.75, 1024: 71.38, 2048: 87.03, 4096: 94.37,
    8192: 97.42, 16384: 98.71, 32768: 99.56, 65536: 99.70, 131072: 99.86, 196608: 100.0,
}  # fmt: skip

PACKS = 5  # that a run is sized by
RECORDS = (".jsonl", ".parquet", ".gz", ".zst")  # how the names of files of records end


@dataclass(frozen=True)
class Sample:
    """Packs of a source.

    Attributes:
        packs: tokens of the documents of each, see ``pack_masks``.
        per_epoch: how many packs an epoch has, about; None for a distribution.
        learned: share of their tokens that have a label.
        counts: of the records that trees were looked for in; None where they were not.
    """

    packs: list[Int64Array]
    per_epoch: float | None = None
    learned: float = 1.0
    counts: PackingCounts | None = None


DISTRIBUTIONS = {
    "histogram": "lengths of a real corpus: median 570, mean 1,800, up to a quarter of the pack",
    "lognormal": "lognormal lengths of 1,024 to 8,192, mean 3,250",
    "few-huge": "half of the tokens in documents of an eighth of the pack, half in tiny ones",
    "dense": "one document as long as the pack",
}


def make_packs(source: str, total: int, count: int, *options: Any, **more: Any) -> list[Int64Array]:
    """The packs of ``sample``."""
    return sample(source, total, count, *options, **more).packs


def sample(
    source: str,
    total: int,
    count: int,
    seed: int = 0,
    tokenizer: str | Path | None = None,
    dataset: str = "sft",
    share_prefixes: bool = False,
    reading: Mapping[str, Any] | None = None,
) -> Sample:
    """Document lengths of each of up to ``count`` packs of at most ``total`` tokens.

    Args:
        source: a name in DISTRIBUTIONS; without a tokenizer a file of lengths in tokens (.npy, otherwise text: integers
            between white space or commas), packed as training packs them; with one, or where the name says so, a data
            set as training takes it, packed by training's own code.
        tokenizer: a data set's: directory with tokenizer.json, tokenizer_config.json and perhaps a chat template.
        dataset: "sft"; "dpo": the data set has preference pairs, which share their prompt; "rollouts": sampled answers.
        share_prefixes: records of the data set that begin with the same tokens are packed as trees.
        reading: other options of the class that packs the data set, see ``PackedDataset``.

    Raises:
        ValueError: a number out of range, an unknown name, a file that cannot be read or holds no lengths, a data set
            without a tokenizer, another kind than "sft" or common beginnings of no data set, ``share_prefixes`` with
            another kind.
    """
    if not 1 <= total < 2**31:
        raise ValueError(f"total is {total} tokens; give 1 to 2,147,483,647")
    if count < 1 or seed < 0:
        raise ValueError(f"{count} packs with seed {seed}; give at least 1 pack and a seed of at least 0")
    path = Path(source)
    exists = os.path.exists(path)  # False also for what is too long for a path: several sources
    is_file_of_lengths = exists and tokenizer is None and path.suffix not in RECORDS and not path.is_dir()
    if dataset != "sft" and (source in DISTRIBUTIONS or is_file_of_lengths):
        what = {"dpo": "preference pairs", "rollouts": "rollouts"}[dataset]
        raise ValueError(f"{shown(source)} has no {what}; give a .jsonl data set of them, or --dataset sft")
    if share_prefixes and (source in DISTRIBUTIONS or is_file_of_lengths):
        raise ValueError(f"{shown(source)} has no tokens to share; give a data set of records, or no --share-prefixes")
    if tokenizer is not None and source in DISTRIBUTIONS:
        raise ValueError(f"{source} has no records to tokenize; give a data set of records, or no --tokenizer")
    if share_prefixes and dataset != "sft":
        raise ValueError("--share-prefixes is for --dataset sft; leave it out, as others share their prompt without it")
    if source in DISTRIBUTIONS:
        count = 1 if source == "dense" else count  # they would all be the same
        return Sample([draw_pack(source, total, seed + number) for number in range(count)])
    if is_file_of_lengths:
        lengths = read_lengths(path)
        return Sample(pack_lengths(lengths, total, count, seed), max(1.0, np.minimum(lengths, total).sum() / total))
    if not exists and tokenizer is None and "://" not in source and not any(suffix in source for suffix in RECORDS):
        names = ", ".join(DISTRIBUTIONS)
        raise ValueError(
            f"{quoted(source)} is neither a file nor a distribution; give an existing file or one of {names}"
        )
    if tokenizer is None:
        raise ValueError(f"{shown(source)} is a data set; give --tokenizer, the directory that holds tokenizer.json")
    return read_data_set(source, Path(tokenizer), total, count, seed, dataset, share_prefixes, **(reading or {}))


def pairs_of(documents: Sample) -> Sample:
    """The same documents as preference pairs: half of one is the prompt, a quarter each answer."""
    packs = [pack[pack >= 4, None] // np.array([2, 4, 4]) for pack in documents.packs]
    return Sample(packs, documents.per_epoch, 0.5)


def draw_pack(distribution: str, total: int, seed: int, batch: int = 1024) -> Int64Array:
    """Lengths of the documents of one pack, in tokens; they sum to total.

    Documents are drawn, capped at a quarter of the pack, packed in sequence, the last one cut to fit, then shuffled.

    Args:
        batch: documents of the histogram that are drawn at a time; another number gives other packs for a seed.
    """
    rng = np.random.default_rng(seed)
    if distribution == "dense":
        return np.array([total])
    longest = max(1, total // 4)
    return rng.permutation(fill_pack(lambda: np.minimum(_draw(distribution, rng, total, batch), longest), total))


def fill_pack(draw: Callable[[], Int64Array], total: int) -> Int64Array:
    """Lengths from one draw after another until they sum to total; the last one is cut to fit."""
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths += draw().tolist()
    ends = np.minimum(np.cumsum(lengths), total)
    return np.diff(ends[: int(np.searchsorted(ends, total)) + 1], prepend=0)


def draw_lengths(rng: np.random.Generator, count: int) -> Int64Array:
    """Lengths of documents of the histogram."""
    edges = np.array([0, *HISTOGRAM])
    bins = np.searchsorted(np.array(list(HISTOGRAM.values())), rng.random(count) * 100)
    return rng.integers(edges[bins] + 1, edges[bins + 1] + 1)


def _draw(distribution: str, rng: np.random.Generator, total: int, batch: int) -> Int64Array:
    """A batch of document lengths."""
    if distribution == "lognormal":
        return np.clip(rng.lognormal(np.log(4096) - 1.1**2 / 2, 1.1, 256), 1024, 8192).astype(np.int64)
    if distribution == "few-huge":
        tiny = rng.integers(16, 512, max(1, total // 8 // 264))
        return np.append(tiny, max(1, total // 8))
    return draw_lengths(rng, batch)


def read_lengths(path: Path) -> Int64Array:
    """Document lengths from a file. Raises ValueError when it holds anything but integers of at least 1."""
    try:
        regular_file(path)
        values = np.load(path) if path.suffix == ".npy" else np.array(_integers(path.read_text(), path), np.int64)
    except Exception as error:  # numpy raises what Python's tokenizer does, and asks for the memory that a file names
        if isinstance(error, ValueError) and str(error).startswith(shown(path)):
            raise
        raise ValueError(
            f"{shown(path)} cannot be read as document lengths ({one_line(error)}); give text or .npy"
        ) from None
    if not isinstance(values, np.ndarray):
        raise ValueError(f"{shown(path)} holds several arrays; give one list of integers")
    if not np.issubdtype(values.dtype, np.integer) or values.ndim != 1:
        raise ValueError(f"{shown(path)} holds {values.dtype} of shape {values.shape}; give one list of integers")
    if len(values) == 0:
        raise ValueError(f"{shown(path)} holds no document length; write at least one integer")
    if values.min() < 1:
        first = int((values < 1).argmax())
        raise ValueError(f"{shown(path)}: length {values[first]} at index {first}; documents have at least 1 token")
    return values.astype(np.int64)


def _integers(text: str, path: Path) -> list[int]:
    words = text.replace(",", " ").split()
    for index, word in enumerate(words):
        if not word.lstrip("+-").isdecimal() or len(word) > 18:
            raise ValueError(
                f"{shown(path)}: {quoted(word[:40])} at index {index} is not a length; write integers, in tokens"
            )
    return [int(word) for word in words]


def pack_lengths(lengths: Int64Array, total: int, count: int, seed: int) -> list[Int64Array]:
    """Packs of a sample of the documents, best fit decreasing as in training; longer documents are truncated."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.permutation(lengths), total)
    needed = int(np.searchsorted(lengths.cumsum(), 2 * count * total)) + 1
    sample = lengths[:needed]
    packs = [sample[pack] for pack in pack_best_fit(sample, total)]
    if needed < len(lengths):  # training carries the emptiest packs over into the next ones
        packs = sorted(packs, key=lambda pack: -int(pack.sum()))[: max(count, len(packs) * 7 // 8)]
    return [packs[i] for i in rng.permutation(len(packs))[:count]]


def read_data_set(
    paths: str, tokenizer: Path, total: int, count: int, seed: int, kind: str, share_prefixes: bool, **reading: Any
) -> Sample:
    """Packs as training makes them of records, whose tokens are kept. Raises ValueError for bad records and assets."""
    chat = load_chat_tokenizer(tokenizer)
    options: dict[str, Any] = {"seed": seed, "epochs": 1, "check": False, "token_cache": default_folder()}
    options |= reading
    if kind == "dpo":
        dataset: PackedDataset = PackedPairDataset(paths, chat.pair, total, **options)
    elif kind == "rollouts":
        dataset = PackedRolloutDataset(paths, chat, total, on_policy=True, **options)
    else:
        dataset = PackedSFTDataset(paths, chat, total, share_prefixes=share_prefixes, **options)
    items = list(itertools.islice(dataset, count))
    learned = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in items)
    packs = _packs_of(dataset, [inputs for inputs, _ in items])
    share = learned / max(1, sum(int(tokens_and_parents(pack)[0].sum()) for pack in packs))
    return Sample(packs, dataset.packs_per_epoch(dataset.counts), share, dataset.counts if share_prefixes else None)


def first_packs(dataset: PackedDataset, count: int) -> list[Int64Array]:
    """The first packs of a run's data, which are those that ``sample`` finds in it."""
    return _packs_of(dataset, [inputs for inputs, _ in dataset.first_items(count)])


def _packs_of(dataset: PackedDataset, items: Sequence[dict[str, Any]]) -> list[Int64Array]:
    if dataset.kind == "pairs":
        return _packs_of_pairs(items)
    if dataset.options.share_prefixes:  # rollouts always do
        return [pack_of_trees(inputs["documents"]) for inputs in items]
    return [np.diff(inputs["documents"])[:, 0].astype(np.int64) for inputs in items]


def _packs_of_pairs(items: Sequence[dict[str, Any]]) -> list[Int64Array]:
    """Prompt, chosen and rejected of each pair, [n, 3]; or trees, if some prompt has more answers or is not shared."""
    packs = []
    for inputs in items:
        start, end, shared = inputs["documents"].astype(np.int64).T
        if len(start) != 2 * len(inputs["pairs"]) or shared[::2].any() or not shared[1::2].all():
            return [pack_of_trees(each["documents"]) for each in items]
        first, second = (end - start).reshape(-1, 2).T
        packs.append(np.stack([shared[1::2], first - shared[1::2], second], 1))
    return packs
