"""Records whose tokens say which record and which place they are from."""

import numpy as np
from support.jsonl import write_jsonl

from torchtitan_magi.data import PackedSFTDataset, TokenizedDocument

SEQ_LEN = 64


def tokenize(record):
    """`text` is "id length first": tokens id * 1000, id * 1000 + 1, ..., the loss on those from `first` on."""
    name, length, first = map(int, record["text"].split())
    tokens = np.arange(name * 1000, name * 1000 + length, dtype=np.int32)
    return TokenizedDocument(tokens, np.arange(length) >= first)


def write(path, documents):
    return write_jsonl(path, ({"text": " ".join(map(str, d))} for d in documents))


def dataset(path, **options):
    defaults = {"seq_len": SEQ_LEN, "seed": 5, "long_documents": "split", "epochs": 1, "window_blocks": 4}
    return PackedSFTDataset(path, tokenize, **(defaults | options))


def flats(batches):
    names = ("input", "positions", "documents")
    return [[*(inputs[name].tolist() for name in names), labels.tolist()] for inputs, labels in batches]
