"""Linear attention over ranks: values and gradients are those of whole documents, however these are cut."""

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import one_line
from support.loopback import Loopback
from support.recurrence import (
    conv_of_ranks,
    convolution,
    flat_ways,
    layer_inputs,
    of_all_ranks,
    on_trees,
    placements,
    plan_of,
    plan_of_mask,
    recurrence,
    tree_placements,
    with_gradients,
)

import torchtitan_magi as magi
from torchtitan_magi.exchange.in_flight import Arrival
from torchtitan_magi.linear.chunked import Chunked, ChunkedBackward, ChunkedForward

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def delta_rule_of_ranks(plan, mesh, inputs, dout, **options):
    """out and the gradients of all inputs, of the whole pack, by the ranks of a mesh."""
    shares = [magi.dispatch(x, plan, mesh) for x in (*inputs, dout)]
    found = with_gradients(lambda *x: magi.cp_gated_delta_rule(*x, plan, mesh, **options), shares[:-1], shares[-1])
    return [magi.undispatch(x, plan, mesh) for x in found]


def conv_inputs(tokens, width, channels=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(tokens)
    x, dout = torch.randn(2, tokens, channels, generator=generator, dtype=torch.float64)
    weight = torch.randn(channels, width, generator=generator, dtype=torch.float64)
    return x.to(dtype), weight.to(dtype), dout.to(dtype)


def check_delta_rule(cu_seqlens, plan):
    check_rule(lambda *x: recurrence(*x, cu_seqlens, 0.3), plan)


def check_rule(definition, plan):
    *inputs, dout = layer_inputs(plan.total_tokens)
    exact = with_gradients(definition, inputs, dout)
    for found in of_all_ranks(plan, lambda mesh: delta_rule_of_ranks(plan, mesh, inputs, dout, scale=0.3)):
        torch.testing.assert_close(found, exact, **EXACT)


def check_conv(cu_seqlens, plan, width):
    check_convolution(lambda x, w: convolution(x, w, cu_seqlens), plan, width)


def check_convolution(definition, plan, width):
    x, weight, dout = conv_inputs(plan.total_tokens, width)
    exact = with_gradients(lambda x, w: F.silu(definition(x, w)), (x, weight), dout)
    found = of_all_ranks(plan, lambda mesh: conv_of_ranks(plan, mesh, x, weight, dout, activation="silu"))
    for out, dx, _ in found:
        torch.testing.assert_close([out, dx], exact[:2], **EXACT)
    torch.testing.assert_close(sum(dweight for *_, dweight in found), exact[2], **EXACT)


def rule_on(nodes, scale):
    def of_way(q, k, g, beta, v, cu_seqlens):
        return recurrence(q, k, v, g, beta, cu_seqlens, scale)

    return lambda q, k, v, g, beta: on_trees(of_way, (q, k, g, beta, v), nodes)


def conv_on(nodes):
    return lambda x, weight: on_trees(lambda way, cu_seqlens: convolution(way, weight, cu_seqlens), (x,), nodes)


def check_trees(nodes, plan, width=4):
    check_rule(rule_on(nodes, 0.3), plan)
    check_convolution(conv_on(nodes), plan, width)


@given(placements())
@settings(max_examples=80)
def test_any_parts_over_any_ranks(case):
    check_delta_rule(*case)


@given(placements())
@pytest.mark.parametrize("width", [1, 2, 4])
@settings(max_examples=30)
def test_convolution_of_any_parts(width, case):
    check_conv(*case, width)


@given(tree_placements(), st.sampled_from([1, 2, 4, 6]))
@settings(max_examples=80)
def test_any_parts_of_trees(case, width):
    check_trees(*case, width)


PACKS = {
    "a pack": [0, 3, 40, 41, 90, 120],
    "one document": [0, 150],
    "more ranks than tokens of documents": [0, 5],
    "no document": [0],
}


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("pack", PACKS)
def test_plans_of_packs(pack, cp_size):
    """Padding at the end belongs to no document: zeros, and no gradient."""
    cu_seqlens = PACKS[pack]
    total = cu_seqlens[-1] + 7
    plan = magi.make_plan(magi.varlen_causal(cu_seqlens), total, cp_size)
    check_delta_rule(cu_seqlens, plan)
    check_conv(cu_seqlens, plan, 4)


def test_another_default_device_changes_nothing():
    plan = magi.make_plan(magi.varlen_causal([0, 90, 150]), 157, 2)
    (x, weight, dout), inputs = conv_inputs(157, 4), layer_inputs(157)

    def results(mesh):
        convolved = conv_of_ranks(plan, mesh, x, weight, dout)
        return convolved + delta_rule_of_ranks(plan, mesh, inputs[:-1], inputs[-1])

    def elsewhere(mesh):
        with torch.device("meta"):
            return results(mesh)

    others = of_all_ranks(plan, elsewhere)  # first, before anything is kept
    for found, own in zip(others, of_all_ranks(plan, results), strict=True):
        assert all(map(torch.equal, found, own))


TREES = {
    "three answers": ([30, 9, 1, 20], [-1, 0, 0, 0]),
    "a conversation with branches": ([20, 10, 8, 12, 5, 6, 7], [-1, 0, 0, 1, 1, 4, 0]),
    "a chain, and documents": ([7, 7, 7, 30, 5, 2], [-1, 0, 1, -1, 3, -1]),
    "a root without tokens": ([0, 10, 20], [-1, 0, 0]),
}


@pytest.mark.parametrize("cp_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("tree", TREES)
def test_plans_of_trees(tree, cp_size):
    lengths, parents = TREES[tree]
    total = sum(lengths) + 5
    check_trees(flat_ways(lengths, parents), magi.make_plan(magi.tree_causal(lengths, parents), total, cp_size))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_plans_of_pairs_that_share_their_prompts(cp_size):
    plan = magi.make_plan(magi.shared_prompt([[20, 7, 9], [1, 30, 2]]), 70, cp_size)
    check_trees(flat_ways([20, 7, 9, 1, 30, 2], [-1, 0, 0, -1, 3, 3]), plan)


def test_parts_of_one_token_take_rows_from_several_ranks():
    """The last token's three rows come from three parts; its own rank has an earlier part, too."""
    check_conv([0, 6], plan_of([0, 6], [3, 0, 1, 2, 3, 0, 1, 2]), 4)
    check_delta_rule([0, 6], plan_of([0, 6], [3, 0, 1, 2, 3, 0, 1, 2]))


def test_results_repeat_bit_for_bit():
    cu_seqlens, total = [0, 20, 25, 90], 96
    plan = magi.make_plan(magi.varlen_causal(cu_seqlens), total, 4)
    *inputs, dout = layer_inputs(total, dtype=torch.float32)
    rows = conv_inputs(total, 4, dtype=torch.float32)

    def layers(mesh):
        return [*delta_rule_of_ranks(plan, mesh, inputs, dout), *conv_of_ranks(plan, mesh, *rows)]

    first, again = (of_all_ranks(plan, layers) for _ in range(2))
    assert all(torch.equal(x, y) for a, b in zip(first, again, strict=True) for x, y in zip(a, b, strict=True))


def test_a_rank_without_tokens_of_documents_takes_part():
    """Rank 2 has padding only. It comes to every exchange of all layers, or the others would wait for ever."""
    plan, calls = plan_of([0, 4], [0, 1, 0, 1, 2, 2]), [0, 0, 0]
    *inputs, dout = layer_inputs(6)

    def layer(mesh):
        exchange = mesh.all_to_all

        def counted(*arguments, **options):
            calls[mesh.rank] += 1
            return exchange(*arguments, **options)

        mesh.all_to_all = counted
        delta_rule_of_ranks(plan, mesh, inputs, dout)
        conv_of_ranks(plan, mesh, *conv_inputs(6, 4))

    Loopback(3).run(layer)
    assert calls == [4, 4, 4]


CUT = [0, 15, 18, 21, 24], [0] * 5 + [1] * 5 + [2] * 5 + [0] * 3 + [1] * 3 + [2] * 3


def test_what_waits_for_nobody_runs_while_maps_travel():
    """Each rank has 5 tokens of a cut document, and a document of 3 tokens."""
    plan, here = plan_of(*CUT), threading.local()
    *inputs, dout = layer_inputs(24)

    def noted_by(of_class, name):
        run = getattr(of_class, name)

        def noted(self, *arguments):
            here.events.append(name)
            return run(self, *arguments)

        return mock.patch.object(of_class, name, noted)

    def events_of(mesh):
        here.events, exchange = [], mesh.all_to_all

        def noted(*arguments, **options):
            here.events.append("send")
            arrival = exchange(*arguments, **options)
            return Arrival(lambda: (here.events.append("wait"), arrival.wait()))

        mesh.all_to_all = noted
        leaves = [magi.dispatch(x, plan, mesh).requires_grad_() for x in inputs]
        out = magi.cp_gated_delta_rule(*leaves, plan, mesh)
        here.events.append("out")
        out.backward(magi.dispatch(dout, plan, mesh))
        return here.events

    with (
        noted_by(ChunkedForward, "maps"), noted_by(ChunkedForward, "finish"), noted_by(ChunkedBackward, "state_grads"),
        noted_by(ChunkedBackward, "prepare"), noted_by(ChunkedBackward, "finish"),
    ):  # fmt: skip
        first, inner, last = Loopback(3).run(events_of)
    there, back = ["send", "wait", "finish", "out"], ["send", "prepare", "wait", "finish"]
    assert first == ["maps", *there, *back]
    assert inner == ["maps", *there, "state_grads", *back]
    assert last == [*there, "state_grads", *back]


def test_all_parts_of_a_rank_run_at_once():
    """Rank 0 has a tree of its own, and a prompt of 4 tokens with one of its answers; rank 1 has two more answers and
    padding. Maps are made of parts that others go on from."""
    lengths, parents = [2, 1, 3, 4, 5, 6, 6], [-1, 0, 0, -1, 3, 3, 3]
    plan, here = plan_of_mask(magi.tree_causal(lengths, parents), [0] * 15 + [1] * 15), threading.local()
    *inputs, dout = layer_inputs(30)

    def noted_by(name):
        run = getattr(Chunked, name)

        def noted(self, tokens, lengths, *rest):
            here.events.append((lengths, rest[-1]))
            return run(self, tokens, lengths, *rest)

        return mock.patch.object(Chunked, name, noted)

    def events_of(mesh):
        here.events = []
        delta_rule_of_ranks(plan, mesh, inputs, dout)
        return here.events

    with noted_by("start"), noted_by("start_backward"):
        first, second = Loopback(2).run(events_of)
    assert first == [([2, 1, 3, 4, 5], [0, 3]), ([2, 1, 3, 4, 5], [1, 2, 4])]
    assert second == [([6, 6, 3], []), ([6, 6, 3], [0, 1])]


def test_what_a_backend_keeps_comes_back():
    def finish(self, states):
        out, _ = run(self, states)
        return out, (self.tokens.g.clone(), torch.tensor(self.lengths))

    def start_backward(self, tokens, lengths, scale, states, kept, *rest):
        assert torch.equal(kept[0], tokens.g)
        assert kept[1].tolist() == lengths
        return run_backward(self, tokens, lengths, scale, states, (), *rest)

    run, run_backward = ChunkedForward.finish, Chunked.start_backward
    with (
        mock.patch.object(ChunkedForward, "finish", finish),
        mock.patch.object(Chunked, "start_backward", start_backward),
    ):
        check_delta_rule(CUT[0], plan_of(*CUT))


def over_gloo(dtype, lengths, parents):
    """Trees in a pack of 90 tokens: the delta rule, and the convolution, by the ranks of a gloo group."""
    plan, mesh = magi.make_plan(magi.tree_causal(lengths, parents), 90, 3), dist.group.WORLD
    *inputs, dout = layer_inputs(90, dtype=dtype)
    return delta_rule_of_ranks(plan, mesh, inputs, dout), conv_of_ranks(plan, mesh, *conv_inputs(90, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "parents", [pytest.param([-1] * 4, id="documents"), pytest.param([-1, 0, 0, 2], id="one tree")]
)
def test_a_process_group_of_gloo(three_ranks, dtype, parents):
    lengths = [20, 5, 43, 20]
    *inputs, dout = (x.double() for x in layer_inputs(90, dtype=dtype))
    of_rule = with_gradients(rule_on(flat_ways(lengths, parents), 5**-0.5), inputs, dout)
    x, weight, dout = (x.double() for x in conv_inputs(90, 4, dtype=dtype))
    of_conv = with_gradients(conv_on(flat_ways(lengths, parents)), (x, weight), dout)
    found = three_ranks.run(over_gloo, dtype, lengths, parents)
    pairs = [
        pair
        for rule, conv in found
        for pair in (*zip(rule, of_rule, strict=True), *zip(conv[:2], of_conv, strict=False))
    ]
    addends = [conv[2].double() for _, conv in found]  # each rank rounds its own
    rounded = torch.finfo(dtype).eps / 2 * sum(addend.norm() for addend in addends)
    assert (sum(addends) - of_conv[2]).norm() <= rounded + 1e-13 * of_conv[2].norm()
    for ours, exact in pairs:
        if dtype == torch.float64:
            torch.testing.assert_close(ours, exact, **EXACT)
        assert (ours.double() - exact).norm() <= 2 * (exact.to(dtype).double() - exact).norm() + 1e-13 * exact.norm()


def test_what_does_not_fit_the_plan_is_named():
    *inputs, _ = layer_inputs(10)
    plan = magi.make_plan(magi.varlen_causal([0, 20]), 20, 2)
    window = magi.make_plan(magi.sliding_window([0, 20], 3), 20, 2)
    for call, x in ((magi.cp_gated_delta_rule, inputs), (magi.cp_causal_conv1d, conv_inputs(10, 4)[:2])):
        with one_line("the plan is for 2 ranks but the mesh has 1"):
            call(*x, plan)
        with one_line("the plan's mask has the slice .*, which is no causal document"):
            call(*x, window)
        with one_line("plan is of type list; make one with make_plan"):
            call(*x, [0, 20])
        with one_line("rows but the plan gives each rank 8 tokens; dispatch them first"):
            call(*x, magi.make_plan(magi.varlen_causal([0, 16]), 16, 2))


def test_gradients_are_taken_once():
    """A second derivative raises. Left out of a sum it would be missed by nobody."""
    *inputs, _ = layer_inputs(10)
    plan = magi.make_plan(magi.varlen_causal([0, 10]), 10, 1)
    for call, arguments in ((magi.cp_gated_delta_rule, inputs), (magi.cp_causal_conv1d, conv_inputs(10, 4)[:2])):
        leaves = [x.requires_grad_() for x in arguments]
        out = call(*leaves, plan)
        with one_line("linear attention has no second derivatives", RuntimeError):
            torch.autograd.grad(out.sum(), leaves, create_graph=True)
