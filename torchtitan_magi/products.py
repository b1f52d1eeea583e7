"""Matrix products in the dtypes of their factors, and those that are added to sums of a wider one."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def own_dtypes(device: torch.device) -> AbstractContextManager[Any]:
    """Within it there is no autocast: it would round products of wider factors to 16 bits, and refuses to concatenate
    16 bits of the other kind."""
    runs = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if runs else nullcontext()


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right; on GPUs the product is rounded to the dtype of the sum alone.

    total: [M, N], of the dtype of the others or float32. left: [M, K]. right: [K, N].
    """
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, out=total)
    elif total.is_cuda:
        torch.addmm(total, left, right, total.dtype, out=total)
    else:
        total += left @ right
