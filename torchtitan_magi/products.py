"""Matrix products that are added to sums of a wider dtype."""

import torch
from torch import Tensor


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
