"""Log-probabilities of target tokens straight from hidden states, without ever holding all logits.

Shape suffixes: T tokens, D width of the model, V vocabulary (under tensor parallelism this rank's share), C tokens of a
chunk.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

IGNORE_INDEX = -100
CHUNK_LOGITS = 2**28  # of a chunk: 1 GiB in float32, about three times that while they are worked on


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
) -> Tensor:
    """log p(target) under the softmax of ``hidden @ weight.T``, differentiable in both.

    Logits exist for one chunk of tokens at a time and are computed again in the backward pass, so that memory does not
    grow with T * V. They are made in the dtype of the inputs (under autocast: its dtype); all that follows, also the
    sum of the weight's gradient over chunks, is float32, or float64 for float64 inputs. Never waits for the device.

    Args:
        hidden_TD: what the output layer gets. Under ``group`` the same on all its ranks.
        weight_VD: of the output layer. Under ``group`` this rank's rows: rank r of n holds the tokens [r V, (r + 1) V)
            of a vocabulary of n V. The logits are not gathered; the gradient of hidden is this rank's addend.
        targets_T: int64; IGNORE_INDEX where there is none.
        group: ranks that share the vocabulary.
        chunk: tokens of a chunk; by default as many as CHUNK_LOGITS allows.

    Returns:
        float32 [T] (float64 for float64 inputs), 0 where there is no target.
    """
    if torch.is_autocast_enabled(hidden_TD.device.type):
        dtype = torch.get_autocast_dtype(hidden_TD.device.type)
        hidden_TD, weight_VD = hidden_TD.to(dtype), weight_VD.to(dtype)
    if chunk is None:
        chunk = max(1, CHUNK_LOGITS // len(weight_VD))
    return _TokenLogprobs.apply(hidden_TD, weight_VD, targets_T, group, chunk)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        group: dist.ProcessGroup | None,
        chunk: int,
    ) -> Tensor:
        has_target_T = targets_T != IGNORE_INDEX
        row_T, is_here_T = _rows(targets_T, has_target_T, len(weight_VD), group)
        picked, lse = [], []
        for hidden_CD, row_C in zip(hidden_TD.split(chunk), row_T.split(chunk), strict=True):
            logits_CV = _logits(hidden_CD, weight_VD)
            lse.append(logits_CV.logsumexp(1))
            picked.append(logits_CV.gather(1, row_C[:, None])[:, 0])
        lse_T, picked_T = torch.cat(lse), torch.cat(picked).mul_(is_here_T)
        if group is not None and len(lse_T):
            lse_T = _over_ranks(lse_T, picked_T, group)
        ctx.save_for_backward(hidden_TD, weight_VD, row_T, is_here_T, has_target_T, lse_T)
        ctx.chunk = chunk
        return torch.where(has_target_T, picked_T - lse_T, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TD, weight_VD, row_T, is_here_T, has_target_T, lse_T = ctx.saved_tensors
        grad_T = gradients[0] * has_target_T
        grad_picked_T = grad_T * is_here_T
        grad_hidden_TD = torch.empty_like(hidden_TD) if ctx.needs_input_grad[0] else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=lse_T.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden_TD), ctx.chunk):
            at = slice(start, start + ctx.chunk)
            # d log p(target) / d logit = [is target] - softmax
            grad_logits_CV = _logits(hidden_TD[at], weight_VD).sub_(lse_T[at, None]).exp_().mul_(-grad_T[at, None])
            grad_logits_CV.scatter_add_(1, row_T[at, None], grad_picked_T[at, None])
            grad_logits_CV = grad_logits_CV.to(weight_VD.dtype)
            if grad_hidden_TD is not None:
                torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_TD[at])
            if grad_weight_VD is not None:
                grad_weight_VD += grad_logits_CV.T @ hidden_TD[at]
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.to(weight_VD.dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def _logits(hidden_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """[C, V], at least float32 and a tensor of its own."""
    logits_CV = hidden_CD @ weight_VD.T
    return logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))


def _rows(targets_T: Tensor, has_target_T: Tensor, rows: int, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Row of this rank's weight for each target, and whether it is here; row 0 where it is not."""
    first = 0 if group is None else dist.get_rank(group) * rows
    row_T = targets_T - first
    is_here_T = has_target_T if group is None else has_target_T & (row_T >= 0) & (row_T < rows)
    return row_T.where(is_here_T, 0), is_here_T


def _over_ranks(lse_T: Tensor, picked_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The logsumexp over all ranks' shares of the vocabulary. Puts the logit of the rank that has it into picked_T."""
    largest_T = lse_T.clone()
    dist.all_reduce(largest_T, dist.ReduceOp.MAX, group)
    sums_2T = torch.stack([(lse_T - largest_T).exp_(), picked_T])
    dist.all_reduce(sums_2T, dist.ReduceOp.SUM, group)
    picked_T.copy_(sums_2T[1])
    return largest_T + sums_2T[0].log_()
