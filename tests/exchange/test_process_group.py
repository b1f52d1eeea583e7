"""Real collectives: every case on gloo against the dense fp64 reference, and the ranks against each other."""

import subprocess
import sys
import warnings
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.cp_case import SLOW_NETWORK, Case, check, documents, of_slices, random_slices, run_case
from support.pool import RankPool
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torchtitan_magi as magi
from torchtitan_magi.attention import api
from torchtitan_magi.exchange.agreement import PlanAgreement, agreement_of, raise_differences
from torchtitan_magi.exchange.mesh import process_group_transport, ranks_per_node
from torchtitan_magi.exchange.transport import ProcessGroupTransport
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, KernelCost


@pytest.fixture(scope="module", params=[2, 4, 3, 8])
def pool(request):
    with RankPool(request.param) as pool:
        yield pool


SLOW_KERNEL = replace(SLOW_NETWORK, backward=KernelCost(0, 5e-7, 0, 0, 0))
NODES = {
    "documents": documents([300, 7, 1, 64, 500, 33, 120]),
    "one document over all ranks": documents([777], stages=2),
    "no overlap": documents([300, 200, 100], stages=0, heads=(3, 3)),
    "four stages": documents([500, 200, 101], stages=4, heads=(6, 1)),
    "bidirectional": documents([200, 90, 410], "full", stages=1),
    "random slices": random_slices(3, 150, stages=2),
    "float32 on the wire": documents([400, 111], dtype=torch.bfloat16, fp32_reduce=True, stages=2),
    "bf16 on the wire": documents([400, 111], dtype=torch.bfloat16, heads=(8, 2), head_dim=32),
    "different stages forward and backward": documents([500, 150], stages=-1, cost=SLOW_KERNEL),
}


def relayed(case, gpus_per_node):
    """The same on nodes whose network is so slow that rows pass through relays."""
    return replace(case, gpus_per_node=gpus_per_node, cost=replace(SLOW_NETWORK, backward=case.cost.backward))


CASES = {
    "mixed lengths": documents([300, 7, 1, 64, 500, 33]),
    "one document over all ranks": documents([777]),
    "one-token documents": documents([1] * 100),
    "one token, ranks with only padding": documents([1]),
    "a ragged tail": documents([100, 3, 250], padding=90),
    "bidirectional": documents([200, 90, 410], "full", stages=2),
    "sliding window": documents([700, 50], "window", 64, stages=2),
    "no overlap": documents([300, 200, 100], stages=0),
    "four stages": documents([300, 200, 101], stages=4),
    "MHA": documents([150, 250], heads=(3, 3)),
    "MQA": documents([150, 250], heads=(6, 1), stages=2),
    "bf16 on the wire": documents([400, 111], heads=(8, 2), head_dim=32, dtype=torch.bfloat16),
    "float32 on the wire": documents([400, 111], heads=(8, 2), head_dim=32, dtype=torch.bfloat16, fp32_reduce=True),
    "widths of their own": documents([60, 5, 130, 61], heads=(4, 2), head_dim=12, value_dim=8, stages=2, sinks=True),
    "fp16": documents([400, 111], heads=(4, 4), dtype=torch.float16, stages=3),
    "a few thousand tokens": documents([1800, 40, 660], heads=(2, 1)),
    **{f"random slices {seed}": random_slices(seed, 120 + 7 * seed, stages=seed % 4) for seed in range(14)},
    "shared prompt pairs": of_slices(magi.shared_prompt([[200, 60, 90], [7, 150, 33]]), 540, stages=2),
    "chosen stages": documents([300, 7, 1, 64, 500, 33], stages=-1),
    **{f"relays in nodes of 2, {name}": relayed(NODES[name], 2) for name in NODES},
    **{f"nodes of 2, {name}": replace(NODES[name], gpus_per_node=2, cost=H200) for name in list(NODES)[:3]},
    **{f"relays in nodes of 4, {name}": relayed(NODES[name], 4) for name in list(NODES)[:4]},
    "relays in nodes of 3, documents": relayed(NODES["documents"], 3),
    "nothing attends": Case(AttnSlices([]), torch.zeros(50, 50, dtype=torch.bool)),
}


def run_on_rank(names):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    return [run_case(CASES[name], mesh.size(), mesh) for name in names]


def test_every_case_over_real_collectives(pool):
    names = list(CASES) if pool.size in (2, 4) else list(CASES)[pool.size % 10 :: 10]
    results = pool.run(run_on_rank, names)
    for name, *per_rank in zip(names, *results, strict=True):
        check(CASES[name], per_rank)


def plan_of(case, cp_size):
    total = len(case.mask)
    return magi.make_plan(case.slices, total, cp_size, case.stages, cost=case.cost, gpus_per_node=case.gpus_per_node)


def test_the_case_of_different_stages_has_them():
    plan = plan_of(CASES["relays in nodes of 2, different stages forward and backward"], 4)
    assert len(plan.forward) == 1
    assert len(plan.backward) > 2


def test_rows_pass_through_relays_in_their_cases_and_go_straight_in_others():
    for name, case in CASES.items():
        assert plan_of(case, 8).routes.has_relays == name.startswith("relays"), name


def repeat_on_rank(name, times):
    runs = [run_case(CASES[name], dist.get_world_size(), dist.group.WORLD) for _ in range(times)]
    return all(torch.equal(run[tensor], runs[0][tensor]) for run in runs for tensor in run)


def test_runs_repeat_bit_for_bit(pool):
    assert all(pool.run(repeat_on_rank, "mixed lengths", 3))
    assert all(pool.run(repeat_on_rank, "relays in nodes of 2, four stages", 3))


def second_derivatives_on_rank(cp_size):
    """Those of a sum of cubes of a pack's tokens, which go to their ranks and back."""
    plan = magi.make_plan(magi.varlen_causal([0, 3, 11]), 11, cp_size)
    mesh = dist.group.WORLD if cp_size > 1 else None
    x = torch.arange(11.0, requires_grad=True)
    y = magi.undispatch(magi.dispatch(x, plan, mesh) ** 3, plan, mesh)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.sum(), x)[0]


def test_dispatch_and_undispatch_have_second_derivatives(pool):
    expected = 30 * torch.arange(11.0) ** 4
    for found in [second_derivatives_on_rank(1), *pool.run(second_derivatives_on_rank, pool.size)]:
        torch.testing.assert_close(found, expected)


def misuse_on_rank():
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    x = torch.zeros(4 * size, 2, 8)
    plan = magi.make_plan(magi.varlen_causal([0, 4 * size]), 4 * size, size)
    with pytest.raises(ValueError, match="pass the context-parallel one"):
        magi.dispatch(x, plan, mesh)
    with pytest.raises(ValueError, match=f"the plan is for {size} ranks but the mesh has 1"):
        magi.dispatch(x, plan, mesh["dp"])
    return magi.dispatch(x, plan, mesh["cp"]).shape


def test_a_mesh_that_does_not_fit_the_plan_is_refused(pool):
    assert pool.run(misuse_on_rank) == [(4, 2, 8)] * pool.size


def outside_on_rank():
    """What a rank outside of a mesh is told, and of a group; None in them."""
    x, plan = torch.zeros(4, 8), magi.make_plan(magi.varlen_causal([0, 4]), 4, 1)
    told = []
    for mesh in (DeviceMesh("cpu", [1], mesh_dim_names=("cp",)), dist.new_group([1])):
        try:
            magi.dispatch(x, plan, mesh)
        except ValueError as error:
            told.append(str(error))
    return told


def test_a_rank_outside_of_its_mesh_is_told_so():
    with RankPool(2) as pool:  # of its own: ranks in unequally many groups cannot make later ones
        outside, inside = pool.run(outside_on_rank)
    assert inside == []
    assert outside == [
        "this rank is not in the mesh of ranks [1]; call it on these",
        "this rank is not in the process group that mesh is to be; call it on the group's ranks",
    ]


def mesh_anew_on_rank():
    """One plan, two meshes that compare equal, the first of which has ended: whether calls use the group of each."""
    size = dist.get_world_size()
    plan = magi.make_plan(magi.varlen_causal([0, 4 * size]), 4 * size, size)
    x, meshes = torch.randn(4, 2, 8), []
    for _ in range(2):
        group = dist.new_group(range(size))
        meshes.append(DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",)))
        with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as spy:
            magi.cp_varlen_attn(x, x, x, plan, meshes[-1])
        used = {call.kwargs["group"] for call in spy.call_args_list}
        dist.barrier()
        dist.destroy_process_group(group)
    return meshes[0] == meshes[1] and used == {group}


def test_a_mesh_like_one_whose_group_has_ended(pool):
    assert all(pool.run(mesh_anew_on_rank))


@pytest.mark.parametrize(("default", "chosen"), [("cpu:gloo", "cuda:nccl"), ("cuda:nccl", None)])
def test_gradients_return_by_the_backends_of_the_group(default, chosen):
    """Not by those of the default group, which may be of gloo alone."""
    facts = {"get_rank": 0, "get_world_size": 2, "get_backend": "nccl", "get_process_group_ranks": [0, 1]}
    made = {name: mock.Mock(return_value=value) for name, value in facts.items()} | {"new_group": mock.Mock()}
    made["get_backend_config"] = lambda group=None: "cuda:nccl" if group else default
    with mock.patch.multiple(dist, **made):
        ProcessGroupTransport(mock.Mock())
        assert dist.new_group.call_args.kwargs["backend"] == chosen


def groups_on_rank(times):
    """Groups that come and go, with one plan: whether each gave the right result and went with all that it had."""
    size = dist.get_world_size()
    plan = magi.make_plan(magi.varlen_causal([0, 4 * size]), 4 * size, size)
    x = torch.randn(4 * size, 2, 8, generator=torch.Generator().manual_seed(0))
    out, _ = magi.flex_flash_attn(x, x, x, plan.slices)
    ends = []
    for _ in range(times):
        group = dist.new_group(range(size))
        mine = magi.dispatch(x, plan, group).requires_grad_()
        whole = magi.undispatch(magi.cp_varlen_attn(mine, mine, mine, plan, group), plan, group)
        torch.testing.assert_close(whole, out)
        whole.sum().backward()
        dist.barrier()
        ended, transport = weakref.ref(group), process_group_transport(group)
        dist.destroy_process_group(group)
        del group
        ends.append((ended(), [key for key in api._handles if key[-1] is transport]))
    return ends == times * [(None, [])]


def test_what_belongs_to_a_group_goes_with_it(pool):
    assert all(pool.run(groups_on_rank, 3))


EXITS = """
import os, sys, torch, torch.distributed as dist
from torchtitan_magi.exchange.mesh import process_group_transport

children = []
for _ in range(4):
    if not (child := os.fork()):
        break
    children.append(child)
else:
    sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
sys.setswitchinterval(60)  # other threads wait for the interpreter until this one pauses
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.group.WORLD
process_group_transport(group)
x = torch.ones(2**20)
dist.all_gather_into_tensor(torch.empty_like(x), x, async_op=True)
dist.destroy_process_group()
"""


def test_a_process_that_still_has_a_group_ends_well():
    """A thread of gloo that then lets go of a collective's tensors would abort it: without us most of these do."""
    subprocess.run([sys.executable, "-W", "ignore", "-c", EXITS], check=True)


def nodes_on_rank():
    """ranks_per_node of the world, and of groups with tensor parallelism inside and outside, for machines of 4."""
    world, half = dist.get_world_size(), dist.get_world_size() // 2
    meshes = init_device_mesh("cpu", (half, 2), mesh_dim_names=("cp", "tp")), init_device_mesh("cpu", (2, half))
    groups = [dist.group.WORLD, meshes[0]["cp"].get_group(), meshes[0]["tp"].get_group(), meshes[1].get_group(0)]
    uneven = dist.new_group(range(world - 2))
    with mock.patch("torchtitan_magi.exchange.mesh.machine", return_value=f"machine {dist.get_rank() // 4}"):
        counts = [ranks_per_node(group) for group in groups]
        counts.append(ranks_per_node(uneven) if dist.get_rank() < world - 2 else [4, 2])
    with mock.patch("torchtitan_magi.exchange.mesh.machine", return_value=f"machine {dist.get_rank() % 2}"):
        counts.append(ranks_per_node(dist.group.WORLD))
    return counts


def test_ranks_are_counted_by_node():
    with RankPool(8) as pool:  # of its own: ranks in unequally many groups cannot make later ones
        results = pool.run(nodes_on_rank)
    assert results == [[[4, 4], [2, 2], None, [1, 1], [4, 2], None]] * 8


def disagree_on_rank(odd_rank, other_tokens):
    """What each rank says after two microbatches, of which `odd_rank` has others in the second."""
    rank, size = dist.get_rank(), dist.get_world_size()
    agreement = PlanAgreement(list(range(size)), [rank] if other_tokens else list(range(size)))
    agreement.check(magi.make_plan(magi.varlen_causal([0, 40]), 40, size), 1)
    raise_differences(wait=True)
    cut = 10 if rank == odd_rank and not other_tokens else 11
    content = 2 if rank == odd_rank and other_tokens else 3
    agreement.check(magi.make_plan(magi.varlen_causal([0, cut, 40]), 40, size), content)
    with pytest.raises(RuntimeError) as at_save:
        raise_differences(wait=True)
    with pytest.raises(RuntimeError) as error:
        agreement.check(magi.make_plan(magi.varlen_causal([0, 40]), 40, size))
    assert str(at_save.value) == str(error.value)
    return str(error.value)


@pytest.mark.parametrize("other_tokens", [False, True])
def test_ranks_with_different_data_are_named(pool, other_tokens):
    for message in pool.run(disagree_on_rank, 1, other_tokens):
        assert message.startswith("microbatch 2: ranks [1] have other documents")


def gather_on_rank():
    """What two gathers bring, by a collective whose name torch keeps: a deprecated one is a warning in each run."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows, agreement = torch.empty(size, 1), PlanAgreement(list(range(size)), [rank])
    with warnings.catch_warnings(action="error", category=FutureWarning):
        process_group_transport(dist.group.WORLD).all_gather(rows, torch.full((1, 1), float(rank)))
        return rows.flatten().tolist(), agreement._of_all_ranks((rank, 7))


def test_gathers_call_nothing_deprecated(pool):
    ranks = range(pool.size)
    assert pool.run(gather_on_rank) == [([*ranks], [[rank, rank, 7] for rank in ranks])] * len(ranks)


def agree_on_rank(data_rank):
    """The ranks that agree with each rank, where every second one has the same data and plans differ between them."""
    rank, size = dist.get_rank(), dist.get_world_size()
    agreement = agreement_of(None, rank % 2 if data_rank else 0)
    if agreement is None:
        return None
    for number in range(3):
        agreement.check(magi.make_plan(magi.varlen_causal([0, 1 + rank, 40]), 40, size), number)
    raise_differences(wait=True)
    return agreement.ranks


def test_ranks_of_a_data_parallel_rank_agree_on_content_alone():
    """Plans may differ between context-parallel groups, whose ranks may sit otherwise in machines."""
    with RankPool(4) as pool:
        assert pool.run(agree_on_rank, False) == [[0, 1, 2, 3]] * 4
        assert pool.run(agree_on_rank, True) == [[0, 2], [1, 3]] * 2
