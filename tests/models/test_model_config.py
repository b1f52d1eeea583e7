"""config.json -> ModelConfig and back; what cannot be expressed; what differs."""

import json
import re
from dataclasses import replace

import pytest
from support.errors import assert_says
from support.published import (
    CONFIGS,
    DEEPSEEK_V3,
    LLAMA3_ROPE,
    OF_0_3,
    WITH_PICTURES,
    YARN,
    gpt_oss,
    in_transformers,
    read,
    small_llama,
    small_moe,
    small_qwen,
)

from torchtitan_magi.models.model_config import (
    Experts,
    LinearAttention,
    ModelConfig,
    MuseGlimmer,
    Rope,
    differences,
    read_model_config,
)

ORIGINAL = "original_max_position_embeddings"
MODELS = CONFIGS | OF_0_3
MODELS |= {"linear positions": small_llama(rope_scaling={"rope_type": "linear", "factor": 4.0})}
MODELS |= {"three experts": CONFIGS["Qwen3 30B-A3B"] | {"num_experts_per_tok": 3}}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_read_as_published_written_and_written_again_by_transformers(name, tmp_path):
    """In the spelling of transformers 5, too: rope_parameters, num_local_experts, a head_dim in every file."""
    config = read(MODELS[name])
    for fields in (MODELS[name], config.to_hf()):
        in_transformers(fields).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text())
        assert "rope_theta" not in written
        assert "rope_parameters" in written
        for again in (read_model_config(tmp_path), read(fields)):
            assert (again, again.max_positions) == (config, MODELS[name]["max_position_embeddings"])


@pytest.mark.parametrize("name", WITH_PICTURES)
def test_the_text_part_of_a_model_is_read_as_published_and_as_transformers_writes_it(name, tmp_path):
    config = read(WITH_PICTURES[name])
    in_transformers(WITH_PICTURES[name]).save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == config
    assert re.search("parts that see pictures( or predict further tokens)? are not trained", config.left_out)
    with pytest.raises(ValueError, match=r"put the config\.json of the whole model in"):
        config.to_hf()


def test_what_muse_glimmer_has_of_its_own():
    config = read(WITH_PICTURES["Muse Glimmer 30B"])
    assert config.windows == (2048, 2048, 2048, 0) * 13
    assert config.muse == MuseGlimmer(3.87, tuple(range(3, 52, 4)), 1e-8, 0.19611613513818404, 20.0)


def test_what_qwen3_5_has_of_its_own():
    config = read(WITH_PICTURES["Qwen3.5 35B-A3B"])
    layers = tuple(number for number in range(40) if number % 4 != 3)
    assert config.linear == LinearAttention(layers, 16, 32, 128, 128, 4)
    assert (config.num_attention_layers, config.rotary_dim, config.experts) == (
        10,
        64,
        Experts(256, 8, 512, True, 0, 1),
    )
    without = with_text("Qwen3.5 9B", layer_types=None, rope_parameters=None, head_dim=None)
    assert read(without).linear.layers == tuple(number for number in range(32) if number % 4 != 3)
    assert read(WITH_PICTURES["Qwen3.5 2B"]).tied


def with_text(name, **fields):
    """A published config.json whose text part has other fields."""
    whole = WITH_PICTURES[name]
    return whole | {"text_config": whole["text_config"] | fields}


MUSE, KIMI, QWEN = "Muse Glimmer 30B", "Kimi K2.5", "Qwen3.5 9B"
EVERY = [f"{kind}_attention" for kind in ("linear", "full")]


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        (WITH_PICTURES[KIMI] | {"text_config": None}, ["text_config is None", "came with the weights"]),
        (with_text(KIMI, model_type="qwen3"), ["text_config.model_type is 'qwen3'", "kimi_k2 or deepseek_v3"]),
        (with_text(KIMI, quantization_config={"bits": 4}), ["text_config.quantization_config is", "a bf16 copy"]),
        (with_text(KIMI, vocab_size=None), ["has no text_config.vocab_size"]),
        (with_text(MUSE, hidden_activation="gelu"), ["text_config.hidden_activation is 'gelu'"]),
        (with_text(MUSE, layer_types=None), ["text_config.layer_types is None"]),
        (with_text(MUSE, layer_rope_theta=[1.0] * 52), ["layer_rope_theta is [1.0,", "rope_theta, 500000.0, for each"]),
        (with_text(QWEN, layer_types=EVERY), ["text_config.layer_types is", "once for each layer"]),
        (with_text(QWEN, layer_types=EVERY[:1] * 32), ["has both full_attention and linear_attention"]),
        (with_text(QWEN, partial_rotary_factor=0.5, rope_parameters=None), ["a quarter of each head"]),
        (with_text(QWEN, attn_output_gate=False), ["text_config.attn_output_gate is False", "has a gate"]),
        (with_text(QWEN, linear_num_value_heads=24), ["a multiple of linear_num_key_heads, 16"]),
        (
            with_text("Qwen3.5 35B-A3B", shared_expert_intermediate_size=300),
            ["shared_expert_intermediate_size is 300", "a multiple of moe_intermediate_size, 512"],
        ),
        (with_text(MUSE, rope_parameters=YARN | {"rope_theta": 500000.0}), ["rope_parameters.rope_type is 'yarn'"]),
        (with_text(MUSE, layer_rope_theta=[0]), ["layer_rope_theta is [0]", "for each layer"]),
    ],
)
def test_what_a_text_part_cannot_be_is_refused_by_name(fields, messages):
    with pytest.raises(ValueError) as caught:
        read(fields)
    assert_says(caught.value, messages)


def test_layers_with_windows_are_those_that_the_file_names():
    fields = gpt_oss(4, 32)
    assert read(fields).windows == (128, 0, 128, 0)
    assert read(fields | {"layer_types": ["full_attention"] * 4}).windows == ()
    assert read(fields | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 7}).windows == (7,) * 4


def test_missing_fields_are_those_of_transformers():
    fields = small_llama()
    without = {name: value for name, value in fields.items() if name not in ("num_key_value_heads", "rope_theta")}
    assert read(without).num_heads_kv == 8
    assert read(without | {"rope_scaling": None}).rope == Rope(10000.0)
    assert read(fields | {"head_dim": None}).head_dim == 8
    moe = small_moe()
    del moe["head_dim"], moe["tie_word_embeddings"], moe["norm_topk_prob"], moe["architectures"]
    config = read(moe)
    assert (config.head_dim, config.tied, config.experts) == (8, False, Experts(128, 8, 48, False))
    routed = {name: value for name, value in DEEPSEEK_V3.items() if name != "norm_topk_prob"}
    assert read(routed) == read(DEEPSEEK_V3)  # where it is True
    yarn = small_llama(rope_scaling=YARN)
    assert read(yarn | {"attention_factor": 1.4, "beta_fast": 4.0}) == read(yarn)  # which transformers takes from YARN
    dense = small_qwen()
    del dense["head_dim"]
    assert read(dense).head_dim == in_transformers(dense).head_dim


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        (small_llama(model_type="mistral"), ["model_type is 'mistral'", "llama, qwen3, qwen3_moe"]),
        (small_llama(model_type="qwen2"), ["model_type is 'qwen2'", "llama, qwen3, qwen3_moe"]),
        (small_llama(architectures=["LlamaForSequenceClassification"]), ["architectures", "LlamaForCausalLM"]),
        (small_llama(auto_map={"AutoModelForCausalLM": "own.Own"}), ["auto_map", "own.Own", "LlamaForCausalLM"]),
        (small_qwen(attention_bias=True), ["attention_bias is True", "no biases"]),
        (small_llama(mlp_bias=True), ["mlp_bias is True", "no biases"]),
        (small_llama(attention_dropout=0.1), ["attention_dropout is 0.1", "set it to 0.0"]),
        (small_llama(hidden_act="gelu"), ["hidden_act is 'gelu'", "silu"]),
        (small_qwen(use_sliding_window=True), ["use_sliding_window is True", "full attention"]),
        (small_qwen(layer_types=["sliding_attention"] * 2), ["layer_types is ['sliding_attention', ", "full"]),
        (small_qwen(layer_types=["full_attention"]), ["layer_types is ['full_attention']", "full"]),
        (small_qwen(layer_types=2), ["layer_types is 2", "full"]),
        (small_qwen(layer_types=["full_attention"] * 2, num_hidden_layers=2**30), ["layer_types is", "full"]),
        (small_llama(quantization_config={"bits": 4}), ["quantization_config is {'bits': 4}", "before"]),
        (small_llama(partial_rotary_factor=0.5), ["partial_rotary_factor is 0.5", "whole heads"]),
        (small_llama(rope_scaling={"partial_rotary_factor": 0.5}), ["partial_rotary_factor is 0.5", "whole"]),
        (small_llama(rope_scaling=YARN | {"mscale": 1.0}), ["rope_scaling.mscale is 1.0", "plain 'yarn' positions"]),
        (small_llama(rope_scaling=YARN | {"beta_fast": -1.0}), ["beta_fast is -1.0", "a positive number"]),
        (small_llama(rope_scaling={"type": "dynamic", "factor": 2.0}), ["rope_type is 'dynamic'", "llama3, yarn"]),
        (small_qwen(rope_parameters={"rope_type": "longrope"}), ["rope_parameters.rope_type is", "take out"]),
        (small_llama(rope_scaling={"rope_type": "longrope"}), ["rope_type is 'longrope'"]),
        (small_llama(rope_scaling={"rope_type": "default", "mrope_section": [1]}), ["mrope_section is [1]"]),
        (small_llama(rope_scaling="linear"), ["rope_scaling is 'linear'", "table"]),
        (small_llama(rope_scaling={"rope_type": "linear"}), ["has no factor"]),
        (small_llama(rope_scaling={"rope_type": "linear", "factor": 0.0}), ["factor is 0.0", "positive number"]),
        (small_llama(rope_scaling=LLAMA3_ROPE | {"low_freq_factor": 4.0}), ["low_freq_factor is 4.0", "less than"]),
        (small_llama(rope_scaling=YARN | {"factor": 0.5}), ["rope_scaling.factor is 0.5", "at least 1"]),
        (small_llama(rope_scaling=YARN | {"truncate": None}), ["truncate is None", "null for false"]),
        (small_llama(rope_scaling=YARN, **{ORIGINAL: 17}), [f"{ORIGINAL} is 17", "that of rope_scaling, 32768, or"]),
        (small_llama(rope_theta=float("inf")), ["rope_theta is inf", "positive number"]),
        (small_moe(mlp_only_layers=[0]), ["mlp_only_layers is [0]", "every layer"]),
        (small_moe(decoder_sparse_step=2), ["decoder_sparse_step is 2", "every layer"]),
        (small_moe(output_router_logits=True), ["output_router_logits is True", "set it to false"]),
        (small_moe(num_experts_per_tok=129), ["num_experts_per_tok is 129", "at most num_experts, 128"]),
        (small_llama(num_attention_heads=10**3000), ["num_attention_heads is 1000", "integer below 2**31"]),
        (small_llama(model_type="a\n" * 5000), [r"model_type is 'a\na\na", "...; use a checkpoint of llama"]),
        (small_llama(num_key_value_heads=3), ["num_key_value_heads is 3", "divisor", "8"]),
        (small_qwen(head_dim=15), ["head_dim is 15", "even"]),
        (small_llama(vocab_size=None), ["has no vocab_size", "came with the weights"]),
        (small_llama(vocab_size="128k"), ["vocab_size is '128k'", "a positive integer"]),
        (small_llama(num_hidden_layers=True), ["num_hidden_layers is True", "a positive integer"]),
        (small_llama(hidden_size=-1), ["hidden_size is -1", "a positive integer"]),
        (small_llama(rms_norm_eps="1e-5"), ["rms_norm_eps is '1e-5'", "a positive number"]),
        (small_llama(rms_norm_eps=10**400), ["rms_norm_eps is 1000", "000...; use a positive number"]),
        (small_llama(tie_word_embeddings="no"), ["tie_word_embeddings is 'no'", "true or false"]),
        (gpt_oss(2, 4, quantization_config={"quant_method": "mxfp4"}), ["'mxfp4'", "use a bf16 copy", "Mxfp4Config"]),
        (gpt_oss(2, 4, layer_types=["chunked_attention"] * 2), ["layer_types is", "full_attention or sliding_att"]),
        (gpt_oss(2, 4, layer_types=None), ["layer_types is None", "came with the weights"]),
        (small_llama(rope_scaling={"x" * 5000: 1}), ["rope_scaling.xxxxx", "plain 'default' positions"]),
        (gpt_oss(2, 4, sliding_window=None), ["has no sliding_window"]),
        (gpt_oss(2, 4, rope_scaling=None), ["rope_parameters is {}", "came with the weights"]),
        (gpt_oss(2, 4, attention_bias=False), ["attention_bias is False", "have biases"]),
        (gpt_oss(2, 4, swiglu_limit=10.0), ["swiglu_limit is 10.0", "7.0"]),
        (DEEPSEEK_V3 | {"quantization_config": {"quant_method": "fp8"}}, ["'fp8'", "use a bf16 copy"]),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, ["scoring_func is 'softmax'", '"sigmoid"']),
        (DEEPSEEK_V3 | {"rope_interleave": False}, ["rope_interleave is False", "adjacent"]),
        (DEEPSEEK_V3 | {"rope_interleave": None}, ["rope_interleave is None", "null for false"]),
        (DEEPSEEK_V3 | {"norm_topk_prob": None}, ["norm_topk_prob is None", "null for false"]),
        (DEEPSEEK_V3 | {"num_key_value_heads": 8}, ["num_key_value_heads is 8", "num_attention_heads, 128"]),
        (DEEPSEEK_V3 | {"n_group": 7}, ["n_group is 7", "a divisor of n_routed_experts, 256"]),
        (DEEPSEEK_V3 | {"topk_group": 9}, ["topk_group is 9", "at most n_group, 8"]),
        (DEEPSEEK_V3 | {"qk_rope_head_dim": 7}, ["qk_rope_head_dim is 7", "even"]),
        (DEEPSEEK_V3 | {"rope_scaling": YARN | {"mscale": 0.7}}, ["rope_scaling is {", "mscale_all_dim alike"]),
        (DEEPSEEK_V3 | {"auto_map": {"AutoModelForCausalLM": "own.Own"}}, ["auto_map", "own.Own"]),
        ({}, ["has no model_type", "came with the weights"]),
        ([], ["holds no JSON object", "download it again"]),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(fields, messages, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError) as caught:
        read_model_config(tmp_path)
    assert_says(caught.value, [f"{tmp_path}/config.json", *messages])
    assert len(str(caught.value)) < 1000


def test_a_file_that_is_missing_or_broken(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: No such file.*put the config.json"):
        read_model_config(tmp_path)
    for content in (b'{"model_type": \n\n', b"[" * 100_000, b"\xff\xfe\x00"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config.json is no JSON .*download it again$"):
            read_model_config(tmp_path)


def test_differences_list_each_field_but_not_the_length():
    dense = ModelConfig("qwen3", 64, 2, 8, 2, 16, 176, 2048, 1e-6, Rope(1e6), max_positions=4096)
    assert differences(dense, replace(dense, max_positions=8)) == []
    other = replace(dense, norm_eps=1e-5, tied=True, experts=Experts(4, 2, 48, True))
    assert differences(dense, other) == [
        "norm_eps 1e-06 in the file, 1e-05 in the flavor",
        "tied False in the file, True in the flavor",
        "experts.num_experts None in the file, 4 in the flavor",
    ]
