"""Losses of preference pairs, and the log-probability sums they are made of."""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

PreferenceLoss = Literal["sigmoid", "ipo", "hinge"]


def preference_losses(
    policy: Tensor,
    reference: Tensor,
    num_tokens: Tensor,
    loss: PreferenceLoss,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss of each pair.

    With the margin m = (log pi(chosen) - log pi(rejected)) - (log ref(chosen) - log ref(rejected)):

    - "sigmoid": -log sigmoid(beta m), DPO (arXiv 2305.18290, equation 7); with label smoothing e its mean over a
      preference that is wrong with probability e, (1 - e) l(m) + e l(-m);
    - "ipo": (m' - 1 / (2 beta))^2, arXiv 2310.12036 with tau = beta, where m' is the margin of log-probabilities that
      are means over the tokens of an answer. The paper writes sums; its authors later said that means were meant;
    - "hinge": max(0, 1 - beta m), from arXiv 2305.10425 with the margin to the reference.

    Args:
        policy, reference: [n, 2], sums of the log-probabilities of chosen and rejected.
        num_tokens: [n, 2], how many log-probabilities are in each sum, at least 1.
        beta: > 0. label_smoothing: in [0, 0.5), for "sigmoid".
    """
    log_ratios = policy - reference
    if loss == "ipo":
        return (_margin(log_ratios / num_tokens) - 1 / (2 * beta)) ** 2
    margin = _margin(log_ratios)
    if loss == "hinge":
        return functional.relu(1 - beta * margin)
    wrong = label_smoothing * functional.logsigmoid(-beta * margin) if label_smoothing else 0.0
    return -(1 - label_smoothing) * functional.logsigmoid(beta * margin) - wrong


PREFERENCE_METRICS = (  # named as in TRL
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def preference_metrics(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """PREFERENCE_METRICS summed over the pairs, one number each; arguments as in ``preference_losses``.

    The reward of an answer is beta (log pi - log ref), of sums also where the loss takes means over tokens.
    "rewards/margins" is chosen less rejected, "rewards/accuracies" counts positive margins, "logps" are log pi.
    """
    rewards = beta * (policy - reference)
    margin = _margin(rewards)
    return torch.stack([*rewards.T, margin, (margin > 0).to(margin.dtype), *policy.T]).sum(1)


def _margin(values: Tensor) -> Tensor:
    """Chosen less rejected, of [n, 2]."""
    return values[:, 0] - values[:, 1]


# ------------------------------------------------------------------------------------------------ sums over branches


def branch_sums(logprobs: Tensor, branch: Tensor, num_branches: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """float64 [num_branches]: summed log-probabilities of each branch's own tokens.

    Losses take differences of these sums, of which float32 would leave few digits for long answers.

    Args:
        logprobs: float32 [T], this rank's tokens, 0 where there is no label. branch: integers [T], see
            ``boundaries.branch_numbers``.
        group: ranks that share the tokens. All get the sums of all; the gradient of each goes to its own tokens only,
            so that every rank may compute the whole loss.
    """
    slot = torch.where(branch >= 0, branch, num_branches).long()
    # Accumulating by index_put is deterministic on a GPU, index_add is not.
    zeros = logprobs.new_zeros(num_branches + 1, dtype=torch.float64)
    sums = zeros.index_put((slot,), logprobs.double(), accumulate=True)[:-1]
    if group is not None and num_branches:
        dist.all_reduce(sums.detach(), group=group)  # in place, unseen by autograd: a sum's gradient is each addend's
    return sums
