"""What training minimises: how many items a microbatch has, the loss of this rank's tokens, and the record of both."""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtitan_magi.losses import IGNORE_INDEX
from torchtitan_magi.losses.boundaries import document_weights
from torchtitan_magi.training.batches.microbatch import MICROBATCH, LocalBatch, Microbatch, Process
from torchtitan_magi.training.experts import whole
from torchtitan_magi.training.objectives.document_losses import DocumentLosses
from torchtitan_magi.training.objectives.logprob_model import LogprobModel

LossFunction = Callable[[Tensor, Tensor], Tensor]  # logits, labels -> the loss summed over tokens


class Reference:
    """The frozen policy that a loss compares the trained one with. This one stands for none."""

    def prepare(self, step: int) -> None:
        """Called once, with the weights loaded and before the first step. step: the checkpoint's, 0 in a new run."""

    def logprobs(self, batches: list[Any]) -> list[Any]:
        """Log-probabilities of what was read, without a gradient: float64 [n, 2] of the pairs of each batch. On ranks
        that a pipeline gives none an empty list."""
        return [None] * len(batches)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the trainer's own state; plain values."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Reads what ``state_dict`` returned, among other keys."""


class Objective:
    """A sum over items (tokens, documents or pairs), divided by the number of items of all ranks and microbatches."""

    model: Any
    reference = Reference()
    num_loss_replicas = 1  # how many context-parallel ranks return one and the same loss
    kept: tuple[DocumentLosses, ...] = ()  # of the microbatches of a step that have been read

    def count_items(self, batch: Microbatch) -> float:
        """The number of items of a microbatch; by default the number of labels. May set the weights of its tokens."""
        return batch.num_labels

    def loss(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> Tensor:
        """The loss summed over the items of a microbatch on the device, as far as this rank's tokens are in it."""
        batch = self.read(inputs, labels, process)
        with torch.no_grad():
            (reference,) = self.reference.logprobs([batch])  # first: no activations of the policy are held yet
        return self.loss_of(batch, self.model, reference)

    def read(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> Any:
        """What ``loss_of`` needs of a microbatch, among it a ``LocalBatch`` as ``local``. Called after ``count_items``,
        with tokens and labels on the device."""
        raise NotImplementedError

    def loss_of(self, batch: Any, model: Any, reference: Any) -> Tensor:
        """The loss of what was read, by a model called as a ``LogprobModel``. reference: its log-probabilities."""
        raise NotImplementedError

    def start_step(self) -> None:
        """Called before the microbatches of a step."""
        self.kept = ()

    def keep(self, batch: Microbatch) -> DocumentLosses | None:
        """Where ``loss_of`` keeps the losses of a microbatch's documents, while training."""
        if not torch.is_grad_enabled():
            return None
        self.kept = (*self.kept, DocumentLosses(batch))
        return self.kept[-1]

    def metrics(self) -> dict[str, float]:
        """What else to log of the last step. A collective of all ranks."""
        return {}


class LogitsLoss(Objective):
    """loss_fn over all logits, per token. For a trainer that keeps its own loss."""

    def __init__(self, model: Callable[..., Tensor], loss_fn: LossFunction) -> None:
        self.model, self.loss_fn = model, loss_fn

    def loss(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> Tensor:
        batch = process(inputs, labels)
        return self.loss_fn(self.model(batch.tokens, **batch.model_inputs), batch.labels)


class SFT(Objective):
    """Cross-entropy per token, or per document: the mean over documents of the mean over a document's labels.

    Args:
        per: "token" or "document".
    """

    def __init__(self, model: LogprobModel | None, per: str) -> None:
        self.model, self.per = model, per

    def count_items(self, batch: Microbatch) -> float:
        if batch.label_weights is not None:
            of_labels = batch.label_weights[:, ("token", "document").index(self.per)]
            batch.weights = of_labels.float()
            return of_labels.sum().item()
        if self.per == "token":
            return super().count_items(batch)
        assert batch.labels is not None
        weights, num_documents = document_weights(batch.branches[:, :2], batch.labels.flatten().numpy())
        batch.weights = torch.from_numpy(weights).view(batch.labels.shape)
        return num_documents

    def read(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> "WeightedBatch":
        weights, local = inputs[MICROBATCH].weights, process(inputs, labels)
        own = None if weights is None else local.take(weights.to(labels.device))
        return WeightedBatch(local, own, self.keep(inputs[MICROBATCH]))

    def loss_of(self, batch: "WeightedBatch", model: Any, reference: None) -> Tensor:
        local, logprobs = batch.local, None
        if batch.kept is not None:
            batch.kept.losses = logprobs = torch.zeros(len(local.labelled), device=local.labels.device)
        total = model.summed(local, batch.weights, logprobs)
        if logprobs is not None:
            logprobs.neg_()
        return -total


class WeightedBatch(NamedTuple):
    """This rank's tokens of a microbatch."""

    local: LocalBatch
    weights: Tensor | None  # float [b, s]
    kept: DocumentLosses | None


class LossRecord:
    """Loss sums of the last step's microbatches, and the number of items (labels, documents or pairs) in each sum.

    Sums and numbers are this rank's; over the context-parallel ranks they add up to those of the microbatch.

    Args:
        num_microbatches: microbatches per step on this rank.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.start(num_microbatches)

    def start(self, num_microbatches: int) -> None:
        """Forgets what it has. num_microbatches: as above, which may differ from step to step."""
        self.microbatches: deque[tuple[Tensor, Tensor | float]] = deque(maxlen=num_microbatches)

    def add(self, loss_sum: Tensor, num_items: Tensor | float) -> None:
        """Records one microbatch."""
        self.microbatches.append((loss_sum.detach(), num_items))

    def record(self, loss_fn: LossFunction) -> LossFunction:
        """loss_fn, which sums over tokens, with each training call recorded."""

        def recorded(pred: Tensor, labels: Tensor) -> Tensor:
            loss_sum = loss_fn(pred, labels)
            if torch.is_grad_enabled():
                self.add(loss_sum, (labels != IGNORE_INDEX).sum())
            return loss_sum

        return recorded

    def sum_and_count(self) -> Tensor:
        """float32 [2]: summed loss and number of items of the last step."""
        loss = sum(whole(loss) for loss, _ in self.microbatches)
        assert isinstance(loss, Tensor)
        count = torch.as_tensor(sum(count for _, count in self.microbatches), device=loss.device)
        return torch.stack([loss.float(), count.float()])
