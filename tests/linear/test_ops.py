"""Layers that recur as ops of torch: compiled, recomputed and held back they give what the calls give."""

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from support.errors import one_line
from support.loopback import Loopback
from support.recurrence import layer_inputs, plan_of, plan_of_mask, with_gradients
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchtitan_magi as magi
from torchtitan_magi.attention.bound_plan import bind_plan
from torchtitan_magi.attention.op import PlanHandle
from torchtitan_magi.backends.flex import FlexBlockAttn
from torchtitan_magi.linear import delta_rule, short_conv
from torchtitan_magi.linear.chunked import Chunked, ChunkedForward
from torchtitan_magi.linear.op import conv_backward_op, conv_op, convolve, recur, rule_backward_op, rule_op

TOKENS, WIDTH = 24, 4
EXACT = {"rtol": 0, "atol": 1e-13}
PLANS = {  # of two ranks
    "whole documents": plan_of([0, 12, 24], [0] * 12 + [1] * 12),
    "one that is cut": plan_of([0, 16, 20, 24], [0] * 8 + [1] * 8 + [0] * 4 + [1] * 4),
    "parts of one token": plan_of([0, 24], [0, 1] * 12),
    "a tree": plan_of_mask(magi.tree_causal([8, 6, 4, 6], [-1, 0, 0, 2]), [0] * 6 + [1] * 8 + [0] * 6 + [1] * 4),
    "no document on the second rank": plan_of([0, 6], [0] * 12 + [1] * 12),
}


class KeepingForward(ChunkedForward):
    def finish(self, states):
        out, _ = super().finish(states)
        return out, (self.tokens.g.float().contiguous(), self.tokens.v[:, :1].contiguous())


class Keeping(Chunked):
    """Keeps rows of a token, which it wants back with it."""

    def start(self, *arguments):
        return KeepingForward(*arguments)

    def start_backward(self, tokens, lengths, scale, states, kept, *rest):
        assert torch.equal(kept[0], tokens.g.float())
        assert torch.equal(kept[1], tokens.v[:, :1])
        return super().start_backward(tokens, lengths, scale, states, (), *rest)

    def room(self, tokens):
        gates = tokens.g.new_zeros(tokens.g.shape, dtype=torch.float32)
        return gates, tokens.v.new_zeros(tokens.v[:, :1].shape)


@pytest.fixture(autouse=True)
def _a_backend_that_keeps_rows(monkeypatch):
    monkeypatch.setattr("torchtitan_magi.linear.op.choose_backend", lambda _: Keeping())


def handle_of(plan, mesh=None):
    return PlanHandle(bind_plan(plan, mesh, FlexBlockAttn(), 2, 1, torch.device("cpu")), recurs=True)


def layer(x, weight, handle):
    """A small DeltaNet: out [T, 8] of x [T, 24]."""
    q, k, v, g = (x + convolve(x, weight, handle, "silu")).split([6, 6, 8, 4], 1)
    q, k = (F.normalize(y.unflatten(1, (2, 3)), dim=-1) for y in (q, k))
    return recur(q, k, v.unflatten(1, (4, 2)), -F.softplus(g), g.sigmoid(), handle, 0.3).flatten(1).tanh()


@functools.cache
def numbers():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((24, 24), (24, 4), (24, 8))]


def of_rank(plan, mesh, function):
    """out and gradients of this rank's tokens."""
    x, weight, dout = numbers()
    handle = handle_of(plan, mesh)
    local = (magi.dispatch(y[: plan.total_tokens], plan, mesh) for y in (x, dout))
    return with_gradients(lambda x, weight: function(x, weight, handle), (next(local), weight), next(local))


def check_on_both_ranks(plan, function):
    """The first rank runs a function in place of the layer, the second the layer itself: exchanges are the same."""
    ours = Loopback(2).run(lambda mesh: of_rank(plan, mesh, layer if mesh.rank else function))
    torch.testing.assert_close(ours, Loopback(2).run(lambda mesh: of_rank(plan, mesh, layer)), **EXACT)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_serves_all_plans(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for plan in PLANS.values():
        check_on_both_ranks(plan, compiled)
    alone = magi.make_plan(magi.tree_causal([5, 4, 3], [-1, 0, 0]), TOKENS // 2, 1)
    torch.testing.assert_close(of_rank(alone, None, compiled), of_rank(alone, None, layer), **EXACT)
    assert counter.frame_count == 1


def save_ops(context, op, *_, **__):
    return CheckpointPolicy.MUST_SAVE if op in (rule_op, conv_op) else CheckpointPolicy.PREFER_RECOMPUTE


HOW = {"full": {}, "selective": {"context_fn": lambda: create_selective_checkpoint_contexts(save_ops)}}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("how", "runs"), [("full", 2), ("selective", 1)])
@pytest.mark.parametrize("plan", ["parts of one token", "a tree"])
def test_checkpointing_redoes_layers_unless_they_are_held_back(plan, how, runs, compiled, monkeypatch):
    def run(*arguments):
        return checkpoint(layer, *arguments, use_reentrant=False, **HOW[how])

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    expected = Loopback(2).run(lambda mesh: of_rank(PLANS[plan], mesh, layer))
    with (
        mock.patch.object(delta_rule, "forward", wraps=delta_rule.forward) as rule,
        mock.patch.object(short_conv, "forward", wraps=short_conv.forward) as conv,
    ):
        found = Loopback(2).run(lambda mesh: of_rank(PLANS[plan], mesh, run))
    assert (rule.call_count, conv.call_count) == (2 * runs, 2 * runs)
    torch.testing.assert_close(found, expected, **EXACT)


def calls(handle, dtype=torch.float64):
    """The ops of both directions, and what they take of a rank's tokens; tensors are not contiguous."""
    generator, (states, matrices, cut) = torch.Generator().manual_seed(1), map(len, handle.counts)
    tokens = len(handle.bound_plan.tokens)
    *inputs, dout = (x.to(dtype).mT.contiguous().mT for x in layer_inputs(tokens))
    x, dx = torch.randn(2, 3, tokens, generator=generator).to(dtype).mT
    weight = torch.randn(3, WIDTH, generator=generator).to(dtype)
    rule, conv = (*inputs, handle.tensor, 0.3), (x, weight, handle.tensor)
    yield rule_op, (*rule, states, matrices)
    _, *kept = rule_op(*rule, states, matrices)
    yield rule_backward_op, (dout, *inputs, *kept, *rule[5:])
    yield conv_op, (*conv, "silu", cut)
    _, received = conv_op(*conv, None, cut)
    yield conv_backward_op, (dx, x, weight, received, handle.tensor, None)


def test_the_ops_compile():
    """torch's own checks of schema, autograd registration, fakes and tracing with static and dynamic shapes."""
    plan = magi.make_plan(magi.tree_causal([10, 9, 5], [-1, 0, 0]), TOKENS, 1)
    for op, arguments in calls(handle_of(plan)):
        torch.library.opcheck(op, arguments)
        if op in (rule_op, conv_op):
            torch.library.opcheck(op, tuple(leaves(arguments)))


def leaves(arguments):
    """Arguments of an op, of which the floating-point tensors require gradients."""
    tensors = (x.is_floating_point() if isinstance(x, torch.Tensor) else False for x in arguments)
    return [x.detach().requires_grad_() if is_float else x for x, is_float in zip(arguments, tensors, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ops_keep_their_promises_to_compilers(plan, dtype):
    """The fakes give the shapes, dtypes and strides of the real results, on ranks with and without parts."""

    def of_rank(mesh):
        handle = handle_of(plan, mesh)
        for op, arguments in calls(handle, dtype):
            real = tree_leaves(op(*arguments))
            with FakeTensorMode(allow_non_fake_inputs=True):
                promised = tree_leaves(op(*arguments))
            assert [(x.shape, x.dtype, x.stride()) for x in real] == [(x.shape, x.dtype, x.stride()) for x in promised]

    Loopback(2).run(of_rank)


def test_second_derivatives_are_refused():
    handle = handle_of(magi.make_plan(magi.varlen_causal([0, TOKENS]), TOKENS, 1))
    for op, arguments in calls(handle):
        if op in (rule_op, conv_op):
            first, *rest = leaves(arguments)
            out, *kept = op(first, *rest)
            assert not any(x.requires_grad for x in tree_leaves(kept))
            with one_line("linear attention has no second derivatives", RuntimeError):
                torch.autograd.grad(out.sum(), first, create_graph=True)


def test_ops_stay_out_of_cuda_graphs():
    for op in (rule_op, rule_backward_op, conv_op, conv_backward_op):
        assert torch.Tag.cudagraph_unsafe in op.tags


def test_names_and_schemas_of_the_ops_are_those_of_saved_graphs():
    tokens = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta"
    assert [str(op._schema).removeprefix("torchtitan_magi::") for op in (rule_op, rule_backward_op)] == [
        f"cp_gated_delta_rule({tokens}, Tensor handle, float scale, SymInt num_states, SymInt num_matrices) -> "
        "(Tensor, Tensor, Tensor, Tensor[])",
        f"cp_gated_delta_rule_backward(Tensor dout, {tokens}, Tensor states, Tensor matrices, Tensor[] of_backend, "
        "Tensor handle, float scale) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    ]
    assert [str(op._schema).removeprefix("torchtitan_magi::") for op in (conv_op, conv_backward_op)] == [
        "cp_causal_conv1d(Tensor x, Tensor weight, Tensor handle, str? activation, SymInt num_cut) -> (Tensor, Tensor)",
        "cp_causal_conv1d_backward(Tensor dout, Tensor x, Tensor weight, Tensor received, Tensor handle, "
        "str? activation) -> (Tensor, Tensor)",
    ]
