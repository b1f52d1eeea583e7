"""Packs of documents for supervised fine-tuning.

Where documents share their beginnings, a label may be of several of them. What it weighs in the loss is added up over
these, so that the loss is that of the documents each by itself.
"""

from typing import Any, Literal, get_args

import numpy as np
import torch

from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.packed_dataset import IGNORE_INDEX, PackedDataset, Sample
from torchtitan_magi.data.packs.prefix_trees import paths_of
from torchtitan_magi.data.packs.stream import Pack
from torchtitan_magi.data.packs.window_plan import Pieces
from torchtitan_magi.data.records.formats import parse_document
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.wording import quoted, quoted_path

LongDocuments = Literal["truncate", "split"]
ANSWERS = 'records with "completions", which are packed as trees'


class PackedSFTDataset(PackedDataset):
    """Packs of documents: conversations or plain texts.

    See `PackedDataset` for the arguments, the shards and the state, and `formats.parse_document` for the records. An
    item has

    - `inputs["documents"]`: NumPy int32 [n, 2], half-open token ranges of the documents, in order and without gaps;
    - `inputs["records"]`: NumPy int64 [n], the number of each document's record in the data set, from 0.

    `long_documents` decides about documents longer than a pack: "truncate", or "split" into several documents (no label
    is lost at a cut). Documents and pieces without a label are left out.

    With `share_prefixes=True` documents of a window that begin with the same tokens are packed as a tree, see
    `prefix_trees`. Then

    - `inputs["documents"]` is int32 [n, 3], rows (start, end, shared): the tokens of a document are the first `shared`
      ones of the document before it (from its own beginning on), and the range [start, end), which may be empty;
    - `inputs["label_weights"]`: float64 [2, seq_len], what each label weighs if the loss is a mean over labels (how
      many documents it is of), and if it is a mean over documents (the sum of 1 / their number of labels). Answers of a
      record with "completions" are documents, each of which counts as often as its weight says.
    """

    kind = "documents"
    parse = staticmethod(parse_document)

    def __init__(self, *args: Any, long_documents: LongDocuments = "truncate", **options: Any):
        if long_documents not in get_args(LongDocuments):
            raise ValueError(
                f"long_documents is {quoted(long_documents)}; use one of {', '.join(get_args(LongDocuments))}"
            )
        self.long_documents = long_documents
        super().__init__(*args, **options)

    def make_pieces(self, block: TokenBlock, indices: np.ndarray) -> tuple[Pieces, PackingCounts]:
        """Pieces of documents. A document of n tokens has n - 1 positions, each with the token after it as its label.

        Shifting comes before cutting: the label of a piece's last position is the first token of the next piece, so no
        label is lost at a cut. "truncate" keeps the first piece only.
        """
        answers = block.firsts[indices + 1] - block.firsts[indices]
        document = np.repeat(block.firsts[indices] - (answers.cumsum() - answers), answers) + np.arange(answers.sum())
        if not self.options.share_prefixes and ((answers > 1).any() or (block.weights[document] != 1).any()):
            raise ValueError(f"{quoted_path(self.records.paths)} has {ANSWERS}; set magi.share_prefixes to true")
        record, begin = np.repeat(indices, answers), block.bounds[document]
        size = np.maximum(0, block.bounds[document + 1] - begin - 1)
        kept = size if self.long_documents == "split" else np.minimum(size, self.seq_len)
        num = -(-kept // self.seq_len)
        number = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)  # of a piece in its document
        start = number * self.seq_len
        length = np.minimum(np.repeat(kept, num) - start, self.seq_len)
        first = np.repeat(begin, num) + start + 1  # token that is the first label
        learned = (block.first_learned(first) < first + length) & (np.repeat(block.weights[document], num) > 0)
        start += np.repeat(begin - block.begins(record), num)
        return Pieces(np.repeat(record, num)[learned], start[learned], length[learned]), PackingCounts(
            documents=len(indices),
            tokens_read=int(size.sum()),
            truncated=int((kept < size).sum()),
            truncated_tokens=int((size - kept).sum()),
            split=int((num > 1).sum()),
            extra_pieces=int(np.maximum(0, num - 1).sum() + (answers - 1).sum()),
            unlabeled=int((~learned).sum() + (num == 0).sum()),
            tokens_left_out=int(length[~learned].sum()),
        )

    def lay_out(self, pack: Pack) -> Sample:
        """The item of a pack, each document with positions from 0."""
        own = pack.length - pack.shared
        ends = np.cumsum(own)
        begins = ends - own
        inputs, following = ([np.zeros(0, np.int32)] * (len(ends) + 1) for _ in range(2))
        changes = np.zeros(self.seq_len + 1, np.int64)  # 1 where a learned range begins, -1 behind it
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
        size = int(own.sum())
        positions = np.arange(size) - np.repeat(begins - pack.shared, own)
        bounds, learned, more = np.stack([begins, ends], axis=1), np.cumsum(changes[:size]) > 0, dict[str, Any]()
        if self.options.share_prefixes:
            weights = np.zeros((2, self.seq_len))
            _add_weights(weights, begins, pack)
            bounds, learned = np.column_stack([bounds, pack.shared]), weights[0, :size] > 0
            more["label_weights"] = torch.from_numpy(weights)
        labelled = np.where(learned, np.concatenate(following), IGNORE_INDEX)
        item, labels = self.item([(np.concatenate(inputs), positions, labelled)], bounds)
        return item | more | {"records": pack.record}, labels

    def identity(self) -> dict[str, Any]:
        """All that the stream of packs depends on, what happens to long documents and to common beginnings included."""
        own = {"long_documents": self.long_documents, "share_prefixes": self.options.share_prefixes}
        return super().identity() | own


def _add_weights(weights: np.ndarray, begins: np.ndarray, pack: Pack) -> None:
    """Adds what the labels of each piece weigh, see `PackedSFTDataset`. begins: int64 [n], where the own positions of
    each piece begin in the pack."""
    for number, path in enumerate(paths_of(pack.shared.tolist(), begins.tolist())):
        learned, weight = _labels(pack, number)
        where = np.concatenate(
            [
                place + np.flatnonzero(learned[first:last])
                for (first, place), last in zip(path, [*(first for first, _ in path[1:]), len(learned)], strict=True)
            ]
        )
        weights[:, where] += [[weight], [weight / len(where)]]


def _labels(pack: Pack, number: int) -> tuple[np.ndarray, float]:
    """bool [length]: which positions of a piece have a label; and how often it counts."""
    tokens = pack.tokens[int(pack.block[number])]
    first = int(tokens.begins(pack.index[number]) + pack.start[number])
    document = tokens.bounds.searchsorted(first, side="right") - 1
    learned = tokens.document(first + 1, first + 1 + int(pack.length[number])).loss_mask
    return learned, float(tokens.weights[document])
