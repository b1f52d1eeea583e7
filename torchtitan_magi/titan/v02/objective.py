"""What training minimises: how a microbatch is weighed, and the loss of this rank's tokens."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims

from torchtitan_magi.losses.token_weights import document_weights
from torchtitan_magi.titan.v02.logprob_model import LogprobModel

# (inputs, labels) of a microbatch -> tokens and labels of this rank, inputs of the model, attention_masks
Process = Callable[[dict[str, Any], Tensor], tuple[Tensor, Tensor, dict[str, Any], dict[str, Any]]]


class Objective:
    """A sum over items (tokens, documents or pairs), divided by the number of items of all ranks and microbatches."""

    copies = 1  # how many context-parallel ranks return one and the same loss

    def weigh(self, inputs: dict[str, Any], labels: Tensor) -> int:
        """The number of items of a microbatch, still on the host; puts what ``loss`` needs per token into inputs."""
        raise NotImplementedError

    def loss(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> Tensor:
        """The loss summed over the items of a microbatch on the device, as far as this rank's tokens are in it."""
        raise NotImplementedError

    def prepare(self, step: int) -> None:
        """Called once, with the weights loaded and before the first step. step: of the checkpoint, 0 in a new run."""

    def start_step(self) -> None:
        """Called before the microbatches of a step."""

    def metrics(self) -> dict[str, float]:
        """What else to log of the last step. A collective of all ranks."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, in torchtitan's train_state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The reverse."""


class LogitsLoss(Objective):
    """torchtitan's own: loss_fn over all logits. For the stock Trainer's validation."""

    def __init__(self, model: Callable[..., Tensor], loss_fn: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.model, self.loss_fn = model, loss_fn

    def weigh(self, inputs: dict[str, Any], labels: Tensor) -> int:
        return int((labels != IGNORE_INDEX).sum())

    def loss(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> Tensor:
        tokens, labels, extra_inputs, masks = process(inputs, labels)
        return self.loss_fn(self.model(tokens, **extra_inputs, **masks), labels)


class SFT(Objective):
    """Cross-entropy per token, or per document: the mean over documents of the mean over a document's labels.

    Args:
        per: "token" or "document".
    """

    def __init__(self, model: LogprobModel, parallel_dims: ParallelDims, per: str) -> None:
        self.model, self.cp_enabled, self.per = model, parallel_dims.cp_enabled, per

    def weigh(self, inputs: dict[str, Any], labels: Tensor) -> int:
        if self.per == "token":
            return int((labels != IGNORE_INDEX).sum())
        weights, num_documents = document_weights(inputs["documents"], labels.flatten().numpy())
        inputs["token_weights"] = torch.from_numpy(weights).view(labels.shape)
        return num_documents

    def loss(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> Tensor:
        weights, labelled = inputs.pop("token_weights", None), inputs.pop("labelled", None)
        tokens, labels, extra_inputs, masks = process(inputs, labels)
        if weights is not None and self.cp_enabled:
            weights = masks["attention_masks"].take(weights)
        return -self.model.summed(labels, tokens, labelled, weights, **extra_inputs, **masks)
