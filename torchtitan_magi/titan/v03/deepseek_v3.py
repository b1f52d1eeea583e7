"""DeepSeek V3 in torchtitan 0.3: its layers."""

from typing import Any

from torchtitan.models import deepseek_v3

from torchtitan_magi.models.model_config import LatentAttention, ModelConfig

LATENT_NORM_EPS = 1e-6  # transformers', whatever a config.json says of the other norms


def layers_of(config: ModelConfig, rope: Any) -> list[Any]:
    """torchtitan's configurations of the layers."""
    assert config.experts is not None
    assert config.latent is not None
    experts, latent = config.experts, config.latent
    groups = {}
    if experts.num_groups > 1:
        groups = {"router_num_expert_groups": experts.num_groups, "router_num_limited_groups": experts.top_groups}
    return deepseek_v3._build_dsv3_layers(
        dim=config.dim,
        n_layers=config.num_layers,
        n_dense_layers=experts.num_dense_layers,
        n_heads=config.num_heads_q,
        q_lora_rank=latent.q_rank,
        kv_lora_rank=latent.kv_rank,
        qk_nope_head_dim=config.head_dim - latent.rope_dim,
        qk_rope_head_dim=latent.rope_dim,
        v_head_dim=config.value_dim,
        mscale=latent.mscale,
        dense_hidden_dim=config.hidden_dim,
        moe_hidden_dim=experts.hidden_dim,
        num_experts=experts.num_experts,
        num_shared_experts=experts.num_shared,
        router_top_k=experts.top_k,
        router_score_func="sigmoid",
        router_route_scale=experts.scale,
        router_route_norm=experts.norm_topk_prob,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=rope,
        **groups,
    )


def set_latent_norms(model: Any) -> None:
    """Gives the norms of latent vectors their own epsilon."""
    for layer in model.layers:
        layer.attention.q_norm.eps = layer.attention.kv_norm.eps = LATENT_NORM_EPS


def latent_of(attention: Any) -> LatentAttention:
    """Of torchtitan's configuration of a layer's attention."""
    return LatentAttention(attention.q_lora_rank, attention.kv_lora_rank, attention.qk_rope_head_dim, attention.mscale)
