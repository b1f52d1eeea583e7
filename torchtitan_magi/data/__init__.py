"""Training data: records -> tokens and labels -> packs -> batches. Knows nothing of torchtitan."""

from torchtitan_magi.data.chat import ChatTokenizer
from torchtitan_magi.data.corpus import Corpus
from torchtitan_magi.data.documents import IGNORE_INDEX, TokenizedDocument, TokenizedPair
from torchtitan_magi.data.jsonl import JsonlFile
from torchtitan_magi.data.packed import PackedDataset, collate_packs
from torchtitan_magi.data.packing import PackingCounts, pack_best_fit
from torchtitan_magi.data.pairs import PackedPairDataset
from torchtitan_magi.data.records import RecordFile
from torchtitan_magi.data.sft import PackedSFTDataset

__all__ = [
    "IGNORE_INDEX",
    "ChatTokenizer",
    "Corpus",
    "JsonlFile",
    "PackedDataset",
    "PackedPairDataset",
    "PackedSFTDataset",
    "PackingCounts",
    "RecordFile",
    "TokenizedDocument",
    "TokenizedPair",
    "collate_packs",
    "pack_best_fit",
]
