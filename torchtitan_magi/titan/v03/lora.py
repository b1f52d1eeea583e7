"""Low-rank adapters in torchtitan 0.3's configuration of a model."""

from dataclasses import replace
from typing import Any

from torchtitan.components.lora import LoRAConverter
from torchtitan.models.common import Linear
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan_magi.training.objectives.lora import check_targets
from torchtitan_magi.training.settings.options import LoRA
from torchtitan_magi.wording import quoted

WITH_ADAPTERS = ("llama3", "qwen3")


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
    if spec.name not in WITH_ADAPTERS:
        raise ValueError(f"magi.lora.rank is {lora.rank}, but {spec.name} gets no adapters here; set it to 0")
    check_targets(lora)
    converter: Any = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=list(lora.target_modules))
    spec = replace(spec, model=converter.build().convert(spec.model), post_optimizer_build_fn=None)
    if not _ranks(spec.model):
        raise ValueError(
            f"magi.lora.target_modules is {quoted(lora.target_modules)}, but the layers of {spec.name} "
            f"{quoted(spec.flavor)} have none of these; add wqkv and wo, the layers of attention"
        )
    return spec


def _ranks(model: Any) -> list[int]:
    """Of the adapters in a model's configuration."""
    return [config.rank for _, config, _, _ in model.traverse(Linear.Config) if hasattr(config, "rank")]
