"""Latent rows that travel between nodes give what K and V that travel give, and cost the network less."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.cp_case import SLOW_NETWORK
from support.gpus import needs_hopper, needs_two_gpus
from support.loopback import Loopback
from support.masks import dense_mask
from support.pool import RankPool

from torchtitan_magi import dispatch, make_plan, undispatch, varlen_causal
from torchtitan_magi.attention.bound_plan import bind_plan
from torchtitan_magi.attention.op import PlanHandle, attention_op
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.exchange.mesh import as_transport
from torchtitan_magi.exchange.transport import ProcessGroupTransport
from torchtitan_magi.planning.cost_model import H200, Heads, Link

HEADS = Heads(4, 4, 24, 16, (16, 8))
DEEPSEEK_V3 = Heads(128, 128, 192, 128, (512, 64))
LENGTHS = [150, 37, 5, 64]
CU_SEQLENS = np.append(0, np.cumsum(LENGTHS)).tolist()
TOTAL = CU_SEQLENS[-1]
CPU = torch.device("cpu")


def inputs(dtype, heads, device):
    """q, latent vectors, rotated columns, weight, dout, of the whole pack."""
    generator = torch.Generator().manual_seed(0)
    rank, rotated = heads.latent
    width = heads.head_dim - rotated + heads.value_dim
    shapes = (
        (TOTAL, heads.num_heads_q, heads.head_dim), (TOTAL, rank), (TOTAL, rotated), (heads.num_heads_kv * width, rank),
        (TOTAL, heads.num_heads_q, heads.value_dim),
    )  # fmt: skip
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    drawn[3] /= rank**0.5
    return [x.to(device, dtype) for x in drawn]


def keys_and_values(latent, rotated, weight, heads):
    """As the model makes them of its own tokens."""
    both = (latent @ weight.T).view(len(latent), heads.num_heads_kv, -1)
    plain = heads.head_dim - rotated.shape[1]
    k = torch.cat([both[..., :plain], rotated[:, None].expand(-1, heads.num_heads_kv, -1)], -1)
    return k, both[..., plain:]


def dense(dtype, rounded=False, heads=HEADS, device="cpu"):
    """out and the gradients of q, latent, rotated and weight, by one device that holds all scores.

    rounded: of the inputs in bfloat16.
    """
    *leaves, dout = (x.to(dtype) for x in inputs(torch.bfloat16 if rounded else dtype, heads, device))
    q, latent, rotated, weight = (x.requires_grad_() for x in leaves)
    k, v = keys_and_values(latent, rotated, weight, heads)
    scores = torch.einsum("qhd,khd->hqk", q, k) * heads.head_dim**-0.5
    seen = torch.from_numpy(dense_mask(varlen_causal(CU_SEQLENS).table, TOTAL, TOTAL)).to(device)
    out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_a_rank(plan, mesh, dtype, fp32_reduce, heads=HEADS, device="cpu"):
    """The same of the ranks of a mesh; the weight's gradients are added up by hand, as FSDP2 does."""
    *leaves, dout = inputs(dtype, heads, device)
    q, latent, rotated = (dispatch(x, plan, mesh).requires_grad_() for x in leaves[:3])
    weight, dout = leaves[3].requires_grad_(), dispatch(dout, plan, mesh)
    bound = bind_plan(plan, mesh, choose_block_attn("auto", dout.device), *heads.counts, dout.device, fp32_reduce)
    k, v = keys_and_values(latent, rotated, weight, heads)
    rows = torch.cat([latent, rotated], 1)
    both = (rows, weight) if bound.sends_latents else ()
    out, _ = attention_op(q, k, v, PlanHandle(bound).tensor, heads.head_dim**-0.5, None, 0.0, *both)
    *grads, dweight = torch.autograd.grad(out, (q, latent, rotated, weight), dout)
    gathered = dweight.new_empty(plan.cp_size * len(dweight), dweight.shape[1])
    as_transport(mesh, plan.cp_size).all_gather(gathered, dweight)
    whole = [undispatch(x, plan, mesh) for x in (out.detach(), *grads)]
    return [*whole, gathered.view(plan.cp_size, *dweight.shape).sum(0)]


def planned(stages=-1, heads=HEADS, nodes=2, cp_size=4):
    options = {"heads": heads, "gpus_per_node": nodes, "cost": SLOW_NETWORK}
    return make_plan(varlen_causal(CU_SEQLENS), TOTAL, cp_size, stages, **options)


@pytest.mark.parametrize("fp32_reduce", [False, True])
@pytest.mark.parametrize(("nodes", "stages"), [(1, -1), (2, -1), (2, 1), (1, 3), (2, 3), ([3, 1], 2)])
def test_ranks_get_what_one_device_gets(nodes, stages, fp32_reduce):
    plan = planned(stages, nodes=nodes)
    assert plan.heads.latent
    assert plan.routes.has_relays == (nodes != 1)
    found = Loopback(4).run(lambda transport: on_a_rank(plan, transport, torch.float64, fp32_reduce))
    for of_rank in found:
        for ours, exact in zip(of_rank, dense(torch.float64), strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-11, atol=1e-11)


def test_their_error_is_within_the_budget():
    plan = planned(2)
    exact, low = dense(torch.float64, rounded=True), dense(torch.bfloat16)
    for of_rank in Loopback(4).run(lambda transport: on_a_rank(plan, transport, torch.bfloat16, False)):
        for ours, right, plainly in zip(of_rank, exact, low, strict=True):
            assert (ours.double() - right).norm() <= 2 * (plainly.double() - right).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_nothing(dtype):
    plan = planned(2)

    def results(inside, transport):
        bound = bind_plan(plan, transport, choose_block_attn("auto", CPU), *HEADS.counts, CPU)
        *leaves, weight, _ = inputs(dtype, HEADS, CPU)
        q, latent, rotated = (dispatch(x, plan, transport) for x in leaves)
        k, v = keys_and_values(latent, rotated, weight, HEADS)
        tensors = [x.requires_grad_() for x in (q, k, v, torch.cat([latent, rotated], 1), weight)]
        with torch.autocast("cpu", torch.float16, enabled=inside):
            scale, handle = HEADS.head_dim**-0.5, PlanHandle(bound).tensor
            out, _ = attention_op(*tensors[:3], handle, scale, None, 0.0, *tensors[3:])
            return out, *torch.autograd.grad(out.sum(), tensors)

    assert plan.heads.latent
    plain, inside = (Loopback(4).run(partial(results, inside)) for inside in (False, True))
    for expected, found in zip(plain, inside, strict=True):
        assert all(map(torch.equal, found, expected))


def test_a_plan_without_remote_rows_needs_none():
    plan = make_plan(varlen_causal([0, 8, 16]), 16, 2, heads=HEADS, gpus_per_node=1)
    assert not plan.heads.latent


@pytest.mark.parametrize(("nodes", "stages"), [(4, -1), (None, 2), (2, 0)])
def test_inside_a_node_and_without_overlap_keys_and_values_travel(nodes, stages):
    assert not planned(stages, nodes=nodes).heads.latent
    assert planned(stages, nodes=nodes).fingerprint == planned(stages, HEADS.with_whole_rows, nodes).fingerprint


@pytest.mark.parametrize("latent", [(12, 8), (16, 4)])
def test_keys_and_values_travel_where_latent_vectors_have_no_whole_units(latent):
    assert not planned(2, replace(HEADS, latent=latent)).heads.latent


def test_latent_rows_travel_where_the_model_finds_that_faster():
    slices = varlen_causal([0, 1 << 17])
    ours = make_plan(slices, 1 << 17, 16, heads=DEEPSEEK_V3, gpus_per_node=8)
    whole = make_plan(slices, 1 << 17, 16, heads=DEEPSEEK_V3.with_whole_rows, gpus_per_node=8)
    assert ours.heads.latent
    assert DEEPSEEK_V3.row_bytes == 1152
    assert DEEPSEEK_V3.with_whole_rows.row_bytes == 81920
    for narrow, wide in zip(ours.predict(), whole.predict(), strict=True):
        assert narrow.seconds < wide.seconds
    network = replace(H200, across=Link(0, 1e15), inside=Link(0, 1e15))
    fast = make_plan(slices, 1 << 17, 16, heads=DEEPSEEK_V3, gpus_per_node=8, cost=network)
    assert not fast.heads.latent


ON_GPU = Heads(16, 16, 192, 128, (512, 64))


def check_on_gpu(found):
    exact, low = dense(torch.float64, True, ON_GPU, "cuda"), dense(torch.bfloat16, heads=ON_GPU, device="cuda")
    for of_rank in found:
        for ours, right, plainly in zip(of_rank, exact, low, strict=True):
            assert (ours.to("cuda").double() - right).norm() <= 2 * (plainly.double() - right).norm()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("nodes", "stages"), [(2, -1), (1, 3), ([3, 1], 2)])
def test_kernels_take_latent_rows(nodes, stages):
    plan = planned(stages, ON_GPU, nodes)
    assert plan.heads.latent
    ranks = Loopback(4)
    check_on_gpu(ranks.run(lambda transport: on_a_rank(plan, transport, torch.bfloat16, False, ON_GPU, "cuda")))


def over_nccl(stages):
    plan = planned(stages, ON_GPU, 1, 2)
    assert plan.heads.latent
    mesh = ProcessGroupTransport(dist.group.WORLD)
    return [x.cpu() for x in on_a_rank(plan, mesh, torch.bfloat16, False, ON_GPU, "cuda")]


@pytest.mark.gpu
@pytest.mark.alone(gpus=2)
@needs_two_gpus
@pytest.mark.parametrize("stages", [-1, 3])
def test_two_gpus_exchange_latent_rows(stages):
    with RankPool(2, "cuda") as pool:
        check_on_gpu(pool.run(over_nccl, stages))
