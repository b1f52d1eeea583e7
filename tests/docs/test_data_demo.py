"""The demonstration data: complete, the same every time, usable as it is."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.corpus import chat_tokenizer

from torchtitan_magi.data import JsonlFile, PackedPairDataset, PackedSFTDataset

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_demo_data.py"
FILES = ["train.jsonl", "validation.jsonl", "pairs.jsonl", "validation_pairs.jsonl"]
FILES += ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]


def make(out_dir):
    return subprocess.run([sys.executable, SCRIPT, out_dir], capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("assets") / "demo"
    result = make(out_dir)
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    return out_dir


@pytest.fixture(scope="module")
def chat(demo):
    return chat_tokenizer(demo)


IMPORTED = """
import asyncio, json, pathlib, runpy, sys, torch
json.dumps.__doc__ = asyncio.__doc__ = "What another package writes here."
runpy.run_path(sys.argv[1])["make_demo_data"](pathlib.Path(sys.argv[2]))
"""


def test_whoever_makes_it_makes_the_same_bytes_and_nothing_left_over(demo, tmp_path):
    """In a process without docstrings that has imported much and changed what it imported."""
    subprocess.run([sys.executable, "-OO", "-c", IMPORTED, SCRIPT, tmp_path], check=True)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert files == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (demo / name).read_bytes()


def test_complete_data_is_left_alone_and_incomplete_data_completed(demo, tmp_path):
    make(tmp_path)
    before = (tmp_path / "train.jsonl").stat().st_mtime_ns
    assert "left alone" in make(tmp_path).stdout
    assert (tmp_path / "train.jsonl").stat().st_mtime_ns == before
    (tmp_path / "tokenizer/tokenizer.json").unlink()
    make(tmp_path)
    assert (tmp_path / "tokenizer/tokenizer.json").read_bytes() == (demo / "tokenizer/tokenizer.json").read_bytes()


def test_tokenizer_fits_the_debug_models(chat):
    assert chat.tokenizer.get_vocab_size() == 2048
    for text in ("def f(x):\n    return x ** 2  # ☃", "\x00 é 🎩"):
        assert chat.tokenizer.decode(chat.tokenizer.encode(text).ids) == text
    for token in ("<|begin_of_text|>", "<|end_of_text|>", "<|im_start|>", "<|im_end|>"):
        assert len(chat.tokenizer.encode(token).ids) == 1


def test_conversations_have_a_long_tail_and_several_turns(demo, chat):
    records = JsonlFile(demo / "train.jsonl")
    lengths = sorted(len(chat(records[i]).tokens) for i in range(len(records)))
    assert len(records) > 1000
    assert lengths[len(lengths) // 2] < 200
    assert lengths[-1] > 5000
    turns = [sum(m["role"] == "assistant" for m in records[i]["messages"]) for i in range(len(records))]
    assert min(turns) == 1
    assert sum(t > 1 for t in turns) > 50
    validation = JsonlFile(demo / "validation.jsonl")
    train = {records[i]["messages"][-1]["content"] for i in range(len(records))}
    assert not any(validation[i]["messages"][-1]["content"] in train for i in range(len(validation)))


def test_assistant_text_is_what_is_learned(demo, chat):
    records = JsonlFile(demo / "train.jsonl")
    for index in range(50):
        document = chat(records[index])
        expected = [m["content"] + "<|im_end|>" for m in records[index]["messages"] if m["role"] == "assistant"]
        learned = chat.tokenizer.decode(document.tokens[document.loss_mask].tolist(), skip_special_tokens=False)
        assert learned == "".join(expected)
        assert int(document.tokens[0]) == chat.bos_id


def test_demo_data_packs_tightly(demo, chat):
    packs = PackedSFTDataset(demo / "train.jsonl", chat, 2048, epochs=1, long_documents="split")
    assert len(list(packs)) > 100
    assert packs.counts.fill > 0.97
    assert packs.counts.unlabeled == 0


def test_demo_pairs_have_every_form_and_a_long_tail(demo, chat):
    lines = [json.loads(line) for line in (demo / "pairs.jsonl").read_text().splitlines()]
    forms = {(type(line.get("prompt")).__name__, type(line["chosen"]).__name__) for line in lines}
    assert forms == {("str", "str"), ("list", "list"), ("NoneType", "list")}
    packs = PackedPairDataset(demo / "pairs.jsonl", chat.pair, 16384, epochs=1)
    lengths = sorted(int(end - start) for inputs, _ in packs for start, _, _, end in inputs["pairs"])
    assert len(lengths) > 1000
    assert lengths[len(lengths) // 2] < 500
    assert lengths[-1] > 5000
    counts = packs.counts
    assert counts.fill > 0.97
    assert counts.equal + counts.long_prompts + counts.unlabeled == 0
    prompts = [start for inputs, _ in packs for start in np.diff(inputs["pairs"][:, :2]).ravel().tolist()]
    assert max(prompts) > 1000
