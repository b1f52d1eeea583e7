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

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchtitan_magi.data.datasets.packed_dataset import IGNORE_INDEX, PackedDataset, Sample
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.stream import Pack
from torchtitan_magi.data.packs.window_plan import Pieces
from torchtitan_magi.data.records.formats import parse_pair
from torchtitan_magi.data.tokens.documents import TokenizedDocument, TokenizedPair
from torchtitan_magi.data.tokens.token_block import TokenBlock


def cut_lengths(chosen: Any, rejected: Any, excess: Any) -> tuple[Any, Any]:
    """Lengths of both completions after `excess` positions are cut; integers or integer arrays.

    The longer completion is cut first, then both to the same length (or one token apart).
    """
    room = chosen + rejected - np.maximum(0, excess)
    shorter = np.minimum(np.minimum(chosen, rejected), np.maximum(0, room // 2))
    longer = np.maximum(0, room - shorter)
    first_is_shorter = chosen <= rejected
    return np.where(first_is_shorter, shorter, longer), np.where(first_is_shorter, longer, shorter)


def fit_pair(pair: TokenizedPair, seq_len: int, shared_prompt: bool) -> TokenizedPair | None:
    """The pair with its completions cut at the end until it fits; None if that leaves a completion without a label."""
    excess = pair.num_positions(shared_prompt) - seq_len
    cuts = cut_lengths(len(pair.chosen.tokens), len(pair.rejected.tokens), excess)
    chosen, rejected = (
        TokenizedDocument(completion.tokens[:cut], completion.loss_mask[:cut])
        for completion, cut in zip((pair.chosen, pair.rejected), cuts, strict=True)
    )
    if not (chosen.loss_mask.any() and rejected.loss_mask.any()):
        return None
    return replace(pair, chosen=chosen, rejected=rejected)


@dataclass(frozen=True)
class LaidOutPair:
    """A pair in its n positions of a pack.

    inputs, labels: int32 [n], already shifted; positions: int32 [n], rotary; bounds: (0, chosen_start, rejected_start,
    n).
    """

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    bounds: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.inputs)


def lay_out_pair(pair: TokenizedPair, shared_prompt: bool) -> LaidOutPair:
    """The positions of a pair, in the layout of the module's docstring."""
    prompt, last = pair.prompt[:-1], pair.prompt[-1:]
    shared = len(prompt)
    context = prompt, np.full(shared, IGNORE_INDEX, np.int32), np.arange(shared, dtype=np.int32)
    columns, bounds = ([context], [0, shared]) if shared_prompt else ([], [0, 0])
    for completion in (pair.chosen, pair.rejected):
        inputs = np.append(last, completion.tokens[:-1])
        labels = np.where(completion.loss_mask, completion.tokens, np.int32(IGNORE_INDEX))
        branch = inputs, labels, np.arange(shared, shared + len(inputs), dtype=np.int32)
        columns += [branch] if shared_prompt else [context, branch]
        bounds.append(sum(len(column[0]) for column in columns))
    inputs, labels, positions = map(np.concatenate, zip(*columns, strict=True))
    return LaidOutPair(inputs, labels, positions, tuple(bounds))


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

    bounds_name = kind = "pairs"
    parse = staticmethod(parse_pair)

    def __init__(self, *args: Any, shared_prompt: bool = True, **options: Any):
        self.shared_prompt = shared_prompt
        if options.get("share_prefixes"):
            raise ValueError("share_prefixes is True, but it is for documents; leave it out for preference pairs")
        super().__init__(*args, **options)

    def make_pieces(self, block: TokenBlock, indices: np.ndarray) -> tuple[Pieces, PackingCounts]:
        """A piece for each pair whose completions keep a label each and still differ when they are cut to seq_len."""
        begin, chosen, rejected, end = (block.bounds[3 * indices + part] for part in range(4))
        shared, sizes = chosen - begin - 1, (rejected - chosen, end - rejected)
        whole = (1 if self.shared_prompt else 2) * shared + sizes[0] + sizes[1]
        cuts = cut_lengths(*sizes, whole - self.seq_len)
        firsts = [block.first_learned(part) - part for part in (chosen, rejected)]
        labelled = (firsts[0] < sizes[0]) & (firsts[1] < sizes[1])
        fits = labelled & (firsts[0] < cuts[0]) & (firsts[1] < cuts[1])
        differs = (cuts[0] != cuts[1]) | (cuts[0] > block.common[indices])
        good = fits & differs
        length = whole - np.maximum(0, whole - self.seq_len)
        return Pieces(indices[good], np.zeros(good.sum(), np.int64), length[good]), PackingCounts(
            documents=len(indices),
            tokens_read=int(whole.sum()),
            truncated=int((length < whole)[good].sum()),
            truncated_tokens=int((whole - length)[good].sum()),
            unlabeled=int((~labelled).sum()),
            long_prompts=int((labelled & ~fits).sum()),
            equal=int((fits & ~differs).sum()),
            tokens_left_out=int(whole[~good].sum()),
        )

    def lay_out(self, pack: Pack) -> Sample:
        """The item of a pack, with the positions of its pairs by `lay_out_pair`."""
        pairs = []
        for block, index in zip(pack.block.tolist(), pack.index.tolist(), strict=True):
            fitted = fit_pair(pack.tokens[block].pair(index), self.seq_len, self.shared_prompt)
            assert fitted is not None
            pairs.append(lay_out_pair(fitted, self.shared_prompt))
        begins = np.cumsum([0, *map(len, pairs)])[:-1, None]
        bounds = np.array([pair.bounds for pair in pairs]).reshape(-1, 4) + begins
        inputs, labels = self.item([(pair.inputs, pair.positions, pair.labels) for pair in pairs], bounds)
        return inputs | {"pair_ids": pack.record}, labels

    def identity(self) -> dict[str, Any]:
        """All that the stream of packs depends on, the layout of pairs included."""
        return super().identity() | {"shared_prompt": self.shared_prompt}
