"""Documents as pieces of packs, and the positions of their tokens there."""

from typing import NamedTuple

import numpy as np

from torchtitan_magi.data.datasets.packed_dataset import IGNORE_INDEX
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.stream import Pack
from torchtitan_magi.data.packs.window_plan import Pieces
from torchtitan_magi.data.tokens.token_block import TokenBlock


def parts_of(block: TokenBlock, indices: np.ndarray) -> np.ndarray:
    """int64 [m]: the parts of these records, record by record."""
    number = block.firsts[indices + 1] - block.firsts[indices]
    return np.repeat(block.firsts[indices] - (number.cumsum() - number), number) + np.arange(number.sum())


def cut_documents(
    block: TokenBlock, indices: np.ndarray, seq_len: int, wanted: np.ndarray, split: bool
) -> tuple[Pieces, PackingCounts]:
    """Pieces of the documents that are parts of these records, those with a label; and the counts.

    A document of n tokens has n - 1 positions, each with the token after it as its label. Shifting comes before
    cutting: the label of a piece's last position is the first token of the next piece, so no label is lost at a cut.

    Args:
        indices: int64 [n].
        wanted: bool [p], which parts of the block are learned.
        split: whether documents of more than seq_len positions become several pieces; otherwise they end there.
    """
    parts = parts_of(block, indices)
    record = np.repeat(indices, block.firsts[indices + 1] - block.firsts[indices])
    begin = block.bounds[parts]
    size = np.maximum(0, block.bounds[parts + 1] - begin - 1)
    kept = size if split else np.minimum(size, seq_len)
    num = -(-kept // seq_len)
    number = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)  # of a piece in its document
    start = number * seq_len
    length = np.minimum(np.repeat(kept, num) - start, seq_len)
    first = np.repeat(begin, num) + start + 1  # token that is the first label
    learned = (block.first_learned(first) < first + length) & np.repeat(wanted[parts], num)
    start += np.repeat(begin - block.begins(record), num)
    return Pieces(np.repeat(record, num)[learned], start[learned], length[learned]), PackingCounts(
        documents=len(indices),
        tokens_read=int(size.sum()),
        truncated=int((kept < size).sum()),
        truncated_tokens=int((size - kept).sum()),
        split=int((num > 1).sum()),
        extra_pieces=int(np.maximum(0, num - 1).sum() + len(parts) - len(indices)),
        unlabeled=int((~learned).sum() + (num == 0).sum()),
        tokens_left_out=int(length[~learned].sum()),
    )


class DocumentColumns(NamedTuple):
    """The t positions of a pack of n documents.

    inputs, following: int32 [t], the token of each position and the one after it; learned: bool [t], whether a document
    that has the position as its own learns the latter; positions: int64 [t], rotary, from 0 in each document; branches:
    int64 [n, 3], see `prefix_trees`.
    """

    inputs: np.ndarray
    following: np.ndarray
    learned: np.ndarray
    positions: np.ndarray
    branches: np.ndarray

    def labels(self, learned: np.ndarray) -> np.ndarray:
        """int32 [t]: the tokens to predict. learned: bool [t], where."""
        return np.where(learned, self.following, np.int32(IGNORE_INDEX))


def lay_out_documents(pack: Pack) -> DocumentColumns:
    """The positions of a pack's documents."""
    own = pack.length - pack.shared
    ends = np.cumsum(own)
    begins = ends - own
    inputs, following = ([np.zeros(0, np.int32)] * (len(ends) + 1) for _ in range(2))
    changes = np.zeros(int(own.sum()) + 1, np.int64)  # 1 where a learned range begins, -1 behind it
    for block, tokens in pack.tokens.items():
        numbers = np.flatnonzero(pack.block == block)
        first = tokens.begins(pack.index[numbers]) + pack.start[numbers] + pack.shared[numbers]
        last = first + own[numbers]
        for number, start, stop in zip(numbers.tolist(), first.tolist(), last.tolist(), strict=True):
            inputs[number] = tokens.tokens[start:stop]
            following[number] = tokens.tokens[start + 1 : stop + 1]
        of, begin, end = tokens.learned_in(first + 1, last + 1)
        shift = (begins[numbers] - first - 1)[of]
        np.add.at(changes, begin + shift, 1)
        np.subtract.at(changes, end + shift, 1)
    positions = np.arange(own.sum()) - np.repeat(begins - pack.shared, own)
    branches = np.stack([begins, ends, pack.shared], axis=1)
    return DocumentColumns(
        np.concatenate(inputs), np.concatenate(following), np.cumsum(changes[:-1]) > 0, positions, branches
    )
