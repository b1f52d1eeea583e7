"""Direct preference optimisation on packed pairs."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchtitan_magi.losses.boundaries import branch_numbers, num_labels
from torchtitan_magi.losses.preference import PREFERENCE_METRICS, branch_sums, preference_losses, preference_metrics
from torchtitan_magi.training.batches.microbatch import MICROBATCH, LocalBatch, Microbatch, Process
from torchtitan_magi.training.objectives.document_losses import DocumentLosses
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.objective import Objective, Reference
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.process.groups import Group, rank_and_size_in, reduced
from torchtitan_magi.training.settings.options import DPO as DPOOptions


@dataclass(frozen=True, eq=False)
class PairBatch:
    """This rank's tokens of a microbatch of pairs, ready for a model."""

    local: LocalBatch
    branch: Tensor  # int32 [b, s], the answer of each token, see boundaries.branch_numbers
    num_answers: int
    pairs: Tensor  # int64 [n, 2], answers that are chosen and rejected
    pair_ids: Tensor  # int64 [n], the number of each pair's record
    pair_numbers: Tensor  # int64 [n], the number of each pair in its record
    num_labels: Tensor  # int64 [n, 2], of chosen and rejected
    cp_group: Group
    kept: DocumentLosses | None = None

    def logprobs(self, model: LogprobModel) -> Tensor:
        """float64 [n, 2]: summed log-probabilities of chosen and rejected."""
        logprobs, branch = model(self.local).flatten(), self.branch.flatten()
        return branch_sums(logprobs, branch, self.num_answers, self.cp_group)[self.pairs]


def read_pairs(inputs: dict[str, Any], labels: Tensor, process: Process, cp_group: Group) -> PairBatch:
    """See ``Objective.read``. cp_group: the context-parallel ranks."""
    batch: Microbatch = inputs[MICROBATCH]
    assert batch.labels is not None
    assert batch.pairs is not None
    branch = branch_numbers(batch.branches, labels.numel()).reshape(labels.shape)
    counts = num_labels(batch.branches[:, 0], batch.branches[:, 1], batch.labels.flatten().numpy())[batch.pairs]
    arrays = branch, batch.pairs, batch.records, batch.pair_numbers, counts
    branch, pairs, ids, numbers, counts = (torch.from_numpy(x).to(labels.device) for x in arrays)
    local = process(inputs, labels)
    return PairBatch(local, local.take(branch), len(batch.branches), pairs, ids, numbers, counts, cp_group)


def logprobs_by(model: LogprobModel | Pipeline, batches: list[PairBatch]) -> list[Tensor]:
    """See ``Reference.logprobs``."""
    if isinstance(model, Pipeline):
        return model.run([batch.local for batch in batches], lambda last, number: batches[number].logprobs(last))
    return [batch.logprobs(model) for batch in batches]


class DPO(Objective):
    """The mean loss of a pair.

    All context-parallel ranks have the sums of all tokens and so the whole loss; their gradients are of their own
    tokens only.

    Args:
        cp_group: the context-parallel ranks.
        batch_group: the ranks that read different batches.
    """

    def __init__(
        self, model: LogprobModel | None, options: DPOOptions, reference: Reference, cp_group: Group, batch_group: Group
    ) -> None:
        self.model, self.options, self.reference = model, options, reference
        self.cp_group, self.batch_group = cp_group, batch_group
        self.num_loss_replicas = rank_and_size_in(cp_group)[1]
        # by the pair_ids of a microbatch: float64 PREFERENCE_METRICS and the number of pairs
        self.sums: dict[Tensor, Tensor] = {}

    def start_step(self) -> None:
        super().start_step()
        self.sums.clear()

    def count_items(self, batch: Microbatch) -> int:
        assert batch.pairs is not None
        return len(batch.pairs)

    def read(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> PairBatch:
        return replace(read_pairs(inputs, labels, process, self.cp_group), kept=self.keep(inputs[MICROBATCH]))

    def loss_of(self, batch: PairBatch, model: Any, reference: Tensor) -> Tensor:
        options, policy = self.options, batch.logprobs(model)
        metrics = preference_metrics(policy.detach(), reference, options.beta)
        self.sums[batch.pair_ids] = torch.cat([metrics, metrics.new_full((1,), len(policy))])
        losses = preference_losses(
            policy, reference, batch.num_labels, options.loss, options.beta, options.label_smoothing
        )
        if batch.kept is not None:
            batch.kept.losses = losses.detach()
        return losses.sum()

    def metrics(self) -> dict[str, float]:
        if not self.sums:
            return {}
        sums = reduced(torch.stack(list(self.sums.values())).sum(0), self.batch_group)
        *values, num_pairs = sums.tolist()
        return {name: value / max(num_pairs, 1) for name, value in zip(PREFERENCE_METRICS, values, strict=True)}
