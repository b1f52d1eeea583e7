import gc
import itertools
import threading
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fwad
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cp_case import check, documents, extras, inputs, of_slices, run_case
from support.dense import assert_within_budget, dense_attention, dense_with_grads
from support.errors import one_line
from support.loopback import Loopback
from support.masks import dense_mask, document_lengths, slice_lists, square_slice_lists
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import torchtitan_magi as magi
from torchtitan_magi.attention import api
from torchtitan_magi.attention.bound_plan import bind_plan, bind_slices
from torchtitan_magi.attention.op import (
    PlanHandle,
    attention_backward_op,
    attention_op,
    num_live_plans,
)
from torchtitan_magi.backends import flex
from torchtitan_magi.backends.flex import FlexBlockAttn
from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs, StageMask
from torchtitan_magi.exchange.agreement import PlanAgreement
from torchtitan_magi.exchange.mesh import process_group_transport
from torchtitan_magi.masks.slices import AttnSlices

HEADS = st.sampled_from([(4, 2), (2, 2), (4, 1), (5, 1)])


def run_on_loopback(case, cp_size):
    if cp_size == 1:
        return [run_case(case, 1, None)]
    return Loopback(cp_size).run(lambda transport: run_case(case, cp_size, transport))


@given(
    document_lengths(512), st.integers(0, 9), st.sampled_from([1, 2, 3, 4, 8]), HEADS, st.integers(0, 4),
    st.sampled_from(["causal", "full", "window", "block"]), st.integers(1, 40), st.booleans(),
)  # fmt: skip
@settings(max_examples=80)
def test_documents_over_ranks(lengths, padding, cp_size, heads, stages, kind, size, fp32_reduce):
    options = {"heads": heads, "head_dim": 8, "stages": stages, "fp32_reduce": fp32_reduce}
    case = documents(lengths, kind, size, padding, **options)
    check(case, run_on_loopback(case, cp_size))


@given(
    square_slice_lists(1, 60), st.sampled_from([1, 2, 3, 8]), HEADS, st.sampled_from([5, 512]), st.integers(0, 3),
    st.sampled_from([0.0, 0.7, 30.0]), st.booleans(), st.booleans(),
)  # fmt: skip
@settings(max_examples=100)
def test_any_slices_over_ranks(total_and_slices, cp_size, heads, tile, stages, softcap, sinks, lse_grad):
    total, slices = total_and_slices
    options = {"softcap": softcap, "sinks": sinks, "lse_grad": lse_grad}
    case = of_slices(slices, total, heads=heads, head_dim=8, stages=stages, **options)
    with mock.patch.object(flex, "TILE", tile):
        check(case, run_on_loopback(case, cp_size))


@given(st.integers(1, 40), st.integers(0, 40), st.sampled_from([7, 512]), st.data())
@settings(max_examples=60)
def test_flex_flash_attn_on_one_device(num_q, num_k, tile, data):
    slices = data.draw(slice_lists(num_q, num_k))
    mask = torch.from_numpy(dense_mask(slices.table, num_q, num_k))
    generator = torch.Generator().manual_seed(num_q)
    q, dout = (torch.randn(num_q, 4, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(num_k, 2, 8, generator=generator) for _ in range(2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    magi.clear_caches()  # of other tiles
    with mock.patch.object(flex, "TILE", tile):
        out, lse = magi.flex_flash_attn(q, k, v, slices, softmax_scale=0.3)
    out.backward(dout)
    ours = {"out": out.detach(), "lse": lse.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    assert_within_budget(ours, q, k, v, dout, mask, 0.3)


def test_flex_attention_stays_compiled_whatever_the_masks(monkeypatch):
    """As on a GPU. Torch would run more than 8 variants uncompiled, with all scores in memory."""
    graphs = []
    compiled = torch.compile(flex_attention, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    q, k = torch.randn(140, 2, 8), torch.randn(140, 1, 8)
    for softcap, ranges in itertools.product((0.0, 1.0), (1, 2, 3, 4, 8, 16)):  # of keys, that each row sees
        slices = AttnSlices([[0, 140, 8 * i, 8 * i + 7, 0] for i in range(ranges)])
        mask = FlexBlockAttn().prepare(StageMask(slices, 140, 140, 2, 1, head_dim=8))
        block_mask = mask.with_block_mask(torch.from_numpy(mask.words)).block_mask
        with torch.no_grad():
            got = flex._flex_attention(q, k, k, block_mask, 0.3, softcap)
        torch.testing.assert_close(got, magi.flex_flash_attn(q, k, k, slices, softmax_scale=0.3, softcap=softcap))
    assert len(graphs) == 10  # 3 ranges share that of 4


@pytest.mark.parametrize("cp_size", [1, 3])
def test_layers_of_several_masks_after_one_dispatch(cp_size):
    """Two layers, full and window attention, with sinks in the second and values narrower than keys."""
    cu, total = [0, 70, 75, 130], 130
    masks = [magi.varlen_causal(cu), magi.sliding_window(cu, 9)]
    dense = [torch.from_numpy(dense_mask(slices.table, total, total)) for slices in masks]
    plans = magi.make_plans(masks, total, cp_size, layers=[2, 1])
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(total, h, d, generator=generator, dtype=torch.float64) for h, d in ((4, 6), (2, 6), (2, 4)))
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)

    def run(mesh):
        x, y, z = (magi.dispatch(each, plans[0], mesh) for each in (q, k, v))
        out = magi.cp_varlen_attn(x, y, z, plans[0], mesh)
        out, lse = magi.cp_varlen_attn(x, y, out[:, ::2], plans[1], mesh, sinks=sinks, softcap=3.0, return_lse=True)
        return magi.undispatch(out, plans[0], mesh), magi.undispatch(lse, plans[1], mesh)

    results = [run(None)] if cp_size == 1 else Loopback(cp_size).run(run)
    first, _ = dense_attention(q, k, v, dense[0], 6**-0.5)
    want = dense_attention(q, k, first[:, ::2], dense[1], 6**-0.5, 3.0, sinks)
    for result in results:
        torch.testing.assert_close(result, want, rtol=1e-10, atol=1e-11)


class LargestResult(TorchDispatchMode):
    """Bytes of the largest result of an operation."""

    nbytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        results = function(*arguments, **(keywords or {}))
        self.nbytes = max(self.nbytes, *(x.nbytes for x in tree_leaves(results) if isinstance(x, torch.Tensor)), 0)
        return results


def test_the_memory_of_scores_does_not_grow_with_the_lengths():
    def largest(num_q, num_k):
        attn = FlexBlockAttn()
        mask = attn.prepare(StageMask(AttnSlices([[0, num_q, 0, num_k, 0]]), num_q, num_k, 2, 2))
        (q, dout), (k, v, dk, dv) = torch.randn(2, num_q, 2, 2), torch.randn(4, num_k, 2, 2)
        inputs = StageInputs(q, k, v, mask.to(torch.from_numpy(mask.words)), 1.0)
        with LargestResult() as forward:
            out, lse = attn.forward(inputs)
        out_grads = OutGrads(dout, lse, (out * dout).sum(-1))
        with LargestResult() as backward:
            attn.backward(inputs, out_grads, Gradients(torch.zeros_like(q), (dk, dv)))
        return forward.nbytes, backward.nbytes

    assert largest(600, 6000) == largest(6000, 600) == largest(600, 600)


@pytest.mark.parametrize(
    "options",
    [{}, {"softcap": 0.5}, {"sinks": True}, {"lse_grad": True}, {"softcap": 2.0, "sinks": True, "lse_grad": True}],
)
def test_the_written_out_passes_agree_with_fp64_to_fp64_precision(options):
    case = documents([33, 1, 66], stages=2, dtype=torch.float64, **options)
    ours, _ = run_on_loopback(case, 2)
    sinks, dlse = extras(case)
    extra = case.softcap, sinks, dlse
    want_all = dense_with_grads(*inputs(case), case.mask, case.head_dim**-0.5, torch.float64, *extra)
    for name in ours:
        torch.testing.assert_close(ours[name], want_all[name], rtol=1e-10, atol=1e-11)


def sinks_on_ranks(sinks, cp_size):
    """out, lse and gradients of q, k, v and sinks under a mask with rows and padding that see nothing."""
    slices, generator = magi.AttnSlices([[5, 30, 5, 30, 1], [40, 47, 0, 9, 0]]), torch.Generator().manual_seed(0)
    plan = magi.make_plan(slices, 47, cp_size, 2)
    x = torch.randn(47, 2, 8, generator=generator, dtype=torch.float64)

    def on_rank(mesh):
        q, k, v = (magi.dispatch(x * factor, plan, mesh).requires_grad_() for factor in (1, 2, 3))
        own = None if sinks is None else sinks.clone().requires_grad_()
        out, lse = magi.cp_varlen_attn(q, k, v, plan, mesh, sinks=own, return_lse=True)
        (out.sum() + lse[lse.isfinite()].sum()).backward()
        found = [magi.undispatch(part, plan, mesh) for part in (out.detach(), lse.detach(), q.grad, k.grad, v.grad)]
        return torch.stack(
            [part.sum(-1) if part.ndim == 3 else part for part in found]
        ), own if own is None else own.grad

    return Loopback(cp_size).run(on_rank) if cp_size > 1 else [on_rank(None)]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_sink_of_minus_infinity_is_no_sink(cp_size):
    without, finite = (sinks_on_ranks(sinks, cp_size) for sinks in (None, torch.tensor([0.3, 0.4])))
    mixed = sinks_on_ranks(torch.tensor([-torch.inf, 0.4]), cp_size)
    for (no, _), (all_, grads), (some, some_grads) in zip(without, finite, mixed, strict=True):
        torch.testing.assert_close(some, torch.stack([no[..., 0], all_[..., 1]], -1))
        torch.testing.assert_close(some_grads, torch.stack([torch.tensor(0.0), grads[1]]))


def test_the_public_call_is_differentiable_and_shares_index_data_between_layers():
    magi.clear_caches()
    before = num_live_plans()
    plan = magi.make_plan(magi.varlen_causal([0, 20, 50]), 50, 1)
    x = torch.randn(50, 2, 8, requires_grad=True)
    y = magi.cp_varlen_attn(x, x, x, plan)
    magi.cp_varlen_attn(y, y, y, plan).square().sum().backward()
    assert num_live_plans() == before + 1
    assert torch.isfinite(x.grad).all()
    assert x.grad.norm() > 0


def test_plans_live_as_long_as_a_graph_needs_them_and_no_longer():
    gc.collect()
    before = num_live_plans()
    q = torch.randn(30, 2, 8, requires_grad=True)
    plan = magi.make_plan(magi.varlen_causal([0, 30]), 30, 1)
    out = attention_op(q, q, q, PlanHandle(bind_plan(plan, None, FlexBlockAttn(), 2, 2, q.device)).tensor, 1.0)[0]
    gc.disable()
    try:
        assert num_live_plans() == before + 1
        out.sum().backward()
        del out
        assert num_live_plans() == before
    finally:
        gc.enable()


@pytest.mark.parametrize("compiled", [False, True])
def test_what_inference_made_serves_training(compiled):
    plan = magi.make_plan(magi.varlen_causal([0, 3, 11]), 11, 1)
    x = torch.randn(11, 2, 8, requires_grad=True)
    with torch.inference_mode():
        expected = magi.cp_varlen_attn(x, x, x, plan)
    attend = torch.compile(magi.cp_varlen_attn, backend="aot_eager") if compiled else magi.cp_varlen_attn
    out = attend(x, x, x, plan)
    assert torch.equal(out, expected)
    out[:, 0].square().sum().backward()
    assert x.grad.any()


def of_channels(x):
    return x.flatten(1), torch.ones(16, 4, dtype=x.dtype)


def gated(x):
    return x, torch.nn.functional.normalize(x, dim=-1), x, -x[..., 0].abs(), x[..., 0].sigmoid()


PUBLIC = {
    "cp_varlen_attn": lambda x, plan: magi.cp_varlen_attn(x, x, x, plan),
    "flex_flash_attn": lambda x, plan: magi.flex_flash_attn(x, x, x, plan.slices)[0],
    "dispatch": lambda x, plan: magi.undispatch(magi.dispatch(x, plan, None) * 2, plan, None),
    "gated_delta_rule": lambda x, plan: magi.gated_delta_rule(*gated(x), [0, 3, 11]),
    "cp_gated_delta_rule": lambda x, plan: magi.cp_gated_delta_rule(*gated(x), plan),
    "cp_causal_conv1d": lambda x, plan: magi.cp_causal_conv1d(*of_channels(x), plan),
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_calls_are_made_between_graphs_of_a_compiler(name):
    """Also where the plan is new, which every microbatch's is."""

    def layer(x, plan):
        return PUBLIC[name](x.sin(), plan).cos()

    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=graphs)
    x = torch.randn(11, 2, 8, requires_grad=True)
    for _ in range(2):
        magi.clear_caches()
        plan = magi.make_plan(magi.varlen_causal([0, 3, 11]), 11, 1)
        outs = compiled(x, plan), layer(x, plan)
        assert torch.equal(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.sum(), x)[0] for out in outs))
    assert graphs.frame_count > 1
    with pytest.raises(torch._dynamo.exc.Unsupported, match="should not be traced"):
        torch.compile(layer, fullgraph=True, backend="aot_eager")(x, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    q, k, v = (torch.randn(40, heads, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))

    def results():
        out, lse = magi.flex_flash_attn(q, k, v, magi.varlen_causal([0, 9, 40]))
        return out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))

    expected = results()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, results(), expected))


def test_rows_return_under_autocast_of_another_dtype():
    plan = magi.make_plan(magi.varlen_causal([0, 40]), 40, 2)
    x = torch.randn(20, 2, 8, dtype=torch.float16, requires_grad=True)

    def grads(inside, transport):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return torch.autograd.grad(magi.cp_varlen_attn(x, x, x, plan, transport).sum(), x)[0]

    plain, inside = (Loopback(2).run(partial(grads, inside)) for inside in (False, True))
    assert all(map(torch.equal, plain, inside))


@pytest.mark.parametrize("pad_value", [-(2**63), 2**53 + 1, 2**63 - 1])
def test_padding_holds_large_integers_exactly(pad_value):
    plan = magi.make_plan(magi.varlen_causal([0, 3]), 3, 2)
    shares = Loopback(2).run(lambda transport: magi.dispatch(torch.arange(3), plan, transport, pad_value))
    assert sorted(torch.cat(shares).tolist()) == sorted([0, 1, 2, pad_value])


def test_factors_of_scores_may_be_numbers_of_numpy():
    x, slices = torch.randn(9, 2, 8), magi.varlen_causal([0, 9])
    out, _ = magi.flex_flash_attn(x, x, x, slices, softmax_scale=np.float32(0.25), softcap=np.int64(3))
    assert torch.equal(out, magi.flex_flash_attn(x, x, x, slices, softmax_scale=0.25, softcap=3.0)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_packs_are_padded_under_autocast_of_another_dtype(dtype):
    plan = magi.make_plan(magi.varlen_causal([0, 3]), 3, 2)
    x = torch.arange(3, dtype=dtype)

    def padded(transport):
        with torch.autocast("cpu", torch.bfloat16):
            return magi.dispatch(x, plan, transport, 9)

    shares = torch.cat(Loopback(2).run(padded))
    assert shares.dtype == dtype
    assert sorted(shares.tolist()) == [0, 1, 2, 9]


def test_a_pack_without_tokens():
    x = torch.randn(0, 2, 8, requires_grad=True)
    out = magi.cp_varlen_attn(x, x, x, magi.make_plan(magi.varlen_causal([0]), 0, 1))
    assert out.shape == x.shape
    out.sum().backward()
    assert x.grad.shape == x.shape
    k = torch.randn(5, 1, 8)
    out, lse = magi.flex_flash_attn(x, k, k, AttnSlices([]))
    assert (out.shape, lse.shape) == ((0, 2, 8), (0, 2))


def test_another_default_device_changes_nothing():
    x = torch.randn(9, 2, 8)
    slices = magi.varlen_causal([0, 4, 9])
    expected, _ = magi.flex_flash_attn(x, x, x, slices)
    plan = magi.make_plan(slices, 9, 2)

    def results(transport):
        with torch.device("meta"):
            alone, _ = magi.flex_flash_attn(x, x, x, AttnSlices(slices.table[::-1]))
            share = magi.dispatch(x, plan, transport)
            out = magi.cp_varlen_attn(share, share, share, plan, transport)
            return alone, magi.undispatch(out, plan, transport)

    for alone, whole in Loopback(2).run(results):
        assert torch.equal(alone, expected)
        torch.testing.assert_close(whole, expected)


def test_what_comes_back_to_the_pack_may_be_changed_in_place():
    x, plan = torch.randn(3, 2, requires_grad=True), magi.make_plan(magi.varlen_causal([0, 3]), 3, 1)
    magi.undispatch(magi.dispatch(x, plan, None), plan, None).mul_(2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def test_public_calls_keep_few_bytes_of_index_data_and_let_go_of_them(monkeypatch):
    x = torch.randn(64, 2, 8)

    def call(n):
        magi.flex_flash_attn(x, x, x, magi.varlen_causal([0, n, 64]))
        magi.cp_varlen_attn(x, x, x, magi.make_plan(magi.varlen_causal([0, n, 64]), 64, 1))

    gc.collect()  # what other tests have left
    magi.clear_caches()
    call(1)
    (size, _), before = [handle.bound_plan.num_bytes for handle in api._handles.values()], 2
    assert size > 0
    for most, kept in ((api.CACHED_BYTES, api.CACHED_PLANS), (3 * size, 3), (0, 1)):
        monkeypatch.setattr(api, "CACHED_BYTES", most)
        for n in range(2, 20):
            call(n)
            assert num_live_plans() == len(api._handles) <= max(kept, before)
        before = kept
        assert len(api._handles) <= kept
    magi.clear_caches()
    assert num_live_plans() == 0


def test_public_calls_of_several_threads_do_not_take_plans_from_each_other(monkeypatch):
    x, others, size = torch.randn(8, 2, 8), [], api._size

    def call(n):
        return magi.flex_flash_attn(x, x, x, magi.varlen_causal([0, n, 8]))[0]

    def size_while_another_calls(handle):
        if not others:
            others.append(threading.Thread(target=call, args=(2,)))
            others[0].start()
            others[0].join(0.2)
        return size(handle)

    expected = call(1)
    magi.clear_caches()
    monkeypatch.setattr(api, "CACHED_PLANS", 1)
    monkeypatch.setattr(api, "_size", size_while_another_calls)
    assert torch.equal(call(1), expected)
    others[0].join()
    assert len(api._handles) == 1


def test_each_stream_has_index_data_of_its_own(monkeypatch):
    """That of another could still be on its way, or be freed for it."""
    bound, x = [], torch.randn(8, 2, 8)
    plan = magi.make_plan(magi.varlen_causal([0, 3, 8]), 8, 1)
    for name in ("bind_plan", "bind_slices"):
        bind = getattr(api, name)
        monkeypatch.setattr(api, name, lambda *rest, bind=bind, **more: bound.append(bind) or bind(*rest, **more))
    magi.clear_caches()
    for stream, number in ((1, 1), (2, 2), (1, 2), (2, 2)):
        monkeypatch.setattr(api, "stream_of", lambda device, stream=stream: stream)
        magi.cp_varlen_attn(x, x, x, plan)
        magi.flex_flash_attn(x, x, x, plan.slices)
        assert len(bound) == 2 * number
    magi.clear_caches()


def test_attention_repeats_bit_for_bit_when_torch_or_the_caller_asks(monkeypatch):
    asked, x = [], torch.randn(8, 4, 8)
    plan = magi.make_plan(magi.varlen_causal([0, 8]), 8, 1)
    monkeypatch.setattr(api, "choose_block_attn", lambda *arguments: asked.append(arguments[2]) or FlexBlockAttn())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for deterministic in (None, True, False):  # a plan that is bound serves the second
            magi.cp_varlen_attn(x, x, x, plan, deterministic=deterministic)
            magi.flex_flash_attn(x, x, x, plan.slices, deterministic=deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    magi.clear_caches()
    magi.cp_varlen_attn(x, x, x, plan)
    assert asked == [True, True, False, False, False]


def test_transports_and_threads_end_with_their_group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        PlanAgreement([0], [0]).check(magi.make_plan(magi.varlen_causal([0, 8]), 8, 1))
        transport = process_group_transport(dist.group.WORLD)
        assert process_group_transport(dist.group.WORLD) is transport
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        x, plan = torch.zeros(8, 2, 8), magi.make_plan(magi.varlen_causal([0, 8]), 8, 1)
        with pytest.raises(ValueError, match=r"x is a DTensor; give this rank's tokens, x\.to_local"):
            magi.dispatch(DTensor.from_local(x, mesh), plan, mesh)
        with pytest.raises(ValueError, match="the tensors are on meta, but the mesh's backend gloo is for cpu"):
            magi.dispatch(x.to("meta"), plan, mesh)
    finally:
        dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="the process group of the mesh has ended; make a mesh of"):
        magi.dispatch(x, plan, mesh)
    del mesh
    gc.collect()
    with pytest.raises(RuntimeError, match=r"process group .* has ended"):
        transport.all_gather(torch.empty(1), torch.empty(1))
    for thread in [thread for thread in threading.enumerate() if thread.name == "plan-agreement"]:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("call", ["attend", "op"])
@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "vmap", "forward_ad", "forward_ad of a parameter"])
def test_transforms_without_a_rule_are_refused_by_name(transform, call):
    slices, x = magi.varlen_causal([0, 6]), torch.randn(6, 2, 8)
    handle = PlanHandle(bind_slices(slices, 6, 6, 2, 2, FlexBlockAttn(), x.device)).tensor

    def attend(x):
        if call == "attend":
            return magi.flex_flash_attn(x, x, x, slices)[0].sum()
        return attention_op(x, x, x, handle, 0.3)[0].sum()

    def forward_ad(f):
        with fwad.dual_level():
            return f(fwad.make_dual(x.requires_grad_("parameter" in transform), torch.ones_like(x)))

    run = {
        "grad": lambda: torch.func.grad(attend)(x),
        "vjp": lambda: torch.func.vjp(attend, x),
        "jvp": lambda: torch.func.jvp(attend, (x,), (x,)),
        "vmap": lambda: torch.func.vmap(attend)(x[None]),
    }.get(transform, lambda: forward_ad(attend))
    if (transform, call) == ("vmap", "op"):  # torch calls the op once for each
        return torch.testing.assert_close(run(), attend(x)[None])
    with pytest.raises(RuntimeError, match=r"attention (cannot run inside torch.func|has no forward-mode)"):
        run()
    assert torch.isfinite(attend(x))  # and works again afterwards


def test_ops_stay_out_of_cuda_graphs():
    for op in (attention_op, attention_backward_op):
        assert torch.Tag.cudagraph_unsafe in op.tags


def test_second_derivatives_are_refused():
    x = torch.randn(6, 2, 8, requires_grad=True)
    out, _ = magi.flex_flash_attn(x, x, x, magi.varlen_causal([0, 6]))
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(out.sum(), x, create_graph=True)


def test_names_and_schemas_of_the_ops_are_those_of_saved_graphs():
    inputs = "Tensor q, Tensor k, Tensor v"
    assert [str(op._schema) for op in (attention_op, attention_backward_op)] == [
        f"torchtitan_magi::cp_varlen_attn({inputs}, Tensor handle, float softmax_scale, Tensor? sinks=None, "
        "float softcap=0., Tensor? latents=None, Tensor? weight=None) -> (Tensor, Tensor)",
        f"torchtitan_magi::cp_varlen_attn_backward(Tensor dout, {inputs}, Tensor out, Tensor lse, Tensor handle, "
        "float softmax_scale, Tensor? sinks=None, float softcap=0., Tensor? dlse=None, Tensor? latents=None, "
        "Tensor? weight=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    ]


def test_the_ops_compile():
    """torch's own checks of schema, autograd registration, fakes and tracing with static and dynamic shapes."""
    plan = magi.make_plan(magi.varlen_causal([0, 4, 9]), 9, 1)
    handle = PlanHandle(bind_plan(plan, None, FlexBlockAttn(), 2, 1, torch.device("cpu"))).tensor
    q, k, v = (torch.randn(9, heads, 4, requires_grad=True) for heads in (2, 1, 1))
    sinks = torch.randn(2, requires_grad=True)
    for options in ((), (sinks, 3.0)):
        torch.library.opcheck(attention_op, (q, k, v, handle, 0.5, *options))
        out, lse = attention_op(q, k, v, handle, 0.5, *options)
        assert lse.requires_grad
        saved = [x.detach() for x in (torch.randn_like(out), q, k, v, out, lse)]
        with_lse = (sinks.detach(), 3.0, torch.randn_like(lse)) if options else ()
        torch.library.opcheck(attention_backward_op, (*saved, handle, 0.5, *with_lse))


def test_ops_keep_their_promises_to_compilers():
    """The fakes give the shapes, dtypes and strides of the real outputs."""
    plan = magi.make_plan(magi.varlen_causal([0, 4, 9]), 9, 1)
    bound = bind_plan(plan, None, FlexBlockAttn(), 2, 1, torch.device("cpu"))
    handle = PlanHandle(bound).tensor
    q, k, v, dout = (torch.randn(9, heads, 4, dtype=torch.bfloat16) for heads in (2, 1, 1, 2))
    out, lse = attention_op(q, k, v, handle, 0.5)
    grads = attention_backward_op(dout, q, k, v, out, lse, handle, 0.5)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = attention_op(q, k, v, handle, 0.5)
        fake_grads = attention_backward_op(dout, q, k, v, out, lse, handle, 0.5)
    for real, promised in zip((out, lse, *grads), (*fake, *fake_grads), strict=True):
        assert (real.shape, real.dtype, real.stride()) == (promised.shape, promised.dtype, promised.stride())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, plan: magi.cp_varlen_attn(x[:7], x[:7], x[:7], plan), "q has 7 rows but the plan gives each rank 8"),
        (lambda x, plan: magi.cp_varlen_attn(x, x[:, :3], x[:, :3], plan), "Hq a multiple of H"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, backend="fla"), "backend is 'fla'; use one of"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, magi.make_plan(plan.slices, 8, 2)), "each rank 4 tokens"),
        (lambda x, plan: magi.cp_varlen_attn(x[:4], x[:4], x[:4], magi.make_plan(plan.slices, 8, 2)), "mesh has 1"),
        (lambda x, plan: magi.dispatch(x[:3], plan, None), "x has 3 rows but the plan 8 tokens"),
        (lambda x, plan: magi.undispatch(x[:3], plan, None), "x_local has 3 rows"),
        (lambda x, plan: magi.flex_flash_attn(x, x, x, AttnSlices([[0, 9, 0, 1, 0]])), "q has 8 rows"),
        (lambda x, plan: magi.flex_flash_attn(x, x, x, AttnSlices([[0, 1, 0, 9, 0]])), "k has 8 rows"),
        (lambda x, plan: magi.flex_flash_attn(x, x, x, [[0, 1, 0, 1, 0]]), "slices are a list; give AttnSlices"),
        (lambda x, plan: magi.make_plan(torch.tensor([0, 8]), 8, 1), "slices are a Tensor; give AttnSlices"),
        (lambda x, plan: magi.make_plan(plan.slices, 8, 1, heads=(4, 4, 8)), r"heads is \(4, 4, 8\) .*; give Heads"),
        (lambda x, plan: magi.make_plan(plan.slices, 8, 1, heads=[4, 4, 8]), r"heads is \[4, 4, 8\] .*; give Heads"),
        (lambda x, plan: magi.make_plan(plan.slices, 8, 1, cost=None), "cost None; give .* a CostModel"),
        (
            lambda x, plan: magi.cp_varlen_attn(x, x, x, plan.slices),
            "plan is of type AttnSlices; make one with make_plan",
        ),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, "cp"), "mesh is 'cp'; pass the context-parallel"),
        (lambda x, plan: magi.cp_varlen_attn(x, x.half(), x, plan), "float32, torch.float16, torch.float32; give all"),
        (lambda x, plan: magi.flex_flash_attn(*[x.int()] * 3, plan.slices), "torch.int32; give all three the same"),
        (lambda x, plan: magi.cp_varlen_attn(x, x[:, :0], x[:, :0], plan), "Hq a multiple of H"),
        (lambda x, plan: magi.cp_varlen_attn(x[:, :0], x, x, plan), "Hq a multiple of H"),
        (lambda x, plan: magi.cp_varlen_attn(*[x[..., :0]] * 3, plan), r"\(8, 4, 0\).* D above 0"),
        (lambda x, plan: magi.flex_flash_attn(*[x[..., :0]] * 3, plan.slices), r"\(8, 4, 0\).* D above 0"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, softcap=-1.0), "softcap is -1.0; it must be a positive"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, softcap=1e39), "softcap is 1e.39; .* that float32 holds"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, softcap=10**400), "softcap is 10000.*that float32 holds"),
        (
            lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, sinks=x[0]),
            r"sinks are torch.float32 \(4, 8\) for 4 query",
        ),
        (
            lambda x, plan: magi.flex_flash_attn(x, x, x, plan.slices, sinks=torch.zeros(4).int()),
            r"sinks are torch.int32 \(4,\) for 4 query heads; give one float",
        ),
        (lambda x, plan: magi.cp_varlen_attn(x.numpy(), x, x, plan), "q is of type ndarray; give a torch.Tensor"),
        (lambda x, plan: magi.cp_varlen_attn(x, None, x, plan), "k is of type NoneType; give a torch.Tensor"),
        (lambda x, plan: magi.flex_flash_attn(x, x, x.tolist(), plan.slices), "v is of type list; give a torch.Tensor"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, sinks=0.0), "sinks is of type float; give a torch.Tensor"),
        (lambda x, plan: magi.cp_varlen_attn(x.to_sparse(), x, x, plan), "q is a torch.sparse_coo tensor; give"),
        (
            lambda x, plan: magi.flex_flash_attn(x, torch.nested.nested_tensor([x[0]]), x, plan.slices),
            "k is a nested tensor; give a dense",
        ),
        (lambda x, plan: magi.cp_varlen_attn(x, x.to("meta"), x, plan), "q, k, v are on cpu, meta, cpu; move them"),
        (
            lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, sinks=x[0, 0, :4].to("meta")),
            "q, k, v, sinks are on cpu, cpu, cpu, meta; move them",
        ),
        (lambda x, plan: magi.flex_flash_attn(*[x.to(torch.float8_e5m2)] * 3, plan.slices), "float8_e5m2; .* 16 bits"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, backend=["flex"]), r"backend is \['flex'\]; use one of"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, deterministic="yes"), "deterministic is 'yes'; use True"),
        (lambda x, plan: magi.cp_varlen_attn(x, x, x, plan, fp32_reduce=[]), r"fp32_reduce is \[\]; use True or False"),
        (lambda x, plan: magi.dispatch(x.numpy(), plan, None), "x is of type ndarray; give a torch.Tensor"),
        (lambda x, plan: magi.undispatch([1.0] * 8, plan, None), "x_local is of type list; give a torch.Tensor"),
        (lambda x, plan: magi.dispatch(x.sum(), plan, None), "x has no dimension but the plan 8 tokens"),
        (lambda x, plan: magi.dispatch(x, plan.slices, None), "plan is of type AttnSlices; make one with make_plan"),
        (lambda x, plan: magi.undispatch(x, None, None), "plan is of type NoneType; make one with make_plan"),
        (lambda x, plan: magi.dispatch(x, plan, None, "a"), "pad_value is 'a'; give a number that x, of torch.float32"),
        (lambda x, plan: magi.dispatch(x.int(), plan, None, 0.5), "pad_value is 0.5; give a number that x, of"),
        (lambda x, plan: magi.dispatch(x.half(), plan, None, 1e6), "pad_value is 1000000.0; .* of torch.float16, can"),
        (lambda x, plan: magi.dispatch(x.byte(), plan, None, -100), "pad_value is -100; .* of torch.uint8, can hold"),
        (lambda x, plan: magi.flex_flash_attn(x, x, x[..., :0], plan.slices), r"\(8, 4, 0\).* D above 0"),
        (lambda x, plan: magi.flex_flash_attn(x, x[..., :4], x, plan.slices), r"\(8, 4, 4\)"),
        *(
            (
                lambda x, plan, s=s, call=call: call(x, x, x, plan, softmax_scale=s),
                f"softmax_scale is {s!r}; it must be a positive",
            )
            for s in (0, -1.0, float("nan"), float("inf"), 10**39, "1")
            for call in (magi.cp_varlen_attn, lambda *args, **kw: magi.flex_flash_attn(*args[:3], args[3].slices, **kw))
        ),
    ],
)
def test_misuse_is_one_line_that_names_the_value(call, message):
    plan = magi.make_plan(magi.varlen_causal([0, 8]), 8, 1)
    with one_line(message):
        call(torch.randn(8, 4, 8), plan)
