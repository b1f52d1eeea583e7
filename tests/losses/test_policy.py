"""The clipped policy gradient by hand, and as TRL's GRPOTrainer computes it from the same numbers."""

import numpy as np
import pytest
import torch
from support.grpo import HIGH, LOW, grpo_loss

from torchtitan_magi.losses.policy import kl_estimates, policy_losses, token_weights

LENGTHS, MAX_LENGTH = [3, 7, 1, 5], 9


def test_losses_by_hand():
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0])
    losses = policy_losses(ratio.log(), torch.zeros(5), advantage, (LOW, HIGH))
    torch.testing.assert_close(losses, torch.tensor([-2.0, -1.28, 1.5, -0.5, 0.8]))
    torch.testing.assert_close(kl_estimates(ratio.log(), torch.zeros(5)), 1 / ratio + ratio.log() - 1)


@pytest.mark.parametrize(("advantage", "wanted"), [(1.0, (-1 - HIGH, 0.0)), (0.0, (0.0, 0.0))])
def test_a_clipped_loss_has_no_gradient_however_large_the_ratio(advantage, wanted):
    logprobs = torch.tensor([100.0], requires_grad=True)  # more than float32's exponential has
    loss = policy_losses(logprobs, torch.zeros(1), torch.tensor([advantage]), (LOW, HIGH))
    found = loss.item(), torch.autograd.grad(loss, logprobs)[0].item()
    assert found == pytest.approx(wanted)


def numbers():
    """By answer: log-probabilities under the policy, the sampler and the reference, [answers, MAX_LENGTH]; advantages;
    which tokens there are."""
    generator = torch.Generator().manual_seed(0)
    policy, behaviour, reference = -3 * torch.rand(3, len(LENGTHS), MAX_LENGTH, generator=generator)
    mask = torch.arange(MAX_LENGTH) < torch.tensor(LENGTHS)[:, None]
    return policy.requires_grad_(), behaviour, reference, torch.tensor([1.0, -0.5, 0.25, -2.0]), mask


def loss_of_trl(normalization, beta):
    policy, behaviour, reference, advantages, mask = numbers()
    loss = grpo_loss(policy, behaviour, reference, advantages, mask, normalization, beta, MAX_LENGTH)
    return loss.detach(), torch.autograd.grad(loss, policy)[0]


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("normalization", ["grpo", "dapo", "dr_grpo"])
def test_the_loss_of_a_batch_is_that_of_trl(normalization, beta):
    policy, behaviour, reference, advantages, mask = numbers()
    weights, num_items = token_weights(np.array(LENGTHS), normalization, MAX_LENGTH)
    of_token = torch.from_numpy(weights).repeat_interleave(torch.tensor(LENGTHS))
    chosen = policy[mask], behaviour[mask], advantages.repeat_interleave(torch.tensor(LENGTHS))
    losses = policy_losses(*chosen, (LOW, HIGH)) + beta * kl_estimates(chosen[0], reference[mask])
    loss = (of_token * losses).sum() / num_items
    (grad,) = torch.autograd.grad(loss, policy)
    torch.testing.assert_close((loss.detach(), grad), loss_of_trl(normalization, beta))
