"""Preference losses by hand, the sums they are made of, and what sharing a prompt saves."""

import math

import numpy as np
import pytest
import torch

from torchtitan_magi.losses.boundaries import branch_numbers, document_weights, num_labels
from torchtitan_magi.losses.preference import PREFERENCE_METRICS, branch_sums, preference_losses, preference_metrics
from torchtitan_magi.masks.builders import shared_prompt
from torchtitan_magi.planning.plan import make_plan

POLICY = torch.tensor([[-10.0, -14.0], [-3.0, -2.0], [-7.0, -7.0]])
REFERENCE = torch.tensor([[-11.0, -12.0], [-3.0, -3.0], [-7.0, -7.0]])
MARGINS = [3.0, -1.0, 0.0]  # (policy - reference) of chosen less that of rejected
NUM_TOKENS = torch.tensor([[2, 4], [1, 5], [3, 7]])
MARGINS_OF_MEANS = [1 / 2 + 2 / 4, 0 - 1 / 5, 0]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


@pytest.mark.parametrize(
    ("loss", "smoothing", "margins", "by_hand"),
    [
        ("sigmoid", 0.0, MARGINS, lambda m: -log_sigmoid(0.5 * m)),
        ("sigmoid", 0.2, MARGINS, lambda m: -0.8 * log_sigmoid(0.5 * m) - 0.2 * log_sigmoid(-0.5 * m)),
        ("ipo", 0.0, MARGINS_OF_MEANS, lambda m: (m - 1) ** 2),
        ("hinge", 0.0, MARGINS, lambda m: max(0, 1 - 0.5 * m)),
    ],
)
def test_losses_by_hand(loss, smoothing, margins, by_hand):
    losses = preference_losses(POLICY, REFERENCE, NUM_TOKENS, loss, 0.5, smoothing)
    torch.testing.assert_close(losses, torch.tensor([by_hand(m) for m in margins]))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge"])
def test_the_gradient_raises_chosen_and_lowers_rejected(loss):
    policy = REFERENCE.clone().requires_grad_()
    preference_losses(policy, REFERENCE, NUM_TOKENS, loss, 0.1).sum().backward()
    assert (policy.grad[:, 0] < 0).all()
    assert (policy.grad[:, 1] > 0).all()


def test_metrics_by_hand():
    sums = dict(zip(PREFERENCE_METRICS, preference_metrics(POLICY, REFERENCE, 0.5).tolist(), strict=True))
    assert sums == {
        "rewards/chosen": 0.5 * (1 + 0 + 0),
        "rewards/rejected": 0.5 * (-2 + 1 + 0),
        "rewards/margins": 0.5 * sum(MARGINS),
        "rewards/accuracies": 1,  # right, wrong, and a tie
        "logps/chosen": -20,
        "logps/rejected": -23,
    }


# ---------------------------------------------------------------------------------------------- weights and branches

OWN = np.array([[1, 5], [5, 8], [9, 10], [10, 12]])  # tokens of four branches; 0 and 8 belong to none
BRANCH = [-1, 0, 0, 0, 0, 1, 1, 1, -1, 2, 3, 3]


def test_branches_by_hand():
    assert branch_numbers(OWN, 12).tolist() == BRANCH
    assert branch_numbers(OWN[:0], 3).tolist() == [-1, -1, -1]


def test_numbers_of_labels_by_hand():
    labels = np.array([9, -100, 9, 5, 5, 5, -100, 5, 9, -100, 5, -100])
    assert num_labels(*OWN.T, labels).tolist() == [3, 2, 0, 1]
    pairs = OWN.reshape(2, 2, 2)
    assert num_labels(pairs[..., 0], pairs[..., 1], labels).tolist() == [[3, 2], [0, 1]]
    assert num_labels(*OWN[:0].T, labels).shape == (0,)


def test_document_weights_by_hand():
    labels = np.array([5, -100, 5, -100, 5, 5, 5, -100, -100, -100])
    weights, count = document_weights(np.array([[0, 3], [3, 7], [7, 9]], np.int32), labels)
    np.testing.assert_allclose(weights, [1 / 2] * 3 + [1 / 3] * 4 + [1, 1] + [0], rtol=1e-7)
    assert count == 2
    losses = np.where(labels == -100, 0, np.arange(1, 11))
    assert (weights * losses).sum() / count == pytest.approx(((1 + 3) / 2 + (5 + 6 + 7) / 3) / 2)


def test_branch_sums_by_hand():
    logprobs = torch.arange(12.0, requires_grad=True)
    sums = branch_sums(logprobs, torch.tensor(BRANCH, dtype=torch.int32), 4)
    assert sums.dtype == torch.float64
    assert sums.tolist() == [1 + 2 + 3 + 4, 5 + 6 + 7, 9, 10 + 11]
    (sums * torch.tensor([1, 2, 3, 4])).sum().backward()
    assert logprobs.grad.tolist() == [{-1: 0, 0: 1, 1: 2, 2: 3, 3: 4}[b] for b in BRANCH]
    assert branch_sums(logprobs, torch.full((12,), -1), 0).shape == (0,)


def sums_of_a_share():
    """Every third token; a loss that is not a sum over ranks."""
    import torch.distributed as dist

    mine = slice(dist.get_rank(), None, dist.get_world_size())
    logprobs = torch.arange(12.0)[mine].requires_grad_()
    sums = branch_sums(logprobs, torch.tensor(BRANCH, dtype=torch.int32)[mine], 4, dist.group.WORLD)
    sums.prod().backward()
    return sums.detach(), logprobs.grad


def test_ranks_that_share_the_tokens_have_the_sums_of_all_and_the_gradients_of_their_own(three_ranks):
    results = three_ranks.run(sums_of_a_share)
    logprobs = torch.arange(12.0, requires_grad=True)
    whole = branch_sums(logprobs, torch.tensor(BRANCH), 4)
    whole.prod().backward()
    gradient = torch.empty(12)
    for rank, (sums, grad) in enumerate(results):
        assert torch.equal(sums, whole.detach())
        gradient[rank::3] = grad
    torch.testing.assert_close(gradient, logprobs.grad)


# ------------------------------------------------------------------------------------------------- a shared prompt


def test_a_shared_prompt_of_half_the_length_saves_a_quarter_of_the_tokens_and_an_eighth_of_the_attention():
    lengths = np.array([100, 240, 1000, 60]) * 2
    shared = shared_prompt(np.stack([lengths, lengths, lengths], 1))
    separate = shared_prompt(np.stack([0 * lengths, 2 * lengths, 2 * lengths], 1))
    tokens = [int(lengths.sum()) * 3, int(lengths.sum()) * 4]
    plans = [make_plan(slices, total, 2) for slices, total in zip((shared, separate), tokens, strict=True)]
    assert plans[0].tokens_per_rank == 0.75 * plans[1].tokens_per_rank
    assert plans[0].slices.area == pytest.approx(7 / 8 * plans[1].slices.area, rel=1e-2)
