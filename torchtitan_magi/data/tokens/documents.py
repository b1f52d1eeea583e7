"""The tokens of a record. No torch: tokenizing workers import this."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TokenizedDocument:
    """The tokens of a document.

    tokens: int32 [n]; loss_mask: bool [n], true where the token is to be predicted; notes: what the chat template
    left out of the record, in words that are the same for all records it is true of.

    Raises ValueError for other arrays.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        tokens, mask = np.asarray(self.tokens), np.asarray(self.loss_mask)
        if tokens.ndim != 1 or mask.shape != tokens.shape or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise ValueError(
                f"tokens are {tokens.dtype} {tokens.shape} and their loss_mask is {mask.dtype} {mask.shape}; give "
                "integers [n], and for each whether it is to be predicted"
            )


@dataclass(frozen=True)
class TokenizedAnswers:
    """The tokens of a prompt with several answers.

    documents: the conversation with each of them, prompt included; weights: how often each counts in the loss, 0 or
    more, or, of rollouts, its advantage, or its reward where they are ``rewarded``; logprobs: float32 [n] of each
    document, of its tokens under the policy that sampled them, NaN elsewhere; none where they are not known.

    Raises ValueError for weights or logprobs of another number.
    """

    documents: tuple[TokenizedDocument, ...]
    weights: tuple[float, ...]
    rewarded: bool = False
    logprobs: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        sizes = [len(document.tokens) for document in self.documents]
        given = [len(values) for values in self.logprobs]
        if len(self.weights) != len(sizes) or (given and given != sizes):
            raise ValueError(
                f"documents of {sizes} tokens have {len(self.weights)} weights and logprobs of {given}; give each "
                "document a weight, and its tokens logprobs, or none of them"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of all conversations."""
        return tuple(dict.fromkeys(note for document in self.documents for note in document.notes))


@dataclass(frozen=True)
class TokenizedPairs:
    """The tokens of a prompt with its answers, of which pairs are compared.

    prompt: int32 [p], p >= 1; answers: each without the prompt, `loss_mask` true on the tokens to predict; pairs:
    numbers of the chosen and the rejected answer of each.

    Raises ValueError for other numbers.
    """

    prompt: np.ndarray
    answers: tuple[TokenizedDocument, ...]
    pairs: tuple[tuple[int, int], ...] = ((0, 1),)

    def __post_init__(self) -> None:
        if not all(0 <= number < len(self.answers) for pair in self.pairs for number in pair):
            raise ValueError(f"pairs are {self.pairs}; number the answers from 0 to {len(self.answers) - 1}")

    @property
    def notes(self) -> tuple[str, ...]:
        """Those of all answers."""
        return tuple(dict.fromkeys(note for answer in self.answers for note in answer.notes))


def pairs_of(documents: Sequence[TokenizedDocument], pairs: Iterable[tuple[int, int]]) -> TokenizedPairs:
    """Makes pairs of whole conversations, prompt included; their `loss_mask` is true in the answers only.

    Raises ValueError if their first tokens differ or are to be predicted.
    """
    first, *others = (document.tokens for document in documents)
    prompt = min(int(d.loss_mask.argmax()) if d.loss_mask.any() else len(d.tokens) for d in documents)
    for tokens in others:
        prompt = num_common(first[:prompt], tokens[:prompt])
    if prompt == 0:
        raise ValueError("the answers have no prompt token in common; give the record a prompt")
    return TokenizedPairs(first[:prompt], tuple(_answer(document, prompt) for document in documents), tuple(pairs))


def num_common(one: np.ndarray, two: np.ndarray) -> int:
    """Number of tokens with which both begin."""
    size = min(len(one), len(two))
    differ = np.flatnonzero(one[:size] != two[:size])
    return int(differ[0]) if len(differ) else size


def _answer(document: TokenizedDocument, start: int) -> TokenizedDocument:
    """The tokens from `start` to the last that is to be predicted."""
    labelled = np.flatnonzero(document.loss_mask)
    where = slice(start, int(labelled[-1]) + 1 if len(labelled) else start)
    return TokenizedDocument(document.tokens[where], document.loss_mask[where], document.notes)
