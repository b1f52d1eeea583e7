"""Validation loss that is the same number under every layout."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn

from torchtitan_magi.exchange.transport import gathered
from torchtitan_magi.training.batches.microbatch import MICROBATCH, Process, on_device
from torchtitan_magi.training.experts import expert_counts_kept, whole
from torchtitan_magi.training.objectives.objective import Objective
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.process.groups import group_of, reduced


@torch.no_grad()
def validate(
    models: list[nn.Module],
    objective: Objective,
    batches: Iterable[Any],
    process: Process,
    context: Any,
    metrics_processor: Any,
    device: str,
    step: int,
    pipeline: Pipeline | None = None,
) -> None:
    """Logs the loss of ``batches`` over all items of all ranks: summed loss / number of items.

    torchtitan counts labels after context parallelism has cut them, so its loss grows with the degree, and a rank
    without a label divides by zero. A collective of all ranks.

    Args:
        models: the parts of the model on this rank.
        context: makes the context that a forward runs in.
        pipeline: of the parts; each batch is a microbatch.
    """
    for model in models:
        model.eval()
    objective.start_step()
    metrics_processor.start_validation()
    loss_sum = torch.zeros((), device=device)
    num_items = torch.zeros((), dtype=torch.float64)
    batches = iter(batches)
    while group := list(islice(batches, 1 if pipeline is None else pipeline.num_microbatches)):
        for inputs, labels in group:
            metrics_processor.ntokens_since_last_log += labels.numel()
            num_items += objective.count_items(inputs[MICROBATCH])
        group = [on_device(batch, device) for batch in group]
        with metrics_processor.memory.noting(), context(), expert_counts_kept(models):
            if pipeline is None:
                losses = [objective.loss(inputs, labels, process) for inputs, labels in group]
            else:
                losses = pipeline.losses(objective, [x for x, _ in group], [y for _, y in group], process)
        for loss in losses:
            loss_sum += whole(loss) / objective.num_loss_replicas
    dims = metrics_processor.parallel_dims
    for axis in ("pp", "loss"):  # 0 on ranks without the last stage
        reduced(loss_sum, group_of(dims, axis))
    total_items = reduced(num_items.to(device), group_of(dims, "batch")).item()
    of_objective = gathered(objective.metrics(), group_of(dims, "pp"))[-1]  # the last stage's, which has losses
    metrics = {f"validation_metrics/{name}": value for name, value in of_objective.items()}
    metrics_processor.log_validation(loss_sum.item() / (total_items or 1), step, metrics)
    for model in models:
        model.train()


def limited(batches: Iterable[Any], steps: int) -> Iterable[Any]:
    """The first of the batches. steps: how many; -1: all."""
    return islice(batches, steps if steps != -1 else None)
