"""Low-rank adapters: the policy without them as the reference of DPO, and their files as PEFT reads them."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_magi.models.names import plain_name
from torchtitan_magi.training.experts import expert_counts_kept
from torchtitan_magi.training.objectives.dpo import PairBatch, logprobs_by
from torchtitan_magi.training.objectives.fingerprint import KnownWeights, fingerprint_of_model
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.process.all_ranks import gathered, rank_and_size
from torchtitan_magi.training.settings.options import LoRA

TARGETS = {  # torchtitan's linear layers -> transformers' names
    "attention.qkv_linear.wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.wo": ("self_attn.o_proj",),
    "feed_forward.w1": ("mlp.gate_proj",),
    "feed_forward.w2": ("mlp.down_proj",),
    "feed_forward.w3": ("mlp.up_proj",),
}


def adapted_layers(parts: Sequence[nn.Module]) -> Iterator[tuple[str, Any]]:
    """The layers with an adapter, by torchtitan's names."""
    for part in parts:
        for name, module in part.named_modules():
            if hasattr(module, "lora_a"):
                yield plain_name(name), module


@contextlib.contextmanager
def adapters_off(parts: Sequence[nn.Module]) -> Iterator[None]:
    """The model as it was before training."""
    layers = [(layer, layer._lora_scaling) for _, layer in adapted_layers(parts)]
    try:
        for layer, _ in layers:
            layer._lora_scaling = 0.0
        yield
    finally:
        for layer, scaling in layers:
            layer._lora_scaling = scaling


class PolicyWithoutAdapters(KnownWeights):
    """The reference of DPO without a second copy of the weights. pp_group: the ranks of a pipeline."""

    def __init__(self, model: LogprobModel | Pipeline, pp_group: dist.ProcessGroup | None) -> None:
        self.model, self.pp_group = model, pp_group

    def prepare(self, step: int) -> None:
        """Raises ValueError in a resumed run whose frozen weights are others than those it began with."""
        found = fingerprint_of_model(self.model.parts, group=self.pp_group)
        self.check_weights("the frozen model", found, step, "load the whole checkpoint, or start another run")

    def logprobs(self, batches: list[PairBatch]) -> list[Tensor]:
        with adapters_off(self.model.parts), expert_counts_kept(self.model.parts):
            return logprobs_by(self.model, batches)


def save_adapters(
    folder: Path, parts: Sequence[nn.Module], adapter: Any, lora: LoRA, base: str, dtype: torch.dtype
) -> None:
    """Writes adapter_model.safetensors and adapter_config.json. A collective of all ranks.

    Args:
        adapter: torchtitan's StateDictAdapter of the model.
        base: the folder of the frozen weights.
    """
    tensors: dict[str, Tensor] = {}
    for name, layer in adapted_layers(parts):
        a, b = (_whole(part.weight).to(dtype) for part in (layer.lora_a, layer.lora_b))
        _, number, kind = name.split(".", 2)
        targets = TARGETS[kind]
        parts = [b] if len(targets) == 1 else _split_qkv(b, adapter)
        for target, part in zip(targets, parts, strict=True):
            prefix = f"base_model.model.model.layers.{number}.{target}"
            tensors |= {f"{prefix}.lora_A.weight": a.clone(), f"{prefix}.lora_B.weight": part.contiguous()}
    tensors = _gathered(tensors)
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        present = {name.split(".")[-3] for name in tensors}  # not those of experts, which get none
        names = [name for kind in TARGETS.values() for path in kind if (name := path.rpartition(".")[2]) in present]
        config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
        config |= {"bias": "none", "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0}
        config["target_modules"] = names
        save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    dist.barrier()


def _gathered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks, on rank 0: in a pipeline they have layers of their own. Each comes from one rank."""
    rank, size = rank_and_size()
    names = gathered(list(tensors))
    mine = {name: tensors[name] for name in set(names[rank]).difference(*names[:rank])}
    found: list[Any] = [None] * size
    dist.gather_object(mine, found if rank == 0 else None)
    return {name: tensor for part in found if part for name, tensor in part.items()}


def _whole(weight: Tensor) -> Tensor:
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).detach().cpu()


def _split_qkv(b: Tensor, adapter: Any) -> list[Tensor]:
    """The rows of queries, keys and values of the fused projection's B, as transformers has them."""
    attention = adapter.model_config.first_attention
    heads, heads_kv = attention.n_heads, attention.n_kv_heads or attention.n_heads
    per_group = b.view(heads_kv, heads // heads_kv + 2, -1, b.shape[1])
    q, k, v = (x.flatten(0, 2) for x in (per_group[:, :-2], per_group[:, -2:-1], per_group[:, -1:]))
    if hasattr(adapter, "_permute"):  # Llama's rows
        q, k = adapter._permute(q, heads, *q.shape), adapter._permute(k, heads_kv, *k.shape)
    return [q, k, v]
