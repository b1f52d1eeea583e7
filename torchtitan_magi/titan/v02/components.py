"""Components of torchtitan 0.2.2's Trainer that are ours: tokenizer, metrics, validation."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.tools import utils

from torchtitan_magi.titan.v02.attention import local_batches
from torchtitan_magi.training.batches.tokenizer import AssetsTokenizer
from torchtitan_magi.training.metrics import PlanMetrics
from torchtitan_magi.training.objectives.objective import LogitsLoss, Objective
from torchtitan_magi.training.objectives.validation import limited, validate


class MagiTokenizer(AssetsTokenizer, HuggingFaceTokenizer):
    """torchtitan's, of the same tokens as the inspector's and the report's."""


class MagiMetricsProcessor(PlanMetrics, MetricsProcessor):
    """torchtitan's, with the numbers of ``PlanMetrics`` once ``count_work`` has been called."""


class MagiValidator(Validator):
    """torchtitan's validator with the loss taken over all items of all ranks. Items are tokens with a label, unless our
    Trainer sets an ``objective``."""

    objective: Objective | None = None

    def __init__(self, job_config: Any, validation_dataloader: Any, **attributes: Any) -> None:
        """Keeps attributes by their names, as torchtitan's Validator does, which also builds a data loader."""
        BaseValidator.__init__(self, job_config)
        self.validation_dataloader = validation_dataloader
        self.__dict__.update(attributes)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Logs the loss of the validation set."""
        objective = self.objective or LogitsLoss(model_parts[0], self.loss_fn)
        process = local_batches(partial(self.post_dataloading_process, model_parts=model_parts))
        batches = limited(self.validation_dataloader, self.job_config.validation.steps)
        processor, device = self.metrics_processor, utils.device_type
        validate(model_parts, objective, batches, process, self._context, processor, device, step)

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with self.validation_context(), self.maybe_enable_amp:
            yield
