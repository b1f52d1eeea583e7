"""What an export writes, in which order, and what is left when it is cut off."""

import json
import logging
import os
import re
from pathlib import Path

import pytest
import torch
from support.adapter import read_job
from support.errors import one_line
from support.runs import DEBUG_TOML, call

from torchtitan_magi.models.model_config import ModelConfig, Rope
from torchtitan_magi.training.checkpoints.export import add_config, export, read_files
from torchtitan_magi.training.settings.values import check_values


def said_of(*options):
    """The error of a run with these options, in words of ours though torchtitan has some of its own."""
    with pytest.raises(ValueError) as error:
        check_values(read_job(DEBUG_TOML, "--checkpoint.enable", *options))
    return str(error.value)


@pytest.mark.parametrize(
    ("option", "other", "remedy"),
    [
        ("last_save_in_hf", "last_save_model_only", "set that to true, too"),
        ("initial_load_in_hf", "initial_load_model_only", "leave that out"),
    ],
)
def test_more_than_weights_in_safetensors_is_refused_before_the_first_step(option, other, remedy):
    message = call(said_of, f"--checkpoint.{option}", f"--checkpoint.no-{other}")
    assert message.startswith(f"checkpoint.{option} is true, but checkpoint.{other} is false; {remedy}")


def test_a_folder_gives_what_transformers_reads_and_nothing_else(tmp_path):
    names = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"]
    names += ["vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"]
    names += ["additional_chat_templates/tools.jinja"]
    names += ["preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"]
    names += ["tiktoken.model", "tokenization_kimi.py"]
    others = ["model.safetensors", "model.safetensors.index.json", "README.md", "original/params.json"]
    for name in [*names, *others]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f'{{"name": "{name}"}}')
    files = read_files(f"{tmp_path}")
    assert sorted(files) == sorted(names)
    assert all(json.loads(content) == {"name": name} for name, content in files.items())


def test_a_snapshot_of_a_cache_is_read_through_its_links(tmp_path):
    blobs, folder = tmp_path / "models--a--b/blobs", tmp_path / "models--a--b/snapshots/0123"
    (folder / "additional_chat_templates").mkdir(parents=True)
    blobs.mkdir()
    for name, to in {"config.json": "../../blobs/0", "additional_chat_templates/t.jinja": "../../../blobs/1"}.items():
        (folder / name).symlink_to(to)
        (folder / name).resolve().write_text("{}")
    (folder / "tokenizer.json").symlink_to("config.json")
    (tmp_path / "model").symlink_to(folder)  # a folder that is a link itself
    for path in (folder, tmp_path / "model"):
        assert sorted(read_files(f"{path}")) == ["additional_chat_templates/t.jinja", "config.json", "tokenizer.json"]


@pytest.mark.parametrize("name", ["tokenizer_a.json", "additional_chat_templates", "blobs"])
def test_a_link_out_of_the_folder_is_not_exported(name, tmp_path):
    secret, folder = tmp_path / ("blobs" if name == "blobs" else "secret"), tmp_path / "model"
    for path in (secret, folder):
        path.mkdir()
    (secret / "key").write_text("{}")
    if name == "additional_chat_templates":
        (folder / name).symlink_to(secret)
    else:
        (folder / "tokenizer_a.json").symlink_to(secret / "key")
    words = r"^.*/model/.* is a link to .*/key, outside of the model's folder, and would be .*; put a copy in its place"
    with pytest.raises(ValueError, match=words):
        read_files(f"{folder}")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nothing")])
def test_what_is_no_file_is_not_exported(make, tmp_path):
    make(tmp_path / "tokenizer_a.json")
    with pytest.raises(ValueError, match=r"tokenizer_a\.json is no file that can be exported .*; remove it"):
        read_files(f"{tmp_path}")


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"^model.hf_assets_path is '.*none', .*no such folder.*; give .*$"):
        read_files(f"{tmp_path}/none")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ValueError, match=r"^.*config.json is no JSON object; download it again$"):
        read_files(f"{tmp_path}")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ValueError, match=r"^model.hf_assets_path is .*Permission denied.*config.json.*; give .*$"):
        read_files(f"{tmp_path}")


@pytest.mark.parametrize("given", [{}, {"dtype": "float32"}, {"torch_dtype": "float32"}])
def test_the_configuration_names_the_dtype_of_the_weights(given, tmp_path):
    from transformers import AutoConfig

    files = {"config.json": json.dumps({"model_type": "llama", "other": "é"} | given).encode()}
    export(tmp_path, files, torch.bfloat16, lambda place: (place / "sharded").mkdir())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"model_type": "llama", "other": "é"} | dict.fromkeys(given or ["torch_dtype"], "bfloat16")
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_an_export_that_is_cut_off_keeps_its_weights_and_does_not_count(tmp_path):
    for name in ("config.json", "model-00002-of-00002.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).write_text("of an earlier export")

    def killed(place):
        assert (place / "config.json").exists()
        (place / "sharded").mkdir()
        (place / "sharded" / "shard").write_text("weights")
        (place / "model.safetensors.index.json").write_text('{"weight_map": {')  # as far as it was written
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(tmp_path, {"config.json": b"{}"}, torch.float32, killed)
    assert (tmp_path / "unfinished" / "sharded" / "shard").read_text() == "weights"
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished"]
    export(tmp_path, {}, torch.float32, lambda place: (place / "sharded").mkdir())  # which would fail if it were there


def test_the_configuration_and_the_index_come_last(tmp_path, monkeypatch):
    moved = []
    monkeypatch.setattr("os.replace", lambda _, path: moved.append(str(path.relative_to(tmp_path))))
    index, weights, template = "model.safetensors.index.json", "model-00001-of-00001.safetensors", "more/chat.jinja"

    def write(place):
        for name in (index, weights, "sharded/shard"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text("")

    export(tmp_path, {"config.json": b"{}", template: b""}, torch.float32, write)
    assert sorted(moved[:2]) == [weights, template]
    assert moved[2:] == ["config.json", index]


def test_a_first_copy_that_cannot_be_removed_is_one_warning(tmp_path, caplog, monkeypatch):
    def refuse(path):
        raise OSError("busy")

    monkeypatch.setattr("shutil.rmtree", refuse)
    with caplog.at_level(logging.WARNING):
        export(tmp_path, {}, torch.float32, lambda place: (place / "sharded").mkdir())
    assert re.fullmatch(r".* is complete, but .*unfinished could not be removed \(.*\); delete it", *caplog.messages)


def error_of_export(folder):
    try:
        export(Path(folder), {"config.json": b"{}"}, torch.float32, lambda place: None)
    except OSError as error:
        return str(error)


def test_a_file_that_cannot_be_written_ends_all_ranks(three_ranks, tmp_path):
    (tmp_path / "step-2").write_text("a file where the folder should be")
    first, *others = three_ranks.run(error_of_export, f"{tmp_path}/step-2/deeper")
    assert "Not a directory" in first
    assert others == [first, first]


def test_the_tokenizer_of_a_bare_folder_keeps_its_class():
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"bos_token": "a"}'}
    add_config(files, {"model_type": "llama"})
    assert json.loads(files["config.json"]) == {"model_type": "llama"}
    assert json.loads(files["tokenizer_config.json"]) == {
        "bos_token": "a", "tokenizer_class": "PreTrainedTokenizerFast"
    }  # fmt: skip
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"tokenizer_class": "LlamaTokenizer"}'}
    add_config(files, {"model_type": "llama"})
    assert json.loads(files["tokenizer_config.json"]) == {"tokenizer_class": "LlamaTokenizer"}


def test_a_model_that_no_configuration_can_say_is_one_line():
    with one_line(r"^model.flavor has qk_norm False, which no config.json can say; use .*false$"):
        ModelConfig("qwen3", 64, 2, 8, 2, 16, 176, 2048, 1e-5, Rope(1e6), other=("qk_norm False",)).to_hf()
