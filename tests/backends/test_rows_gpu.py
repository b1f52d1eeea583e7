"""Our row kernels on a GPU that writes to itself, as if its memory were that of several ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.gpus import needs_hopper

from torchtitan_magi import AttnSlices, shared_prompt, sliding_window, varlen_causal
from torchtitan_magi.backends.ffa.row_kernels import CudaRowMover, write_bands
from torchtitan_magi.backends.ffa.worklists import build_worklists
from torchtitan_magi.backends.interface import StageMask
from torchtitan_magi.exchange import in_flight

pytestmark = [pytest.mark.gpu, needs_hopper]
TOKENS, HEADS, DIM = 3000, 8, 128
SHAPE = in_flight.RowShape(HEADS, DIM, DIM)
ROW = SHAPE.width


def boxes(counts, row_bytes, flags, dtype, begin):
    """Places of ranks that get so many rows each, and the memory that they write to, a tensor each."""
    targets = [torch.full((count, ROW), torch.nan, dtype=dtype, device="cuda") for count in counts]
    ends = np.cumsum(counts).tolist()
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    addresses = [x.data_ptr() - start * row_bytes for x, start in zip(targets, starts, strict=True)]
    words = [flags.data_ptr() + 4 * i for i in range(len(flags))]
    return in_flight.Places(ends, addresses, starts[begin], words), targets


@pytest.mark.parametrize(
    "slices",
    [
        varlen_causal([0, 3, 100, 101, 640, 900]),
        sliding_window([0, 700, 1100], 130),
        shared_prompt([[300, 200, 150], [20, 40, 500]]),
        AttnSlices([[3, 40, 0, 100, 0], [40, 80, 5000, 5100, 0], [60, 200, 2000, 2300, 3]]),
        AttnSlices([]),
    ],
)
def test_row_bands(slices):
    num_q = 1300
    lists = build_worklists(StageMask(slices, num_q, 6000, 1, 1))
    table = torch.from_numpy(lists.words[lists.sizes.slices :][: 5 * lists.sizes.num_slices]).cuda().view(-1, 5)
    bands = torch.full((lists.sizes.num_bands, 2), -1, dtype=torch.int32, device="cuda")
    write_bands(table, bands)
    want = np.stack(slices.row_bands(num_q), 2).reshape(-1, 2)
    np.testing.assert_array_equal(bands.cpu().numpy(), want)


@pytest.mark.parametrize("counts", [[700], [1, 900, 333], [5, 4, 3, 2, 1, 600, 7]])
def test_rows_are_written_to_each_place_and_then_counted(counts):
    k, v = torch.randn(2, TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    rows = torch.cat([torch.randperm(TOKENS)[:n].sort().values for n in counts]).int().cuda()
    flags = torch.zeros(len(counts), dtype=torch.int32, device="cuda")
    for turn in range(3):
        places, targets = boxes(counts, 2 * HEADS * DIM * 2, flags, k.dtype, turn % len(counts))
        CudaRowMover().gather(k, v, [rows], places)
        for target, part in zip(targets, rows.split(counts), strict=True):
            assert torch.equal(target, torch.cat([k[part.long()], v[part.long()]], 1).flatten(1))
        assert (flags == turn + 1).all()


def test_no_rows_are_counted_too():
    k = torch.randn(TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    flags = torch.zeros(2, dtype=torch.int32, device="cuda")
    places = in_flight.Places([], [], 0, [flags.data_ptr(), flags.data_ptr() + 4])
    CudaRowMover().gather(k, k, [torch.zeros(0, dtype=torch.int32, device="cuda")], places)
    assert flags.tolist() == [1, 1]


@pytest.mark.parametrize("num_rows", [None, 0, 700])
@pytest.mark.parametrize("head_dim", [128, 72, 256])
@pytest.mark.parametrize("more", [0, 8, 1 << 20])
def test_row_sums_and_zeros_beside_packing(num_rows, head_dim, more):
    k, v = torch.randn(2, TOKENS, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    out, dout = torch.randn(2, TOKENS, 5, head_dim, device="cuda", dtype=torch.bfloat16)
    zeros = [torch.full((n,), torch.nan, device="cuda") for n in (out.numel(), more)[: 1 + bool(more)]]
    delta = torch.full((TOKENS, 5), torch.nan, device="cuda")
    sums = in_flight.RowSums(out, dout, delta, tuple(zeros))
    if num_rows is None:
        CudaRowMover().sum(sums)
    else:
        rows = torch.randperm(TOKENS)[:num_rows].int().cuda()
        sent = torch.full((num_rows, ROW), torch.nan, dtype=k.dtype, device="cuda")
        CudaRowMover().gather(k, v, [rows], sent, sums)
        assert torch.equal(sent, torch.cat([k[rows.long()], v[rows.long()]], 1).flatten(1))
    torch.testing.assert_close(delta, (out.float() * dout.float()).sum(-1), rtol=1e-5, atol=1e-4)
    assert not any(zero.any() for zero in zeros)


@pytest.mark.parametrize("heads", [1, 5, 64, 256, 300])
@pytest.mark.parametrize("tokens", [0, 1, 1000, 33000])
def test_gradients_of_sinks(tokens, heads):
    sinks, (lse, delta) = torch.randn(heads, device="cuda"), torch.randn(2, tokens, heads, device="cuda")
    sinks[0] = lse[:, 0] = -torch.inf  # no sink, and rows that see no key
    found = CudaRowMover().sink_grads(sinks, lse, delta)
    terms = (sinks - lse).double().exp().nan_to_num() * delta.double()
    assert ((found.double() + terms.sum(0)).abs() <= 1e-5 * terms.abs().sum(0)).all()
    assert all(torch.equal(found, CudaRowMover().sink_grads(sinks, lse, delta)) for _ in range(3))


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("parts", [None, (), (slice(3, 5),), (slice(0, 0), slice(20, 70), slice(500, 900))])
def test_a_piece_of_gradients_is_rounded_to_its_slot_and_then_counted(wire, parts):
    grad, flags = torch.randn(900, ROW, device="cuda"), torch.zeros(2, dtype=torch.int32, device="cuda")
    numbers = torch.arange(900, device="cuda")
    chosen = numbers if parts is None else torch.cat([numbers[:0], *(numbers[part] for part in parts)])
    for turn in range(3):
        slot = torch.full((len(chosen), ROW), torch.nan, dtype=wire, device="cuda")
        places = in_flight.Places([len(chosen)], [slot.data_ptr()], 0, [flags.data_ptr(), flags.data_ptr() + 4])
        CudaRowMover().round_to(grad, in_flight.Piece(parts, places, slot, in_flight.Arrival(lambda: None)))
        assert torch.equal(slot, grad[chosen].to(wire))
        assert flags.tolist() == [turn + 1] * 2


@pytest.mark.parametrize(
    ("wire", "is_rounded"), [(torch.bfloat16, False), (torch.float32, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("unsent", [0, 1, 900])
def test_the_end_of_a_backward_sends_before_it_waits(wire, is_rounded, unsent):
    """Several ranks in one: what is sent comes back at once, and only then may be added."""
    counts = [n for n in (unsent // 3, unsent - unsent // 3) if n]
    sent = [torch.randperm(TOKENS)[:n].sort().values for n in counts]
    exchange = SimpleNamespace(send_rows=torch.cat([*sent, torch.zeros(0, dtype=torch.int64)]).numpy())
    index = [torch.from_numpy(np.asarray(part)).int().cuda() for part in CudaRowMover().index(exchange)]
    dq = torch.randn(TOKENS, 64, DIM, device="cuda")
    dkv, grad = (torch.randn(n, ROW, device="cuda") for n in (TOKENS, unsent))
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    for turn in range(3):
        received = torch.full((unsent, ROW), torch.nan, dtype=wire, device="cuda")
        ends = np.cumsum(counts).tolist()
        addresses = [received.data_ptr()] * len(counts)
        places = in_flight.Places(ends, addresses, 0, [flag.data_ptr()])
        arrival = in_flight.Arrival(lambda: None, lambda turn=turn: in_flight.Flag(flag.data_ptr(), turn + 1))
        if is_rounded:  # with the rows that are sent behind the rank's own
            found = tuple(x.bfloat16().contiguous() for x in SHAPE.split(torch.cat([dkv, grad])))
            first, to_send = TOKENS, found
        else:
            found, first, to_send = dkv, 0, grad
        returned = in_flight.Returned(received, index, exchange, arrival, in_flight.Unsent(to_send, first, places))
        rounded, dk, dv = CudaRowMover().finish(returned, in_flight.LeftGrads(dq, found, SHAPE, 0.25, torch.bfloat16))
        want = dkv.bfloat16().float() if is_rounded else dkv.clone()
        for rows, end in zip(sent, ends, strict=True):
            want.index_add_(0, rows.cuda(), grad[end - len(rows) : end].to(wire).float())
        assert torch.equal(received, grad.to(wire))
        for got, part in zip((dk, dv), SHAPE.split(want), strict=True):
            torch.testing.assert_close(got, part.bfloat16(), rtol=8e-3, atol=1e-6)
        assert torch.equal(rounded, _plain_order(dq * 0.25).bfloat16())
        assert flag.item() == turn + 1


def _plain_order(x):
    """Columns of each 8 as they are in gradients; the kernel keeps the even ones before the odd ones."""
    return x.unflatten(-1, (-1, 2, 4)).transpose(-1, -2).flatten(-3)
