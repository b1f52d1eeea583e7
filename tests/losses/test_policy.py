"""The clipped policy gradient by hand, and as TRL's GRPOTrainer computes it from the same numbers."""

from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchtitan_magi.losses.policy import group_advantages, kl_estimates, policy_losses, token_weights

LOW, HIGH = 0.2, 0.28
LENGTHS, MAX_LENGTH = [3, 7, 1, 5], 9


def test_losses_by_hand():
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    advantage = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0])
    losses = policy_losses(ratio.log(), torch.zeros(5), advantage, (LOW, HIGH))
    torch.testing.assert_close(losses, torch.tensor([-2.0, -1.28, 1.5, -0.5, 0.8]))
    torch.testing.assert_close(kl_estimates(ratio.log(), torch.zeros(5)), 1 / ratio + ratio.log() - 1)


def test_advantages_by_hand():
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1], "dr_grpo"), [0.5, -0.5, -0.5, 0.5])
    deviation = (1 / 3) ** 0.5
    np.testing.assert_allclose(group_advantages([1, 0, 0, 1], "grpo")[0], 0.5 / (deviation + 1e-4))
    assert group_advantages([3.0], "dapo").tolist() == [0.0]
    assert group_advantages([2.0] * 3, "grpo").tolist() == [0.0] * 3


def numbers():
    """By answer: log-probabilities under the policy, the sampler and the reference, [answers, MAX_LENGTH]; advantages;
    which tokens there are."""
    generator = torch.Generator().manual_seed(0)
    policy, behaviour, reference = -3 * torch.rand(3, len(LENGTHS), MAX_LENGTH, generator=generator)
    mask = torch.arange(MAX_LENGTH) < torch.tensor(LENGTHS)[:, None]
    return policy.requires_grad_(), behaviour, reference, torch.tensor([1.0, -0.5, 0.25, -2.0]), mask


def loss_of_trl(normalization, beta):
    grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="the reference")
    policy, behaviour, reference, advantages, mask = numbers()
    trainer = grpo_trainer.GRPOTrainer.__new__(grpo_trainer.GRPOTrainer)
    trainer.__dict__ |= {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (policy, torch.zeros_like(policy), None),
        "accelerator": SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, **_: x),
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": defaultdict(list)},
        "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "importance_sampling_level": "token",
        "beta": beta, "loss_type": normalization, "epsilon_low": LOW, "epsilon_high": HIGH, "use_vllm": False,
        "max_completion_length": MAX_LENGTH, "current_gradient_accumulation_steps": 1, "aux_loss_enabled": False,
        "_entropy_bonus_enabled": False, "tools": None,
    }  # fmt: skip
    inputs = {"prompt_ids": torch.zeros(len(LENGTHS), 1), "prompt_mask": torch.ones(len(LENGTHS), 1)}
    inputs |= {"completion_ids": mask.long(), "completion_mask": mask.long(), "advantages": advantages}
    inputs |= {"old_per_token_logps": behaviour, "ref_per_token_logps": reference, "num_items_in_batch": mask.sum()}
    loss = trainer._compute_loss(trainer.model, inputs)
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
