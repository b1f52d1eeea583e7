"""config.json of published models, in their spelling."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(dim, hidden_dim, layers, heads, **fields):
    """A config.json as published with Llama 3.1, in the spelling of transformers 4."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": hidden_dim,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    } | fields


def qwen(dim, hidden_dim, layers, heads, **fields):
    """A config.json as published with Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": hidden_dim,
        "max_position_embeddings": 40960,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    } | fields


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
