"""Low-rank adapters by torchtitan 0.3's converter."""

import functools
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.moe_sharding import expert_param_placement_dense
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from torchtitan_magi.titan.v03.families.configs import copied
from torchtitan_magi.training.objectives.lora import SEEN, adapters_seen
from torchtitan_magi.training.settings.magi_section import check_rank, check_targets
from torchtitan_magi.training.settings.options import EXPERTS, LoRA
from torchtitan_magi.wording import quoted

# Weights of experts -> the input that they share with others, and with it the first matrix of their adapters
INPUT_OF = {"w1_EFD": "up", "w3_EFD": "up", "w2_EDF": "down", "mlp1_weight_EGD": "up", "mlp2_weight_EDF": "down"}
IN_ONE, APART = "in_proj_qkv", ("in_proj_q", "in_proj_k", "in_proj_v")  # in transformers' linear attention, in ours


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
    check_rank(lora)
    if not lora.rank:
        return spec
    check_targets(lora)
    there = {name.rpartition(".")[2] for name, *_ in spec.model.traverse(Linear.Config)}
    there |= {EXPERTS for _ in spec.model.traverse(GroupedExperts.Config)}
    if there.issuperset(APART):
        there.add(IN_ONE)
    absent = [name for name in lora.target_modules if name not in there]
    if absent and lora.target_modules != LoRA().target_modules:  # which has the names of all models
        named = f"magi.lora.target_modules names {', '.join(absent)}"
        raise ValueError(f"{named}, which {spec.name} {quoted(spec.flavor)} has not; leave it out")
    targets = [name for name in lora.target_modules if name in there - {EXPERTS, IN_ONE}]
    targets += APART if IN_ONE in there.intersection(lora.target_modules) else ()
    converter: Any = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets)
    spec = replace(spec, model=converter.build().convert(deepcopy(spec.model)), post_optimizer_build_fn=None)
    if EXPERTS in lora.target_modules:
        for _, config, parent, name in list(spec.model.traverse(GroupedExperts.Config)):
            setattr(parent, name, _with_factors(config, lora))
    return spec


def _ranks(model: Any) -> list[int]:
    """The ranks of the adapters in a model's configuration."""
    return [config.rank for _, config, _, _ in model.traverse(Linear.Config) if hasattr(config, "rank")]


class Factors(Module):
    """One matrix of the adapters of a layer's experts for each of their inputs, or of their weights.

    Each parameter is [experts, rank, in] or [experts, out, rank].
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        shapes: dict[str, tuple[int, int, int]]

    def __init__(self, config: Config) -> None:
        super().__init__()
        for name, shape in config.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))


@functools.cache
def _adapted(experts: type) -> type:
    """The class of experts whose weights are W + scale * B @ A, as PEFT's ``target_parameters`` have them: what they
    compute with, in whatever way, is the whole sum. Others see the weights: FSDP2 takes them once more before the first
    forward, when adapters that were loaded are no longer 0."""

    class AdaptedExperts(experts):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            weights = {name: x.shape for name, x in self._parameters.items() if name in INPUT_OF}
            rank, layouts = config.rank, getattr(config.sharding_config, "state_shardings", {})
            shapes_a = {INPUT_OF[name]: (shape[0], rank, shape[2]) for name, shape in weights.items()}
            shapes_b = {name: (*shape[:2], rank) for name, shape in weights.items()}
            bounds = {name: shape[2] ** -0.5 for name, shape in shapes_a.items()}
            draw = {name: partial(nn.init.uniform_, a=-bound, b=bound) for name, bound in bounds.items()}
            layouts_a = {INPUT_OF[name]: _layout(layouts, name, 1) for name in weights}
            layouts_b = {name: _layout(layouts, name, 2) for name in weights}
            self.lora_a = _factors(shapes_a, draw, layouts_a)
            self.lora_b = _factors(shapes_b, dict.fromkeys(shapes_b, nn.init.zeros_), layouts_b)
            self._lora_scaling = config.alpha / rank

        def forward(self, *inputs: Any) -> Any:
            with adapters_seen(self):
                return super().forward(*inputs)

    for name in INPUT_OF:
        setattr(AdaptedExperts, name, property(partial(_weight, name)))
    return AdaptedExperts


def _weight(name: str, experts: Any) -> Tensor:
    if name not in experts._parameters:
        raise AttributeError(name)
    weight: Tensor = experts._parameters[name]
    a, b = getattr(experts.lora_a, INPUT_OF[name]), getattr(experts.lora_b, name)
    return torch.baddbmm(weight, b, a, alpha=experts._lora_scaling) if getattr(experts, SEEN, False) else weight


def check_factors(model: nn.Module) -> None:
    """Asserts of a model that has been distributed what ``_weight`` relies on: no adapter was left behind."""
    for experts in model.modules():
        if isinstance(getattr(experts, "lora_b", None), Factors):
            distributed = {isinstance(parameter, DTensor) for parameter in experts.parameters()}
            assert len(distributed) == 1, "weights and adapters of experts are not distributed alike"


def _layout(layouts: dict[str, Any], weight: str, dim: int) -> Any:
    """How a factor is split, for that of a weight [experts, out, in]: as this, whole in the dimension of the rank."""
    layout = layouts.get(weight)
    whole = expert_param_placement_dense(tp_placement=spmd.R)
    return whole if layout == expert_param_placement_dense(tp_placement=spmd.S(dim)) else layout


def _factors(shapes: dict[str, Any], init: dict[str, Any], layouts: dict[str, Any]) -> Any:
    sharding = ShardingConfig(state_shardings=layouts) if all(layouts.values()) else None
    return Factors.Config(shapes=shapes, param_init=init, sharding_config=sharding).build()


def _with_factors(experts: Any, lora: LoRA) -> Any:
    """The configuration of the same experts with adapters. experts: frozen ones."""
    kind = type(experts)
    own = {"_owner": _adapted(kind._owner), "rank": lora.rank, "alpha": lora.alpha}
    return copied(type(kind.__name__, (kind,), own), experts)


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
