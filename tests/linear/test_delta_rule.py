"""The gated delta rule and the short convolution on one device, against their definitions and transformers."""

import itertools
import re
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.errors import one_line
from support.recurrence import convolution, layer_inputs, recurrence, with_gradients

import torchtitan_magi as magi
from torchtitan_magi.linear import chunked

EXACT = {"rtol": 1e-12, "atol": 1e-12}


@given(
    st.lists(st.integers(0, 12), max_size=5), st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]), st.sampled_from([(1, 1), (4, 2), (3, 6)]),
)  # fmt: skip
def test_chunks_of_documents_are_the_recurrence(lengths, chunk, heads, dims):
    cu_seqlens = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    *inputs, dout = layer_inputs(cu_seqlens[-1], heads, dims)
    with mock.patch.object(chunked, "CHUNK", chunk):
        ours = with_gradients(lambda *x: magi.gated_delta_rule(*x, cu_seqlens, scale=0.3), inputs, dout)
    if cu_seqlens[-1]:
        exact = with_gradients(lambda *x: recurrence(*x, cu_seqlens, 0.3), inputs, dout)
        torch.testing.assert_close(ours, exact, **EXACT)


def test_documents_of_several_whole_chunks():
    cu_seqlens = [0, 63, 127, 192, 322]
    *inputs, dout = layer_inputs(322)
    ours = with_gradients(lambda *x: magi.gated_delta_rule(*x, torch.tensor(cu_seqlens)), inputs, dout)
    exact = with_gradients(lambda *x: recurrence(*x, cu_seqlens, 5**-0.5), inputs, dout)
    torch.testing.assert_close(ours, exact, **EXACT)


def test_strong_gates_neither_overflow_nor_spoil_gradients():
    *inputs, dout = layer_inputs(130)
    inputs[3] = inputs[3] * 300
    ours = with_gradients(lambda *x: magi.gated_delta_rule(*x, [0, 130]), inputs, dout)
    exact = with_gradients(lambda *x: recurrence(*x, [0, 130], 5**-0.5), inputs, dout)
    torch.testing.assert_close(ours, exact, **EXACT)


@pytest.mark.parametrize("forgetting", [0.0, -1e4, -1e38])
def test_in_float32_gates_cost_at_most_twice_what_they_cost_token_by_token(forgetting):
    """Ever stronger gates, and now and then one that forgets all."""
    *inputs, dout = layer_inputs(200, (2, 4), (16, 8), dtype=torch.float32)
    tokens = torch.arange(200)[:, None]
    inputs[3] = torch.where((tokens % 50 == 3) & (forgetting < 0), forgetting, inputs[3] * tokens)
    ours = with_gradients(lambda *x: magi.gated_delta_rule(*x, [0, 200]), inputs, dout)
    plain = with_gradients(lambda *x: recurrence(*x, [0, 200], 0.25), inputs, dout)
    exact = with_gradients(lambda *x: recurrence(*x, [0, 200], 0.25), [x.double() for x in inputs], dout.double())
    for mine, low, right in zip(ours, plain, exact, strict=True):
        assert (mine - right).norm() <= 2 * (low - right).norm()


@pytest.mark.parametrize("name", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
def test_it_is_what_transformers_computes(name):
    """Which computes in float32, document by document. Its chunked form's error is at least half as large as ours."""
    theirs = getattr(pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5"), name)
    cu_seqlens = [0, 70, 71, 200]
    *inputs, dout = layer_inputs(200, (2, 4), (16, 8), dtype=torch.float32)

    def by_transformers(*x):
        documents = (slice(*ends) for ends in itertools.pairwise(cu_seqlens))
        return torch.cat([theirs(*(y[None, document] for y in x), initial_state=None, output_final_state=False)[0][0]
                          for document in documents])  # fmt: skip

    ours = with_gradients(lambda *x: magi.gated_delta_rule(*x, cu_seqlens), inputs, dout)
    low = with_gradients(by_transformers, inputs, dout)
    exact = with_gradients(lambda *x: recurrence(*x, cu_seqlens, 0.25), [x.double() for x in inputs], dout.double())
    for mine, plain, right in zip(ours, low, exact, strict=True):
        torch.testing.assert_close(plain, mine, rtol=1e-4, atol=1e-5)
        assert "chunk" not in name or (mine - right).norm() <= 2 * (plain - right).norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_cost_their_own_rounding_only(dtype):
    """Inputs of 16 bits are computed in float32; g and beta may have more bits than the rest."""
    q, k, v, g, beta, dout = layer_inputs(150)
    inputs = [x.to(dtype) for x in (q, k, v)] + [g.float(), beta.float()]
    dout = dout.to(dtype)
    ours = with_gradients(lambda *x: magi.gated_delta_rule(*x, [0, 150]), inputs, dout)
    exact = with_gradients(lambda *x: recurrence(*x, [0, 150], 5**-0.5), [x.double() for x in inputs], dout.double())
    assert [x.dtype for x in ours] == [dtype] * 4 + [torch.float32] * 2
    for mine, right in zip(ours, exact, strict=True):
        rounded = (right.to(mine.dtype) - right).norm() if mine.dtype == dtype else 1e-5 * right.norm()
        assert (mine - right).norm() <= 1.01 * rounded


def test_autocast_leaves_states_in_float32():
    *inputs, dout = layer_inputs(80, dtype=torch.float32)
    plan = magi.make_plan(magi.varlen_causal([0, 80]), 80, 1)

    def both(*x):
        return magi.gated_delta_rule(*x, [0, 80]) + magi.cp_gated_delta_rule(*x, plan)

    def under_autocast(*x):
        with torch.autocast("cpu", torch.bfloat16):
            return both(*x)

    assert all(map(torch.equal, *(with_gradients(function, inputs, dout) for function in (both, under_autocast))))


def test_on_meta_there_are_shapes():
    """A device that has no autocast."""
    *inputs, dout = (x.to("meta") for x in layer_inputs(10))
    plan = magi.make_plan(magi.varlen_causal([0, 10]), 10, 1)
    for run in (lambda *x: magi.gated_delta_rule(*x, [0, 10]), lambda *x: magi.cp_gated_delta_rule(*x, plan)):
        assert [x.shape for x in with_gradients(run, inputs, dout)] == [dout.shape, *(x.shape for x in inputs)]


def conv(x, weight, cu_seqlens, **options):
    return magi.cp_causal_conv1d(x, weight, magi.make_plan(magi.varlen_causal(cu_seqlens), len(x), 1), **options)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 5), st.booleans())
def test_short_convolution_of_documents_shorter_than_the_kernel(lengths, width, silu):
    cu_seqlens = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    generator = torch.Generator().manual_seed(width)
    x, dout = torch.randn(2, cu_seqlens[-1], 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, width, generator=generator, dtype=torch.float64)
    activation = F.silu if silu else lambda x: x
    ours = with_gradients(lambda x, w: conv(x, w, cu_seqlens, activation="silu" if silu else None), (x, weight), dout)
    exact = with_gradients(lambda x, w: activation(convolution(x, w, cu_seqlens)), (x, weight), dout)
    torch.testing.assert_close(ours, exact, **EXACT)


def test_short_convolution_of_sixteen_bits_costs_their_own_rounding_only():
    generator = torch.Generator().manual_seed(0)
    x, dout = torch.randn(2, 50, 8, generator=generator).bfloat16()
    weight = torch.randn(8, 4, generator=generator).bfloat16()
    ours = with_gradients(lambda x, w: conv(x, w, [0, 20, 50], activation="silu"), (x, weight), dout)
    exact = with_gradients(
        lambda x, w: F.silu(convolution(x, w, [0, 20, 50])), (x.double(), weight.double()), dout.double()
    )
    for mine, right in zip(ours, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine - right).norm() <= 1.01 * (right.bfloat16() - right).norm()


def changed(number, change):
    def change_one(inputs):
        return [change(x) if i == number else x for i, x in enumerate(inputs)]

    return change_one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(3, lambda g: g[..., None].expand(-1, -1, 5)), "g has shape (10, 4, 5): a gate per channel (KDA)"),
        (lambda x: [y[None] for y in x], "(1, 10, 4), (1, 10, 4); give [T, HK, K] twice, [T, H, V] and [T, H] twice"),
        (changed(0, lambda q: q.tolist()), "q is of type list; give a torch.Tensor"),
        (changed(1, lambda k: k[:, :1]), "give [T, HK, K] twice, [T, H, V] and [T, H] twice"),
        (changed(4, lambda beta: beta[:9]), "give [T, HK, K] twice, [T, H, V] and [T, H] twice"),
        (changed(2, lambda v: v[..., :0]), "no dimension but T of 0"),
        (lambda x: [*x[:2], *(y[:, :3] for y in x[2:])], "v has 3 heads for 2 of q and k; give a multiple"),
        (changed(2, lambda v: v.float()), "floating-point dtypes of 16 bits or more, q, k and v the same"),
        (changed(3, lambda g: g.long()), "floating-point dtypes of 16 bits or more, q, k and v the same"),
        (changed(4, lambda beta: beta.to("meta")), "q, k, v, g, beta are on cpu and meta; move them to one device"),
    ],
)
def test_inputs_that_do_not_fit_are_named(change, message):
    *inputs, _ = layer_inputs(10)
    plan = magi.make_plan(magi.varlen_causal([0, 10]), 10, 1)
    with one_line(re.escape(message)):
        magi.gated_delta_rule(*change(inputs), [0, 10])
    with one_line(re.escape(message)):
        magi.cp_gated_delta_rule(*change(inputs), plan)


@pytest.mark.parametrize("scale", [0, -1.0, float("inf"), 1e39, 10**400, "1"])
def test_the_scale_is_positive(scale):
    *inputs, _ = layer_inputs(10)
    with one_line(r"it must be a positive number .* that float32 holds, K \*\* -0.5 by default"):
        magi.gated_delta_rule(*inputs, [0, 10], scale=scale)


def test_the_scale_may_be_a_number_of_numpy():
    *inputs, _ = layer_inputs(10)
    out = magi.gated_delta_rule(*inputs, [0, 10], scale=np.float32(0.25))
    assert torch.equal(out, magi.gated_delta_rule(*inputs, [0, 10], scale=0.25))


def test_documents_end_with_the_tokens():
    *inputs, _ = layer_inputs(10)
    with one_line("cu_seqlens ends at 9 but there are 10 tokens"):
        magi.gated_delta_rule(*inputs, [0, 9])


@pytest.mark.parametrize(
    ("x", "weight", "options", "message"),
    [
        ((10, 3), (2, 4), {}, "x and weight have shapes (10, 3) and (2, 4); give [T, C] and [C, W]"),
        ((10, 3), (3, 1, 4), {}, "give [T, C] and [C, W]"),
        ((10, 3), (3, 0), {}, "W at least 1"),
        ((9, 3), (3, 4), {}, "x has 9 rows but the plan gives each rank 10 tokens; dispatch them first"),
        ((10, 3), (3, 4), {"activation": "relu"}, "activation is 'relu'; use \"silu\" or None"),
    ],
)
def test_what_does_not_fit_the_convolution_is_named(x, weight, options, message):
    plan = magi.make_plan(magi.varlen_causal([0, 10]), 10, 1)
    with one_line(re.escape(message)):
        magi.cp_causal_conv1d(torch.zeros(x), torch.zeros(weight), plan, **options)
    with one_line("x and weight are torch.int64"):
        magi.cp_causal_conv1d(torch.zeros(10, 3).long(), torch.zeros(3, 4), plan)
