"""Pipeline parallelism: what it does not go with, and a step of the schedule whose microbatches have plans of their
own."""

from typing import Any

import torch
from torch import Tensor

from torchtitan_magi.training.logprob_model import LogprobModel
from torchtitan_magi.training.model_config import ModelConfig
from torchtitan_magi.training.objectives import SFT, LocalBatch, Objective
from torchtitan_magi.training.options import DPO_DATASET
from torchtitan_magi.wording import quoted

SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe")


def check_pipeline(job: Any, model: ModelConfig) -> None:
    """Raises ValueError, one line that names the value and the remedy, for what the pipeline does not go with."""
    parallelism = job.parallelism
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    if degree == 1:
        return
    if schedule not in SCHEDULES or parallelism.pipeline_parallel_schedule_csv:
        given = quoted(parallelism.pipeline_parallel_schedule_csv or schedule)
        raise ValueError(
            f"parallelism.pipeline_parallel_schedule is {given}; "
            f"use one of {', '.join(SCHEDULES)}: others split the backward, which this attention does not"
        )
    for name, found, remedy in (
        ("tie_word_embeddings", model.tied, "the first and the last stage cannot share a weight"),
        ("training.dataset", job.training.dataset == DPO_DATASET, "pairs need the whole model on a rank"),
        ("magi.lora.rank", job.magi.lora.rank > 0, "adapters need the whole model on a rank"),
        ("validation.enable", job.validation.enable, "validate the checkpoints in a run without it"),
    ):
        if found:
            raise ValueError(
                f"parallelism.pipeline_parallel_degree is {degree}, but {name} does not go with it: {remedy}; set it "
                "to 1, and use context, tensor or data parallelism"
            )


class Pipeline:
    """The part of a pipeline on this rank, for SFT.

    Args:
        trainer: a ``MagiTrainer`` with its model parts.
    """

    def __init__(self, trainer: Any, compiled: bool) -> None:
        self.trainer = trainer
        self.microbatches: list[tuple[LocalBatch, Tensor | None]] = []  # of the step
        if trainer.pp_has_last_stage:
            part = trainer.model_parts[-1]
            part._skip_lm_head = True  # the loss calls the output layer, as torchtitan's chunked loss does
            self.last = LogprobModel(part, compiled)
            self.last.model = self.last.output
            trainer.loss_fn.of_hidden = self._loss

    def _loss(self, hidden: Tensor, number: Tensor) -> Tensor:
        """The addend of a microbatch to the step's mean loss. number: 0-d int64 on the CPU, as targets are tensors."""
        batch, scale = self.microbatches[int(number)]
        return -self.last.summed(batch.labels, hidden, batch.labelled, scale) / self.trainer.num_items

    def forward_backward(self, objective: Objective, inputs: list[dict[str, Any]], labels: list[Tensor]) -> Tensor:
        """This rank's addend to the step's mean loss, detached; -1 on ranks without the last stage, as torchtitan has
        it."""
        assert isinstance(objective, SFT)  # see check_pipeline
        trainer, counts = self.trainer, [batch.pop("num_items") for batch in inputs]
        read = [objective.read(batch, of, trainer.process) for batch, of in zip(inputs, labels, strict=True)]
        self.microbatches = read
        losses: list[Tensor] = []
        with trainer.train_context():
            _step(
                trainer.pp_schedule,
                [(batch.tokens,) for batch, _ in read] if trainer.pp_has_first_stage else None,
                [batch.model_inputs for batch, _ in read],
                list(torch.arange(len(read))) if trainer.pp_has_last_stage else None,
                losses if trainer.pp_has_last_stage else None,
                return_outputs=False,
            )
        record = trainer.metrics_processor.losses
        if not trainer.pp_has_last_stage:
            record.add(torch.zeros((), device=trainer.device), 0.0)
            return torch.tensor(-1.0, device=trainer.device)
        for loss, count in zip(losses, counts, strict=True):
            record.add(loss.to(trainer.device) * trainer.num_items, count / trainer.parallel_dims.cp)
        return torch.stack(losses).sum().detach().to(trainer.device)


def _step(schedule: Any, *microbatches: Any, return_outputs: bool) -> None:
    """A step with microbatches that have been made. ``step`` of the torch that this package runs on, up to 2.13, makes
    them itself of one batch; newer ones take them by keyword."""
    for stage in schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]:
        stage.has_backward = True
        stage.clear_runtime_states()
    schedule._step_microbatches(*microbatches, return_outputs=return_outputs)
