"""Merging partial attention results over disjoint sets of keys."""

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, new_out: Tensor, new_lse: Tensor) -> None:
    """Merges the attention over more keys into (out, lse), in place.

    out = out * exp(lse - lse') + new_out * exp(new_lse - lse') with lse' = log(exp(lse) + exp(new_lse)); rows that have
    seen no key have lse = -inf and out = 0, before and after.

    Args:
        out: [T, H, D] in float32 or wider. lse: [T, H] natural logarithms.
        new_out, new_lse: the same shapes, any float dtype.
    """
    merged = torch.logaddexp(lse, new_lse)
    reference = merged.masked_fill(merged == -torch.inf, 0.0)
    out.mul_(torch.exp(lse - reference).unsqueeze(-1))
    out.add_(new_out * torch.exp(new_lse - reference).unsqueeze(-1))
    lse.copy_(merged)
