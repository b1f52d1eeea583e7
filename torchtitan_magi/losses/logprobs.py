"""Log-probabilities of target tokens straight from hidden states, without ever holding all logits.

Shape suffixes: T tokens, D width of the model, V vocabulary (this rank's, under tensor parallelism), C tokens per
chunk.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.losses import IGNORE_INDEX
from torchtitan_magi.products import add_product

CHUNK_LOGITS = 2**28  # logits per chunk: 1 GiB in float32, about three times that while they are worked on


class LogitCap(NamedTuple):
    """Logits y are limit * tanh(scale * x / limit) of products x: scaled, and between -limit and limit."""

    scale: float
    limit: float


def token_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    compiled: bool = False,
    cap: LogitCap | None = None,
) -> Tensor:
    """log p(target) under the softmax of ``hidden @ weight.T``, differentiable in both.

    Logits exist for one chunk of tokens at a time and are computed again in the backward pass, so that memory does not
    grow with T * V. They are made in the dtype of the inputs (under autocast: its dtype); all that follows, also the
    sum of the weight's gradient over chunks, is float32, or float64 for float64 inputs. Never waits for the device.

    Args:
        hidden_TD: what the output layer gets. Under ``group`` the same on all its ranks.
        weight_VD: the output layer's weight. Under ``group`` this rank's rows: rank r of n holds the tokens
            [r V, (r + 1) V) of a vocabulary of n V. The logits are not gathered; the gradient of hidden is this rank's
            addend.
        targets_T: int64, each in the vocabulary; IGNORE_INDEX where there is none.
        group: ranks that share the vocabulary.
        chunk: tokens per chunk; by default as many as CHUNK_LOGITS allows.
        compiled: whether torch.compile fuses what is done with the logits, so that they are read and written once.
        cap: of the logits; None: they are the products.

    Returns:
        float32 [T] (float64 for float64 inputs), 0 where there is no target.

    Raises:
        ValueError: a target outside the vocabulary. Targets on a GPU end in a failed assertion there, as those of
            torch's cross_entropy do.
    """
    hidden_TD, weight_VD = _as_autocast_wants(hidden_TD, weight_VD)
    options = _Options(group, chunk or max(1, CHUNK_LOGITS // len(weight_VD)), compiled, cap)
    return _TokenLogprobs.apply(hidden_TD, weight_VD, targets_T, options)


def summed_logprobs(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    targets_T: Tensor,
    scale_T: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    chunk: int | None = None,
    compiled: bool = False,
    kept_T: Tensor | None = None,
    cap: LogitCap | None = None,
) -> Tensor:
    """``(scale * token_logprobs(...)).sum()``, with its gradient computed on the way: logits are made only once.

    Args:
        scale_T: how much each token counts, no gradient; None: all alike.
        kept_T: gets the log-probabilities themselves.
        The others, and memory, as for ``token_logprobs``.

    Returns:
        0-d, float32 (float64 for float64 inputs).
    """
    hidden_TD, weight_VD = _as_autocast_wants(hidden_TD, weight_VD)
    options = _Options(group, chunk or max(1, CHUNK_LOGITS // len(weight_VD)), compiled, cap, kept_T)
    if not torch.is_grad_enabled():
        hidden_TD, weight_VD = hidden_TD.detach(), weight_VD.detach()
    return _SummedLogprobs.apply(hidden_TD, weight_VD, targets_T, scale_T, options)


class _Options(NamedTuple):
    """As for ``token_logprobs``."""

    group: dist.ProcessGroup | None
    chunk: int
    compiled: bool
    cap: LogitCap | None = None
    kept_T: Tensor | None = None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, options: _Options) -> Tensor:
        has_target_T = targets_T != IGNORE_INDEX
        row_T = _rows(targets_T, len(weight_VD), options.group)
        statistics = _maybe_compiled(_statistics, options.compiled)
        chunks = zip(hidden_TD.split(options.chunk), row_T.split(options.chunk), strict=True)
        found = [statistics(hidden_CD @ weight_VD.T, row_C, options.cap) for hidden_CD, row_C in chunks]
        lse, picked = zip(*found, strict=True)
        lse_T, picked_T = _over_ranks(torch.cat(lse), torch.cat(picked), options.group)
        ctx.save_for_backward(hidden_TD, weight_VD, row_T, has_target_T, lse_T)
        ctx.options = options
        return torch.where(has_target_T, picked_T - lse_T, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _check_once()
        hidden_TD, weight_VD, row_T, has_target_T, lse_T = ctx.saved_tensors
        sums = _GradientSums(hidden_TD, weight_VD, lse_T.dtype, ctx.needs_input_grad, ctx.options)
        grad_T = gradients[0] * has_target_T
        for at in _slices(len(hidden_TD), ctx.options.chunk):
            sums.add(at, hidden_TD[at] @ weight_VD.T, lse_T[at], row_T[at], grad_T[at])
        return *sums.rounded(), None, None


class _SummedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, scale_T: Tensor | None, options: _Options
    ) -> Tensor:
        dtype = torch.promote_types(hidden_TD.dtype, torch.float32)
        grad_T = (targets_T != IGNORE_INDEX).to(dtype)
        if scale_T is not None:
            grad_T *= scale_T
        row_T = _rows(targets_T, len(weight_VD), options.group)
        statistics = _maybe_compiled(_statistics, options.compiled)
        sums = _GradientSums(hidden_TD, weight_VD, dtype, ctx.needs_input_grad, options)
        total = grad_T.new_zeros(())
        for at in _slices(len(hidden_TD), options.chunk):
            products_CV = hidden_TD[at] @ weight_VD.T
            lse_C, picked_C = statistics(products_CV, row_T[at], options.cap)
            lse_C, picked_C = _over_ranks(lse_C, picked_C, options.group)
            logprobs_C = picked_C - lse_C
            total += (grad_T[at] * logprobs_C).sum()
            if options.kept_T is not None:
                options.kept_T[at] = logprobs_C
            sums.add(at, products_CV, lse_C, row_T[at], grad_T[at])
        ctx.sums = sums
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _check_once()
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise RuntimeError("summed_logprobs runs backward once; call it again for another gradient")
        return *sums.rounded(gradients[0]), None, None, None


def _check_once() -> None:
    """Raises RuntimeError in a backward of which a graph is asked for, which would leave its part out."""
    if torch.is_grad_enabled():
        raise RuntimeError("log-probabilities have no second derivatives; take gradients without create_graph")


class _GradientSums:
    """Gradients of hidden and of the weight, chunk by chunk.

    ``sums``: that of hidden in its dtype, and that of the weight in float32 or wider; None where it is not needed. For
    a vocabulary of 128k tokens and a width of 8,192 the latter takes 4 GiB, so nothing of its size is made beside it.
    """

    def __init__(
        self, hidden_TD: Tensor, weight_VD: Tensor, dtype: torch.dtype, needed: tuple[bool, ...], options: _Options
    ) -> None:
        self.hidden_TD, self.weight_VD = hidden_TD, weight_VD
        grad_hidden_TD = torch.empty_like(hidden_TD) if needed[0] else None
        grad_weight_VD = weight_VD.new_zeros(weight_VD.shape, dtype=dtype) if needed[1] else None
        self.sums = grad_hidden_TD, grad_weight_VD
        self.grad_products, self.cap = _maybe_compiled(_grad_products, options.compiled), options.cap

    def add(self, at: slice, products_CV: Tensor, lse_C: Tensor, row_C: Tensor, grad_C: Tensor) -> None:
        """Adds what the tokens ``at`` contribute. grad_C: the gradient of the log-probabilities, 0 without a target."""
        grad_hidden_TD, grad_weight_VD = self.sums
        if grad_hidden_TD is None and grad_weight_VD is None:
            return
        grad_CV = self.grad_products(products_CV, lse_C, row_C, grad_C, self.cap)
        if grad_hidden_TD is not None:
            torch.mm(grad_CV, self.weight_VD, out=grad_hidden_TD[at])
        if grad_weight_VD is not None:
            add_product(grad_weight_VD, grad_CV.T, self.hidden_TD[at])

    def rounded(self, scale: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """Both, times ``scale``, in the dtype of the inputs; the sums are gone after this."""
        for x in self.sums:
            if x is not None and scale is not None:
                x *= scale
        return tuple(None if x is None else _rounded_in_place(x, self.hidden_TD.dtype) for x in self.sums)


def _rounded_in_place(wide_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """``wide``, contiguous, in a dtype that is narrower or the same: in the front of the memory of ``wide``.

    Row i of n bytes moves to byte i n / 2 or before, where rows up to i / 2 lay: so i to 2 i - 1 can move at once.
    """
    if dtype == wide_VD.dtype or not len(wide_VD):
        return wide_VD
    narrow_VD = wide_VD.view(-1).view(dtype)[: wide_VD.numel()].view(wide_VD.shape)
    narrow_VD[0] = wide_VD[0].to(dtype)
    start = 1
    while start < len(wide_VD):
        narrow_VD[start : 2 * start] = wide_VD[start : 2 * start]
        start *= 2
    return narrow_VD


def _slices(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]


def _as_autocast_wants(hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
    if not torch.is_autocast_enabled(hidden_TD.device.type):
        return hidden_TD, weight_VD
    dtype = torch.get_autocast_dtype(hidden_TD.device.type)
    return hidden_TD.to(dtype), weight_VD.to(dtype)


@functools.cache
def _maybe_compiled(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if compiled else function


def _logits(products: Tensor, cap: LogitCap | None) -> Tensor:
    """The logits, at least float32."""
    wide = products.to(torch.promote_types(products.dtype, torch.float32))
    return wide if cap is None else cap.limit * (wide * (cap.scale / cap.limit)).tanh()


def _statistics(products_CV: Tensor, row_C: Tensor, cap: LogitCap | None) -> tuple[Tensor, Tensor]:
    """logsumexp and the logit of the target's row, 0 where it is not here (row -1); at least float32."""
    picked_C = _logits(products_CV.gather(1, row_C.clamp(min=0)[:, None])[:, 0], cap)
    return _logits(products_CV, cap).logsumexp(1), picked_C * (row_C >= 0)


def _grad_products(products_CV: Tensor, lse_C: Tensor, row_C: Tensor, grad_C: Tensor, cap: LogitCap | None) -> Tensor:
    """Gradient of the products for that of the log-probabilities: d log p(target) / d logit = [is target] - softmax,
    and d logit / d product = scale * (1 - (logit / limit) ** 2) under a cap."""
    logits_CV = _logits(products_CV, cap)
    is_target_CV = torch.arange(logits_CV.shape[1], device=logits_CV.device) == row_C[:, None]
    grad_CV = (is_target_CV.to(lse_C.dtype) - (logits_CV - lse_C[:, None]).exp()) * grad_C[:, None]
    if cap is not None:
        grad_CV = grad_CV * cap.scale * (1 - (logits_CV / cap.limit) ** 2)
    return grad_CV.to(products_CV.dtype)


def _rows(targets_T: Tensor, rows: int, group: dist.ProcessGroup | None) -> Tensor:
    """Row of this rank's weight for each target; -1 where there is none or another rank has it.

    Raises:
        ValueError: as for ``token_logprobs``.
    """
    _check_targets(targets_T, rows * (1 if group is None else dist.get_world_size(group)))
    row_T = targets_T - (0 if group is None else dist.get_rank(group) * rows)
    is_here_T = (targets_T != IGNORE_INDEX) & (row_T >= 0) & (row_T < rows)
    return row_T.where(is_here_T, -1)


def _check_targets(targets_T: Tensor, vocabulary: int) -> None:
    is_fine_T = ((targets_T >= 0) & (targets_T < vocabulary)) | (targets_T == IGNORE_INDEX)
    if targets_T.device.type != "cpu":
        torch._assert_async(is_fine_T.all(), f"a target is outside the vocabulary of {vocabulary} tokens")
    elif not is_fine_T.all():
        raise ValueError(
            f"target {int(targets_T[~is_fine_T][0])} is outside the vocabulary of {vocabulary:,} tokens; a token "
            f"without a target has {IGNORE_INDEX}"
        )


def _over_ranks(lse_T: Tensor, picked_T: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """logsumexp over the whole vocabulary, and the logit of the rank that has the target."""
    if group is None or not len(lse_T):
        return lse_T, picked_T
    largest_T = lse_T.clone()
    dist.all_reduce(largest_T, dist.ReduceOp.MAX, group)
    sums_2T = torch.stack([(lse_T - largest_T).exp_(), picked_T])
    dist.all_reduce(sums_2T, dist.ReduceOp.SUM, group)
    return largest_T + sums_2T[0].log_(), sums_2T[1]
