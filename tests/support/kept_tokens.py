"""A folder of documents and pairs, packed with kept tokens."""

import json
import random

import numpy as np
from support.corpus import make_corpus, text

from torchtitan_magi.data import PackedPairDataset, PackedSFTDataset

SEQ_LEN = 512


def make_folder(folder):
    """The corpus with pairs.jsonl beside its other files."""
    rng = random.Random(3)
    pairs = [{"prompt": text(rng, 20), "chosen": text(rng, 40), "rejected": text(rng, 30)} for _ in range(200)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return make_corpus(folder)


def dataset(folder, tokenizer, cache, kind="documents", **options):
    options = {"seq_len": SEQ_LEN, "epochs": 1, "window_blocks": 2, "token_cache": cache} | options
    if kind == "pairs":
        return PackedPairDataset(folder / "pairs.jsonl", tokenizer, **options)
    return PackedSFTDataset(folder / "train.jsonl", tokenizer, **options)


def flats(items):
    return [[*(np.asarray(value).tolist() for value in inputs.values()), labels.tolist()] for inputs, labels in items]


def num_files(cache):
    return len(list(cache.glob("*.tokens")))
