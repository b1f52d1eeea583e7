"""A data set summed up: its sources' lengths and losses, what looks wrong, and some records to look at."""

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from torchtitan_magi.data.inspection.examine import Batch, Examiner, Seen, Workers
from torchtitan_magi.data.inspection.findings import Found
from torchtitan_magi.data.inspection.judgement import Findings, Warning, by_block, sample, without_template
from torchtitan_magi.data.inspection.spelling import Cell
from torchtitan_magi.data.inspection.trees import Sharing, sharing
from torchtitan_magi.data.packs.best_fit import pack_best_fit
from torchtitan_magi.data.records.corpus import Corpus, Source
from torchtitan_magi.data.tokens.assets import load_tokenizer
from torchtitan_magi.data.tokens.chat import ChatTokenizer
from torchtitan_magi.data.tokens.token_cache import default_folder

SAMPLE = 2_000  # records that are read, unless all are
FEW = 3  # records that are read if training refuses the template, which may take its time
SAMPLE_BLOCKS = 16  # that they come from
SAMPLE_TOKENS = 4_000_000  # no more are read once they have so many
BATCH = 128  # records
_SUMS = ("read", "tokens", "kept", "learned", "truncated", "truncated_tokens", "pairs", "alone", "left_out")


@dataclass
class Tally:
    """Sums over the records of one source that were read.

    tokens: of each record; kept: positions of each piece in a pack; pairs: preference pairs in packs; alone: positions
    of these if each were a record.
    """

    path: str
    records: int
    read: int = 0
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    kept: "array[int]" = field(default_factory=lambda: array("q"))
    learned: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    pairs: int = 0
    alone: int = 0
    left_out: "Counter[str]" = field(default_factory=Counter)

    def add(self, seen: Seen) -> None:
        """Counts one more record."""
        self.read += 1
        if seen.error:
            self.left_out["refused"] += 1
            return
        self.tokens.append(seen.tokens)
        self.learned += seen.learned
        if seen.left_out:
            self.left_out[seen.left_out] += 1
            return
        self.kept.extend(seen.pieces)
        self.pairs += seen.pairs
        self.alone += seen.alone
        self.truncated += seen.kept < seen.length
        self.truncated_tokens += seen.length - seen.kept

    def histogram(self) -> list[tuple[int, int]]:
        """(b, number of records with 2^b to 2^(b + 1) - 1 tokens), from the shortest to the longest."""
        if not self.tokens:
            return []
        powers = np.log2(np.maximum(1, np.array(self.tokens))).astype(int)
        return [(b, int((powers == b).sum())) for b in range(int(powers.min()), int(powers.max()) + 1)]

    def fill(self, seq_len: int) -> float:
        """Fraction of the packs' positions that is filled, 0 to 1. Of a part of the records the emptiest of several
        packs does not count: further records would fill it."""
        kept = np.array(self.kept, dtype=np.int64)
        fills = sorted((int(kept[pack].sum()) for pack in pack_best_fit(kept, seq_len)), reverse=True)
        if self.read < self.records:
            fills = fills[:-1] or fills
        return sum(fills) / max(1, len(fills) * seq_len)


def joined(tallies: Sequence[Tally]) -> Tally:
    """The sums over all sources together."""
    together = Tally("together", sum(tally.records for tally in tallies))
    for tally in tallies:
        for name in _SUMS:
            setattr(together, name, getattr(together, name) + getattr(tally, name))
    return together


@dataclass(frozen=True)
class Inspection:
    """What was seen of a data set.

    setting: what was read, line by line; seq_len: tokens per pack, None if it was not given; template: a conversation
    that shows it, empty if it refuses it; shown: place and content of some records; tallies: of each source; sharing:
    of common beginnings, if that was asked for.
    """

    setting: list[str]
    seq_len: int | None
    template: list[Cell]
    shown: list[tuple[str, Seen]]
    tallies: list[Tally]
    warnings: list[Warning]
    sharing: Sharing | None = None


def inspect_data(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    kind: str = "documents",
    seq_len: int | None = None,
    num_shown: int = 3,
    read_all: bool = False,
    share_prefixes: bool = False,
) -> Inspection:
    """Examines a data set, with a progress bar in a terminal.

    Args:
        source: as `Corpus` takes it.
        folder: holds the tokenizer and its chat template.
        kind: of the records: "documents", "pairs" or "rollouts".
        seq_len: tokens per pack; None: no truncation.
        num_shown: records to show.
        read_all: reads all records instead of a random sample: at most SAMPLE records and SAMPLE_TOKENS tokens.
        share_prefixes: also packs the beginning of the data set as training does with that option.

    Raises ValueError for a source or folder that cannot be read, and if a process that renders the template dies.
    """
    chat, of_template = _load(folder)
    corpus = Corpus(source, _as_it_is, default_folder())
    count = FEW if any(kind == "set-up" for kind, _ in of_template) else len(corpus) if read_all else SAMPLE
    samples = [_sample(corpus, part, count) for part in corpus.sources]
    rng = np.random.default_rng(0)
    shown: dict[int, Seen] = {}
    for number, drawn in enumerate(samples):
        share = len(range(number, num_shown, len(samples)))
        shown |= {int(index): Seen(int(index)) for index in rng.permutation(drawn[:SAMPLE])[:share]}
    limit = None if read_all else SAMPLE_TOKENS // len(samples)
    tallies, findings = [], Findings()
    with (
        Workers(Examiner(corpus, chat, kind, seq_len, set(shown))) as workers,
        tqdm(total=sum(map(len, samples)), unit=" records", leave=False, disable=None) as progress,
    ):
        template, of_probe = workers.template()
        for part, drawn in zip(corpus.sources, samples, strict=True):
            tally, num_tokens = Tally(part.name, len(part)), 0
            tallies.append(tally)
            for seen in workers.examine(_batches(corpus, drawn)):
                tally.add(seen)
                findings.add(seen)
                if seen.index in shown:
                    shown[seen.index] = seen
                progress.update()
                num_tokens += seen.tokens
                if limit and num_tokens >= limit:
                    break
    read = sum(tally.read for tally in tallies)
    return Inspection(
        [_what_was_read(corpus, read), _what_tokenizer(chat)],
        seq_len,
        template,
        [(corpus.where(index), seen) for index, seen in shown.items() if seen.tokens or seen.error],
        tallies,
        findings.warnings([*of_template, *of_probe], read, corpus),
        sharing(source, chat, seq_len) if share_prefixes and seq_len else None,
    )


def _load(folder: str | os.PathLike[str]) -> tuple[ChatTokenizer, list[Found]]:
    """The tokenizer with its chat template, also one that training refuses, and what is wrong with the template."""
    tokenizer = load_tokenizer(folder)
    chat = ChatTokenizer.from_assets(*tokenizer, folder, check=False)
    wrong = without_template(folder, tokenizer.tokenizer)
    try:
        chat.check()
    except ValueError as error:
        wrong.append(("set-up", str(error)))
    return chat, wrong


def _as_it_is(value: Any) -> Any:
    return value


def _sample(corpus: Corpus, source: Source, count: int) -> np.ndarray:
    """Numbers of the records of a source that are read, int64: of `count` its share, from a few blocks."""
    if count >= len(corpus):
        return np.arange(source.first, source.first + len(source))
    num_sources = len(corpus.sources)
    return sample(corpus, source, -(-count // num_sources), -(-SAMPLE_BLOCKS // num_sources))


def _batches(corpus: Corpus, indices: np.ndarray) -> Iterator[Batch]:
    """Numbers of records cut into batches, each of one block."""
    for block, run in by_block(corpus, indices):
        for start in range(0, len(run), BATCH):
            yield block, run[start : start + BATCH].tolist()


def _what_was_read(corpus: Corpus, read: int) -> str:
    if read == len(corpus):
        return f"{corpus.name}: all {read:,} records read"
    return f"{corpus.name}: {read:,} of {len(corpus):,} records read, drawn at random (--all reads all)"


def _what_tokenizer(chat: ChatTokenizer) -> str:
    names = [
        f"{name} {'none' if number is None else chat.tokenizer.id_to_token(number)}"
        for name, number in (("BOS", chat.bos_id), ("EOS", chat.eos_id))
    ]
    return f"tokenizer: {chat.tokenizer.get_vocab_size():,} tokens, {', '.join(names)}"
