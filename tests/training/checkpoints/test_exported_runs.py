"""The folder of a run's last checkpoint is a model that transformers loads as it is."""

import functools
import importlib
import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapter import dense_model, read_model
from support.hf_models import make_hf_folder, tensors_of
from support.runs import DEBUG_TOML, IS_0_3, LAYERS, corpus, new_folder, train, watch

from torchtitan_magi.data import PackedSFTDataset
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer
from torchtitan_magi.models.model_config import read_model_config

from layouts import LAYOUTS  # isort: skip

TEXT = "bada gogu <|im_start|>user\nBada  123\n"
CHAT = [{"role": "user", "content": "bada gogu"}, {"role": "assistant", "content": "lo"}]


def report_weights(report):
    """The weights as the run starts, and as they are when the last checkpoint has been written."""
    from torch.distributed.tensor import DTensor
    from torchtitan.train import Trainer

    def report_now(_, trainer, *args):
        weights = trainer.checkpointer.states["model"].state_dict()
        full = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in weights.items()}
        report("weights", trainer.step, {name: x.clone().numpy() for name, x in full.items()})

    watch(Trainer, "batch_generator", report_now)
    watch(Trainer, "close", report_now)


def trained(layout, assets, folder, *options):
    """The weights before the first step, the last step and the weights after it of a run that ends with an export, and
    what it printed."""
    arguments = [*LAYOUTS[layout].arguments, "--checkpoint.enable", "--checkpoint.last_save_in_hf", *options]
    arguments += ["--model.hf_assets_path", f"{assets}", "--job.dump_folder", folder]
    run = train(LAYOUTS[layout].processes, arguments, setup=report_weights)
    (_, first), (step, last) = run.of("weights")
    first, last = ({name: torch.from_numpy(x) for name, x in weights.items()} for weights in (first, last))
    return first, step, last, run.output


def logits_of_torchtitan(config, weights, tokens):
    model, _ = dense_model(config)
    model.load_state_dict(weights, strict=True)
    return model(tokens)


def assert_same_model(folder, config, weights, dtype):
    """transformers' model of a folder has the dtype, and the logits of torchtitan's with the weights in this dtype."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert model.dtype == getattr(torch, dtype)
    tokens = torch.randint(0, 2048, (2, 100), generator=torch.Generator().manual_seed(0))
    rounded = {name: x.to(model.dtype).float() for name, x in weights.items()}
    with torch.no_grad():
        difference = model.float()(tokens).logits - logits_of_torchtitan(config, rounded, tokens)
    assert difference.abs().max() <= 5e-5


def assert_same_tokenizer(folder, assets):
    from transformers import AutoTokenizer

    ours, source = (AutoTokenizer.from_pretrained(path) for path in (folder, assets))
    assert ours(TEXT).input_ids == source(TEXT).input_ids
    assert (ours.bos_token, ours.eos_token) == (source.bos_token, source.eos_token)
    chat = ours.apply_chat_template(CHAT, tokenize=False)
    assert chat == source.apply_chat_template(CHAT, tokenize=False)
    assert "bada gogu" in chat


def round_matrices(folder):
    for path in folder.glob("*.safetensors"):
        tensors = {name: x if x.dim() == 1 else x.bfloat16() for name, x in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})


def dtypes_of(folder):
    return {name: tensor.dtype for name, tensor in tensors_of(folder).items()}


@functools.cache
def longest_document():
    """Positions of the longest document in the two packs of each of two steps."""
    dataset = PackedSFTDataset(
        corpus() / "train.jsonl", load_chat_tokenizer(corpus() / "tokenizer"), 256, packs_per_step=2
    )
    return max(1 + int(inputs["positions"].max()) for inputs, _ in itertools.islice(dataset, 4))


@pytest.mark.parametrize(
    ("kind", "layout", "dtype"),
    [
        ("llama", "cp4", "bfloat16"),  # with two K/V heads: a rank has a part of one, here and in the next layout
        ("llama", "cp2_tp2", "float32"),
        pytest.param("qwen3", "cp1", "bfloat16", marks=pytest.mark.long),
        ("qwen3", "cp2_tp2", "float32"),
    ],
)
def test_transformers_loads_the_last_checkpoint(kind, layout, dtype, tmp_path):
    """It is in several files whose index has a name too much, made for fewer positions than documents have; with norms
    in float32 where others have 16 bits."""
    from transformers import AutoModelForCausalLM

    how = {"shards": 2, "tied": (kind, layout) == ("qwen3", "cp2_tp2"), "max_position_embeddings": 150}
    assets = make_hf_folder(kind, folder=tmp_path / "assets", **how)
    if dtype == "bfloat16":
        round_matrices(assets)
    config = read_model_config(assets)
    (assets / "generation_config.json").write_text('{"temperature": 0.5, "do_sample": true}')
    index = json.loads((assets / "model.safetensors.index.json").read_text())
    num_files = len(set(index["weight_map"].values()))
    index["weight_map"]["model.layers.0.self_attn.rotary_emb.inv_freq"] = min(index["weight_map"].values())
    (assets / "model.safetensors.index.json").write_text(json.dumps(index))
    model = ["--model.name", config.model, "--model.flavor", "hf", "--checkpoint.initial_load_in_hf"]
    options = [*model, "--training.steps", "2", "--checkpoint.export_dtype", dtype]
    loaded, step, weights, output = trained(layout, assets, f"{tmp_path}", *options)
    exported = tmp_path / "checkpoint" / f"step-{step}"
    assert_same_model(assets, config, loaded, "float32")
    assert_same_model(exported, config, weights, dtype)
    assert_same_tokenizer(exported, assets)
    assert not torch.equal(loaded["norm.weight"], weights["norm.weight"])
    assert not list(exported.glob("*/*.safetensors"))
    assert json.loads((exported / "generation_config.json").read_text())["temperature"] == 0.5
    assert len(list(exported.glob("*.safetensors"))) == num_files > 1
    assert dtypes_of(exported) == dtypes_of(assets)
    fields = json.loads((exported / "config.json").read_text())
    assert 150 < fields["max_position_embeddings"] == longest_document()
    assert "training.seq_len is 256, but the model was trained for 150 positions" in output
    assert AutoModelForCausalLM.from_pretrained(exported).generation_config.eos_token_id == [1, 4]
    assert fields["eos_token_id"] == [1, 4]
    assert "Turns end with <|im_end|>, so generation must stop there: the export has eos_token_id [1, 4]" in output
    end = f'The model is in {exported}: AutoModelForCausalLM.from_pretrained("{exported}")'
    assert end in output.partition("Training completed")[2]


def test_a_bare_tokenizer_folder_and_data_that_end_early(tmp_path):
    """The configuration is made from the flavor, the default chat template is the one that the run trains with, and
    the checkpoint counts as finished."""
    assets, folder = shutil.copytree(corpus() / "tokenizer", tmp_path / "assets"), new_folder()
    tokenizer_config = json.loads((assets / "tokenizer_config.json").read_text())
    (assets / "tokenizer_config.json").write_text(
        json.dumps({name: tokenizer_config[name] for name in ("bos_token", "eos_token")})
    )
    records = (corpus() / "train.jsonl").read_text().splitlines()[:8]
    (tmp_path / "few.jsonl").write_text("\n".join(records))
    few = ["--training.dataset_path", f"{tmp_path}/few.jsonl", "--magi.epochs", "1", "--training.steps", "50"]
    _, step, weights, _ = trained("cp1", assets, folder, *few)
    assert step < 50
    exported = Path(folder, "checkpoint", f"step-{step}")
    assert (exported / "chat_template.jinja").read_text().startswith("{{ bos_token }}")
    shutil.copy(exported / "chat_template.jinja", assets)
    config = replace(read_model(DEBUG_TOML), num_layers=LAYERS)
    assert_same_model(exported, config, weights, "float32")
    assert_same_tokenizer(exported, assets)
    assert not (exported / "generation_config.json").exists()
    assert json.loads((exported / "config.json").read_text())["eos_token_id"] == [1, 4]
    checkpoints = importlib.import_module(f"torchtitan.components.{'checkpointer' if IS_0_3 else 'checkpoint'}")
    found = checkpoints.CheckpointManager._find_load_step(SimpleNamespace(folder=f"{exported.parent}"))
    assert found == step
