"""The text part of Qwen3.5 to 3.8 in torchtitan 0.3: a decoder with layers that recur, and its tensors in files."""

import importlib
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models import qwen3
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_sequence_parallel_placement, set_decoder_sharding_config
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.models.utils import get_moe_model_nparams_and_flops

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.models.names import name_in_files
from torchtitan_magi.titan.v03.families.positions import YarnRoPE

EMBEDDING, OUTPUT = name_in_files("qwen3_5", "model.embed_tokens.weight"), "lm_head.weight"
# What a checkpoint has in one tensor, queries, keys and values one after the other
FUSED = {"in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"), "conv1d": ("conv_q", "conv_k", "conv_v")}
RECURRENT = {f"linear_attn.{name}": f"attn.{name}" for name in ("A_log", "dt_bias")}
RECURRENT |= {
    f"linear_attn.{name}.weight": f"attn.{name}.weight"
    for name in ("in_proj_z", "in_proj_a", "in_proj_b", "norm", "out_proj")
}
SHARED = {
    f"mlp.shared_expert.{theirs}_proj": f"moe.shared_experts.{ours}"
    for theirs, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
}
SHARED |= {"mlp.shared_expert_gate": "moe.shared_experts.gate"}


def _delta_net() -> Any:
    """The layers' module, imported by those alone who have such a model: it takes flash-linear-attention."""
    return importlib.import_module("torchtitan_magi.titan.v03.families.delta_net")


class TextModel(Decoder):
    """The text part of torchtitan's Qwen3.5."""

    @dataclass(kw_only=True, slots=True)
    class Config(Decoder.Config):
        def update_from_config(self, *, config: Any, **others: Any) -> None:
            """Takes degrees and lengths of a run: how tensor parallelism splits layers, and the length of positions."""
            Decoder.Config.update_from_config(self, config=config, **others)
            set_layer = importlib.import_module("torchtitan.models.qwen3_5.sharding")._set_qwen35_layer_sharding
            set_decoder_sharding_config(self, enable_sp=True)
            options = {"attention_input_layout": dense_sequence_parallel_placement()}
            options["enable_ep"] = config.parallelism.expert_parallel_degree > 1
            for layer in self.layers:
                set_layer(layer, **options)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Numbers of parameters, and of operations for a token."""
            attention: Any = self.first_attention
            heads, dims = attention.n_heads, 2 * attention.head_dim
            return get_moe_model_nparams_and_flops(self, model, heads, dims, seq_len)  # type: ignore[no-any-return]


def model_of(config: ModelConfig, rope: Any) -> Any:
    """torchtitan's configuration of the model."""
    delta_net = _delta_net()
    stock, size = delta_net.qwen3_5, {"in_features": config.dim, "out_features": config.vocab_size}
    return TextModel.Config(
        dim=config.dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=config.tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=config.vocab_size,
            embedding_dim=config.dim,
            param_init=qwen3._EMBEDDING_SKIP_INIT if config.tied else stock._EMBEDDING_INIT,
        ),
        norm=stock.OffsetRMSNorm.Config(dim=config.dim, eps=config.norm_eps, param_init=stock._OFFSET_NORM_INIT),
        lm_head=Linear.Config(**size, param_init=stock._output_linear_init(config.dim)),
        layers=delta_net.layers_of(config, _rope_of(config, rope)),
    )


def _rope_of(config: ModelConfig, rope: Any) -> Any:
    """The positions of a layer. rope: torchtitan's configuration of them."""
    if config.rope.attention_factor == 1:
        return rope
    values = {option.name: getattr(rope, option.name) for option in fields(rope) if option.init}
    return YarnRoPE.Config(**values, attention_factor=config.rope.attention_factor)


class Qwen35Adapter(Qwen3StateDictAdapter):
    """Qwen3's, with the tensors of layers that recur and of shared experts, by the names that whole models have."""

    from_hf_map: dict[str, Any]
    joined: dict[str, str]  # tensors that are rows of others in files, one after the other: torchtitan's name -> theirs

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        super().__init__(model_config, hf_assets_path)
        plain = ((theirs, ours) for theirs, ours in self.from_hf_map.items() if ours)
        names = {theirs: ours.replace(".attention.", ".attn.").replace(".qkv_linear", "") for theirs, ours in plain}
        names |= {f"model.layers.{{}}.{theirs}": f"layers.{{}}.{ours}" for theirs, ours in RECURRENT.items()}
        names |= {f"model.layers.{{}}.{theirs}.weight": f"layers.{{}}.{ours}.weight" for theirs, ours in SHARED.items()}
        self.from_hf_map = {name_in_files("qwen3_5", theirs): ours for theirs, ours in names.items()}
        self.joined = {
            f"layers.{{}}.attn.{ours}.weight": _in_file("{}", fused) for fused, parts in FUSED.items() for ours in parts
        }

    def _validate_hf_rope_config(self, *_: Any) -> None:
        """Nothing: positions were made of the file, and torchtitan looks for them in every layer."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """transformers' tensors of torchtitan's."""
        tensors = super().to_hf(state_dict)
        for number, layer in enumerate(self.model_config.layers):
            for fused, names in FUSED.items() if layer.delta_net else ():
                parts = [state_dict.get(f"layers.{number}.attn.{name}.weight") for name in names]
                if parts[0] is not None:
                    tensors[_in_file(number, fused)] = _joined(parts)
        return tensors

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """torchtitan's tensors of transformers'."""
        theirs, found = dict(hf_state_dict), {}
        if self.model_config.enable_weight_tying and EMBEDDING in theirs:
            theirs.setdefault(OUTPUT, theirs[EMBEDDING])
        for number, layer in enumerate(self.model_config.layers):
            for fused, names in FUSED.items() if layer.delta_net else ():
                if (whole := theirs.pop(_in_file(number, fused), None)) is not None:
                    sizes = [getattr(layer.delta_net, name).out_features for name in FUSED["in_proj_qkv"]]
                    for name, part in zip(names, whole.split(sizes), strict=True):
                        found[f"layers.{number}.attn.{name}.weight"] = part
        return found | super().from_hf(theirs)


def _in_file(number: object, name: str) -> str:
    return name_in_files("qwen3_5", f"model.layers.{number}.linear_attn.{name}.weight")


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows one after the other; of distributed ones each rank keeps its share."""
    whole = torch.cat(parts)
    if isinstance(whole, DTensor):
        whole = whole.redistribute(placements=[Shard(0)] * whole.device_mesh.ndim)
    return whole
