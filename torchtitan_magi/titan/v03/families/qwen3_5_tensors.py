"""The tensors of Qwen3.5's text part as files have them, and as torchtitan 0.3 has."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from torchtitan_magi.models.names import name_in_files

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
