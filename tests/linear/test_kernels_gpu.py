"""The gated delta rule by kernels, on GPUs, against float64.

Errors are at most twice those of plain torch with products of 16 bits, or one rounding to 16 bits: so maps are rounded,
and the states from which the gradient of gates follows.
"""

import itertools

import pytest
import torch
from support.gpus import needs_hopper
from support.loopback import Loopback
from support.recurrence import layer_inputs, with_gradients

import torchtitan_magi as magi
from torchtitan_magi.attention.bound_plan import bind_plan
from torchtitan_magi.attention.op import PlanHandle
from torchtitan_magi.backends.flex import FlexBlockAttn
from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.linear.chunked import Chunked, run
from torchtitan_magi.linear.kernels import Kernels
from torchtitan_magi.linear.op import recur

pytest.importorskip("flash_qla", reason="needs the extra linear")
pytestmark = [pytest.mark.gpu, needs_hopper]

HEADS, DIMS, SCALE = (2, 4), (128, 128), 0.1
ROUNDING = 2**-8  # to bfloat16
GRADS = ("dq", "dk", "dv", "dg", "dbeta")
LENGTHS = {
    "a pack": [640, 37, 1, 64, 300],
    "one document, in fragments": [4096],
    "several in fragments": [2500, 300, 3000],
}


def inputs_of(lengths, dtype=torch.bfloat16, forgets=0.1):
    """Tokens, dout, states, dends. forgets: factor of g."""
    total, shape = sum(lengths), (len(lengths), HEADS[1], *DIMS)
    q, k, v, g, beta, dout = (x.cuda() for x in layer_inputs(total, HEADS, DIMS))
    generator = torch.Generator("cuda").manual_seed(total)
    states, dends = 0.3 * torch.randn(2, *shape, device="cuda", generator=generator)
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    return Tokens(q, k, v, forgets * g.float(), beta.float()), dout, states, dends


def wide(x):
    """In float64, also inside tuples."""
    if isinstance(x, Tokens):
        return Tokens(*map(wide, x))
    return x.double() if torch.is_tensor(x) else tuple(map(wide, x))


def both_ways(backend, lengths, tokens, dout, states=(), dends=(), mapped=()):
    """Outputs, gradients of the tokens, maps, and gradients of states."""
    started = backend.start(tokens, lengths, SCALE, mapped)
    maps = [*map(torch.stack, started.maps())] if mapped else []
    out, kept = started.finish(dict(enumerate(states)))
    started = backend.start_backward(tokens, lengths, SCALE, dict(enumerate(states)), kept, dout, mapped)
    dstates = [torch.stack([*started.state_grads()])] if mapped else []
    started.prepare()
    return [out, *started.finish(dict(enumerate(dends))), *maps, *dstates]


def lowly(function, dtype=torch.bfloat16):
    """A function of plain torch, whose products are of 16 bits."""

    def low(*arguments):
        with torch.autocast("cuda", dtype):
            return function(*arguments)

    return low


def check_errors(ours, low, exact, names):
    for name, mine, plain, right in zip(names, ours, low, exact, strict=True):
        errors = [float((x.double() - right).norm() / right.norm()) for x in (mine, plain)]
        assert errors[0] <= max(2 * errors[1], ROUNDING), f"{name}: {errors[0]:.2e}, plain 16 bits {errors[1]:.2e}"


@pytest.mark.parametrize("forgets", [0.001, 0.1, 1.0])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_both_ways_against_float64(lengths, forgets):
    tokens, dout, states, dends = inputs_of(lengths, forgets=forgets)
    mapped = list(range(0, len(lengths), 2)) if forgets < 1 else []  # else nothing is left of the matrices
    case = tokens, dout, states, dends, mapped
    exact = both_ways(Chunked(), lengths, *map(wide, case[:4]), mapped)
    low = lowly(both_ways)(Chunked(), lengths, *case)
    names = ("out", *GRADS, *(("states", "matrices", "dstates") if mapped else ()))
    check_errors(both_ways(Kernels(), lengths, *case), low, exact, names)


def test_float16_and_no_states():
    lengths = [40, 704, 512]
    tokens, dout, *_ = inputs_of(lengths, torch.float16)
    ours = both_ways(Kernels(), lengths, tokens, dout)
    low = lowly(both_ways, torch.float16)(Chunked(), lengths, tokens, dout)
    check_errors(ours, low, both_ways(Chunked(), lengths, wide(tokens), wide(dout)), ("out", *GRADS))
    assert [x.dtype for x in ours] == [torch.float16] * 4 + [torch.float32] * 2


@pytest.mark.parametrize("cu_seqlens", [[0, 100, 900, 901, 1400], [0, 2040]], ids=["a pack", "one document"])
@pytest.mark.parametrize("cp_size", [1, 3])
def test_layers_of_ranks_against_float64(cp_size, cu_seqlens):
    total = 2048 - 2048 % (8 * cp_size)
    cu_seqlens = [min(end, total) for end in cu_seqlens]
    plan = magi.make_plan(magi.varlen_causal(cu_seqlens), total, cp_size)
    tokens, dout, *_ = inputs_of([total])
    lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]

    def of_rank(mesh):
        shares = [magi.dispatch(x, plan, mesh) for x in (*tokens, dout)]
        found = with_gradients(
            lambda *x: magi.cp_gated_delta_rule(*x, plan, mesh, scale=SCALE), shares[:-1], shares[-1]
        )
        return [magi.undispatch(x, plan, mesh) for x in found]

    def plainly(*x):
        out, _ = run(Tokens(*(y[: cu_seqlens[-1]] for y in x)), lengths, SCALE)
        return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, total - len(out))).to(x[2].dtype)

    exact = with_gradients(plainly, wide(tokens), wide(dout))
    low = with_gradients(lowly(plainly), tokens, dout)
    for ours in [of_rank(None)] if cp_size == 1 else Loopback(cp_size).run(of_rank):
        check_errors(ours, low, exact, ("out", *GRADS))


def test_what_is_kept_has_the_promised_shapes():
    tokens, *_ = inputs_of([100, 200])
    _, kept = Kernels().start(tokens, [100, 200], SCALE).finish({})
    room = Kernels().room(tokens)
    assert [(x.shape, x.dtype, x.stride()) for x in kept] == [(x.shape, x.dtype, x.stride()) for x in room]


def test_the_op_of_a_plan_compiles():
    tokens, dout, *_ = inputs_of([1000])
    plan = magi.make_plan(magi.varlen_causal([0, 300, 1000]), 1000, 1)
    handle = PlanHandle(bind_plan(plan, None, FlexBlockAttn(), 2, 1, dout.device), recurs=True)

    def layer(*x):
        return recur(*x, handle, SCALE)

    called = with_gradients(layer, tokens, dout)
    assert all(map(torch.equal, called, with_gradients(torch.compile(layer, fullgraph=True), tokens, dout)))


def test_one_device_and_a_plan_of_one_rank_are_equal_bit_for_bit():
    tokens, dout, *_ = inputs_of([1000])
    plan = magi.make_plan(magi.varlen_causal([0, 300, 1000]), 1000, 1)
    alone = with_gradients(lambda *x: magi.gated_delta_rule(*x, [0, 300, 1000]), tokens, dout)
    planned = with_gradients(lambda *x: magi.cp_gated_delta_rule(*x, plan), tokens, dout)
    again = with_gradients(lambda *x: magi.gated_delta_rule(*x, [0, 300, 1000]), tokens, dout)
    assert all(map(torch.equal, alone, planned))
    assert all(map(torch.equal, alone, again))
