"""Our Trainer: SFT per token or per document, and DPO, without ever holding all logits."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.train
from torch import Tensor
from torchtitan.train import Trainer

from torchtitan_magi.titan.v02.job_config import DPO_DATASET, ENTRY
from torchtitan_magi.titan.v02.metadata import local_batches
from torchtitan_magi.titan.v02.metrics import MagiMetricsProcessor
from torchtitan_magi.titan.v02.references import ReferenceModel, reference_file
from torchtitan_magi.titan.v02.spec import MagiSpec
from torchtitan_magi.training.dpo import DPO, PairReader
from torchtitan_magi.training.logprob_model import LogprobModel
from torchtitan_magi.training.objectives import SFT, Objective
from torchtitan_magi.training.planned_loader import Batch
from torchtitan_magi.wording import quoted


class MagiTrainer(Trainer):
    """torchtitan's Trainer with the loss of an ``Objective``, divided by the items of all microbatches and ranks."""

    metrics_processor: MagiMetricsProcessor

    def __init__(self, job_config: Any) -> None:
        if "LOCAL_RANK" not in os.environ:
            raise ValueError(f"LOCAL_RANK is not set, as torchrun sets it; start it with {ENTRY}")
        MagiSpec.has_objectives = True
        # Our log-probabilities split the vocabulary over the TP ranks by themselves.
        parallelism = replace(job_config.parallelism, disable_loss_parallel=True)
        super().__init__(replace(job_config, parallelism=parallelism))
        if not isinstance(self.metrics_processor, MagiMetricsProcessor):
            raise ValueError(
                f"model.name is {quoted(job_config.model.name)}, whose train spec is not ours; train it with "
                "torchtitan's entry point, torchrun -m torchtitan.train, or add a flavor to llama3 or qwen3 instead"
            )
        dims = self.parallel_dims
        # DDP takes the mean of the ranks' gradients, while torchtitan tells FSDP2 to add them.
        self.gradient_factor = dims.dp_replicate if dims.dp_replicate_enabled and not dims.fsdp_enabled else 1
        compile_config = self.job_config.compile
        compiled = compile_config.enable and "loss" in compile_config.components
        self.model = LogprobModel(self.model_parts[0], compiled)
        self.reference_model = ReferenceModel(self)
        self.objective = self._make_objective(self.job_config.training)
        self.objectives = [self.objective]
        self.metrics_processor.objective_metrics = self.objective.metrics
        if self.job_config.validation.enable:
            self.validator.objective = self._make_objective(self.job_config.validation)
            self.objectives.append(self.validator.objective)

    def _make_objective(self, section: Any) -> Objective:
        magi = self.job_config.magi
        if section.dataset != DPO_DATASET:
            return SFT(self.model, magi.loss_per)
        reader = PairReader(self._group("cp"))
        reference = reference_file(self, section, reader) if magi.dpo.reference == "file" else self.reference_model
        return DPO(self.model, magi.dpo, reference, reader, self._group("batch"))

    def _group(self, name: str) -> dist.ProcessGroup | None:
        """The group of a mesh axis; None where it has a single rank."""
        mesh = self.parallel_dims.get_optional_mesh(name)
        return None if mesh is None else mesh.get_group()

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        """torchtitan calls this once, between loading the checkpoint and the first step."""
        for objective in self.objectives:
            objective.prepare(self.step)
        return super().batch_generator(data_iterable)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        microbatches = [next(data_iterator) for _ in range(self.gradient_accumulation_steps)]
        self.objective.start_step()
        for inputs, labels in microbatches:
            inputs["num_items"] = self.objective.weigh(inputs, labels)
        num_items = sum(inputs["num_items"] for inputs, _ in microbatches)
        self.num_items = torch.full((), num_items, device=self.device)
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(self.num_items, group=self.parallel_dims.get_mesh("batch").get_group())
        self.num_items.clamp_(min=1)  # a step without any item has no loss
        super().train_step(iter(microbatches))

    def forward_backward_step(
        self, *, input_dict: dict[str, Any], labels: Tensor, global_valid_tokens: Tensor | float
    ) -> Tensor:
        """This rank's addend to the step's mean loss, detached: it is the sum over all ranks and microbatches."""
        num_items = input_dict.pop("num_items")
        with self.train_context():
            with self.maybe_enable_amp:
                loss_sum = self.objective.loss(input_dict, labels, local_batches(self.post_dataloading_process))
                loss = loss_sum / self.num_items
            (loss * self.gradient_factor).backward()
        copies = self.objective.copies
        self.metrics_processor.losses.add(loss_sum / copies, num_items / self.parallel_dims.cp)
        return loss.detach() / copies

    def state_dict(self) -> dict[str, Any]:
        """ntokens_seen counts the tokens of all data-parallel ranks, as a resumed run may have more or fewer ranks."""
        state = super().state_dict()
        return state | {"ntokens_seen": state["ntokens_seen"] * self._num_batches} | self.objective.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"ntokens_seen": state_dict["ntokens_seen"] // self._num_batches})
        for objective in self.objectives:
            objective.load_state_dict(state_dict)

    @property
    def _num_batches(self) -> int:
        """The number of batches that the data-parallel ranks read at a time."""
        return self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard


def main() -> None:
    """Trains as the command line says."""
    torchtitan.train.main(MagiTrainer)
