"""Steps and states that are not finite: such an update is left out, such a state is not saved, and the run ends."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.exchange.agreement import raise_differences
from torchtitan_magi.training.experts import expert_biases, local
from torchtitan_magi.training.objectives.document_losses import DocumentLosses, Where, described, mean_losses
from torchtitan_magi.training.process.all_ranks import gathered, rank_and_size
from torchtitan_magi.training.process.groups import data_parallel_rank


class StepGuard:
    """Takes the place of ``step`` of torchtitan's optimizers, and ends the run by the step that was not finite.

    A fused optimizer leaves an update out by a number on the device, as it does for a gradient scaler; weights, moments
    and counts stay as they were. Another number tells the host, which reads it before it asks for the next update, so a
    step without a fault waits for nothing. Optimizers that are not fused, or whose weights are offloaded, wait for that
    number before each update.

    Args:
        trainer: torchtitan's, with its optimizers and metrics.
    """

    grad_norm: Tensor | None = None  # of the gradients clipped last in this process

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.optimizers, self.device = trainer, trainer.optimizers, trainer.device
        self.update = self.optimizers.step
        self.optimizers.step = self.step
        self.found = torch.zeros((), device=self.device)  # 1: the optimizers leave their update out
        self.masks = _can_leave_out(self.optimizers, self.device)
        for optimizer in self.optimizers if self.masks else ():
            optimizer.found_inf = self.found
        on_gpu = self.device.type == "cuda"
        self.seen = torch.zeros(2, pin_memory=on_gpu)  # 1 where the loss, the gradient norm is not finite
        self.copied = torch.cuda.Event() if on_gpu else None
        self.unread: int | None = None  # the step that ``seen`` and ``kept`` are of, once
        self.kept: tuple[DocumentLosses, ...] = ()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """The update of a step. A collective of all ranks.

        Raises:
            FloatingPointError: on all ranks: the step before was not finite, or this one, where that is read at once.
            RuntimeError: ranks that must have the same microbatches are known to have had others.
        """
        raise_differences()
        self.check()
        self._look()
        if not self.masks:
            self.check()
        biases = local(*expert_biases(self.optimizers.model_parts)) if self.masks else []
        kept = [bias.clone() for bias in biases]
        result = self.update(*args, **kwargs)
        for bias, before in zip(biases, kept, strict=True):  # which a hook of the update moves
            bias.copy_(torch.where(self.found > 0, before, bias))
        if self.trainer.metrics_processor.should_log(self.trainer.step):  # which waits for the device next
            self.check()
        return result

    @torch.no_grad()
    def _look(self) -> None:
        """Tells the optimizers and, later, the host whether loss and gradient norm are finite on all ranks."""
        record = getattr(self.trainer.metrics_processor, "losses", None)  # that of a train spec of the user's has none
        losses = [loss for loss, _ in record.microbatches] if record is not None else []
        norms = [] if self.grad_norm is None else [self.grad_norm]
        bad = torch.stack([_any_odd(values, self.device) for values in (losses, norms)])
        if rank_and_size()[1] > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        self.found.copy_(bad.amax())
        self.seen.copy_(bad, non_blocking=True)
        if self.copied is not None:
            self.copied.record()
        self.unread = self.trainer.step
        if hasattr(self.trainer, "objective"):  # torchtitan's own Trainer has none
            self.kept = self.trainer.objective.kept

    def check(self) -> None:
        """Reads what is known of the last update, once. A collective of all ranks if the run ends.

        Raises:
            FloatingPointError: on all ranks, one line that names the step, its documents and the remedy.
        """
        if self.unread is None:
            return
        if self.copied is not None:
            self.copied.synchronize()
        step, self.unread = self.unread, None
        of_loss, of_norm = self.seen.tolist()
        if of_loss or of_norm:
            raise FloatingPointError(self._reason(step, "loss" if of_loss else "gradient norm"))

    def _reason(self, step: int, what: str) -> str:
        where = _records_of(self.trainer.dataloader)
        means = mean_losses(self.kept, where, data_parallel_rank(self.trainer.parallel_dims))
        return (
            f"step {step}: the {what} is not finite{described(means)}; nothing of this step is saved: correct such "
            "documents or leave them out, or lower optimizer.lr, or load other weights if it is the first step, and "
            "start the run again"
        )

    def end_step(self, saves: bool, is_last: bool) -> None:
        """Called after each step, before a checkpoint is written. A collective of all ranks.

        Raises:
            FloatingPointError: as ``check`` does if there will be a checkpoint or no other step; of a last step that
                writes none, also for weights that are not finite.
            RuntimeError: if there will be a checkpoint or no other step, and ranks had other microbatches.
        """
        if saves or is_last:
            raise_differences(wait=True)
            self.check()
        if is_last and not saves:
            parts = self.optimizers.model_parts
            check_state({name: weight for part in parts for name, weight in part.named_parameters()}, self.trainer.step)


def clip_and_note(clip: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    """Calls torchtitan's ``clip_grad_norm_``, and tells the guard the norm."""
    StepGuard.grad_norm = norm = clip(*args, **kwargs)
    return norm


def check_state(state: dict[str, Any], step: int) -> None:
    """Checks what a checkpoint will hold: weights, and the optimizers' state if it is "optimizer". A collective of all
    ranks; waits for the device.

    Raises:
        FloatingPointError: on all ranks, one line that names the first tensor that is not finite, and the remedy.
    """
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    if "optimizer" in state:
        tensors |= dict(_moments(state["optimizer"]))
    names = list(dict.fromkeys(itertools.chain(*gathered(_not_finite(tensors)))))
    if names:
        others = f" and {len(names) - 1:,} other tensors" if len(names) > 1 else ""
        raise FloatingPointError(
            f"after step {step} {names[0]}{others} hold numbers that are not finite, which are not saved; lower "
            "optimizer.lr, or load other weights if it is the first save, and start the run again"
        )


def _moments(optimizers: Any) -> Iterator[tuple[str, Tensor]]:
    """The state of torchtitan's optimizers, with names."""
    names = {weight: name for part in optimizers.model_parts for name, weight in part.named_parameters()}
    for optimizer in optimizers:
        for weight, state in optimizer.state.items():
            yield from ((f"{kind} of {names[weight]}", x) for kind, x in state.items() if isinstance(x, Tensor))


def _not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Names of those of which this rank's part has a number that is not finite. Takes no memory to speak of."""
    alike: dict[Any, dict[str, Tensor]] = {}
    for name, part in zip(tensors, local(*tensors.values()), strict=True):
        if part.is_floating_point() and part.numel():
            alike.setdefault((part.device, part.dtype), {})[name] = part
    odd = set()
    for parts in alike.values():
        largest = torch.stack(torch._foreach_norm(list(parts.values()), math.inf))
        odd |= {name for name, good in zip(parts, largest.isfinite().tolist(), strict=True) if not good}
    return [name for name in tensors if name in odd]


def _any_odd(values: list[Tensor], device: torch.device) -> Tensor:
    """float 0-d: 1 if one of the numbers is not finite."""
    finite = [value.isfinite().to(device, non_blocking=True).all() for value in local(*values)]
    return (~torch.stack(finite).all()).float() if finite else torch.zeros((), device=device)


def _can_leave_out(optimizers: Any, device: torch.device) -> bool:
    """Whether they leave an update out by a number on the device."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    on_device = all(weight.device.type == device.type for group in groups for weight in group["params"])
    return on_device and all(group.get("fused") for group in groups)


def _records_of(loader: Any) -> Where | None:
    """The names of the records that it reads; None of torchtitan's own."""
    records = getattr(getattr(getattr(loader, "loader", None), "dataset", None), "records", None)
    return None if records is None else records.where
