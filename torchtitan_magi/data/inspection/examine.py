"""What training would make of single records.

Records are rendered and tokenized in limited processes (`guard`), since a chat template is another's program.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from torchtitan_magi import machine
from torchtitan_magi.data import guard
from torchtitan_magi.data.datasets.pairs import pieces_of_pairs
from torchtitan_magi.data.inspection.findings import Checker, Found
from torchtitan_magi.data.inspection.spelling import Cell, Part, Speller
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.records.formats import parse_document, parse_pair
from torchtitan_magi.data.records.record_file import attempt
from torchtitan_magi.data.records.rollout_format import parse_rollouts
from torchtitan_magi.data.tokens.chat import ChatTokenizer
from torchtitan_magi.data.tokens.documents import TokenizedAnswers, TokenizedDocument, TokenizedPairs, num_common
from torchtitan_magi.data.tokens.token_block import TokenBlock, Tokenized

T = TypeVar("T")

PARSERS = {"documents": parse_document, "pairs": parse_pair, "rollouts": parse_rollouts}  # by kind of records
_NO_LIMIT = 2**62  # tokens

# Shows what a template writes around turns.
PROBE = [
    {"role": role, "content": f"{number} {name}."}
    for number in ("First", "Second")
    for role, name in (("user", "question"), ("assistant", "answer"))
]


Batch = tuple[int, list[int]]  # a block of the corpus, and numbers of records in it


@dataclass(frozen=True)
class Seen:
    """What became of one record.

    index: its number; error: why it is refused; tokens, learned: of all its parts; length: its positions before
    truncation; pieces: those of each piece after it; left_out: why it is in no pack; pairs: preference pairs in packs;
    alone: positions of these if each were a record; cells: the tokens of each part, if it is to be shown.
    """

    index: int
    error: str = ""
    tokens: int = 0
    learned: int = 0
    length: int = 0
    pieces: tuple[int, ...] = ()
    left_out: str = ""
    pairs: int = 0
    alone: int = 0
    found: tuple[Found, ...] = ()
    cells: tuple[tuple[str, list[Cell]], ...] = ()

    @property
    def kept(self) -> int:
        """Positions of all pieces."""
        return sum(self.pieces)


class Examiner:
    """Examines the records of a corpus whose records are plain JSON values.

    Args:
        kind: of the records, in PARSERS.
        seq_len: tokens per pack; None: no truncation.
        shown: numbers of the records to show.
    """

    def __init__(self, corpus: Corpus, chat: ChatTokenizer, kind: str, seq_len: int | None, shown: set[int]) -> None:
        self.corpus, self.chat, self.kind, self.shown = corpus, chat, kind, shown
        self.seq_len = _NO_LIMIT if seq_len is None else seq_len
        self.speller = Speller(chat)
        self.checker = Checker(chat, self.speller)
        self._block, self._raws = -1, list[Any]()  # the last that was read

    def examine(self, batch: Batch) -> list[Seen]:
        """Reads, renders, tokenizes and checks these records. Raises ValueError if their file has changed."""
        block, indices = batch
        if block != self._block:
            self._block, self._raws = block, self.corpus.read(block)
        first = int(self.corpus.block_firsts[block])
        raws = [self._raws[index - first] for index in indices]
        records = [attempt(PARSERS[self.kind], raw) for raw in raws]
        return self.examine_parsed(indices, raws, records)

    def examine_parsed(self, indices: Sequence[int], raws: Sequence[Any], records: Sequence[Any]) -> list[Seen]:
        """Renders, tokenizes and checks records with these numbers. raws: their JSON values; None: not known."""
        results: Sequence[Any] = getattr(self.chat, self.kind)(records)
        return [self._seen(*of_one) for of_one in zip(indices, raws, records, results, strict=True)]

    def template(self) -> tuple[list[Cell], list[Found]]:
        """A conversation of two rounds as the template writes it, empty if it refuses it, and what looks wrong."""
        (document,) = self.chat.documents([{"messages": PROBE}])
        if not isinstance(document, TokenizedDocument):
            return [], [("probe", str(document))]
        part = Part("", document.tokens, document.loss_mask, tuple(turn["content"] for turn in PROBE))
        return self.speller.cells(part), self.checker.check_template(part)

    def _seen(self, index: int, raw: Any, record: Any, result: Tokenized | ValueError) -> Seen:
        if isinstance(result, ValueError):
            return Seen(index, error=str(result))
        parts = parts_of(record, result)
        fitted = self._fitted_pairs(result) if isinstance(result, TokenizedPairs) else self._fitted(parts)
        own = _parted(parts) if isinstance(result, TokenizedAnswers) else parts
        return replace(
            fitted,
            index=index,
            tokens=sum(len(part.tokens) for part in own),
            learned=sum(int(part.learned.sum()) for part in own),
            found=tuple(dict.fromkeys([*self.checker.check(raw, record, parts, result.notes), *self._unread()])),
            cells=tuple((part.name, self.speller.cells(part)) for part in own) if index in self.shown else (),
        )

    def _unread(self) -> list[Found]:
        """The columns of the current block that no record has, whose keys would be named."""
        return [("key", name) for name in self.corpus.unread_columns(self._block)]

    def _fitted(self, parts: Sequence[Part]) -> Seen:
        """Positions before and after truncation, and why the record is left out; of answers those of all of them."""
        documents = [part for part in parts if part.counts]
        if not documents:
            return Seen(0, left_out="without a label")
        each = [self._fitted_document(document) for document in documents]
        lost = sum(length - kept for length, kept, _ in each)
        pieces, (_, of_first, _) = list[int](), each[0]
        for document, (_, kept, _) in zip(documents, each, strict=True):
            shared = min(of_first, kept, self._num_alike(documents[0], document)) if of_first and kept else 0
            if pieces and shared and pieces[-1] + kept - shared <= self.seq_len:
                pieces[-1] += kept - shared
            elif kept:
                pieces.append(kept)
        return Seen(0, length=sum(pieces) + lost, pieces=tuple(pieces), left_out="" if pieces else each[0][2])

    def _num_alike(self, one: Part, other: Part) -> int:
        """Positions that two answers have in common; of rollouts only those before a label, as each keeps its own."""
        common = num_common(one.tokens, other.tokens) - 1
        if self.kind == "rollouts":
            common = min(common, *(int(part.learned[1:].argmax()) for part in (one, other)))
        return max(0, common)

    def _fitted_document(self, document: Part) -> tuple[int, int, str]:
        length = max(0, len(document.tokens) - 1)
        kept = min(length, self.seq_len)
        if document.learned[1 : kept + 1].any():
            return length, kept, ""
        return length, 0, "without a label" if kept == length else "without a label after truncation"

    def _fitted_pairs(self, result: TokenizedPairs) -> Seen:
        found = pieces_of_pairs(TokenBlock.of([result]), np.zeros(1, np.int64), self.seq_len, shared_prompt=True)
        counts, num_pairs, pieces = found.counts, len(found.number), tuple(found.pieces.length.tolist())
        if not num_pairs:
            reasons = {"without a label": counts.unlabeled, "with too long a prompt": counts.long_prompts}
            left_out = next((reason for reason, count in reasons.items() if count), "with chosen equal to rejected")
            return Seen(0, length=counts.tokens_read, left_out=left_out)
        alone = num_pairs * (len(result.prompt) - 1) + int(found.kept.sum())
        return Seen(0, length=sum(pieces) + counts.truncated_tokens, pieces=pieces, pairs=num_pairs, alone=alone)


def parts_of(record: dict[str, Any], result: Tokenized) -> tuple[Part, ...]:
    """The tokens of a record: one part for a document, three for a pair; of answers each with its prompt."""
    if isinstance(result, TokenizedAnswers):
        texts = "prompt_ids" not in record  # of token ids nothing more is known
        said = [_contents(answer) if texts else () for answer in record["completions"]]
        said[0] = (_contents(record["prompt"]) if texts else ()) + said[0]
        counts = [weight > 0 for weight in record.get("weights", [1] * len(said))]
        return tuple(
            Part(f"answer {number}", one.tokens, one.loss_mask & counted, words, counted)
            for number, (one, words, counted) in enumerate(zip(result.documents, said, counts, strict=True), start=1)
        )
    if isinstance(result, TokenizedDocument):
        contents = (record["text"],) if "text" in record else _contents(record["messages"])
        return (Part("", result.tokens, result.loss_mask, contents),)
    prompt = Part("prompt", result.prompt, np.zeros(len(result.prompt), dtype=bool), _contents(record["prompt"]))
    of_each = zip(_names(result), result.answers, record["answers"], strict=True)
    return prompt, *(Part(name, one.tokens, one.loss_mask, _contents(said)) for name, one, said in of_each)


def _parted(answers: tuple[Part, ...]) -> tuple[Part, ...]:
    """The first answer with its prompt, and of each other one what differs from that."""
    first, *others = answers
    forks = [num_common(first.tokens, one.tokens) for one in others]
    rest = [replace(one, tokens=one.tokens[n:], learned=one.learned[n:]) for one, n in zip(others, forks, strict=True)]
    return first, *rest


def _names(pairs: TokenizedPairs) -> list[str]:
    """What answers are called: "chosen" and "rejected", or numbers with what each is preferred to."""
    if len(pairs.pairs) == 1:
        ((chosen, _),) = pairs.pairs
        return ["chosen" if number == chosen else "rejected" for number in range(len(pairs.answers))]
    names = []
    for number in range(len(pairs.answers)):
        worse = ", ".join(str(1 + rejected) for chosen, rejected in pairs.pairs if chosen == number)
        names.append(f"answer {1 + number}" + (f", better than {worse}" if worse else ""))
    return names


def _contents(messages: list[dict[str, Any]]) -> tuple[str, ...]:
    said = [message.get(key) for message in messages for key in ("reasoning_content", "content")]
    return tuple(text for text in said if isinstance(text, str) and text.strip())


# ----------------------------------------------------------------------------------------------------------- processes

_examiner: Examiner  # of a worker process


class Workers:
    """Limited processes, one per core, that examine records. A context manager.

    Its methods raise ValueError if a process dies.
    """

    def __init__(self, examiner: Examiner) -> None:
        context = multiprocessing.get_context("fork")
        cores = len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(cores, context, initializer=_begin, initargs=(examiner,))
        self._ahead = 2 * cores

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: Any) -> None:
        self._pool.shutdown(cancel_futures=True)

    def template(self) -> tuple[list[Cell], list[Found]]:
        """The template's own conversation and what looks wrong in it, as `Examiner.template`."""
        return _result(self._pool.submit(_template))

    def examine(self, batches: Iterable[Batch]) -> Iterator[Seen]:
        """Examines these records; yields them in their order."""
        waiting: deque[Future[list[Seen]]] = deque()
        for batch in batches:
            waiting.append(self._pool.submit(_examine, batch))
            if len(waiting) > self._ahead:
                yield from _result(waiting.popleft())
        while waiting:
            yield from _result(waiting.popleft())


def _begin(examiner: Examiner) -> None:
    global _examiner
    _examiner = examiner
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process per core already
    guard.limit_process()


def _template() -> tuple[list[Cell], list[Found]]:
    return _examiner.template()


def _examine(batch: Batch) -> list[Seen]:
    return _examiner.examine(batch)


def _result(future: "Future[T]") -> T:
    try:
        return future.result()
    except BrokenProcessPool:
        died = "a process that renders the chat template died"
        raise ValueError(f"{died}; correct the template, or {machine.memory_remedy()}") from None
    except MemoryError as error:
        raise ValueError(machine.lack(error, "a process that renders the chat template lacks memory")) from None
