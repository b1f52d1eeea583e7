"""A microbatch's plan, in the shape in which torchtitan hands attention metadata to every layer."""

from typing import Any

import torch
from torch import Tensor
from torchtitan.models.attention import VarlenMetadata

from torchtitan_magi.attention.bound_plan import BoundPlan
from torchtitan_magi.attention.op import make_handle
from torchtitan_magi.training.batches.microbatch import MICROBATCH, LocalBatch, Process
from torchtitan_magi.training.batches.planner import MagiRuntime


class HandleHolder:
    """Keeps a handle from being taken for data: the tensor stays as it is, wherever the inputs of a model go."""

    def __init__(self, handle: Tensor) -> None:
        self.handle = handle


class PlanMetadata(VarlenMetadata):
    """What torchtitan hands to every layer of one microbatch: the handle of its plan.

    It takes the place of ``cu_seq_q``: FSDP2 rebuilds named tuples from their fields, and anything else would be lost
    on the way to the layers. It travels inside an object, because FSDP2 copies tensors to the GPU: a copy of a handle
    owns no plan, and reading it would make every layer wait for the device.
    """

    # int [batch, seq_len] of the whole pack; None: torchtitan's own. Read before the model runs
    positions: Tensor | None

    @property
    def handle(self) -> Tensor:
        """0-d int64 on the CPU, see ``attention.make_handle``."""
        return self.cu_seq_q.handle  # type: ignore[attr-defined]

    def take(self, x: Tensor) -> Tensor:
        """This rank's tokens of x [batch, seq_len, ...] as [batch, seq_len / cp, ...]."""
        bound: BoundPlan = self.handle.bound_plan  # type: ignore[attr-defined]
        return bound.take(x)


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
    metadata = PlanMetadata(HandleHolder(make_handle(bound)), None, 0, 0)  # type: ignore[arg-type]
    metadata.positions = positions
    return metadata


def local_batches(process: Any) -> Process:
    """The ``post_dataloading_process`` of torchtitan's Trainer or Validator, as an objective calls it."""

    def local_batch(inputs: dict[str, Any], labels: Tensor) -> LocalBatch:
        labelled = inputs[MICROBATCH].labelled.to(labels.device)
        tokens, labels, extra_inputs, masks = process(inputs, labels)
        return LocalBatch(tokens, labels, labelled, extra_inputs | masks, masks["attention_masks"].take)

    return local_batch
