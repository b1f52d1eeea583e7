"""A folder of documents and pairs, packed with kept tokens."""

import random

import numpy as np
import pytest
from support.corpus import chat_tokenizer, make_corpus, text
from support.jsonl import write_jsonl

from torchtitan_magi.data import PackedPairDataset, PackedSFTDataset

SEQ_LEN = 512


def make_folder(folder):
    """The corpus with pairs.jsonl beside its other files."""
    rng = random.Random(3)
    pairs = [{"prompt": text(rng, 20), "chosen": text(rng, 40), "rejected": text(rng, 30)} for _ in range(200)]
    write_jsonl(folder / "pairs.jsonl", pairs)
    return make_corpus(folder)


def corpus_fixtures():
    """Fixtures of a module: such a folder and its tokenizer."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory):
        return make_folder(tmp_path_factory.mktemp("corpus"))

    @pytest.fixture(scope="module")
    def tokenizer(folder):
        return chat_tokenizer(folder)

    return folder, tokenizer


def dataset(folder, tokenizer, cache, kind="documents", **options):
    options = {"seq_len": SEQ_LEN, "epochs": 1, "window_blocks": 2, "token_cache": cache} | options
    if kind == "pairs":
        return PackedPairDataset(folder / "pairs.jsonl", tokenizer, **options)
    return PackedSFTDataset(folder / "train.jsonl", tokenizer, **options)


def flats(items):
    return [[*(np.asarray(value).tolist() for value in inputs.values()), labels.tolist()] for inputs, labels in items]


def num_files(cache):
    return len(list(cache.glob("*.tokens")))


def damage(path, what):
    """Writes the file again with a bit or its end changed."""
    whole = path.read_bytes()
    index = 16 + int.from_bytes(whole[8:12], "little")
    place = {"magic": 2, "head": 20, "index": index + 9, "content": len(whole) - 2}.get(what)
    if place:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    else:
        path.write_bytes({"truncated": whole[:-4], "empty": b"", "longer": whole + b"x"}[what])
