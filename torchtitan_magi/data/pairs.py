"""Packs of preference pairs: a prompt with a chosen and a rejected completion.

The tokens. The conversations prompt + chosen and prompt + rejected are each rendered and encoded as a whole, so their
tokens are those of SFT. A token that holds any character of the completion's assistant text is to be predicted, the
end of its turn included. The prompt P of the pair is the longest common prefix of the two encodings before the first
such token. Usually that is the whole rendered prompt. If a merge of the tokenizer crosses from the prompt into the
completion, or the template renders the prompt differently, the tokens that differ belong to the completions C and R,
without a label. So P + C and P + R are the plain encodings in every layout. Tokens after the last label of a completion
are dropped.

The layout. With a shared prompt a pair takes p - 1 + |C| + |R| positions of the pack:

    range             inputs               labels           positions
    shared prompt     P[:-1]               none             0 .. p - 2
    chosen branch     P[-1], C[:-1]        C                p - 1 .. p + |C| - 2
    rejected branch   P[-1], R[:-1]        R                p - 1 .. p + |R| - 2

The last prompt token begins both branches, so each label is the token after its input. A branch attends to the shared
prompt and to itself. Without a shared prompt the pair is two documents, (P + C)[:-1] and (P + R)[:-1],
with positions from 0 and the same labels; they stay in one pack.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from torchtitan_magi.data.documents import IGNORE_INDEX, Piece, TokenizedDocument, TokenizedPair, labels_of
from torchtitan_magi.data.formats import parse_pair
from torchtitan_magi.data.packed import PackedDataset, Sample
from torchtitan_magi.data.packing import PackingCounts


def fit_pair(pair: TokenizedPair, seq_len: int, shared_prompt: bool) -> TokenizedPair | None:
    """The pair with its completions cut at the end until it fits; None if that leaves a completion without a label.

    The longer completion is cut first, then both to the same length (or one token apart).
    """
    excess = pair.num_positions(shared_prompt) - seq_len
    if excess > 0:
        lengths = len(pair.chosen.tokens), len(pair.rejected.tokens)
        room = sum(lengths) - excess
        shorter = min(*lengths, max(0, room // 2))
        longer = max(0, room - shorter)
        cuts = (shorter, longer) if lengths[0] <= lengths[1] else (longer, shorter)
        chosen, rejected = (
            TokenizedDocument(completion.tokens[:cut], completion.loss_mask[:cut])
            for completion, cut in zip((pair.chosen, pair.rejected), cuts, strict=True)
        )
        pair = replace(pair, chosen=chosen, rejected=rejected)
    return pair if pair.chosen.loss_mask.any() and pair.rejected.loss_mask.any() else None


def lay_out_pair(record: int, pair: TokenizedPair, shared_prompt: bool) -> Piece:
    """The positions of a pair, in the layout of the module's docstring."""
    prompt, last = pair.prompt[:-1], pair.prompt[-1:]
    shared = len(prompt)
    no_label, places = np.full(shared, IGNORE_INDEX, np.int32), np.arange(shared, dtype=np.int32)
    inputs, labels, positions, bounds = [], [], [], [0]
    if shared_prompt:
        inputs, labels, positions, bounds = [prompt], [no_label], [places], [0, shared]
    else:
        bounds = [0, 0]
    for completion in (pair.chosen, pair.rejected):
        if not shared_prompt:
            inputs, labels, positions = [*inputs, prompt], [*labels, no_label], [*positions, places]
        inputs += [last, completion.tokens[:-1]]
        labels.append(labels_of(completion))
        positions.append(np.arange(shared, shared + len(completion.tokens), dtype=np.int32))
        bounds.append(sum(map(len, inputs)))
    return Piece(record, 0, np.concatenate(inputs), np.concatenate(labels), np.concatenate(positions), tuple(bounds))


class PackedPairDataset(PackedDataset):
    """Packs of preference pairs, for direct preference optimisation.

    See `PackedDataset` for the arguments, the shards and the state, `formats.parse_pair` for the records, and the
    module's docstring for the positions of a pair. `tokenize` maps a record to a TokenizedPair, as `ChatTokenizer.pair`
    does. An item has

    - `inputs["pairs"]`: NumPy int32 [n, 4], rows (start, chosen_start, rejected_start, end): shared prompt
      [start, chosen_start), chosen branch [chosen_start, rejected_start), rejected branch [rejected_start, end). Rows
      are in order and without gaps. With `shared_prompt=False`, chosen_start equals start; each branch is a document.
    - `inputs["pair_ids"]`: NumPy int64 [n], the number of each pair's record in the data set, from 0.

    A pair that does not fit a pack loses the end of its completions; the prompt is kept. A pair is left out and counted
    if its prompt leaves no room for a label of each completion, or if its completions have equal tokens.
    """

    bounds_name = "pairs"
    parse = staticmethod(parse_pair)

    def __init__(self, *args: Any, shared_prompt: bool = True, **options: Any):
        self.shared_prompt = shared_prompt
        super().__init__(*args, **options)

    def make_pieces(self, record: int, content: dict[str, Any]) -> tuple[list[Piece], PackingCounts]:
        pair: TokenizedPair = self.tokenize(content)
        whole = pair.num_positions(self.shared_prompt)
        read = PackingCounts(documents=1, tokens_read=whole)
        if not (pair.chosen.loss_mask.any() and pair.rejected.loss_mask.any()):
            return [], read + PackingCounts(unlabeled=1, tokens_left_out=whole)
        fitted = fit_pair(pair, self.seq_len, self.shared_prompt)
        if fitted is None:
            return [], read + PackingCounts(long_prompts=1, tokens_left_out=whole)
        if np.array_equal(fitted.chosen.tokens, fitted.rejected.tokens):
            return [], read + PackingCounts(equal=1, tokens_left_out=whole)
        piece = lay_out_pair(record, fitted, self.shared_prompt)
        removed = whole - len(piece)
        return [piece], read + PackingCounts(truncated=int(removed > 0), truncated_tokens=removed)

    def lay_out(self, pieces: Any) -> Sample:
        inputs, labels = super().lay_out(pieces)
        return inputs | {"pair_ids": np.array([piece.record for piece in pieces], dtype=np.int64)}, labels

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"shared_prompt": self.shared_prompt}
