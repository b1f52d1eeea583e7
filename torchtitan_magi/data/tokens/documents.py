"""The tokens of a record, and the pieces cut from them, which are packed. No torch: tokenizing workers import this."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORE_INDEX = -100  # label of a position that does not count in the loss


@dataclass(frozen=True)
class TokenizedDocument:
    """tokens: int32 [n]; loss_mask: bool [n], true where the token is to be predicted.

    notes: what the chat template left out of the record, in words that are the same for all records it is true of.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenizedPair:
    """prompt: int32 [p], p >= 1; chosen, rejected: completions C and R, `loss_mask` true on the tokens to predict."""

    prompt: np.ndarray
    chosen: TokenizedDocument
    rejected: TokenizedDocument

    def num_positions(self, shared_prompt: bool) -> int:
        """Number of positions that the pair takes in a pack."""
        shared = len(self.prompt) - 1
        return (1 if shared_prompt else 2) * shared + len(self.chosen.tokens) + len(self.rejected.tokens)


def pair_of(chosen: TokenizedDocument, rejected: TokenizedDocument) -> TokenizedPair:
    """Makes a pair of two whole conversations, prompt included; their `loss_mask` is true in the completions only.

    Raises ValueError if their first tokens differ or are to be predicted.
    """
    first_labels = [int(d.loss_mask.argmax()) if d.loss_mask.any() else len(d.tokens) for d in (chosen, rejected)]
    limit = min(first_labels)
    differ = np.flatnonzero(chosen.tokens[:limit] != rejected.tokens[:limit])
    prompt = int(differ[0]) if len(differ) else limit
    if prompt == 0:
        raise ValueError("chosen and rejected have no prompt token in common; give the record a prompt")
    return TokenizedPair(chosen.tokens[:prompt], _completion(chosen, prompt), _completion(rejected, prompt))


def _completion(document: TokenizedDocument, start: int) -> TokenizedDocument:
    """The tokens from `start` to the last that is to be predicted."""
    labelled = np.flatnonzero(document.loss_mask)
    where = slice(start, int(labelled[-1]) + 1 if len(labelled) else start)
    return TokenizedDocument(document.tokens[where], document.loss_mask[where], document.notes)


@dataclass(frozen=True)
class Pieces:
    """Pieces cut from the records of a block, which are packed: documents, cuts of long ones, or preference pairs.

    index: int64 [n], the record's index in its block; start: int64 [n], first position within its document; length:
    int64 [n], positions.
    """

    index: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def rows(self, rows: np.ndarray) -> "Pieces":
        return Pieces(self.index[rows], self.start[rows], self.length[rows])

    @classmethod
    def concatenate(cls, pieces: Sequence["Pieces"]) -> "Pieces":
        columns = [(p.index, p.start, p.length) for p in pieces] or [(np.zeros(0, np.int64),) * 3]
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))


def labels_of(document: TokenizedDocument) -> np.ndarray:
    """int32 [n]: the tokens to predict, IGNORE_INDEX in place of the others."""
    return np.where(document.loss_mask, document.tokens, np.int32(IGNORE_INDEX))
