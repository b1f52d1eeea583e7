"""What surrounds the short convolution's kernels, with kernels of plain torch in their place."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.loopback import Loopback
from support.recurrence import conv_of_ranks, convolution, of_all_ranks, plan_of, with_gradients
from torch.utils._python_dispatch import TorchDispatchMode

import torchtitan_magi as magi
from torchtitan_magi.linear import conv_kernels, short_conv

CASES = {  # document boundaries, and who has each token
    "one rank": ([0, 1, 3, 70, 90], [0] * 96),
    "cut documents": ([0, 30, 31, 64], [0] * 10 + [1] * 6 + [0] * 16 + [1] * 2 + [2] * 32 + [1] * 24 + [0] * 6),
    "many small parts": ([0, 40, 41], [token % 3 for token in range(48)]),
}


def sums(x, history, taps, tables):
    """As short_conv.cu has them, from its tables."""
    offset, edge, taken = tables
    token = torch.arange(len(x))
    total = torch.zeros_like(x, dtype=taps.dtype)
    for distance, tap in enumerate(taps):
        own = distance <= offset
        row = torch.where(own[:, None], x[(token - distance).clamp(min=0)], 0.0)
        if distance and len(taken):
            source = torch.where((edge >= 0) & ~own & (offset >= 0), taken[edge.clamp(min=0), distance - 1], -1)
            row = torch.where((source >= 0)[:, None], history[source.clamp(min=0)], row) if len(history) else row
        total = total + row * tap
    return total


def forward(x, weight, history, tables, activation):
    total = sums(x, history, weight.flip(1).T, tables)
    return F.silu(total) if activation else total


def backward(x, weight, history, tables, activation, dout):
    leaves = [each.detach().requires_grad_() for each in (x, weight)]
    with torch.enable_grad():
        total = sums(leaves[0], history, leaves[1].flip(1).T, tables)
        out = F.silu(total) if activation else total
    dtotal = torch.autograd.grad(out, total, dout, retain_graph=True)[0]
    dx, dweight = torch.autograd.grad(total, leaves, torch.where(tables[0][:, None] >= 0, dtotal, 0.0))
    return dx, dweight, dtotal[tables[1] >= 0].float()


def stand_in(monkeypatch):
    for name, instead in (("has_kernel", lambda *_: True), ("forward", forward), ("backward", backward)):
        monkeypatch.setattr(conv_kernels, name, instead)


def test_autocast_of_another_dtype_changes_nothing(monkeypatch):
    stand_in(monkeypatch)
    plan = plan_of(*CASES["cut documents"])
    x, weight = torch.randn(plan.tokens_per_rank, 3).half(), torch.randn(3, 4).half()

    def results(inside, mesh):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return with_gradients(lambda *inputs: magi.cp_causal_conv1d(*inputs, plan, mesh), (x, weight), x)

    plain, inside = (Loopback(plan.cp_size).run(partial(results, inside)) for inside in (False, True))
    for expected, found in zip(plain, inside, strict=True):
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("case", CASES)
def test_history_and_its_gradients_come_and_go(case, activation, monkeypatch):
    stand_in(monkeypatch)
    plan = plan_of(*CASES[case])
    generator = torch.Generator().manual_seed(0)
    x, dout = torch.randn(2, plan.total_tokens, 3, generator=generator)
    weight = torch.randn(3, 4, generator=generator)

    def plain(x, w):
        out = convolution(x, w, CASES[case][0])
        return F.silu(out) if activation else out

    found = of_all_ranks(plan, lambda mesh: conv_of_ranks(plan, mesh, x, weight, dout, activation=activation))
    ours = *found[0][:2], sum(dweight for *_, dweight in found)
    torch.testing.assert_close(list(ours), with_gradients(plain, (x, weight), dout))


class RowsApart(TorchDispatchMode):
    """Asserts that index_add, which has no order on a GPU, adds to no row twice."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "index_add" in op.name():
            assert len(args[2].unique()) == len(args[2])
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("by_kernel", [False, True])
def test_gradients_of_a_row_that_several_branches_take_in_have_an_order(by_kernel, monkeypatch):
    if by_kernel:
        stand_in(monkeypatch)
    plan = magi.make_plan(magi.tree_causal([8, 6, 4, 6], [-1, 0, 0, 0]), 24, 1)
    x, weight = torch.randn(24, 3), torch.randn(3, 4)
    with RowsApart():
        with_gradients(lambda *inputs: magi.cp_causal_conv1d(*inputs, plan), (x, weight), x)


def test_each_stream_has_tables_of_its_own(monkeypatch):
    parts, found = plan_of(*CASES["cut documents"]).document_parts.ranks[1], []
    for stream in (1, 2, 1):
        monkeypatch.setattr(short_conv, "stream_of", lambda device, stream=stream: stream)
        found.append(short_conv.ConvRows.of(parts, 4, torch.device("cpu")))
    assert found[0] is found[2]
    assert found[0].offset.data_ptr() != found[1].offset.data_ptr()


@pytest.mark.parametrize("found", [
    torch.randn(81, dtype=torch.bfloat16)[1:].view(5, 16),
    torch.randn(5, 32, dtype=torch.bfloat16)[:, ::2],
    torch.randn(5, 16, dtype=torch.bfloat16),
], ids=["behind an odd offset", "every other column", "as it is"])  # fmt: skip
def test_rows_that_the_kernel_reads_are_aligned(found):
    read = conv_kernels._readable(found)
    assert torch.equal(read, found)
    assert read.is_contiguous()
    assert read.data_ptr() % 16 == 0
