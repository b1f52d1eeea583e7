"""Validation loss that is the same number under every layout."""

from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils

from torchtitan_magi.titan.v02.metadata import local_batches
from torchtitan_magi.titan.v02.moe import expert_counts_kept
from torchtitan_magi.training.objectives import LogitsLoss, Objective, to_device


class MagiValidator(Validator):
    """torchtitan's validator with the loss taken over all items of all ranks: summed loss / number of items.

    torchtitan counts labels after context parallelism has cut them, so its loss grows with the degree, and a rank
    without a label divides by zero. Items are tokens with a label, unless our Trainer sets an ``objective``.
    """

    objective: Objective | None = None

    def __init__(self, job_config: Any, validation_dataloader: Any, **attributes: Any) -> None:
        """attributes: kept by their names, as torchtitan's Validator does, which also builds a data loader."""
        BaseValidator.__init__(self, job_config)
        self.validation_dataloader = validation_dataloader
        self.__dict__.update(attributes)

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Logs the loss of the validation set."""
        (model,) = model_parts
        model.eval()
        objective = self.objective or LogitsLoss(model, self.loss_fn)
        process = local_batches(partial(self.post_dataloading_process, model_parts=model_parts))
        objective.start_step()
        steps = self.job_config.validation.steps
        loss_sum = torch.zeros((), device=utils.device_type)
        num_items = torch.zeros((), dtype=torch.int64)
        for inputs, labels in islice(self.validation_dataloader, steps if steps != -1 else None):
            self.metrics_processor.ntokens_since_last_log += labels.numel()
            num_items += objective.weigh(inputs, labels)
            with self.validation_context(), self.maybe_enable_amp, expert_counts_kept(model):
                loss = objective.loss(to_device(inputs, utils.device_type), labels.to(utils.device_type), process)
            loss = dist_utils.DTensor.full_tensor(loss) if isinstance(loss, dist_utils.DTensor) else loss
            loss_sum += loss / objective.copies
        dims = self.parallel_dims
        total_loss = dist_utils.dist_sum(loss_sum, dims.get_optional_mesh("loss"))
        total_items = dist_utils.dist_sum(num_items.to(utils.device_type), dims.get_optional_mesh("batch"))
        metrics = {f"validation_metrics/{name}": value for name, value in objective.metrics().items()}
        self.metrics_processor.log_validation(total_loss / max(total_items, 1), step, metrics)
        model.train()
