"""gpt-oss in torchtitan 0.3: its layers, and its experts' tensors as transformers names them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models import gpt_oss
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward, swiglu
from torchtitan.models.gpt_oss.state_dict_adapter import GptOssStateDictAdapter

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.training.experts import by_expert, local

# What a checkpoint that is not quantized has of the experts -> torchtitan's parameters
EXPERTS = {
    "gate_up_proj": "mlp1_weight_EGD",
    "gate_up_proj_bias": "mlp1_bias_EG",
    "down_proj": "mlp2_weight_EDF",
    "down_proj_bias": "mlp2_bias_ED",
}


def layers_of(config: ModelConfig, rope: Any) -> list[Any]:
    """torchtitan's configurations of the layers. Its builder knows the published heads and windows only."""
    assert config.experts is not None
    layers = gpt_oss._build_gptoss_layers(
        dim=config.dim,
        n_layers=config.num_layers,
        hidden_dim=config.experts.hidden_dim,
        num_experts=config.experts.num_experts,
        top_k=config.experts.top_k,
        load_balance_coeff=None,  # no bias where experts are selected: a checkpoint has none
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=rope,
    )
    windows = config.windows or (0,) * config.num_layers
    for number, (layer, window) in enumerate(zip(layers, windows, strict=True)):
        layer.attention = gpt_oss._make_gptoss_attn_config(
            dim=config.dim,
            layer_id=number,
            attn_backend="flex",
            n_heads=config.num_heads_q,
            n_kv_heads=config.num_heads_kv,
            head_dim=config.head_dim,
            sliding_window_size=window or None,
            rope=rope,
        )
    return layers


class GptOssAdapter(GptOssStateDictAdapter):
    """torchtitan's, with the experts, which its own leaves out: it knows them by names that the model has not."""

    from_hf_map: dict[str, Any]

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        names = {theirs: ours for theirs, ours in self.from_hf_map.items() if ".mlp.experts." not in theirs}
        for theirs, ours in EXPERTS.items():
            names[f"model.layers.{{}}.mlp.experts.{theirs}"] = f"layers.{{}}.moe.routed_experts.inner_experts.{ours}"
        self.from_hf_map = names

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """transformers' tensors of torchtitan's."""
        return _turned(super().to_hf(state_dict))

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """torchtitan's tensors of transformers'."""
        return super().from_hf(_turned(hf_state_dict))


def _turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers has the experts' matrices as [experts, in, out], torchtitan as [experts, out, in]."""
    return {
        name: x.transpose(1, 2).contiguous() if name.endswith(("experts.gate_up_proj", "experts.down_proj")) else x
        for name, x in tensors.items()
    }


class GptOssExperts(GptOssGroupedExperts):
    """torchtitan's experts, which compute in bfloat16 whatever arrives; in float32, one expert after the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """The experts' results of x_RD [rows, dim]: rows by expert, then rows without one, whose result is 0.

        Args:
            num_tokens_per_expert_E: int [experts].
        """
        if x_RD.dtype != torch.float32:
            return super().forward(x_RD, num_tokens_per_expert_E)
        *weights, b2 = local(self.mlp1_weight_EGD, self.mlp1_bias_EG, self.mlp2_weight_EDF, self.mlp2_bias_ED)
        mesh = self.mlp2_bias_ED.device_mesh if isinstance(self.mlp2_bias_ED, DTensor) else None
        tp = mesh["tp"].size() if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else 1

        def run(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
            return swiglu(x @ w1.T + b1, limit=self.swiglu_limit) @ w2.T + b2

        return by_expert(x_RD, num_tokens_per_expert_E, [*weights, _shared_out(b2, tp)], run)


class RowwiseLinear(ScaledBiasRowwiseLinear):
    """torchtitan's output layer of attention, whose bias would get a gradient divided by the tensor-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: Tensor) -> Tensor:
        """This rank's addend to the output: [..., out_features] of input [..., its columns]."""
        weight, bias = local(self.weight, self.bias)
        return F.linear(input, weight, _shared_out(bias, self.tp_degree))


def _shared_out(bias: Tensor, tp: int) -> Tensor:
    """What each tensor-parallel rank adds, so that their sum has the bias once; each has the bias' whole gradient."""
    return ScaleBiasForward.apply(bias, tp, bias.dtype)  # type: ignore[no-any-return]


REPLACED = {GptOssGroupedExperts.Config: GptOssExperts.Config, ScaledBiasRowwiseLinear.Config: RowwiseLinear.Config}
