"""A run with magi.share_prefixes is sized by its trees: masks, packs and words are those of training."""

import json
import re
import shutil

import numpy as np
import pytest
from support.jsonl import write_jsonl
from support.published import llama
from support.runs import corpus
from support.trees import answers_files, trees_file

from torchtitan_magi.data import PackedSFTDataset
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer
from torchtitan_magi.masks.builders import shared_prompt, sliding_window, varlen_causal
from torchtitan_magi.sizing import command
from torchtitan_magi.sizing.sample_packs import make_packs
from torchtitan_magi.sizing.strategies.pack_masks import mask_of, tokens_and_parents
from torchtitan_magi.training.batches.microbatch import Microbatch

SEQ_LEN = 2048
RUN = """
[model]
hf_assets_path = "model"
[training]
dataset = "{dataset}"
dataset_path = "{path}"
seq_len = 2048
local_batch_size = 2
steps = 6
[parallelism]
context_parallel_degree = 4
data_parallel_shard_degree = 1
[magi]
share_prefixes = {shared}
{more}
"""


@pytest.fixture
def size(tmp_path, monkeypatch, capsys):
    """Sizes a run on records; what is printed, and the figures."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus() / "tokenizer", "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(llama(512, 1024, 2, 8, num_key_value_heads=2)))

    def size(path, *options, shared="true", dataset="sft", more=""):
        (tmp_path / "run.toml").write_text(RUN.format(path=path, shared=shared, dataset=dataset, more=more))
        command.main(["run.toml", "--packs", "99", "--json", "size.json", *options])
        return " ".join(capsys.readouterr().out.split()), json.loads((tmp_path / "size.json").read_text())

    return size


def dataset(path, shared=True):
    return PackedSFTDataset(path, load_chat_tokenizer(corpus() / "tokenizer"), SEQ_LEN, epochs=1, share_prefixes=shared)


@pytest.mark.parametrize("path", [trees_file, lambda: answers_files()[0]], ids=["trees", "answers"])
def test_masks_of_sampled_packs_are_those_of_training(path):
    microbatches = [Microbatch.of(inputs, labels, None) for inputs, labels in dataset(path())]
    packs = make_packs(str(path()), SEQ_LEN, 99, 0, corpus() / "tokenizer", share_prefixes=True)
    assert len(packs) == len(microbatches)
    for pack, microbatch in zip(packs, microbatches, strict=True):
        assert (tokens_and_parents(pack)[1] >= 0).any()
        for window in (0, 100):
            assert mask_of(pack, window) == microbatch.masks([window])[0].canonical()


def test_masks_of_documents_and_pairs_are_those_of_their_builders():
    lengths = np.array([300, 40, 7, 1])
    bounds = np.append(0, lengths.cumsum())
    assert mask_of(lengths) == varlen_causal(bounds).canonical()
    assert mask_of(lengths, 64) == sliding_window(bounds, 64).canonical()
    pairs = np.array([[30, 8, 12], [5, 1, 2]])
    assert mask_of(pairs, 9) == shared_prompt(pairs, window=9).canonical()


def test_a_run_is_sized_by_its_trees(size):
    said, figures = size(trees_file())
    packs = dataset(trees_file())
    trees, attention = len(list(packs)), figures["run"]["step"]["attention"]
    counts, sharing = packs.counts, figures["run"]["sharing"]
    assert sharing == {
        "records": 37,
        "tokens": counts.tokens,
        "tokens_flat": counts.tokens + counts.shared_tokens,
        "records_per_step": 2 * counts.pieces / counts.packs,
        "steps_per_epoch": pytest.approx(trees / 2),
    }
    assert f" 6 steps = 0 min; {12 / trees:.3g} epochs. magi.share_prefixes: {counts.tokens:,} tokens in place" in said
    assert re.search(r" packs? of \S+trees.jsonl: \d+ trees in one, the longest ", said)
    assert figures["run"]["tokens_per_step"] == pytest.approx(2 * counts.tokens / trees)
    assert figures["packs"][0]["tokens"] <= SEQ_LEN
    assert figures["run"]["gpus"] == 4  # as the degrees say, where no --gpus is given
    assert [row["strategy"] for row in figures["summary"]] == ["ours", "all-gather", "Ulysses", "min-heap"]
    assert "ring: cuts causal documents; a tree is none" in said

    said, flat = size(trees_file(), shared="false")
    assert "share_prefixes" not in said
    assert flat["run"]["sharing"] is None
    assert flat["run"]["epochs"] <= figures["run"]["epochs"] / 2
    by_option = size(trees_file(), "--share-prefixes", shared="false")[1]["run"]
    assert by_option["sharing"] == sharing
    assert by_option["step"]["attention"] == attention


def test_answers_are_sized_as_so_many_records(size):
    said, figures = size(answers_files()[0])
    assert "tokens in place of" in said
    sharing = figures["run"]["sharing"]
    assert sharing["records"] == 6
    assert sharing["records_per_step"] * sharing["steps_per_epoch"] == pytest.approx(18)  # one of four has weight 0


def test_what_cannot_be_counted_is_said_or_refused(size, capsys):
    missing = "magi.share_prefixes is true; what records share the data will say, and it is not counted."
    assert missing in size("nowhere.jsonl")[0]
    said, figures = size(corpus() / "validation.jsonl")
    assert "no two of 60 records that are packed together begin with the same tokens." in said
    assert figures["run"]["sharing"]["tokens"] == figures["run"]["sharing"]["tokens_flat"]
    with pytest.raises(SystemExit):
        size("pairs.jsonl", dataset="dpo")
    refused = "magi.share_prefixes is true and training.dataset 'dpo'; it is for 'sft': use that, or false"
    assert refused in capsys.readouterr().err


def test_rollouts_are_sized_as_trees_and_without_a_file_by_the_histogram(size, tmp_path):
    answers = [{"completion_ids": [7] * 100, "reward": number} for number in range(4)]
    records = [{"prompt_ids": [number + 1] * 400, "completions": answers} for number in range(6)]
    write_jsonl(path := tmp_path / "rollouts.jsonl", records)
    (pack, *_) = make_packs(str(path), 800, 1, tokenizer=corpus() / "tokenizer", dataset="rollouts")
    tokens, parents = tokens_and_parents(pack)
    assert (tokens.tolist(), parents.tolist()) == ([399, *[100] * 4], [-1, 0, 0, 0, 0])
    said, figures = size(path, shared="false", dataset="rollouts")
    assert figures["packs"][0]["tokens"] <= SEQ_LEN
    assert "is not there yet" not in said
    assert "what open_trainer will be given is not there yet" in size("", shared="false", dataset="rollouts")[0]


def test_records_are_read_and_packed_as_the_runs_file_says(size, tmp_path, capsys):
    long = {"text": "the hat " * 4000}
    write_jsonl(path := tmp_path / "data.jsonl", [{"a": 1}, long, long])
    with pytest.raises(SystemExit):
        size(path, shared="false")
    assert "data.jsonl:1: the record has only the keys ['a']" in capsys.readouterr().err
    skips = 'bad_records = "skip"\ntoken_cache = "tokens"'
    truncated = size(path, shared="false", more=skips)[1]["run"]["epochs"]
    assert list((tmp_path / "tokens").iterdir())
    split = size(path, shared="false", more=f'{skips}\nlong_documents = "split"')[1]["run"]["epochs"]
    assert split < truncated / 2
    write_jsonl(path, [{"prompt": "the hat " * 100, "chosen": "a cat", "rejected": "a dog"}])
    shares, apart = (
        size(path, shared="false", dataset="dpo", more=more)[1]["packs"][0]["tokens"]
        for more in ("", "[magi.dpo]\nshared_prompt = false")
    )
    assert apart > 1.9 * shares
