"""The loss of tokens that a policy sampled, by the advantage of their answer: a clipped policy gradient."""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Normalization = Literal["grpo", "dapo", "dr_grpo"]


def policy_losses(
    logprobs: Tensor, behaviour: Tensor, advantage: Tensor, clip: tuple[float, float] = (0.2, 0.2)
) -> Tensor:
    """The loss of each token, PPO's (arXiv 1707.06347, equation 7): -min(r A, clamp(r, 1 - low, 1 + high) A).

    That is -A times the smaller of r and 1 + high, or for A < 0 the larger of r and 1 - low. It is cut before the
    exponential: where it is clipped it has a gradient of 0, also where r is more than the dtype has.

    Args:
        logprobs: float [N], log-probabilities of sampled tokens under the policy that is trained.
        behaviour: float [N], those under the policy that sampled them; r is the ratio of the probabilities.
        advantage: float [N], A of the answer that each token is in.
        clip: low and high; both alike in GRPO (arXiv 2402.03300), the second larger in DAPO (arXiv 2503.14476).
    """
    low, high = map(math.log1p, (-clip[0], clip[1]))
    log_ratio = logprobs - behaviour
    return -advantage * torch.where(advantage < 0, log_ratio.clamp(min=low), log_ratio.clamp(max=high)).exp()


def kl_estimates(logprobs: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(policy || reference) by each sampled token, never negative (arXiv 2402.03300, equation 4).

    With d = log ref - log pi it is exp(d) - d - 1.

    Args:
        logprobs, reference: float [N], log-probabilities under both.
    """
    difference = reference - logprobs
    return difference.exp() - difference - 1


def token_weights(
    num_tokens: npt.NDArray[np.int64], normalization: Normalization, max_length: int
) -> tuple[npt.NDArray[np.float32], int]:
    """The weight of each answer's tokens in a sum, and the number of items by which sums are divided in the end.

    "grpo": the mean over answers of the mean over their tokens. "dapo": the mean over all tokens. "dr_grpo": the sum
    over tokens, over the number of answers times `max_length`, whatever the lengths are.

    Args:
        num_tokens: [n], tokens of each answer that are trained.
        max_length: tokens that an answer may have, for "dr_grpo".
    """
    if normalization == "dapo":
        return np.ones(len(num_tokens), np.float32), int(num_tokens.sum())
    lengths = num_tokens if normalization == "grpo" else np.full(len(num_tokens), max_length)
    return (1 / np.maximum(lengths, 1)).astype(np.float32), len(num_tokens)
