"""The demonstration data: they fit the debug models and hold what people's data hold, short and long."""

import json

import numpy as np
import pytest
from support.corpus import DEMO, SPECIAL, chat_tokenizer

from torchtitan_magi.data import JsonlFile, PackedPairDataset, PackedSFTDataset


@pytest.fixture(scope="module")
def chat():
    return chat_tokenizer(DEMO)


def test_tokenizer_fits_the_debug_models(chat):
    assert chat.tokenizer.get_vocab_size() == 2048
    for text in ("def f(x):\n    return x ** 2  # ☃", "\x00 é 🎩"):
        assert chat.tokenizer.decode(chat.tokenizer.encode(text).ids) == text
    for token in SPECIAL:
        assert len(chat.tokenizer.encode(token).ids) == 1


def test_conversations_have_a_long_tail_and_several_turns(chat):
    records = list(JsonlFile(DEMO / "train.jsonl"))
    lengths = sorted(len(chat(record).tokens) for record in records)
    assert len(records) == 200
    assert lengths[100] < 200
    assert lengths[-1] > 5000
    turns = [sum(message["role"] == "assistant" for message in record["messages"]) for record in records]
    assert min(turns) == 1
    assert sum(turn > 1 for turn in turns) > 20
    answers = {record["messages"][-1]["content"] for record in records}
    assert not [r for r in JsonlFile(DEMO / "validation.jsonl") if r["messages"][-1]["content"] in answers]


def test_assistant_text_is_what_is_learned(chat):
    for record in list(JsonlFile(DEMO / "train.jsonl"))[:50]:
        document = chat(record)
        expected = [m["content"] + "<|im_end|>" for m in record["messages"] if m["role"] == "assistant"]
        learned = chat.tokenizer.decode(document.tokens[document.loss_mask].tolist(), skip_special_tokens=False)
        assert learned == "".join(expected)
        assert int(document.tokens[0]) == chat.bos_id


def test_demo_data_packs_tightly(chat):
    packs = PackedSFTDataset(DEMO / "train.jsonl", chat, 2048, epochs=1, long_documents="split")
    assert len(list(packs)) > 20
    assert packs.counts.fill > 0.97
    assert packs.counts.unlabeled == 0


def test_demo_pairs_have_every_form_and_a_long_tail(chat):
    lines = [json.loads(line) for line in (DEMO / "pairs.jsonl").read_text().splitlines()]
    forms = {(type(line.get("prompt")).__name__, type(line["chosen"]).__name__) for line in lines}
    assert forms == {("str", "str"), ("list", "list"), ("NoneType", "list")}
    packs = PackedPairDataset(DEMO / "pairs.jsonl", chat.pair, 16384, epochs=1)
    found = np.concatenate([inputs["documents"][inputs["pairs"]] for inputs, _ in packs])  # chosen, rejected
    lengths = sorted((found[:, 1, 1] - found[:, 0, 0]).tolist())
    assert len(lengths) == len(lines) == 100
    assert lengths[50] < 500
    assert lengths[-1] > 5000
    assert packs.counts.fill > 0.97
    assert packs.counts.equal + packs.counts.long_prompts + packs.counts.unlabeled == 0
    assert found[:, 1, 2].max() > 200  # of the prompts
