"""Packs of documents for supervised fine-tuning.

Where documents share their beginnings, a label may be of several of them. What it weighs in the loss is added up over
these, so that the loss is that of the documents each by itself.
"""

from typing import Any, Literal, get_args

import numpy as np
import torch

from torchtitan_magi.data.datasets.documents import cut_documents, lay_out_documents, parts_of
from torchtitan_magi.data.datasets.packed_dataset import PackedDataset, Sample
from torchtitan_magi.data.packs.best_fit import PackingCounts
from torchtitan_magi.data.packs.prefix_trees import paths_of
from torchtitan_magi.data.packs.stream import Pack
from torchtitan_magi.data.packs.window_plan import Pieces
from torchtitan_magi.data.records.formats import parse_document
from torchtitan_magi.data.tokens.documents import TokenizedAnswers, TokenizedDocument
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

    kind, made = "documents", (TokenizedDocument, TokenizedAnswers)
    parse = staticmethod(parse_document)

    def __init__(self, *args: Any, long_documents: LongDocuments = "truncate", **options: Any):
        if long_documents not in get_args(LongDocuments):
            raise ValueError(
                f"long_documents is {quoted(long_documents)}; use one of {', '.join(get_args(LongDocuments))}"
            )
        self.long_documents = long_documents
        super().__init__(*args, **options)

    def make_pieces(self, block: TokenBlock, indices: np.ndarray) -> tuple[Pieces, PackingCounts]:
        """Pieces of documents, see `cut_documents`."""
        if not self.options.share_prefixes:
            parts = parts_of(block, indices)
            if len(parts) > len(indices) or (block.weights[parts] != 1).any():
                raise ValueError(f"{quoted_path(self.records.paths)} has {ANSWERS}; set magi.share_prefixes to true")
        return cut_documents(block, indices, self.seq_len, block.weights > 0, self.long_documents == "split")

    def lay_out(self, pack: Pack) -> Sample:
        """The item of a pack, each document with positions from 0."""
        columns = lay_out_documents(pack)
        learned, more = columns.learned, dict[str, Any]()
        if self.options.share_prefixes:
            weights = np.zeros((2, self.seq_len))
            _add_weights(weights, columns.branches[:, 0], pack)
            learned = weights[0, : len(learned)] > 0
            more["label_weights"] = torch.from_numpy(weights)
        bounds = columns.branches[:, : 2 + self.options.share_prefixes]
        item, labels = self.item([(columns.inputs, columns.positions, columns.labels(learned))], bounds)
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
