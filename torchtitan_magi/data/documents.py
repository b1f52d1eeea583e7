"""The tokens of a record, and the pieces cut from them, which are packed. No torch: tokenizing workers import this."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

IGNORE_INDEX = -100  # label of a position that does not count in the loss

LongDocuments = Literal["truncate", "split"]


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
class Piece:
    """Consecutive positions of a pack, made from one record: a document, a cut of a long one, or a preference pair.

    record: number of the record; start: first position within its document; inputs, labels: int32 [length], already
    shifted (`labels[i]` is the token to predict after `inputs[i]`, or IGNORE_INDEX); positions: int32 [length], rotary;
    bounds: boundaries from 0 to length: (0, length) for a document, and (0, chosen_start, rejected_start, length) for a
    pair.
    """

    record: int
    start: int
    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    bounds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def has_label(self) -> bool:
        return bool((self.labels != IGNORE_INDEX).any())


def labels_of(document: TokenizedDocument) -> np.ndarray:
    """int32 [n]: the tokens to predict, IGNORE_INDEX in place of the others."""
    return np.where(document.loss_mask, document.tokens, np.int32(IGNORE_INDEX))


def cut_document(
    record: int, document: TokenizedDocument, seq_len: int, long_documents: LongDocuments
) -> tuple[list[Piece], int]:
    """Shifts a document of n tokens to n - 1 positions and cuts it into pieces of at most seq_len.

    Shifting comes first: the label of a piece's last position is the first token of the next piece, so no label is
    lost at a cut. "truncate" keeps the first piece only.

    Returns the pieces and the number of positions that truncation removed.
    """
    inputs = document.tokens[:-1]
    labels = labels_of(document)[1:]
    kept = len(inputs) if long_documents == "split" else min(len(inputs), seq_len)
    pieces = []
    for start in range(0, kept, seq_len):
        stop = min(start + seq_len, kept)
        positions, bounds = np.arange(stop - start, dtype=np.int32), (0, stop - start)
        pieces.append(Piece(record, start, inputs[start:stop], labels[start:stop], positions, bounds))
    return pieces, len(inputs) - kept
