"""The clipped policy gradient on packed rollouts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_magi.losses.boundaries import num_labels, spread
from torchtitan_magi.losses.policy import kl_estimates, policy_losses, token_weights
from torchtitan_magi.training.batches.microbatch import MICROBATCH, LocalBatch, Microbatch, Process
from torchtitan_magi.training.objectives.document_losses import DocumentLosses
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.objective import Objective, Reference
from torchtitan_magi.training.process.groups import Group, reduced
from torchtitan_magi.training.settings.options import Rollouts

METRICS = "policy/kl", "policy/ratio", "policy/clipped"


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """This rank's tokens of a microbatch of answers. Of each of its l labelled tokens:

    weights, advantages, behaviour: float32 [l], see ``losses.policy``; behaviour is NaN where it is the policy's own.
    """

    local: LocalBatch
    weights: Tensor
    advantages: Tensor
    behaviour: Tensor
    kept: DocumentLosses | None = None

    def logprobs(self, model: LogprobModel) -> Tensor:
        """float32 [l]: log-probabilities of the labels."""
        return model(self.local).flatten().index_select(0, self.local.labelled)


class PolicyGradient(Objective):
    """The clipped loss of sampled tokens and, if it has a weight, the KL divergence to the reference.

    Args:
        loss_group: the ranks that have different tokens.
    """

    def __init__(self, model: LogprobModel | None, options: Rollouts, reference: Reference, loss_group: Group) -> None:
        self.model, self.options, self.loss_group = model, options, loss_group
        if options.beta:
            self.reference = reference
        # by the labels of a microbatch: float64 METRICS summed over tokens, and the number of tokens
        self.sums: dict[Tensor, Tensor] = {}

    def start_step(self) -> None:
        super().start_step()
        self.sums.clear()

    def count_items(self, batch: Microbatch) -> float:
        assert batch.labels is not None
        starts, ends, _ = batch.branches.T
        counts = num_labels(starts, ends, batch.labels.flatten().numpy())
        weights, number = token_weights(counts, self.options.normalization, self.options.max_length)
        batch.weights = torch.from_numpy(
            spread(starts, ends, weights, batch.labels.numel(), 0).reshape(batch.labels.shape)
        )
        return number

    def read(self, inputs: dict[str, Any], labels: Tensor, process: Process) -> RolloutBatch:
        batch: Microbatch = inputs[MICROBATCH]
        assert batch.weights is not None
        assert batch.behaviour is not None
        assert batch.advantages is not None
        starts, ends, _ = batch.branches.T
        advantages = spread(starts, ends, batch.advantages, labels.numel(), 0.0).reshape(labels.shape)
        local = process(inputs, labels)
        of_tokens = batch.weights, torch.from_numpy(advantages), batch.behaviour
        own = [local.take(x.to(labels.device)).flatten().index_select(0, local.labelled) for x in of_tokens]
        return RolloutBatch(local, own[0], own[1], own[2], self.keep(batch))

    def loss_of(self, batch: RolloutBatch, model: Any, reference: Tensor | None) -> Tensor:
        options, policy = self.options, batch.logprobs(model)
        behaviour = torch.where(batch.behaviour.isnan(), policy.detach(), batch.behaviour)
        clip = options.clip_low, options.clip_high
        losses = policy_losses(policy, behaviour, batch.advantages, clip)
        divergence = torch.zeros_like(policy) if reference is None else kl_estimates(policy, reference)
        losses = losses + options.beta * divergence
        if batch.kept is not None:
            batch.kept.losses = losses.detach()
        with torch.no_grad():
            ratio = (policy - behaviour).exp()
            sign = batch.advantages.sign()
            clipped = ((ratio - 1) * sign > torch.where(sign > 0, clip[1], clip[0])) & (sign != 0)
            values = divergence, ratio, clipped, torch.ones_like(ratio)
            self.sums[batch.local.labels] = torch.stack([x.double().sum() for x in values])
        return (batch.weights * losses).sum()

    def metrics(self) -> dict[str, float]:
        if not self.sums:
            return {}
        *sums, number = reduced(torch.stack(list(self.sums.values())).sum(0), self.loss_group).tolist()
        found = {name: value / max(number, 1) for name, value in zip(METRICS, sums, strict=True)}
        return found if self.options.beta else {name: found[name] for name in METRICS[1:]}
