"""DeepSeek V3 in torchtitan 0.3: its layers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models import deepseek_v3
from torchtitan.models.common import Linear
from torchtitan.models.deepseek_v3.model import Attention

from torchtitan_magi.attention.op import PlanHandle
from torchtitan_magi.models.model_config import LatentAttention, ModelConfig

LATENT_NORM_EPS = 1e-6  # transformers', whatever a config.json says of the other norms


class MagiLatentAttention(Attention):
    """torchtitan's latent attention, whose latent vectors travel in place of K and V where the plan has it so."""

    @dataclass(kw_only=True, slots=True)
    class Config(Attention.Config):
        pass

    def forward(self, x: Tensor, attention_masks: PlanHandle, positions: Tensor | None = None) -> Tensor:
        """Attention of this rank's tokens x [b, s, dim] in the same shape; positions: int [b, s]."""
        if not attention_masks.sends_latents or type(self.wkv_b) is not Linear:
            return super().forward(x, attention_masks, positions)
        q = self.wq(x) if self.q_lora_rank == 0 else self.wq_b(self.q_norm(self.wq_a(x)))
        latent, rotated = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_norm(latent)
        plain = self.qk_nope_head_dim
        q, kv = q.unflatten(2, (-1, self.qk_head_dim)), self.wkv_b(latent).unflatten(2, (-1, plain + self.v_head_dim))
        q_rotated, rotated = self.rope(q[..., plain:], rotated.unsqueeze(2), positions)
        q = torch.cat([q[..., :plain], q_rotated], -1)
        k = torch.cat([kv[..., :plain], rotated.expand(-1, -1, kv.shape[2], -1)], -1)
        rows = torch.cat([latent, rotated.squeeze(2)], -1).flatten(0, 1)
        weight = self.wkv_b.weight
        if isinstance(rows, DTensor):
            rows = rows.to_local(grad_placements=[Partial()])  # of the rank's own heads
        if isinstance(weight, DTensor):
            weight = weight.to_local()
        out = self.inner_attention(
            q,
            k,
            kv[..., plain:],
            attention_masks=attention_masks,
            scale=self.softmax_scale,
            latents=(rows, weight.to(rows.dtype)),
        )
        return self.wo(out.contiguous().flatten(2))


REPLACED: dict[Any, Any] = {Attention.Config: MagiLatentAttention.Config}


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
    """The latent attention in torchtitan's configuration of a layer."""
    return LatentAttention(attention.q_lora_rank, attention.kv_lora_rank, attention.qk_rope_head_dim, attention.mscale)
