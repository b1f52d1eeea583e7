"""The tokens of one block of records, kept as a file that is mapped into memory, see `array_file`."""

import itertools
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_magi.data.tokens.array_file import Layout
from torchtitan_magi.data.tokens.documents import TokenizedAnswers, TokenizedDocument, TokenizedPairs, num_common

VERSION = 8  # of the files, and of the way from a record to its tokens

_INDEX = {"bounds": np.int64, "firsts": np.int64, "weights": np.float32, "learned": np.int64}
_INDEX |= {"pairs": np.int64, "first_pairs": np.int64, "common": np.int64}
_INDEX |= {"checksums": np.uint32, "noted": np.uint32, "rewarded": np.uint32, "logprobs": np.float32}
_FILE = Layout(b"magitoks", _INDEX, "tokens")
Tokenized = TokenizedDocument | TokenizedAnswers | TokenizedPairs

_MAX_NOTES = 16  # of a block, each by itself


@dataclass(frozen=True)
class TokenBlock:
    """The tokens of n consecutive records, of p parts: documents, or of each record prompt and answers.

    tokens: int32 [t], parts one after the other; bounds: int64 [p + 1], first token of each part, and t; firsts: int64
    [n + 1], first part of each record, and p; weights: float32 [p], of each part, see `TokenizedAnswers`; learned:
    int64 [m, 2], ranges of tokens to predict, ascending; pairs: int64 [k, 2], numbers of the chosen and the rejected
    answer in their record; first_pairs: int64 [n + 1], first pair of each record, and k; common: int64 [k], number of
    tokens with which both answers of a pair begin; checksums: uint32 [n], CRC-32 of each record's tokens; malformed:
    index in the block -> what is wrong with the record, which then has no token; notes: what the chat template left out
    of records; noted: uint32 [n], bit k is set for a record that notes[k] is true of; rewarded: uint32 [n], 1 for
    rollouts with rewards; logprobs: float32 [t], see `TokenizedAnswers`, or [0] where no record has any.
    """

    tokens: np.ndarray
    bounds: np.ndarray
    firsts: np.ndarray
    weights: np.ndarray
    learned: np.ndarray
    pairs: np.ndarray
    first_pairs: np.ndarray
    common: np.ndarray
    checksums: np.ndarray
    noted: np.ndarray
    rewarded: np.ndarray
    logprobs: np.ndarray
    malformed: dict[int, str]
    notes: list[str]

    def __len__(self) -> int:
        return len(self.checksums)

    @classmethod
    def of(cls, records: Sequence[Tokenized | ValueError]) -> "TokenBlock":
        """The block of these records."""
        malformed = {index: str(record) for index, record in enumerate(records) if isinstance(record, ValueError)}
        rows = [_parts_of(record) for record in records]
        pairs = [record.pairs if isinstance(record, TokenizedPairs) else () for record in records]
        tokens = np.concatenate([np.zeros(0, np.int32), *(part.tokens for row in rows for part in row)])
        masks = np.concatenate([np.zeros(1, bool), *(part.loss_mask for row in rows for part in row), [False]])
        bounds = np.cumsum([0, *(len(part.tokens) for row in rows for part in row)])
        common = [
            num_common(row[1 + chosen].tokens, row[1 + rejected].tokens)
            for row, of_one in zip(rows, pairs, strict=True)
            for chosen, rejected in of_one
        ]
        firsts = np.cumsum([0, *map(len, rows)])
        weights = [weight for record, row in zip(records, rows, strict=True) for weight in _weights_of(record, row)]
        notes, noted = _noted([{note for part in row for note in part.notes} for row in rows])
        checksums = [zlib.crc32(tokens[first:last].data) for first, last in itertools.pairwise(bounds[firsts].tolist())]
        return cls(
            tokens,
            bounds,
            firsts,
            np.array(weights, np.float32),
            np.flatnonzero(masks[1:] != masks[:-1]).reshape(-1, 2),
            np.array([*itertools.chain(*pairs)], np.int64).reshape(-1, 2),
            np.cumsum([0, *map(len, pairs)]),
            np.array(common, np.int64),
            np.array(checksums, np.uint32),
            noted,
            np.array([isinstance(record, TokenizedAnswers) and record.rewarded for record in records], np.uint32),
            _logprobs_of(records, rows),
            malformed,
            notes,
        )

    def begins(self, indices: np.ndarray) -> np.ndarray:
        """int64 [k]: the first token of each of these records."""
        return self.bounds[self.firsts[indices]]

    def are_sound(self, indices: np.ndarray) -> bool:
        """Whether the tokens of these records are those that were written. A record may be named for each answer."""
        indices = np.unique(indices)
        firsts, lasts = (self.begins(record).tolist() for record in (indices, indices + 1))
        rows = zip(firsts, lasts, self.checksums[indices].tolist(), strict=True)
        return all(zlib.crc32(self.tokens[first:last].data) == checksum for first, last, checksum in rows)

    def notes_on(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Note -> those of the records that it is true of."""
        bits = self.noted[indices]
        found = {note: indices[(bits & (1 << number)) != 0] for number, note in enumerate(self.notes)}
        return {note: those for note, those in found.items() if len(those)}

    def document(self, first: int, last: int) -> TokenizedDocument:
        """The tokens first:last, which are a part of a record."""
        mask = np.zeros(last - first, bool)
        _, starts, stops = self.learned_in(np.array([first]), np.array([last]))
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            mask[start - first : stop - first] = True
        return TokenizedDocument(self.tokens[first:last], mask)

    def learned_in(self, first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The learned ranges inside n ranges first:last, cut to them: int64 [m] each, the number of the range that it
        lies in, its first token, and the token behind it."""
        ends = self.learned.reshape(-1)
        before = ends.searchsorted(first, side="right") // 2
        num = (ends.searchsorted(last - 1, side="right") + 1) // 2 - before
        of = np.repeat(np.arange(len(first)), num)
        found = self.learned[np.arange(len(of)) + (before - (np.cumsum(num) - num))[of]]
        return of, np.maximum(first[of], found[:, 0]), np.minimum(last[of], found[:, 1])

    def first_learned(self, first: np.ndarray) -> np.ndarray:
        """int64 [n]: the first token from `first` on that is to be predicted; past the last token if there is none."""
        begin = np.searchsorted(self.learned[:, 1], first, side="right")
        return np.maximum(np.append(self.learned[:, 0], len(self.tokens))[begin], first)

    def write(self, path: str) -> None:
        """Writes a file, whole or not at all. Raises OSError."""
        head = {"malformed": self.malformed, "notes": self.notes}
        _FILE.write(path, head, {name: getattr(self, name) for name in (*_FILE.index, "tokens")})

    @classmethod
    def open(cls, path: str) -> "TokenBlock":
        """Maps a file. Raises FileNotFoundError, OSError, and Damaged if it is not as it was written."""
        head, arrays = _FILE.open(path)
        malformed = {int(index): what for index, what in head["malformed"].items()}
        return cls(malformed=malformed, notes=head["notes"], **arrays)


def _parts_of(record: Tokenized | ValueError) -> list[TokenizedDocument]:
    if isinstance(record, TokenizedPairs):
        return [TokenizedDocument(record.prompt, np.zeros(len(record.prompt), bool)), *record.answers]
    if isinstance(record, ValueError):
        return [TokenizedDocument(np.zeros(0, np.int32), np.zeros(0, bool))]
    return [*record.documents] if isinstance(record, TokenizedAnswers) else [record]


def _weights_of(record: Tokenized | ValueError, parts: list[TokenizedDocument]) -> Sequence[float]:
    return record.weights if isinstance(record, TokenizedAnswers) else [1.0] * len(parts)


def _logprobs_of(records: Sequence[Tokenized | ValueError], rows: list[list[TokenizedDocument]]) -> np.ndarray:
    given = [record.logprobs if isinstance(record, TokenizedAnswers) else () for record in records]
    if not any(given):
        return np.zeros(0, np.float32)
    missing = [[np.full(len(part.tokens), np.nan, np.float32) for part in row] for row in rows]
    return np.concatenate([of_part for own, none in zip(given, missing, strict=True) for of_part in own or none])


def _noted(found: list[set[str]]) -> tuple[list[str], np.ndarray]:
    """The notes on each record -> notes and noted, see `TokenBlock`. Beyond _MAX_NOTES they are one note."""
    counted = Counter(note for notes in found for note in sorted(notes))
    notes = [note for note, _ in counted.most_common(_MAX_NOTES)]
    number = dict.fromkeys(counted, _MAX_NOTES) | {note: number for number, note in enumerate(notes)}
    if len(counted) > len(notes):
        notes.append(f"the chat template leaves out {len(counted) - len(notes):,} more things")
    bits = [sum(1 << bit for bit in {number[note] for note in those}) for those in found]
    return notes, np.array(bits, np.uint32)
