"""What the loss of a step is made of."""

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan_magi.losses import IGNORE_INDEX

LossFunction = Callable[[Tensor, Tensor], Tensor]


class LossRecord:
    """Loss sums of the last step's microbatches, and the number of items (labels, documents or pairs) in each sum.

    Sums and numbers are this rank's; over the context-parallel ranks they add up to those of the microbatch.

    Args:
        num_microbatches: microbatches per step on this rank.
    """

    def __init__(self, num_microbatches: int) -> None:
        self.microbatches: deque[tuple[Tensor, Tensor | float]] = deque(maxlen=num_microbatches)

    def add(self, loss_sum: Tensor, num_items: Tensor | float) -> None:
        """Records one microbatch."""
        self.microbatches.append((loss_sum.detach(), num_items))

    def record(self, loss_fn: LossFunction) -> LossFunction:
        """loss_fn, which sums over tokens, with each training call recorded."""

        def recorded(pred: Tensor, labels: Tensor) -> Tensor:
            loss_sum = loss_fn(pred, labels)
            if torch.is_grad_enabled():
                self.add(loss_sum, (labels != IGNORE_INDEX).sum())
            return loss_sum

        return recorded

    def sum_and_count(self) -> Tensor:
        """float32 [2]: summed loss and number of items of the last step."""
        loss = sum(loss.full_tensor() if isinstance(loss, DTensor) else loss for loss, _ in self.microbatches)
        assert isinstance(loss, Tensor)
        count = torch.as_tensor(sum(count for _, count in self.microbatches), device=loss.device)
        return torch.stack([loss.float(), count.float()])
