"""Layers of torchtitan 0.3's Qwen3.5, of which those of Gated DeltaNet run by our plan.

Importing this takes torchtitan's models.qwen3_5, which imports flash-linear-attention: nobody else should.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import local_map

from torchtitan_magi.attention.op import PlanHandle
from torchtitan_magi.linear.op import convolve, recur
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.titan.v03.families.configs import copied
from torchtitan_magi.titan.v03.families.fla import fla_stands_in

EPS = 1e-6  # of the lengths of queries and keys


with fla_stands_in():
    from torchtitan.models import qwen3_5


class DeltaNet(qwen3_5.GatedDeltaNet):
    """torchtitan's Gated DeltaNet, of documents that may go on at other context-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(qwen3_5.GatedDeltaNet.Config):
        pass

    def forward(self, x_BLD: Tensor, attention_masks: PlanHandle) -> Tensor:
        """The layer's output for this rank's tokens x [b, s, dim] in the same shape."""
        q, k, v = (project(x_BLD) for project in (self.in_proj_q, self.in_proj_k, self.in_proj_v))
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x_BLD).float() + self.dt_bias)
        beta = self.in_proj_b(x_BLD).sigmoid()
        weights = self.conv_q.weight, self.conv_k.weight, self.conv_v.weight
        out = self._on_own_heads(partial(self._mix, attention_masks), q, k, v, g, beta, *weights)
        gate = self.in_proj_z(x_BLD).unflatten(2, (-1, self.value_head_dim))
        return self.out_proj(self.norm(out, gate).flatten(2))  # type: ignore[no-any-return]

    def _mix(self, handle: PlanHandle, *tensors: Tensor) -> Tensor:
        """The convolution and the rule: [b, s, h, value_head_dim] of q, k, v [b, s, channels], g, beta [b, s, h] and
        the weights of three convolutions, all of this rank's heads."""
        *of_tokens, g, beta = (x.flatten(0, 1) for x in tensors[:5])
        weight = torch.cat([x.squeeze(1) for x in tensors[5:]])
        mixed = convolve(torch.cat(of_tokens, 1), weight.to(of_tokens[0].dtype), handle, "silu")
        parts = mixed.split([x.shape[1] for x in of_tokens], 1)
        dims = self.key_head_dim, self.key_head_dim, self.value_head_dim
        q, k, v = (x.unflatten(1, (-1, dim)) for x, dim in zip(parts, dims, strict=True))
        out = recur(_normalized(q), _normalized(k), v, g, beta, handle, self.key_head_dim**-0.5)
        return out.unflatten(0, tensors[0].shape[:2])

    def _on_own_heads(self, function: Any, *tensors: Any) -> Any:
        """What a function makes of the parts that this tensor-parallel rank has of tensors."""
        first = tensors[0]
        if not isinstance(first, DTensor):
            return function(*tensors)
        placements = tuple(x.placements for x in tensors)
        run = local_map(
            function,
            out_placements=(first.placements,),
            in_placements=placements,
            in_grad_placements=placements,
            device_mesh=first.device_mesh,
        )
        return run(*tensors)


def _normalized(x: Tensor) -> Tensor:
    """x by its length over the last dimension."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + EPS)).to(x.dtype)


class Block(qwen3_5.Qwen35TransformerBlock):
    """torchtitan's block, whose both kinds take the microbatch's plan in place of masks."""

    @dataclass(kw_only=True, slots=True)
    class Config(qwen3_5.Qwen35TransformerBlock.Config):
        pass

    def forward(self, x_BLD: Tensor, attention_masks: PlanHandle, positions: Tensor | None = None) -> Tensor:
        """The block's output for this rank's tokens x [b, s, dim] in the same shape; positions: int [b, s]."""
        return super().forward(x_BLD, {self.attn_mask_key: attention_masks}, positions)  # type: ignore[no-any-return]


def layers_of(config: ModelConfig, rope: Any) -> list[Any]:
    """torchtitan's configurations of the layers."""
    assert config.linear is not None
    linear, experts = config.linear, config.experts
    common: dict[str, Any] = {"dim": config.dim, "n_heads": config.num_heads_q, "n_kv_heads": config.num_heads_kv}
    common |= {"head_dim": config.head_dim, "rotary_dim": config.rotary_dim, "rope": rope, "attn_backend": "flex"}
    common |= {"n_key_heads": linear.num_heads_qk, "n_value_heads": linear.num_heads_v, "n_layers": config.num_layers}
    common |= {"key_head_dim": linear.head_dim, "value_head_dim": linear.value_dim}
    build: Any = partial(qwen3_5._build_qwen35_layers, hidden_dim=config.hidden_dim)
    if experts is not None:
        build = partial(
            qwen3_5._build_qwen35_moe_layers,
            moe_hidden_dim=experts.hidden_dim,
            num_experts=experts.num_experts,
            top_k=experts.top_k,
            shared_expert_hidden_dim=experts.num_shared * experts.hidden_dim,
        )
    kinds = zip(
        build(**common, full_attention_interval=1),
        build(**common, full_attention_interval=config.num_layers + 1),
        strict=True,
    )
    return [_layer(each[number in linear.layers], config) for number, each in enumerate(kinds)]


def _layer(stock: Any, config: ModelConfig) -> Any:
    """The configuration of our block for that of torchtitan's."""
    assert config.linear is not None
    layer = copied(Block.Config, stock)
    if layer.delta_net is not None:
        layer.delta_net = copied(DeltaNet.Config, layer.delta_net, conv_kernel_size=config.linear.conv_width)
        for conv in (layer.delta_net.conv_q, layer.delta_net.conv_k, layer.delta_net.conv_v):
            conv.kernel_size = config.linear.conv_width
    if layer.moe is not None:
        layer.moe.load_balance_coeff = None  # no bias where experts are selected: a checkpoint has none
    for kind in (qwen3_5.OffsetRMSNorm, qwen3_5.RMSNormGated):
        for _, norm, _, _ in layer.traverse(kind.Config):
            norm.eps = config.norm_eps
    return layer
