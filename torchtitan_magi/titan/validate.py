"""Validation loss that is the same number under every layout."""

from itertools import islice
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils

from torchtitan_magi.titan.data import build_validation_dataloader


class MagiValidator(Validator):
    """torchtitan's validator with the loss taken over all tokens of all ranks: summed loss / valid labels.

    torchtitan counts labels after context parallelism has cut them, so its loss grows with the degree, and a rank
    without a label divides by zero.
    """

    def __init__(
        self,
        job_config: Any,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        parallel_dims: Any,
        loss_fn: Any,
        validation_context: Any,
        maybe_enable_amp: Any,
        metrics_processor: Any,
        **pipeline: Any,
    ) -> None:
        BaseValidator.__init__(self, job_config)
        self.tokenizer, self.parallel_dims, self.loss_fn = tokenizer, parallel_dims, loss_fn
        self.validation_context, self.maybe_enable_amp = validation_context, maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.validation_dataloader = build_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config)

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Logs the loss of the validation set."""
        (model,) = model_parts
        model.eval()
        steps = self.job_config.validation.steps
        loss_sum = torch.zeros((), device=utils.device_type)
        valid = torch.zeros((), dtype=torch.int64)
        for input_dict, labels in islice(self.validation_dataloader, steps if steps != -1 else None):
            self.metrics_processor.ntokens_since_last_log += labels.numel()
            valid += (labels != IGNORE_INDEX).sum()
            on_device = {
                name: value.to(utils.device_type) if isinstance(value, torch.Tensor) else value
                for name, value in input_dict.items()
            }
            inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(
                on_device, labels.to(utils.device_type), model_parts
            )
            with self.validation_context(), self.maybe_enable_amp:
                loss = self.loss_fn(model(inputs, **extra_inputs, **extra_kwargs), labels)
            loss_sum += dist_utils.DTensor.full_tensor(loss) if isinstance(loss, dist_utils.DTensor) else loss
        dims = self.parallel_dims
        total_loss = dist_utils.dist_sum(loss_sum, dims.get_mesh("loss") if dims.dp_cp_enabled else None)
        total_valid = dist_utils.dist_sum(
            valid.to(utils.device_type), dims.get_mesh("batch") if dims.dp_enabled else None
        )
        self.metrics_processor.log_validation(loss=total_loss / max(total_valid, 1), step=step)
        model.train()
