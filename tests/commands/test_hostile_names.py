"""Names that would steer a terminal, and pipes in place of files: each reader ends in one printable line."""

import json
import os
import re
import shutil

import numpy as np
import pytest
from support.corpus import chat_tokenizer, make_corpus
from support.errors import one_line

from torchtitan_magi import verify
from torchtitan_magi.data import Corpus, PackedSFTDataset
from torchtitan_magi.data.__main__ import main as inspect
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer, load_tokenizer
from torchtitan_magi.data.tokens.chat import load_chat_template
from torchtitan_magi.data.tokens.special_tokens import read_special_tokens
from torchtitan_magi.data.tokens.token_writer import unusable
from torchtitan_magi.models.model_config import ModelConfig, Rope, read_model_config
from torchtitan_magi.planning.cost_model import CostModel
from torchtitan_magi.sizing.command import main as report
from torchtitan_magi.sizing.run_file import RunFile, options_of
from torchtitan_magi.sizing.sample_packs import read_lengths
from torchtitan_magi.training.batches.template_date import template_date
from torchtitan_magi.training.checkpoints.digests import check_digests, check_sizes
from torchtitan_magi.training.checkpoints.export import read_files
from torchtitan_magi.training.checkpoints.hf_weights import INDEX, check_weights
from torchtitan_magi.training.objectives.reference_file import read_logprobs, write_logprobs
from torchtitan_magi.training.process.run_folder import check_writable, lock_folder
from torchtitan_magi.training.settings.values import read_toml

NAME = "a\n\x1b[31m<b>" + os.fsdecode(b"\xff")  # a line, red, a tag, no UTF-8
MODEL = ModelConfig("llama3", 64, 2, 8, 2, 8, 176, 100, 1e-5, Rope(5e5), max_positions=128)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def hostile(tmp_path):
    (tmp_path / NAME).mkdir()
    return tmp_path / NAME


def written(path, text):
    path.write_text(text)
    return path


def refuse(text):
    raise ValueError(text)


def write_reference(folder):
    (folder / "r.npz").mkdir()
    write_logprobs(folder / "r.npz", {"model": "", "data": ""}, np.zeros((1, 2)))


READERS = {
    "no records": lambda folder: Corpus(folder / "none.jsonl"),
    "empty records": lambda folder: Corpus(written(folder / "a.jsonl", "")),
    "malformed records": lambda folder: PackedSFTDataset(written(folder / "a.jsonl", "{}\n"), None, 8),
    "no folder of records": Corpus,
    "tokenizer": load_tokenizer,
    "broken tokenizer": lambda folder: load_tokenizer(written(folder / "tokenizer.json", "{}").parent),
    "template": lambda folder: load_chat_template(folder / "none"),
    "broken template": lambda folder: load_chat_template(written(folder / "tokenizer_config.json", "[").parent),
    "cache": lambda folder: refuse(unusable(folder, OSError(28, "No space left on device"))),
    "config": read_model_config,
    "broken config": lambda folder: read_model_config(written(folder / "config.json", "{").parent),
    "field of config": lambda folder: read_model_config(written(folder / "config.json", "{}").parent),
    "weights": lambda folder: check_weights(folder, MODEL),
    "broken weights": lambda folder: check_weights(written(folder / "a.safetensors", "{").parent, MODEL),
    "index": lambda folder: check_weights(written(folder / INDEX, "{}").parent, MODEL),
    "names in an index": lambda folder: check_weights(
        written(folder / INDEX, json.dumps({"weight_map": {"a": NAME}})).parent, MODEL
    ),
    "export": lambda folder: read_files(folder / "none"),
    "export of a list": lambda folder: read_files(written(folder / "config.json", "[]").parent),
    "checkpoint": check_sizes,
    "broken checkpoint": lambda folder: check_sizes(written(folder / ".metadata", "3").parent),
    "digests": check_digests,
    "cost model": lambda folder: CostModel.load(folder / "cost.json"),
    "lengths": lambda folder: read_lengths(folder / "lengths.txt"),
    "run file": lambda folder: options_of(RunFile(str(folder / "run.toml")), with_heads=True),
    "reference": lambda folder: read_logprobs(written(folder / "r.npz", "3"), {}, 1, "delete it"),
    "no room for a reference": write_reference,
    "TOML": lambda folder: read_toml(str(folder / "run.toml")),
    "dump folder": lambda folder: check_writable(str(written(folder / "file", "") / "inside")),
    "lock": lambda folder: lock_folder(str(written(folder / "file", "") / "inside")),
    "date": lambda folder: template_date("", str(written(folder / "template_date", "today\x1b").parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_names_in_errors_are_printable(name, hostile):
    with pytest.raises(ValueError, match="31m<b>") as error:
        READERS[name](hostile)
    assert str(error.value).isprintable()


def test_the_inspection_shows_names_and_prints_no_controls(made, hostile, capsys):
    shutil.copytree(made / "tokenizer", hostile / "tokenizer")
    (hostile / f"{NAME}.jsonl").write_text('{"text": "a"}\n{}\n')
    page = hostile / "page.html"
    inspect([str(hostile), "--tokenizer", str(hostile / "tokenizer"), "--html", str(page)])
    printed, text = capsys.readouterr().out, page.read_text()
    assert all(line.isprintable() for line in [*printed.splitlines(), *text.splitlines()])
    assert r"a\n\x1b[31m<b>\udcff.jsonl" in printed
    assert r"a\n\x1b[31m&lt;b&gt;\udcff.jsonl" in text
    assert "31m<b>" not in text


def test_names_in_the_log_are_printable(made, hostile, caplog):
    caplog.set_level("INFO")
    path = shutil.copy(made / "train.jsonl", hostile / "train.jsonl")
    for _ in range(2):
        packs = PackedSFTDataset(path, chat_tokenizer(made), 512, epochs=1, token_cache=hostile / "cache")
        list(packs)
        for file in packs.tokens.folder.glob("*.tokens"):
            os.truncate(file, 70)
    assert "is damaged and is made again" in caplog.text
    assert all(record.getMessage().isprintable() for record in caplog.records)
    assert str(packs.tokens).isprintable()


def test_commands_end_in_a_printable_line(hostile, capsys):
    assert verify.main([f"{hostile}/step-2"]) == 1
    with pytest.raises(SystemExit, match="2"):
        report([f"{hostile}/none.toml"])
    lines = capsys.readouterr().err.splitlines()
    assert sum("31m<b>" in line for line in lines) == 2
    assert all(line.isprintable() for line in lines)


PIPES = {
    "records.jsonl": Corpus,
    "records.parquet": Corpus,
    "chat_template.jinja": lambda path: load_chat_template(path.parent),
    "tokenizer_config.json": lambda path: load_chat_template(path.parent),
    "tokenizer.json": lambda path: load_chat_tokenizer(path.parent),
    "special_tokens_map.json": lambda path: read_special_tokens(path.parent),
    "config.json": lambda path: read_model_config(path.parent),
    "model.safetensors": lambda path: check_weights(path.parent, MODEL),
    INDEX: lambda path: check_weights(path.parent, MODEL),
    ".metadata": lambda path: check_sizes(path.parent),
    "SHA256SUMS": lambda path: check_digests(path.parent),
    "cost.json": CostModel.load,
    "lengths.npy": read_lengths,
    "lengths.txt": read_lengths,
    "run.toml": lambda path: options_of(RunFile(str(path)), with_heads=True),
    "job.toml": lambda path: read_toml(str(path)),
    "reference.npz": lambda path: read_logprobs(path, {}, 1, "delete it"),
    "template_date": lambda path: template_date("", str(path.parent)),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_is_not_waited_for(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with one_line(re.escape(name)):
        PIPES[name](tmp_path / name)


def test_a_pipe_among_the_indices_is_made_again(made, tmp_path):
    path, cache = shutil.copy(made / "train.jsonl", tmp_path / "train.jsonl"), tmp_path / "cache"
    size = len(Corpus(path, cache=cache))
    (index,) = cache.glob("*.index")
    index.unlink()
    os.mkfifo(index)
    assert len(Corpus(path, cache=cache)) == size
