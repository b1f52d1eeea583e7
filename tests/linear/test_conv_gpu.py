"""The short convolution's kernel on GPUs: values and gradients against float64, at most twice as far as 16 bits are."""

import pytest
import torch
import torch.nn.functional as F
from support.gpus import needs_hopper
from support.recurrence import conv_of_ranks, convolution, of_all_ranks, plan_of, with_gradients

from torchtitan_magi.linear import conv_kernels

pytestmark = [pytest.mark.gpu, needs_hopper]
CASES = {  # document boundaries, and who has each token
    "one rank": ([0, 1, 3, 70, 500, 501, 900], [0] * 960),
    "cut documents": (
        [0, 300, 310, 640],
        [0] * 100 + [1] * 60 + [0] * 160 + [1] * 3 + [2] * 320 + [1] * 257 + [0] * 60,
    ),
    "many small parts": ([0, 190, 191], [token % 3 for token in range(192)]),
}


def of_ranks(plan, x, weight, dout, activation):
    found = of_all_ranks(plan, lambda mesh: conv_of_ranks(plan, mesh, x, weight, dout, activation=activation))
    return *found[0][:2], sum(dweight.double() for *_, dweight in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case, activation, dtype, monkeypatch):
    cu_seqlens, owner = CASES[case]
    plan, channels = plan_of(cu_seqlens, owner), 264
    generator = torch.Generator("cuda").manual_seed(0)
    x, dout = torch.randn(2, plan.total_tokens, channels, device="cuda", generator=generator).to(dtype)
    weight = torch.randn(channels, 4, device="cuda", generator=generator).to(dtype)

    def plain(x, w):
        out = convolution(x, w, cu_seqlens)
        return F.silu(out) if activation else out

    exact = with_gradients(plain, (x.double(), weight.double()), dout.double())
    lowly = with_gradients(plain, (x, weight), dout)
    launched = []
    monkeypatch.setattr(
        conv_kernels, "_kernel", lambda *key, make=conv_kernels._kernel: launched.append(key) or make(*key)
    )
    found = of_ranks(plan, x, weight, dout, activation)
    assert len(launched) == 2 * plan.cp_size
    for ours, low, want in zip(found, lowly, exact, strict=True):
        assert (ours.double() - want).abs().max() <= 2 * (low.double() - want).abs().max()
