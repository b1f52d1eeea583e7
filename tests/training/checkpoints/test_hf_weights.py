"""Weights in every layout that transformers loads are found; those that the model has no place for are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.errors import one_line
from support.hf_models import KINDS, TEXT_PARTS, edit, make_hf_folder, tensors_of

from torchtitan_magi.models.model_config import read_model_config
from torchtitan_magi.training.checkpoints.hf_reader import WeightsReader
from torchtitan_magi.training.checkpoints.hf_weights import INDEX, check_weights, shard_numbers, tensor_shapes


@pytest.fixture(scope="module")
def folders():
    return {kind: make_hf_folder(kind) for kind in KINDS}


@pytest.fixture
def folder(folders, tmp_path):
    """Makes a copy of a model's folder, to be changed."""
    return lambda kind: Path(shutil.copytree(folders[kind], tmp_path / "model"))


def store(folder, tensors):
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def check(folder):
    check_weights(folder, read_model_config(folder))


def loaded(folder):
    """What torch loads under the names of a published checkpoint."""
    check(folder)
    tensors = {name: torch.zeros(shape) for name, shape in tensor_shapes(read_model_config(folder)).items()}
    dcp.load(tensors, storage_reader=WeightsReader(str(folder)), no_dist=True)
    return tensors


def assert_equal(tensors, others):
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)


def assert_refused(message, folder):
    with one_line(message):
        check(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_layout_that_transformers_has_in_memory(kind, shards, folders, tmp_path):
    """With experts in one tensor."""
    make_hf_folder(kind, layout="fused", shards=shards, folder=tmp_path)
    assert_equal(loaded(tmp_path), tensors_of(folders[kind]))
    numbers = shard_numbers(tmp_path, read_model_config(tmp_path))
    assert (numbers is None) == (shards == 1)
    assert numbers is None or numbers.keys() == tensors_of(folders[kind]).keys()


@pytest.mark.parametrize("kind", KINDS)
def test_names_without_their_prefix(kind, folder):
    from transformers import AutoModelForCausalLM

    changed = folder(kind)
    tensors = tensors_of(changed)
    store(changed, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert_equal(loaded(changed), tensors)
    _, report = AutoModelForCausalLM.from_pretrained(changed, output_loading_info=True)
    assert not any(report.values())


def test_kimis_names_as_published_and_as_transformers_writes_them(tmp_path):
    folder = make_hf_folder("kimi_k25", folder=tmp_path, shards=3)
    written, names = tensors_of(folder), shard_numbers(folder, read_model_config(folder))
    published = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): x for name, x in written.items()
    }
    assert published.keys() != written.keys()
    text = {name: x for name, x in published.items() if name.startswith("language_model.")}
    assert_equal(loaded(folder), text)
    assert names.keys() == text.keys()
    (folder / INDEX).unlink()
    store(folder, published)
    assert_equal(loaded(folder), text)


@pytest.mark.parametrize("kind", TEXT_PARTS)
def test_tensors_of_pictures_have_their_place_and_others_have_none(kind, tmp_path):
    folder = make_hf_folder(kind, folder=tmp_path)
    tensors = tensors_of(folder)
    store(folder, tensors | {"sound.weight": torch.zeros(2)})
    assert_refused(r"has sound.weight that the model has no place for", folder)


def test_a_model_that_was_saved_without_its_output_layer(tmp_path):
    tied = make_hf_folder("qwen3", tied=True)
    base = make_hf_folder("qwen3", tied=True, layout="base")
    assert json.loads((base / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    assert_equal(loaded(base), tensors_of(tied))
    base = make_hf_folder("llama", layout="base")
    assert_refused(r"lacks lm_head.weight, but tie_word_embeddings is not true .*; set it to true", base)


# ------------------------------------------------------------------------------------------------------------- refused


def test_more_weights_than_the_model_has(folder):
    changed = folder("llama")
    edit(changed, num_hidden_layers=1)
    assert_refused(r"has model.layers.1.input_layernorm.weight and 8 more tensors that the model has no place", changed)
    edit(changed, num_hidden_layers=2)
    tensors = tensors_of(changed)
    store(changed, tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    assert_refused(r"has model.layers.0.self_attn.q_proj.bias that the model has no place for; use the con", changed)
    store(changed, tensors | {"norm.weight": torch.zeros(64)})
    assert_refused(r"has norm.weight that the model has no place for", changed)


@pytest.mark.parametrize("layout", ["published", "fused"])
def test_more_experts_than_the_model_has(layout, tmp_path):
    make_hf_folder("qwen3_moe", layout=layout, folder=tmp_path)
    edit(tmp_path, num_local_experts=3, num_experts=3)
    assert_refused(r"gate.weight has shape \[4, 64\], in this model \[3, 64\]", tmp_path)
    tensors = tensors_of(tmp_path)
    store(tmp_path, tensors | {name: x[:3] for name, x in tensors.items() if name.endswith("mlp.gate.weight")})
    assert_refused(r"has model.layers.0.mlp.experts.3.down_proj.weight and 5 more tensors", tmp_path)


def test_what_transformers_leaves_out_as_well_is_left_out(folder):
    changed = folder("deepseek_v3")
    tensors = tensors_of(changed)
    names = ["mtp.layers.0.norm.weight", "model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
    names += [f"model.layers.2.{name}.weight" for name in ("eh_proj", "enorm", "self_attn.o_proj", "shared_head.head")]
    store(changed, tensors | dict.fromkeys(names, torch.zeros(2)))
    assert_equal(loaded(changed), tensors)
    store(changed, tensors | dict.fromkeys(names[-1:], torch.zeros(2)))  # no layer that predicts
    assert_refused(r"has model.layers.2.shared_head.head.weight that the model has no place for", changed)


def test_files_beside_the_models_do_not_count(folder):
    changed = folder("llama")
    save_file({"base_model.model.lora_A.weight": torch.zeros(2)}, changed / "adapter_model.safetensors")
    check(changed)
    (changed / "model.safetensors").rename(changed / "weights.safetensors")
    assert_refused(r"has base_model.model.lora_A.weight that", changed)
    names = [name for name in tensors_of(changed) if not name.startswith("base_model")]
    (changed / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "weights.safetensors")}))
    check(changed)


# --------------------------------------------------------------------------------------------------------- tied weights


TIED = {"qwen3": "model.embed_tokens.weight", "qwen3_5": "model.language_model.embed_tokens.weight"}  # the embedding


def text_of(tensors):
    """Tensors without those that see pictures."""
    return {name: tensor for name, tensor in tensors.items() if "visual" not in name}


@pytest.mark.parametrize(("kind", "embedding"), TIED.items())
def test_an_output_layer_beside_a_tied_embedding(kind, embedding, tmp_path):
    """transformers takes it if it is another, and warns."""
    changed = make_hf_folder(kind, tied=True, folder=tmp_path)
    tensors = tensors_of(changed)
    output = tensors[embedding].clone()
    store(changed, tensors | {"lm_head.weight": output})
    assert_equal(loaded(changed), text_of(tensors))
    store(changed, tensors | {"lm_head.weight": output[:-1]})
    assert_refused(rf"has another lm_head.weight than {embedding}", changed)
    output[-1, -1] += 1
    store(changed, tensors | {"lm_head.weight": output})
    assert_refused(r"has another lm_head.weight than .*, but tie_word_embeddings is true.*; set it to false", changed)
    edit(changed, tie_word_embeddings=False)
    assert_equal(loaded(changed), text_of(tensors) | {"lm_head.weight": output})


@pytest.mark.parametrize(("kind", "embedding"), TIED.items())
def test_a_tied_embedding_that_is_stored_as_the_output_layer(kind, embedding, tmp_path):
    """As transformers loads it; not where the two are not tied."""
    changed = make_hf_folder(kind, tied=True, folder=tmp_path)
    tensors = tensors_of(changed)
    others = {name: tensor for name, tensor in tensors.items() if name != embedding}
    store(changed, others | {"lm_head.weight": tensors[embedding]})
    assert_equal(loaded(changed), text_of(tensors))
    edit(changed, tie_word_embeddings=False)
    assert_refused(rf"lacks {embedding} of the model", changed)
