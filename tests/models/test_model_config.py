"""config.json -> ModelConfig -> torchtitan's arguments and back; what cannot be expressed; what differs."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.hf_models import make_hf_folder
from support.published import CONFIGS, DEEPSEEK_V3, LLAMA3_ROPE, OF_0_3, gpt_oss, llama, qwen, qwen_moe
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.qwen3.model import model as qwen3
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_magi.titan  # noqa: F401
from torchtitan_magi.models.model_config import Experts, ModelConfig, Rope, differences, read_model_config
from torchtitan_magi.titan.v02.models import args_of, config_of
from torchtitan_magi.training.checkpoints.hf_weights import tensor_shapes

small_llama, small_qwen = partial(llama, 64, 176, 2, 8), partial(qwen, 64, 176, 2, 8)
small_moe = partial(qwen_moe, 64, 176, 2, 8, 48)


def in_transformers(fields):
    return transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))  # which edits tables in place


@pytest.fixture
def read(tmp_path):
    def read_fields(fields):
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_model_config(tmp_path)

    return read_fields


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
        ("Qwen3 4B 2507", "4B_varlen", ["rope.theta 5000000.0 in the file, 1000000 in the flavor"]),
        ("Qwen3 8B", "30B-A3B_varlen", ["dim 4096", "experts.num_experts None in the file, 128 in the flavor"]),
        ("Qwen3 30B-A3B", "30B-A3B_varlen", []),
        ("Qwen3 30B-A3B 2507", "30B-A3B_varlen", ["rope.theta 10000000.0 in the file, 1000000 in the flavor"]),
        ("Qwen3 235B-A22B", "235B-A22B_varlen", ["rope.theta 1000000.0 in the file, 5000000 in the flavor"]),
        ("Qwen3 235B-A22B 2507", "235B-A22B_varlen", []),
    ],
)
def test_named_flavors_beside_published_models(name, flavor, fields, read):
    args = get_train_spec(CONFIGS[name]["model_type"].partition("_")[0].replace("llama", "llama3")).model_args[flavor]
    found = differences(read(CONFIGS[name]), config_of(args))
    if not fields:
        assert found == []
    for field in fields:
        assert any(line.startswith(field) for line in found), found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_in_torchtitans_arguments_and_back(name, read):
    config = read(CONFIGS[name])
    args = args_of(config)
    again = config_of(args)
    assert again == config
    assert again.max_positions == CONFIGS[name]["max_position_embeddings"]
    assert (args.attn_type, args.attn_mask_type) == ("varlen", "block_causal")
    assert read(CONFIGS[name] | {"rope_theta": 2.0e7}) == replace(config, rope=replace(config.rope, theta=2.0e7))


def test_a_mixture_routes_as_the_checkpoint_does(read):
    moe = args_of(read(CONFIGS["Qwen3 30B-A3B"])).moe_args
    assert (moe.num_experts, moe.top_k, moe.num_shared_experts) == (128, 8, 0)
    assert (moe.score_func, moe.route_norm, moe.route_scale) == ("softmax", True, 1.0)
    assert (moe.score_before_experts, moe.load_balance_coeff, moe.gate_bias) == (False, None, False)
    assert not args_of(read(CONFIGS["Qwen3 30B-A3B"] | {"norm_topk_prob": None})).moe_args.route_norm


def test_what_no_config_json_can_say_is_a_difference(read):
    config = read(CONFIGS["Qwen3 30B-A3B"])
    args = args_of(config)
    args.qk_norm = False
    args.moe_args.num_shared_experts = 1
    assert differences(config, config_of(args)) == [
        "other () in the file, ('qk_norm False', 'num_shared_experts 1') in the flavor"
    ]


def test_llama3_has_exactly_the_files_width_of_the_feed_forward(read):
    with torch.device("meta"):
        for dim in (64, 96, 2048, 3072, 4096, 5120, 6656, 8192, 16384):
            for hidden_dim in [*range(1, 40), *range(2 * dim - 3, 2 * dim + 3), 7 * dim // 2 + 1, 14336, 28672, 53248]:
                args = args_of(read(llama(dim, hidden_dim, 1, 8)))
                feed_forward = llama3.FeedForward(dim, 4 * dim, args.multiple_of, args.ffn_dim_multiplier)
                assert feed_forward.w1.out_features == hidden_dim
                assert config_of(args).hidden_dim == hidden_dim


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_what_transformers_5_writes_is_what_it_reads(kind, tmp_path, read):
    """Its spelling: rope_parameters, num_local_experts, a head_dim in every file."""
    old = CONFIGS[{"llama": "Llama 3.1 8B", "qwen3": "Qwen3 4B 2507", "qwen3_moe": "Qwen3 30B-A3B"}[kind]]
    old = {**old, "norm_topk_prob": True, "num_experts_per_tok": 3} if kind == "qwen3_moe" else old
    config = read(old)
    in_transformers(old).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_theta" not in written
    assert "rope_parameters" in written
    assert read_model_config(tmp_path) == config


@pytest.mark.parametrize("name", OF_0_3)
def test_models_of_torchtitan_0_3_are_read_and_written(name, tmp_path, read):
    config = read(OF_0_3[name])
    in_transformers(OF_0_3[name]).save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == read(config.to_hf()) == config
    in_transformers(config.to_hf()).save_pretrained(tmp_path)
    assert read_model_config(tmp_path) == config
    with pytest.raises(ValueError, match=r"model.name is '\w+', which needs torchtitan 0.3; install it"):
        args_of(config)


def test_layers_with_windows_are_those_that_the_file_names(read):
    fields = gpt_oss(4, 32)
    assert read(fields).windows == (128, 0, 128, 0)
    assert read(fields | {"layer_types": ["full_attention"] * 4}).windows == ()
    assert read(fields | {"layer_types": ["sliding_attention"] * 4, "sliding_window": 7}).windows == (7,) * 4


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
    spec = get_train_spec({"llama": "llama3"}.get(kind, kind))
    args = replace(args_of(read_model_config(folder)), attn_type="sdpa", attn_mask_type="causal")
    ours = spec.model_cls(args)
    tensors = load_file(folder / "model.safetensors")
    ours.load_state_dict(spec.state_dict_adapter(args, None).from_hf(tensors), strict=True)
    tokens = torch.randint(0, args.vocab_size, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.allclose(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fields", [small_llama(), small_qwen(), small_qwen(tie_word_embeddings=True), small_moe()])
def test_torchtitan_writes_the_tensors_that_a_checkpoint_has(fields, read):
    config = read(fields)
    spec, args = get_train_spec(config.model), args_of(config)
    with torch.device("meta"):
        written = spec.state_dict_adapter(args, None).to_hf(spec.model_cls(args).state_dict())
    assert {name: tuple(tensor.shape) for name, tensor in written.items()} == tensor_shapes(config)


def test_missing_fields_are_those_of_transformers(read):
    fields = small_llama()
    without = {name: value for name, value in fields.items() if name not in ("num_key_value_heads", "rope_theta")}
    assert read(without).num_heads_kv == 8
    assert read(without | {"rope_scaling": None}).rope == Rope(10000.0)
    assert read(fields | {"head_dim": None}).head_dim == 8
    moe = small_moe()
    del moe["head_dim"], moe["tie_word_embeddings"], moe["norm_topk_prob"], moe["architectures"]
    config = read(moe)
    assert (config.head_dim, config.tied, config.experts) == (8, False, Experts(128, 8, 48, False))
    dense = small_qwen()
    del dense["head_dim"]
    assert read(dense).head_dim == in_transformers(dense).head_dim


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
def test_llama3_turns_by_the_same_bits_as_transformers(rope, head_dim, read, monkeypatch):
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
def test_qwen3_turns_by_the_same_bits_as_transformers(theta, read):
    fields = qwen(512, 64, 1, 8, rope_theta=theta, head_dim=64)
    args = args_of(read(fields))
    ours = qwen3.precompute_rope_cache(args.head_dim, 300, args.rope_theta)
    model = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(in_transformers(fields))
    assert torch.equal(ours, torch.cat(model(torch.zeros(()), torch.arange(300)[None]), -1)[0])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


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
def test_what_cannot_be_expressed_is_refused_by_name(fields, messages, read, tmp_path):
    with pytest.raises(ValueError) as caught:
        read(fields)
    for message in [f"{tmp_path}/config.json", *messages]:
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


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
def test_what_torchtitan_has_not_is_refused_by_name(fields, messages, read):
    with pytest.raises(ValueError) as caught:
        args_of(read(fields))
    for message in messages:
        assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_missing_or_broken(tmp_path):
    with pytest.raises(ValueError, match=r"config.json: No such file.*put the config.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": \n\n')
    with pytest.raises(ValueError, match=r"config.json is no JSON .*download it again$"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is no JSON .*download it again$"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
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
