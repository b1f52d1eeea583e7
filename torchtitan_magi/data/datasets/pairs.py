"""Packs of preference pairs: a prompt with answers, of which pairs of a chosen and a rejected one are compared.

The tokens. The conversations prompt + answer are each rendered and encoded as a whole, so their tokens are those of
SFT. A token that holds any character of the answer's assistant text is to be predicted, the end of its turn included.
The prompt P of a record is the longest common prefix of all encodings before the first such token. Usually that is the
whole rendered prompt. If a merge of the tokenizer crosses from the prompt into an answer, or the template renders the
prompt differently, the tokens that differ belong to the answers A, B, ..., without a label. So P + A, P + B, ... are
the plain encodings in every layout. Tokens after the last label of an answer are dropped.

The layout. With a shared prompt the answers of a piece take p - 1 + |A| + |B| + ... positions of the pack:

    range             inputs               labels           positions
    shared prompt     P[:-1]               none             0 .. p - 2
    first branch      P[-1], A[:-1]        A                p - 1 .. p + |A| - 2
    second branch     P[-1], B[:-1]        B                p - 1 .. p + |B| - 2

The last prompt token begins all branches, so each label is the token after its input. A branch attends to the shared
prompt and to itself. Without a shared prompt each answer is a document, (P + A)[:-1], (P + B)[:-1], with positions from
0 and the same labels; those of a piece stay in one pack.

The pieces. The good pairs of a record, in their order, lie in one piece as long as their prompt and answers, each once,
fit a pack; then the next begins, which has the prompt again. A pair that does not fit by itself loses the end of its
answers.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from torchtitan_magi.data.datasets.packed_dataset import IGNORE_INDEX, PackedDataset, Sample
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.stream import Pack
from torchtitan_magi.data.packs.window_plan import Pieces
from torchtitan_magi.data.records.formats import parse_pair
from torchtitan_magi.data.tokens.documents import TokenizedPairs
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


@dataclass(frozen=True)
class PairPieces:
    """The pieces of some records of a block, of their good pairs: those whose answers keep a label each, and differ,
    when the end is cut that does not fit a pack.

    pieces: p of them; `start` is the number of the first pair in its record; bounds: int64 [p + 1], first good pair of
    each, and k; number: int64 [k], of each pair in its record; answers: int64 [k, 2], numbers of chosen and rejected in
    their record; kept: int64 [k, 2], tokens of both that are kept.
    """

    block: TokenBlock
    pieces: Pieces
    bounds: np.ndarray
    number: np.ndarray
    answers: np.ndarray
    kept: np.ndarray
    counts: PackingCounts

    @functools.cached_property
    def places(self) -> dict[tuple[int, int], int]:
        """(record's index in the block, start) -> the piece."""
        found = zip(self.pieces.index.tolist(), self.pieces.start.tolist(), strict=True)
        return {place: piece for piece, place in enumerate(found)}

    def pairs(self, piece: int) -> slice:
        """The good pairs of a piece."""
        return slice(*self.bounds[piece : piece + 2].tolist())

    def tokens(self, piece: int) -> TokenizedPairs:
        """The prompt of a piece, its answers as far as they are kept, and its pairs of these."""
        block, pairs, index = self.block, self.pairs(piece), self.pieces.index[piece]
        begin, *begins = block.bounds[slice(*block.firsts[index : index + 2])].tolist()
        answers = self.answers[pairs].tolist()
        kept = dict(zip(chain(*answers), chain(*self.kept[pairs].tolist()), strict=True))
        place = {answer: number for number, answer in enumerate(sorted(kept))}
        return TokenizedPairs(
            block.tokens[begin : begins[0]],
            tuple(block.document(begins[answer], begins[answer] + kept[answer]) for answer in place),
            tuple((place[chosen], place[rejected]) for chosen, rejected in answers),
        )


def pieces_of_pairs(block: TokenBlock, indices: np.ndarray, seq_len: int, shared_prompt: bool) -> PairPieces:
    """The pieces of these records of a block, int64 [n], none of which is malformed or there twice."""
    count = block.first_pairs[indices + 1] - block.first_pairs[indices]
    number = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count)
    record = np.repeat(indices, count)
    pair, prompt = block.first_pairs[record] + number, block.firsts[record]
    shared = block.bounds[prompt + 1] - block.bounds[prompt] - 1
    part = prompt[:, None] + 1 + block.pairs[pair]
    begin = block.bounds[part]
    sizes, first_label = block.bounds[part + 1] - begin, block.first_learned(begin) - begin
    whole = (1 if shared_prompt else 2) * shared + sizes.sum(1)
    kept = np.stack(cut_lengths(sizes[:, 0], sizes[:, 1], whole - seq_len), 1)
    labelled = (first_label < sizes).all(1)
    fits = labelled & (first_label < kept).all(1)
    differs = (kept[:, 0] != kept[:, 1]) | (kept[:, 0] > block.common[pair])
    good = np.flatnonzero(fits & differs)
    record, number, answers, kept = record[good], number[good], block.pairs[pair[good]], kept[good]
    begins, length = np.ones(len(good), bool), np.minimum(whole, seq_len)[good]
    firsts = np.flatnonzero(np.diff(record, prepend=-1))
    lasts = np.append(firsts[1:], len(good))
    several = lasts - firsts > 1
    for first, last in zip(firsts[several].tolist(), lasts[several].tolist(), strict=True):
        begins[first:last] = False
        again = 0 if shared_prompt else int(shared[good[first]])
        own = answers[first:last].tolist(), sizes[good[first:last]].tolist(), whole[good[first:last]].tolist()
        for start, positions in _runs(*own, again, seq_len):
            begins[first + start], length[first + start] = True, positions
    heads = np.flatnonzero(begins)
    cut, left_out = np.maximum(0, whole[good] - seq_len), whole.sum() - whole[good].sum()
    return PairPieces(
        block,
        Pieces(record[heads], number[heads], length[heads]),
        np.append(heads, len(good)),
        number,
        answers,
        kept,
        PackingCounts(
            documents=len(indices),
            tokens_read=int(length[heads].sum() + cut.sum() + left_out),
            truncated=int((cut > 0).sum()),
            truncated_tokens=int(cut.sum()),
            extra_pieces=len(heads) + len(pair) - len(good) - len(indices),
            unlabeled=int((~labelled).sum()),
            long_prompts=int((labelled & ~fits).sum()),
            equal=int((fits & ~differs).sum()),
            tokens_left_out=int(left_out),
        ),
    )


def _runs(
    answers: list[list[int]], sizes: list[list[int]], whole: list[int], again: int, seq_len: int
) -> Iterator[tuple[int, int]]:
    """The first pair of each piece of a record's good pairs, and the positions that the piece takes.

    Args:
        answers: chosen and rejected of each pair. sizes: tokens of both. whole: positions of the pair by itself.
        again: positions of the prompt that each further answer takes.
    """
    held, start, total = set(answers[0]), 0, whole[0]
    for number, (pair, both) in enumerate(zip(answers[1:], sizes[1:], strict=True), start=1):
        more = sum(again + size for answer, size in zip(pair, both, strict=True) if answer not in held)
        if total + more <= seq_len:
            held, total = held | {*pair}, total + more
        else:
            yield start, min(total, seq_len)
            held, start, total = {*pair}, number, whole[number]
    yield start, min(total, seq_len)


@dataclass(frozen=True)
class LaidOutPairs:
    """A piece in its n positions of a pack.

    inputs, labels: int32 [n], already shifted; positions: int32 [n], rotary; branches: int64 [m, 3], (start, end,
    shared) of each answer, see `prefix_trees`; pairs: int64 [k, 2], branches of chosen and rejected.
    """

    inputs: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    branches: np.ndarray
    pairs: np.ndarray

    def __len__(self) -> int:
        return len(self.inputs)


def lay_out_pairs(pairs: TokenizedPairs, shared_prompt: bool) -> LaidOutPairs:
    """The positions of a piece, in the layout of the module's docstring."""
    prompt, last = pairs.prompt[:-1], pairs.prompt[-1:]
    shared = len(prompt)
    context = prompt, np.full(shared, IGNORE_INDEX, np.int32), np.arange(shared, dtype=np.int32)
    columns, place = list[tuple[np.ndarray, np.ndarray, np.ndarray]](), 0
    branches = list[tuple[int, int, int]]()
    for answer in pairs.answers:
        inputs = np.append(last, answer.tokens[:-1])
        labels = np.where(answer.loss_mask, answer.tokens, np.int32(IGNORE_INDEX))
        branch = inputs, labels, np.arange(shared, shared + len(inputs), dtype=np.int32)
        has_prompt = not (shared_prompt and branches)
        columns += [context, branch] if has_prompt else [branch]
        end = place + has_prompt * shared + len(inputs)
        branches.append((place, end, 0 if has_prompt else shared))
        place = end
    inputs, labels, positions = map(np.concatenate, zip(*columns, strict=True))
    return LaidOutPairs(inputs, labels, positions, np.array(branches), np.array(pairs.pairs))


class PackedPairDataset(PackedDataset):
    """Packs of preference pairs, for direct preference optimisation.

    See `PackedDataset` for the arguments, the shards and the state, `formats.parse_pair` for the records, and the
    module's docstring for pieces and positions. `tokenize` maps a record to TokenizedPairs, as `ChatTokenizer.pair`
    does. An item has

    - `inputs["documents"]`: NumPy int32 [m, 3], a row (start, end, shared) for each answer: its tokens are the first
      `shared` ones of the answer before it (from the beginning of the prompt on), and the range [start, end). The first
      answer to a prompt shares none; with `shared_prompt=False` no answer does, and each is a document. Rows are in
      order and without gaps;
    - `inputs["pairs"]`: NumPy int32 [k, 2], rows of documents: the chosen and the rejected answer of each pair;
    - `inputs["pair_ids"]`: NumPy int64 [k], the number of each pair's record in the data set, from 0;
    - `inputs["pair_numbers"]`: NumPy int64 [k], the number of each pair in its record, from 0.

    A pair is left out and counted if its prompt leaves no room for a label of each answer, or if its answers have equal
    tokens.
    """

    kind, made = "pairs", (TokenizedPairs,)
    parse = staticmethod(parse_pair)

    def __init__(self, *args: Any, shared_prompt: bool = True, **options: Any):
        self.shared_prompt = shared_prompt
        if options.get("share_prefixes"):
            raise ValueError("share_prefixes is True, but it is for documents; leave it out for preference pairs")
        super().__init__(*args, **options)

    def _pieces(self, block: TokenBlock, indices: np.ndarray) -> PairPieces:
        return pieces_of_pairs(block, indices, self.seq_len, self.shared_prompt)

    def make_pieces(self, block: TokenBlock, indices: np.ndarray) -> tuple[Pieces, PackingCounts]:
        """The pieces of these records."""
        found = self._pieces(block, indices)
        return found.pieces, found.counts

    def lay_out(self, pack: Pack) -> Sample:
        """The item of a pack, with the positions of its pieces by `lay_out_pairs`."""
        of_block = {
            block: self._pieces(tokens, np.unique(pack.index[pack.block == block]))
            for block, tokens in pack.tokens.items()
        }
        columns, branches, pairs = [], [np.zeros((0, 3), np.int64)], [np.zeros((0, 2), np.int64)]
        ids, numbers = [pack.record[:0]], [pack.record[:0]]
        place = before = 0  # positions and answers of the pieces before this one
        rows = (pack.block.tolist(), pack.index.tolist(), pack.start.tolist(), pack.record.tolist())
        for block, index, start, record in zip(*rows, strict=True):
            found = of_block[block]
            piece = found.places[index, start]
            laid = lay_out_pairs(found.tokens(piece), self.shared_prompt)
            columns.append((laid.inputs, laid.positions, laid.labels))
            branches.append(laid.branches + np.array([place, place, 0]))
            pairs.append(laid.pairs + before)
            ids.append(np.full(len(laid.pairs), record))
            numbers.append(found.number[found.pairs(piece)])
            place, before = place + len(laid), before + len(laid.branches)
        inputs, labels = self.item(columns, np.concatenate(branches))
        of_pairs = {"pair_ids": np.concatenate(ids), "pair_numbers": np.concatenate(numbers)}
        return inputs | {"pairs": np.concatenate(pairs).astype(np.int32)} | of_pairs, labels

    def identity(self) -> dict[str, Any]:
        """All that the stream of packs depends on, the layout of pairs included."""
        return super().identity() | {"shared_prompt": self.shared_prompt}
