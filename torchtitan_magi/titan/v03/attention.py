"""The attention module of a layer in torchtitan 0.3's shapes, and what it gets of a microbatch's plan."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config.override import override
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.decoder_sharding import dense_activation_placement
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from torchtitan_magi.attention.op import PlanHandle, attend
from torchtitan_magi.training.batches.microbatch import MICROBATCH, LocalBatch
from torchtitan_magi.training.batches.planner import MagiRuntime

OVERRIDE = "torchtitan_magi.titan.v03.attention.varlen"


class VarlenAttention(Module):
    """Varlen attention over the ranks of the context-parallel mesh."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """What the override sets."""

        temperature: float = 1.0
        """Factor of the scores beside head_dim ** -0.5, as YaRN has it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.temperature = config.temperature

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: PlanHandle,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        latents: tuple[Tensor, Tensor] | tuple[()] = (),
    ) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            q_BLNH: [b, s, Hq, D]. k_BLNH: [b, s, H, D]. v_BLNH: [b, s, H, Dv]. Local tensors.
            attention_masks: the microbatch's plan for layers of this kind, in the place of torchtitan's masks.
            scale: the scores' factor; default D ** -0.5.
            out_transform: gpt-oss' method that would scale the result by its layer's sinks; our kernel has them itself.
            latents: what k and v come from, to travel in their place: rows and weight as ``Latents`` has them, local.

        Returns:
            [b, s, Hq, Dv] in the dtype of v_BLNH.
        """
        q, k, v = (x.flatten(0, 1).to(v_BLNH.dtype) for x in (q_BLNH, k_BLNH, v_BLNH))
        scale = (q.shape[-1] ** -0.5 if scale is None else scale) * self.temperature
        with spmd.no_typecheck():
            out, _ = attend(q, k, v, attention_masks, scale, _sinks(out_transform), 0.0, *latents)
        return out.unflatten(0, q_BLNH.shape[:2])


def _sinks(out_transform: Any) -> Tensor | None:
    """The sinks [Hq] of this rank's heads, in the layer whose method it is; None without a method."""
    if out_transform is None:
        return None
    sinks = out_transform.__self__.sinks
    return sinks.to_local(grad_placements=sinks.placements) if isinstance(sinks, DTensor) else sinks


@override(target=FlexAttention.Config, description="varlen context parallelism")
def varlen(config: FlexAttention.Config, temperature: float = 1.0) -> VarlenAttention.Config:
    """Our attention in place of torchtitan's. Every rank keeps its own tokens: nothing is gathered at the boundary."""
    own = dense_activation_placement(tp=spmd.S(2))
    names = ("q_BLNH", "k_BLNH", "v_BLNH")
    sharding = ShardingConfig(
        in_src_shardings=dict.fromkeys(names, own),
        in_dst_shardings=dict.fromkeys(names, own),
        out_src_shardings=own,
        local_map=LocalMapConfig(in_grad_placements=(own,) * 3),
    )
    return VarlenAttention.Config(temperature=temperature, sharding_config=sharding)


def _mask_names(window: int) -> tuple[str, ...]:
    """The names by which layers choose their mask: those of gpt-oss, those of Muse Glimmer. window: 0 for none."""
    return ("sliding_window_mask", f"swa_{window}") if window else ("basic_mask", "global")


def local_batch(runtime: MagiRuntime, inputs: dict[str, Any], labels: Tensor) -> LocalBatch:
    """This rank's tokens of a microbatch on the device. A collective of the context-parallel ranks.

    Args:
        inputs: what the planned loader gave.
        labels: int64 [batch, seq_len].
    """
    tokens, batch = inputs["input"], inputs[MICROBATCH]
    plans, for_model = runtime.bind(batch)
    positions = for_model.pop("positions", None)
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    take = next(iter(plans.values())).take
    handles = {window: PlanHandle(bound, runtime.recurs) for window, bound in plans.items()}
    masks: Any = {name: handle for window, handle in handles.items() for name in _mask_names(window)}
    if len(handles) == 1:
        (masks,) = handles.values()
    model_inputs = {**for_model, "positions": take(positions), "attention_masks": masks}
    return LocalBatch(take(tokens), take(labels), batch.labelled.to(labels.device), model_inputs, take)
