"""A tokenized document and the training positions made from it."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

IGNORE_INDEX = -100  # the label of a position that the loss leaves out

LongDocuments = Literal["truncate", "split"]


@dataclass(frozen=True)
class TokenizedDocument:
    """tokens: int32 [n]; loss_mask: bool [n], true where the token is to be predicted."""

    tokens: np.ndarray
    loss_mask: np.ndarray


@dataclass(frozen=True)
class Piece:
    """Consecutive positions of a record's document, packed as a document of their own.

    record: index of the record; start: first position within its document; inputs, labels: int32 [length], already
    shifted (`labels[i]` is the token after `inputs[i]`, or IGNORE_INDEX).
    """

    record: int
    start: int
    inputs: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def has_label(self) -> bool:
        return bool((self.labels != IGNORE_INDEX).any())


def cut_document(
    record: int, document: TokenizedDocument, seq_len: int, long_documents: LongDocuments
) -> tuple[list[Piece], int]:
    """Shift a document of n tokens to n - 1 positions and cut it to pieces of at most seq_len.

    Shifting comes first, so the label of a piece's last position is the first token of the next piece: no label is
    lost at a cut. "truncate" keeps the first piece.

    Returns the pieces and the number of positions that truncation removed.
    """
    inputs = document.tokens[:-1]
    labels = np.where(document.loss_mask[1:], document.tokens[1:], np.int32(IGNORE_INDEX))
    kept = len(inputs) if long_documents == "split" else min(len(inputs), seq_len)
    cuts = [slice(start, min(start + seq_len, kept)) for start in range(0, kept, seq_len)]
    return [Piece(record, cut.start, inputs[cut], labels[cut]) for cut in cuts], len(inputs) - kept
