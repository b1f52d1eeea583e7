"""What looks wrong in a data set: the judgement of its records, for the inspector and for the start of a run."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from torchtitan_magi.data import guard
from torchtitan_magi.data.inspection.examine import Examiner, Seen
from torchtitan_magi.data.inspection.findings import KINDS, LEVELS, SURE, Found, Level, say
from torchtitan_magi.data.records.corpus import Corpus, Source
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE, ChatTokenizer, default_template, load_chat_template

MAX_OF_A_KIND = 10  # warnings

# What the start of a run looks at: a second of one core at most, as a rule
RECORDS = 256
BLOCKS = 4  # that they come from
CHARACTERS = 2**20  # of records; no more are looked at once they have so many


@dataclass(frozen=True)
class Warning:
    """What looks wrong. where: the first record that has it; "" for the template itself.

    of_template: whether the template's own conversation has it. is_sure: whether training surely goes wrong by it.
    """

    kind: str
    level: Level
    text: str
    where: str
    of_template: bool
    is_sure: bool

    @property
    def shown(self) -> str:
        """The text, with what a run would do."""
        return self.text + '; a run refuses to start, unless magi.findings is "warn"' * self.is_sure


class Findings:
    """How many records have each finding, and the first that has it."""

    def __init__(self) -> None:
        self.counts: Counter[Found] = Counter()
        self._firsts: dict[Found, tuple[int, str]] = {}  # index, error

    def add(self, seen: Seen) -> None:
        """Counts what was found in one record."""
        refusal = [("refused", re.sub(r"\d+", "N", seen.error))] if seen.error else []
        for found in (*seen.found, *refusal):
            self.counts[found] += 1
            self._firsts.setdefault(found, (seen.index, seen.error))

    def warnings(self, of_template: Sequence[Found], read: int, corpus: Corpus) -> list[Warning]:
        """A warning for each finding, the worst first, then the most frequent; of each kind only some.

        Args:
            of_template: what was found in the template itself.
            read: number of records that were added.
        """
        if self.counts["text", ""] == read:  # nothing is rendered
            of_template = []
        kinds = {kind for kind, _ in of_template}
        warnings = [
            Warning(kind, KINDS[kind][0], say(kind, detail, 0, 0), "", True, kind in SURE)
            for kind, detail in of_template
            if not self.counts[kind, detail]
        ]
        refused = sum(count for (kind, _), count in self.counts.items() if kind == "refused")
        number: Counter[str] = Counter()
        for (kind, detail), count in self.counts.most_common():
            number[kind] += 1
            if number[kind] <= MAX_OF_A_KIND:
                index, error = self._firsts[kind, detail]
                text = say(kind, error if kind == "refused" else detail, count, read)
                is_sure = kind in SURE and (kind in kinds or count == read - refused)
                warnings.append(Warning(kind, KINDS[kind][0], text, corpus.where(index), kind in kinds, is_sure))
        return sorted(warnings, key=lambda warning: LEVELS.index(warning.level))


def without_template(folder: str | os.PathLike[str], tokenizer: Tokenizer) -> list[Found]:
    """What is wrong with a folder that has no chat template."""
    if load_chat_template(folder) is not None:
        return []
    return [("default", "ChatML" if default_template(tokenizer) == CHATML_TEMPLATE else "plain text")]


def sample(corpus: Corpus, source: Source, count: int, num_blocks: int) -> np.ndarray:
    """Numbers of `count` records of a source, int64, drawn from so many of its blocks; one block after the other."""
    rng = np.random.default_rng(0)
    blocks = source.first_block + rng.permutation(source.num_blocks)[:num_blocks]
    places = np.concatenate([np.arange(*corpus.block_firsts[block : block + 2]) for block in blocks])
    return places[np.sort(rng.permutation(len(places))[:count])]


def by_block(corpus: Corpus, indices: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Numbers of records, int64, in runs of consecutive ones of the same block, each behind that block."""
    blocks = np.searchsorted(corpus.block_firsts, indices, side="right") - 1
    cuts = np.flatnonzero(np.diff(blocks)) + 1
    for run, of_run in zip(np.split(indices, cuts), np.split(blocks, cuts), strict=True):
        yield int(of_run[0]), run


def first_look(corpus: Corpus, chat: ChatTokenizer, kind: str, of_template: list[Found]) -> tuple[list[Warning], int]:
    """What looks wrong in the template and in a few records, which a limited process renders; and their number.

    Args:
        corpus: of parsed records.
        kind: of these, in PARSERS.
        of_template: what is known to be wrong with it.

    Raises ValueError if a file has changed since it was opened, and `guard.Died` if the process dies.
    """
    of_probe, seen = guard.apart(_examined, corpus, chat, kind, _drawn(corpus))
    findings = Findings()
    for one in seen:
        findings.add(one)
    return findings.warnings([*of_template, *of_probe], len(seen), corpus), len(seen)


def _drawn(corpus: Corpus) -> dict[int, Any]:
    """A few well-formed records, by number."""
    sources = np.random.default_rng(0).permutation(len(corpus.sources))[:BLOCKS]
    drawn: dict[int, Any] = {}
    for number in sorted(sources):
        indices = sample(corpus, corpus.sources[number], RECORDS // len(sources), BLOCKS // len(sources))
        for block, run in by_block(corpus, indices):
            size, records, first = 0, corpus.read(block), int(corpus.block_firsts[block])
            for index in run.tolist():
                if size < CHARACTERS // BLOCKS and not isinstance(records[index - first], ValueError):
                    drawn[index] = records[index - first]
                    size += len(str(drawn[index]))
    return drawn


def _examined(corpus: Corpus, chat: ChatTokenizer, kind: str, drawn: dict[int, Any]) -> tuple[list[Found], list[Seen]]:
    """What was found in the template, and in the records. Runs in a process of its own."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a fork has none of its parent's threads
    guard.limit_process()
    examiner = Examiner(corpus, chat, kind, None, set())
    return examiner.template()[1], examiner.examine_parsed([*drawn], [None] * len(drawn), [*drawn.values()])
