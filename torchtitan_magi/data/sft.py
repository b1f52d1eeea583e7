"""Packs of documents for supervised fine-tuning."""

from typing import Any, get_args

from torchtitan_magi.data.documents import LongDocuments, Piece, cut_document
from torchtitan_magi.data.formats import parse_document
from torchtitan_magi.data.packed import PackedDataset
from torchtitan_magi.data.packing import PackingCounts


class PackedSFTDataset(PackedDataset):
    """Packs of documents: conversations or plain texts.

    See `PackedDataset` for the arguments, the shards and the state, and `formats.parse_document` for the records. An
    item's boundaries are `inputs["documents"]`: NumPy int32 [n, 2], half-open token ranges of the documents, in order
    and without gaps. `long_documents` decides about documents longer than a pack: "truncate", or "split" into several
    documents (no label is lost at a cut). Documents and pieces without a label are left out.
    """

    bounds_name = "documents"
    parse = staticmethod(parse_document)

    def __init__(self, *args: Any, long_documents: LongDocuments = "truncate", **options: Any):
        if long_documents not in get_args(LongDocuments):
            raise ValueError(f"long_documents is {long_documents!r}; use one of {', '.join(get_args(LongDocuments))}")
        self.long_documents = long_documents
        super().__init__(*args, **options)

    def make_pieces(self, record: int, content: dict[str, Any]) -> tuple[list[Piece], PackingCounts]:
        document = self.tokenize(content)
        pieces, removed = cut_document(record, document, self.seq_len, self.long_documents)
        labelled = [piece for piece in pieces if piece.has_label]
        return labelled, PackingCounts(
            documents=1,
            tokens_read=max(0, len(document.tokens) - 1),
            truncated=int(removed > 0),
            truncated_tokens=removed,
            split=int(len(pieces) > 1),
            extra_pieces=max(0, len(pieces) - 1),
            unlabeled=len(pieces) - len(labelled) if pieces else 1,
            tokens_left_out=sum(map(len, pieces)) - sum(map(len, labelled)),
        )

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"long_documents": self.long_documents}
