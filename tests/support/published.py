"""config.json of published models, in their spelling, and of small ones like them."""

import json
import tempfile
from functools import partial
from pathlib import Path

from torchtitan_magi.models.model_config import read_model_config

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def published(name, model_type, dim, hidden_dim, layers, heads, /, **fields):
    """Fields of every config.json, and more, or others."""
    return {
        "architectures": [f"{name}ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": hidden_dim,
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    } | fields


def llama(*sizes, **fields):
    """A config.json as published with Llama 3.1, in the spelling of transformers 4. sizes: dim, hidden_dim, ..."""
    llama = {
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
    }
    return published("Llama", "llama", *sizes, **llama | fields)


def qwen(dim, hidden_dim, layers, heads, **fields):
    """A config.json as published with Qwen3."""
    qwen = {
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return published("Qwen3", "qwen3", dim, hidden_dim, layers, heads, **qwen | fields)


def qwen_moe(dim, hidden_dim, layers, heads, expert_dim, **fields):
    moe = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": expert_dim,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    return qwen(dim, hidden_dim, layers, heads) | moe | fields


def gpt_oss(layers, experts, **fields):
    """A config.json as published with gpt-oss, but for its quantization_config: that of a bf16 copy."""
    gpt_oss = {
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_local_experts": experts,
        "output_router_logits": False,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "vocab_size": 201088,
    }
    return published("GptOss", "gpt_oss", 2880, 2880, layers, 64, **gpt_oss | fields)


_DEEPSEEK_V3 = {  # as published, but for its quantization_config: that of a bf16 copy
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V3 = published("DeepseekV3", "deepseek_v3", 7168, 18432, 61, 128, **_DEEPSEEK_V3)
KIMI_K2 = {
    name: value for name, value in DEEPSEEK_V3.items() if name not in ("ep_size", "num_nextn_predict_layers")
} | {
    "first_k_dense_replace": 1,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"factor": 64.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
LAYERS_OF_MUSE = [number % 4 == 3 for number in range(52)]  # those without window and positions
MUSE_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "final_logit_softcapping": 20.0,
    "head_dim": 128,
    "hidden_activation": "silu",
    "hidden_size": 6656,
    "intermediate_size": 19968,
    "layer_rope_theta": [0 if full else 500000.0 for full in LAYERS_OF_MUSE],
    "layer_types": ["full_attention" if full else "sliding_attention" for full in LAYERS_OF_MUSE],
    "max_position_embeddings": 131072,
    "model_type": "muse_glimmer_text",
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-08,
    "qk_scale_factor": 3.87,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "sliding_window": 2048,
    "tie_word_embeddings": False,
    "vocab_size": 202048,
}
QWEN35_ROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}


def qwen35(dim, hidden_dim, layers, heads, heads_v, tied=False, **experts):
    """A Qwen3.5 with its part that sees pictures; experts: fields of a mixture of them, without hidden_dim."""
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    text = {
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": dim,
        "layer_types": ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": heads_v,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": f"{kind}_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": heads[0],
        "num_hidden_layers": layers,
        "num_key_value_heads": heads[1],
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default", **QWEN35_ROPE},
        "tie_word_embeddings": tied,
        "vocab_size": 248320,
    }
    name = "Qwen3_5MoeForConditionalGeneration" if experts else "Qwen3_5ForConditionalGeneration"
    return {
        "architectures": [name],
        "model_type": kind,
        "text_config": text | (experts or {"intermediate_size": hidden_dim}),
        "tie_word_embeddings": tied,
    }


WITH_PICTURES = {  # of which the text part is trained, by torchtitan 0.3 only
    "Muse Glimmer 30B": {
        "architectures": ["MuseGlimmerForConditionalGeneration"],
        "image_token_id": 200092,
        "model_type": "muse_glimmer",
        "out_hidden_size": 6144,
        "text_config": MUSE_TEXT,
    },
    "Kimi K2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
        "model_type": "kimi_k25",
        "text_config": KIMI_K2,
        "tie_word_embeddings": False,
    },
    "Qwen3.5 2B": qwen35(2048, 6144, 24, (8, 2), 16, tied=True),
    "Qwen3.5 9B": qwen35(4096, 12288, 32, (16, 4), 32),
    "Qwen3.6 27B": qwen35(5120, 17408, 64, (24, 4), 48),
    "Qwen3.5 35B-A3B": qwen35(
        2048,
        0,
        40,
        (16, 2),
        32,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}
OF_0_3 = {  # models of torchtitan 0.3 only
    "gpt-oss 20b": gpt_oss(24, 32),
    "gpt-oss 120b": gpt_oss(36, 128),
    "DeepSeek V3": DEEPSEEK_V3,
}
CONFIGS = {
    "Llama 3 8B": llama(4096, 14336, 32, 32, rope_scaling=None, max_position_embeddings=8192),
    "Llama 3.1 8B": llama(4096, 14336, 32, 32),
    "Llama 3.1 70B": llama(8192, 28672, 80, 64),
    "Llama 3.3 70B": llama(8192, 28672, 80, 64, head_dim=128),
    "Llama 3.1 405B": llama(16384, 53248, 126, 128),
    "Qwen3 8B": qwen(4096, 12288, 36, 32),
    "Qwen3 14B": qwen(5120, 17408, 40, 40),
    "Qwen3 32B": qwen(5120, 25600, 64, 64),
    "Qwen3 4B": qwen(2560, 9728, 36, 32, tie_word_embeddings=True),
    "Qwen3 4B 2507": qwen(2560, 9728, 36, 32, tie_word_embeddings=True, rope_theta=5000000),
    "Qwen3 30B-A3B": qwen_moe(2048, 6144, 48, 32, 768),
    "Qwen3 30B-A3B 2507": qwen_moe(2048, 6144, 48, 32, 768, rope_theta=10000000, max_position_embeddings=262144),
    "Qwen3 235B-A22B": qwen_moe(4096, 12288, 94, 64, 1536),
    "Qwen3 235B-A22B 2507": qwen_moe(4096, 12288, 94, 64, 1536, rope_theta=5000000),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SHIPPED = {  # folders that files of train_configs name -> the published model
    "Llama-3.1-8B-Instruct": "Llama 3.1 8B",
    "Llama-3.1-70B-Instruct": "Llama 3.1 70B",
    "Qwen3-8B": "Qwen3 8B",
    "Qwen3-32B": "Qwen3 32B",
    "Qwen3-30B-A3B": "Qwen3 30B-A3B",
    "gpt-oss-20b-bf16": "gpt-oss 20b",
    "Qwen3.5-9B": "Qwen3.5 9B",
    "Qwen3.6-27B": "Qwen3.6 27B",
}
small_llama, small_qwen = partial(llama, 64, 176, 2, 8), partial(qwen, 64, 176, 2, 8)
small_moe = partial(qwen_moe, 64, 176, 2, 8, 48)


def shipped_model(values):
    """The config.json of the model that a file of train_configs trains; None for a flavor of torchtitan's own."""
    name = SHIPPED.get(Path(values["model"]["hf_assets_path"]).name)
    return name and (CONFIGS | OF_0_3 | WITH_PICTURES)[name]


def needs_0_3(values):
    """Whether torchtitan 0.2.2 refuses a file of train_configs: for its model, or its adapters."""
    name = SHIPPED.get(Path(values["model"]["hf_assets_path"]).name)
    return name in OF_0_3 | WITH_PICTURES or "lora" in values["magi"]


def read(fields):
    """The ModelConfig of a config.json with these fields."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(fields))
        return read_model_config(folder)


def in_transformers(fields):
    """The configuration of transformers with these fields."""
    import transformers

    return transformers.AutoConfig.for_model(**json.loads(json.dumps(fields)))  # which edits tables in place
