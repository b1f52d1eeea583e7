"""ModelConfig -> torchtitan's model and back: the named flavors, logits and tensors of models."""

from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.adapter import dense_model, read_model, there_and_back
from support.hf_models import make_hf_folder
from support.published import CONFIGS, LLAMA3_ROPE, read, small_llama, small_moe, small_qwen
from support.runs import DEBUG_TOML

import torchtitan_magi.titan  # noqa: F401
from torchtitan_magi.models.model_config import differences, read_model_config
from torchtitan_magi.training.checkpoints.hf_weights import tensor_shapes

BIAS = "other () in the file, ('a bias by which experts are chosen',) in the flavor"  # of 0.3, that no checkpoint has


def named(model, flavor):
    return ["--model.name", model, "--model.flavor", flavor, "--comm.trace_buf_size", "0"]


@pytest.mark.parametrize(
    ("name", "flavor", "fields"),
    [
        ("Llama 3 8B", "8B_varlen", ["rope.type default in the file, llama3 in the flavor", "rope.factor 1.0"]),
        ("Llama 3.1 8B", "8B_varlen", []),
        ("Llama 3.1 70B", "70B_varlen", []),
        ("Llama 3.3 70B", "70B_varlen", []),
        ("Llama 3.1 405B", "405B_varlen", []),
        ("Llama 3.1 8B", "70B_varlen", ["dim 4096 in the file, 8192 in the flavor", "num_layers 32", "num_heads_q 32"]),
        ("Qwen3 8B", "8B_varlen", []),
        ("Qwen3 14B", "14B_varlen", []),
        ("Qwen3 32B", "32B_varlen", []),
        ("Qwen3 4B", "4B_varlen", []),
        ("Qwen3 4B 2507", "4B_varlen", ["rope.theta 5000000.0 in the file, 1000000"]),
        ("Qwen3 8B", "30B-A3B_varlen", ["dim 4096", "experts.num_experts None in the file, 128 in the flavor"]),
        ("Qwen3 30B-A3B", "30B-A3B_varlen", []),
        ("Qwen3 30B-A3B 2507", "30B-A3B_varlen", ["rope.theta 10000000.0 in the file, 1000000"]),
        ("Qwen3 235B-A22B", "235B-A22B_varlen", ["rope.theta 1000000.0 in the file, 5000000"]),
        ("Qwen3 235B-A22B 2507", "235B-A22B_varlen", []),
    ],
)
def test_named_flavors_beside_published_models(name, flavor, fields):
    model = CONFIGS[name]["model_type"].partition("_")[0].replace("llama", "llama3")
    found = differences(read(CONFIGS[name]), read_model(DEBUG_TOML, *named(model, flavor)))
    found = [line for line in found if line != BIAS]
    if not fields:
        assert found == []
    for field in fields:
        assert any(line.startswith(field) for line in found), found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_torchtitans_arguments_and_back(name):
    config = read(CONFIGS[name])
    again = there_and_back(config)
    assert differences(config, again) == []
    assert again.max_positions == CONFIGS[name]["max_position_embeddings"]
    assert read(CONFIGS[name] | {"rope_theta": 2.0e7}) == replace(config, rope=replace(config.rope, theta=2.0e7))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("llama", {}),
        ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"rope": LLAMA3_ROPE | {"original_max_position_embeddings": 32}}),
        ("qwen3", {}),
        ("qwen3", {"tied": True, "rope": {"rope_theta": 100.0}, "rms_norm_eps": 1e-2}),
    ],
)
def test_logits_are_those_of_transformers(kind, fields):
    folder = make_hf_folder(kind, **fields)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ours, adapter = dense_model(read_model_config(folder))
    ours.load_state_dict(adapter.from_hf(load_file(folder / "model.safetensors")), strict=True)
    tokens = torch.randint(0, theirs.config.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", [small_llama(), small_qwen(), small_qwen(tie_word_embeddings=True), small_moe()])
def test_torchtitan_writes_the_tensors_that_a_checkpoint_has(fields):
    config = read(fields)
    model, adapter = dense_model(config)
    written = adapter.to_hf(model.state_dict())
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == tensor_shapes(config)
