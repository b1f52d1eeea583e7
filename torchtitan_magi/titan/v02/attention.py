"""The attention module of a layer in torchtitan 0.2.2's shapes, and what it gets of a microbatch's plan."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models import attention as titan_attention
from torchtitan.models.attention import VarlenMetadata

from torchtitan_magi.attention.op import PlanHandle, attend
from torchtitan_magi.training.batches.microbatch import MICROBATCH, LocalBatch, Process
from torchtitan_magi.training.batches.planner import MagiRuntime


class PlanMetadata(VarlenMetadata):
    """What torchtitan hands to every layer of one microbatch: the handle of its plan.

    It takes the place of ``cu_seq_q``: FSDP2 rebuilds named tuples from their fields, and anything else would be lost
    on the way to the layers.
    """

    # int [batch, seq_len] of the whole pack; None: torchtitan's own. Read before the model runs
    positions: Tensor | None

    @property
    def handle(self) -> PlanHandle:
        """The handle of the plan, the same for all layers."""
        return self.cu_seq_q  # type: ignore[return-value]

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [batch, seq_len, ...] as [batch, seq_len / cp, ...]."""
        return self.handle.take(x)


class VarlenAttentionWrapper(titan_attention.VarlenAttentionWrapper):
    """torchtitan's varlen attention, over the ranks of the context-parallel mesh.

    Args:
        dtype: in which attention runs; None: that of v.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(
        self, xq: Tensor, xk: Tensor, xv: Tensor, attention_masks: VarlenMetadata, scale: float | None = None
    ) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            xq: [b, Hq, s, D]. xk, xv: [b, H, s, D]. Tensors, or DTensors that tensor parallelism shards by heads.
            attention_masks: the microbatch's ``PlanMetadata``.
            scale: the scores' factor; default D ** -0.5.

        Returns:
            [b * s, Hq, D] in the dtype of xv; a DTensor if xq is one.
        """
        assert isinstance(attention_masks, PlanMetadata)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (xq, xk, xv))
        layout = (q.device_mesh, q.placements) if isinstance(q, DTensor) else None
        if layout is not None:
            q, k, v = (x.to_local() for x in (q, k, v))
        dtype = self.dtype or v.dtype
        q, k, v = (x.to(dtype) for x in (q, k, v))  # on CUDA autocast leaves the norms of qwen3's q and k in float32
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        out, _ = attend(q, k, v, attention_masks.handle, scale)
        out = out.to(xv.dtype)
        return out if layout is None else DTensor.from_local(out, *layout, run_check=False)


def attention_metadata(
    runtime: MagiRuntime, tokens: Tensor, eos_id: int | None, extra_inputs: dict[str, Any]
) -> PlanMetadata:
    """The metadata that all layers of one microbatch share.

    Args:
        tokens: [batch, seq_len] on the device.
        eos_id: see ``MagiRuntime.plan_ahead``.
        extra_inputs: what else the loader gave, planned or not. Edited in place, as torchtitan calls the model with the
            same dict: afterwards it holds what the model takes. ``positions`` are among it where the model finds them
            here; under context parallelism they go with the metadata to ``cp_shard``.
    """
    batch = extra_inputs.get(MICROBATCH) or runtime.plan_ahead({"input": tokens.cpu(), **extra_inputs}, None, eos_id)
    plans, for_model = runtime.bind(batch)
    (bound,) = plans.values()  # all layers are alike
    positions = for_model.pop("positions", None)
    if runtime.cp_size == 1:
        in_pack = torch.arange(tokens.shape[1], device=tokens.device)[None]
        for_model["positions"] = in_pack if positions is None else positions
    extra_inputs.clear()
    extra_inputs.update(for_model)
    metadata = PlanMetadata(PlanHandle(bound), None, 0, 0)  # type: ignore[arg-type]
    metadata.positions = positions
    return metadata


def local_batches(process: Any) -> Process:
    """The ``post_dataloading_process`` of torchtitan's Trainer or Validator, as an objective calls it."""

    def local_batch(inputs: dict[str, Any], labels: Tensor) -> LocalBatch:
        labelled = inputs[MICROBATCH].labelled.to(labels.device)
        tokens, labels, extra_inputs, masks = process(inputs, labels)
        return LocalBatch(tokens, labels, labelled, extra_inputs | masks, masks["attention_masks"].take)

    return local_batch
