"""Low-rank adapters by torchtitan 0.3's converter."""

from dataclasses import replace
from typing import Any

import spmd_types as spmd
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_magi.training.settings.magi_section import check_targets
from torchtitan_magi.training.settings.options import LoRA
from torchtitan_magi.wording import quoted


def with_adapters(spec: ModelSpec, lora: LoRA) -> ModelSpec:
    """The same model with adapters beside weights that stay as they are, if the rank is not 0.

    The bias by which experts are chosen stays, too. torchtitan moves it for balance, but it is part of the frozen
    model, which is the reference of DPO and which an adapter is loaded onto.

    Raises:
        ValueError: the model gets no adapters here, or has some; one line.
    """
    if found := _ranks(spec.model):
        raise ValueError(
            f"the model has adapters of rank {found[0]} by a LoRAConverter of its own; leave that out, and set "
            f"magi.lora.rank to {found[0]}"
        )
    if not lora.rank:
        return spec
    check_targets(lora)
    there = {name.rpartition(".")[2] for name, *_ in spec.model.traverse(Linear.Config)}
    targets = [name for name in lora.target_modules if name in there]
    converter: Any = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets)
    spec = replace(spec, model=converter.build().convert(spec.model), post_optimizer_build_fn=None)
    if not _ranks(spec.model):
        raise ValueError(
            f"magi.lora.target_modules is {quoted(lora.target_modules)}, but the layers of {spec.name} "
            f"{quoted(spec.flavor)} have none of these; add wo, the output layer of attention"
        )
    return spec


def _ranks(model: Any) -> list[int]:
    """The ranks of the adapters in a model's configuration."""
    return [config.rank for _, config, _, _ in model.traverse(Linear.Config) if hasattr(config, "rank")]


def sharding_of_adapter(stock: Any, layer: ShardingConfig | None) -> Any:
    """How tensor parallelism splits an adapter's two matrices; torchtitan's own does not know layers that it splits by
    neither rows nor columns, as those that make DeepSeek's latent vectors.

    Args:
        stock: torchtitan's own function.
        layer: how it splits the layer that has the adapter.
    """
    whole = dense_param_placement(tp=spmd.R)
    if layer is None or layer.state_shardings.get("weight") != whole:
        return stock(layer)
    return (ShardingConfig(state_shardings={"weight": whole}),) * 2


def join_local_layers(model: nn.Module) -> None:
    """Lets adapters compute beside layers that see this tensor-parallel rank's tensors alone, as gpt-oss' output layer
    of attention: their matrices are DTensors. What they add is this rank's addend, as that of the layer."""
    for layer in model.modules():
        if isinstance(layer, ScaledBiasRowwiseLinear) and hasattr(layer, "lora_a"):
            layer.lora_a.register_forward_pre_hook(_as_columns)
            layer.lora_b.register_forward_hook(_as_addend)


def _as_columns(lora_a: Any, inputs: tuple[Tensor]) -> Any:
    """The rank's columns [..., d / tp] of a whole input."""
    (x,) = inputs
    weight = lora_a.weight
    return DTensor.from_local(x, weight.device_mesh, [Shard(x.dim() - 1)]) if isinstance(weight, DTensor) else x


def _as_addend(_: nn.Module, inputs: Any, out: Tensor) -> Tensor:
    return out.to_local(grad_placements=[Replicate()]) if isinstance(out, DTensor) else out
