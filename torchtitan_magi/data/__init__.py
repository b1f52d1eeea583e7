"""Training data: records -> tokens and labels -> packs -> batches. Knows nothing of torchtitan."""

from torchtitan_magi.data.datasets.packed_dataset import IGNORE_INDEX, PackedDataset, collate_packs
from torchtitan_magi.data.datasets.pairs import PackedPairDataset
from torchtitan_magi.data.datasets.rollouts import PackedRolloutDataset, group_advantages
from torchtitan_magi.data.datasets.sft import PackedSFTDataset
from torchtitan_magi.data.packs.best_fit import PackingCounts, pack_best_fit
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.records.jsonl import JsonlFile
from torchtitan_magi.data.records.record_file import RecordFile
from torchtitan_magi.data.tokens.chat import ChatTokenizer
from torchtitan_magi.data.tokens.documents import TokenizedAnswers, TokenizedDocument, TokenizedPairs

__all__ = [
    "IGNORE_INDEX",
    "ChatTokenizer",
    "Corpus",
    "JsonlFile",
    "PackedDataset",
    "PackedPairDataset",
    "PackedRolloutDataset",
    "PackedSFTDataset",
    "PackingCounts",
    "RecordFile",
    "TokenizedAnswers",
    "TokenizedDocument",
    "TokenizedPairs",
    "collate_packs",
    "group_advantages",
    "pack_best_fit",
]
