"""ModelConfig -> torchtitan's arguments and back: the named flavors, widths, rotary embeddings and logits of models."""

import pytest
import torch
import transformers
from support.errors import assert_says
from support.published import (
    CONFIGS,
    LLAMA3_ROPE,
    OF_0_3,
    YARN,
    in_transformers,
    llama,
    qwen,
    read,
    small_llama,
    small_qwen,
)
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.qwen3.model import model as qwen3

import torchtitan_magi.titan  # noqa: F401
from torchtitan_magi.models.model_config import differences
from torchtitan_magi.titan.v02.models import args_of, config_of


def test_a_mixture_routes_as_the_checkpoint_does():
    moe = args_of(read(CONFIGS["Qwen3 30B-A3B"])).moe_args
    assert (moe.num_experts, moe.top_k, moe.num_shared_experts) == (128, 8, 0)
    assert (moe.score_func, moe.route_norm, moe.route_scale) == ("softmax", True, 1.0)
    assert (moe.score_before_experts, moe.load_balance_coeff, moe.gate_bias) == (False, None, False)
    assert not args_of(read(CONFIGS["Qwen3 30B-A3B"] | {"norm_topk_prob": None})).moe_args.route_norm


def test_what_no_config_json_can_say_is_a_difference():
    config = read(CONFIGS["Qwen3 30B-A3B"])
    args = args_of(config)
    args.qk_norm = False
    args.moe_args.num_shared_experts = 1
    assert differences(config, config_of(args)) == [
        "other () in the file, ('qk_norm False', 'num_shared_experts 1') in the flavor"
    ]


def test_llama3_has_exactly_the_files_width_of_the_feed_forward():
    with torch.device("meta"):
        for dim in (64, 96, 2048, 3072, 4096, 5120, 6656, 8192, 16384):
            for hidden_dim in [*range(1, 40), *range(2 * dim - 3, 2 * dim + 3), 7 * dim // 2 + 1, 14336, 28672, 53248]:
                args = args_of(read(llama(dim, hidden_dim, 1, 8)))
                feed_forward = llama3.FeedForward(dim, 4 * dim, args.multiple_of, args.ffn_dim_multiplier)
                assert feed_forward.w1.out_features == hidden_dim
                assert config_of(args).hidden_dim == hidden_dim


ROPES = [
    {},
    {"rope_theta": 10000.0},
    {"rope_theta": 1e9},
    {"rope_theta": 5e5, "rope_type": "linear", "factor": 3.0},
    {"rope_theta": 1e4, "type": "linear", "factor": 16},
    {"rope_theta": 5e5, **LLAMA3_ROPE},
    {"rope_theta": 1e6, **LLAMA3_ROPE, "factor": 32.0, "high_freq_factor": 7.0, "original_max_position_embeddings": 50},
    {"rope_theta": 5e5, "rope_type": "llama3", "factor": 2, "low_freq_factor": 1, "high_freq_factor": 2},
]


@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize(
    "rope", ROPES, ids=lambda rope: f"{rope.get('rope_type') or rope.get('type')}-{len(str(rope))}"
)
def test_llama3_turns_by_the_same_bits_as_transformers(rope, head_dim, monkeypatch):
    monkeypatch.setattr(llama3.torch, "polar", lambda ones, angles: angles)
    plain = llama(8 * head_dim, 64, 1, 8)
    del plain["rope_scaling"], plain["rope_theta"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    old = plain | {"rope_scaling": scaling or None, "rope_theta": rope.get("rope_theta", 10000.0)}
    new = plain | {"rope_parameters": rope}
    assert read(old) == read(new)
    args = args_of(read(new))
    ours = llama3.precompute_freqs_cis(head_dim, 2, args.rope_theta, args.rope_scaling_args)[1]
    for fields in (old, new):
        theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(in_transformers(fields))
        assert torch.equal(ours, theirs.inv_freq)
    assert config_of(args) == read(new)


@pytest.mark.parametrize("theta", [1e4, 1000000, 5e6, 1e9])
def test_qwen3_turns_by_the_same_bits_as_transformers(theta):
    fields = qwen(512, 64, 1, 8, rope_theta=theta, head_dim=64)
    args = args_of(read(fields))
    ours = qwen3.precompute_rope_cache(args.head_dim, 300, args.rope_theta)
    model = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(in_transformers(fields))
    assert torch.equal(ours, torch.cat(model(torch.zeros(()), torch.arange(300)[None]), -1)[0])


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        (small_llama(tie_word_embeddings=True), ["tie_word_embeddings is True", "torchtitan 0.2.2's llama3"]),
        (small_llama(head_dim=16), ["head_dim is 16", "64 / 8"]),
        (small_qwen(rope_scaling={"type": "linear", "factor": 2.0}), ["rope_type is 'linear'", "'default'"]),
        (small_qwen(rope_scaling=YARN), ["rope_type is 'yarn'", "'default'", "install torchtitan 0.3"]),
        (small_llama(rope_scaling=YARN), ["rope_type is 'yarn'", "'default', 'linear', 'llama3'"]),
        (small_qwen(rope_scaling=LLAMA3_ROPE), ["rope_type is 'llama3'", "'default'"]),
    ],
)
def test_what_torchtitan_has_not_is_refused_by_name(fields, messages):
    with pytest.raises(ValueError) as caught:
        args_of(read(fields))
    assert_says(caught.value, messages)


@pytest.mark.parametrize("name", OF_0_3)
def test_models_of_torchtitan_0_3_are_refused(name):
    with pytest.raises(ValueError, match=r"model.name is '\w+', which needs torchtitan 0.3; pip install torch"):
        args_of(read(OF_0_3[name]))
