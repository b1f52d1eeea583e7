"""Context-parallel attention on GPUs: our kernel, our row kernels and NCCL against the dense fp64 reference."""

import gc

import pytest
import torch
import torch.distributed as dist
from support.cp_case import BF16, CASES_ON_GPUS, SLOW_NETWORK, check, documents, inputs, random_slices, run_case
from support.gpus import needs_hopper
from support.loopback import Loopback
from support.pool import RankPool

import torchtitan_magi as magi
from torchtitan_magi.attention.bound_plan import bind_plan
from torchtitan_magi.attention.op import PlanHandle, attention_op
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.cuda import launch
from torchtitan_magi.exchange import peer_memory as peer
from torchtitan_magi.exchange.mesh import process_group_transport
from torchtitan_magi.exchange.peer_memory import MAX_SLOT_BYTES, WRITTEN_BYTES, PeerTransport
from torchtitan_magi.exchange.transport import ProcessGroupTransport

pytestmark = [pytest.mark.gpu, needs_hopper]


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.alone(gpus=n)) for n in (2, 4, 8)])
def pool(request):
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, there are {torch.cuda.device_count()}")
    with RankPool(request.param, "cuda") as pool:
        yield pool


BESIDE = magi.varlen_causal([0, 1200, 1290, 1601])
RELAYED = {"gpus_per_node": 2, "cost": SLOW_NETWORK}
CASES = CASES_ON_GPUS | {
    "GQA 8:1": documents([900, 7, 1, 64, 500, 33], heads=(8, 1), **BF16, stages=2),
    "MHA, odd total": documents([700, 201], heads=(4, 4), **BF16, padding=2),
    "GQA 5:1, head_dim 64": documents([700, 201], heads=(10, 2), dtype=torch.bfloat16, head_dim=64, stages=3),
    "fp16": documents([1000, 211, 7], heads=(16, 4), dtype=torch.float16, head_dim=128),
    "float32 on the wire": documents([1000, 211, 7], heads=(16, 4), **BF16, fp32_reduce=True, stages=2),
    "float32 on the wire, no overlap": documents([100, 211, 7], heads=(16, 4), **BF16, fp32_reduce=True, stages=0),
    "bidirectional": documents([500, 90, 410], "full", heads=(8, 2), **BF16, stages=2),
    "sliding window": documents([1700, 50], "window", 200, heads=(8, 2), **BF16, stages=2),
    "two nodes": documents([900, 7, 1, 64, 500, 33, 495], heads=(64, 8), **BF16, stages=2, gpus_per_node=2),
    "relays": documents([900, 7, 1, 64, 500, 33, 495], heads=(64, 8), **BF16, stages=2, **RELAYED),
    "relays, no overlap": documents([700, 1201], heads=(8, 1), **BF16, stages=0, **RELAYED),
    "stages chosen": documents([1900, 7, 1, 64, 1500], heads=(8, 2), **BF16, stages=-1),
    "one-token documents": documents([1] * 300, heads=(8, 2), **BF16),
    "one token": documents([1], heads=(8, 2), **BF16),
    "MHA, each row of dk and dv in one piece": documents([1501, 7, 400, 492], heads=(64, 64), **BF16),
    "sinks and a gradient of lse": documents([900, 7, 1, 64, 500], heads=(64, 8), **BF16, sinks=True, lse_grad=True),
    "sinks in a window": documents([1700, 50], "window", 128, heads=(16, 2), **BF16, stages=2, sinks=True),
    "softcap and sinks, head_dim 64": documents(
        [700, 201], heads=(8, 2), dtype=torch.bfloat16, head_dim=64, stages=0, softcap=20.0, sinks=True
    ),
    "head_dim 192, values 128": documents(
        [900, 211, 33], heads=(8, 8), dtype=torch.bfloat16, head_dim=192, value_dim=128, lse_grad=True
    ),
    "head_dim 256, softcap": documents(
        [700, 201, 90], heads=(8, 2), dtype=torch.float16, head_dim=256, stages=2, softcap=50.0
    ),
    "head_dim 256": documents([900, 211, 33], heads=(8, 2), dtype=torch.bfloat16, head_dim=256),
    "a window beside full attention": documents(
        [1200, 90, 311], "window", 64, heads=(8, 2), **BF16, sinks=True, beside=BESIDE
    ),
    **{f"random slices {n}": random_slices(n, 500 + 77 * n, heads=(8, 2), **BF16, stages=n % 4) for n in range(8)},
}


def travel_by(way):
    """From now on; "mixed": large exchanges in pieces, smaller ones fetched, the smallest written."""
    peer.WRITTEN_BYTES = {"fetched": 0, "pieces": 0, "mixed": 1 << 15}.get(way, WRITTEN_BYTES)
    peer.MAX_SLOT_BYTES = {"pieces": 1 << 18, "mixed": 1 << 16}.get(way, MAX_SLOT_BYTES)  # a row for each rank
    process_group_transport(dist.group.WORLD).prepared.cache_clear()


def run_on_rank(names, way):
    mesh = ProcessGroupTransport(dist.group.WORLD) if way == "NCCL" else dist.group.WORLD
    travel_by(way)
    backend = "flex" if way == "flex" else "auto"
    results = [run_case(CASES[name], dist.get_world_size(), mesh, "cuda", backend) for name in names]
    return [{tensor: value.cpu() for tensor, value in result.items()} for result in results]


@pytest.mark.parametrize("way", ["written", "fetched", "pieces", "NCCL", "flex"])
def test_every_case(pool, way):
    names = ["no overlap", "four stages"] if way == "flex" else list(CASES)
    results = pool.run(run_on_rank, names, way)
    for name, *per_rank in zip(names, *results, strict=True):
        check(CASES[name], per_rank, "cuda")


def first_run_on_rank(name):
    travel_by("fetched")
    launch.load.cache_clear()  # so that kernels are loaded again
    return {
        tensor: x.cpu() for tensor, x in run_case(CASES[name], dist.get_world_size(), dist.group.WORLD, "cuda").items()
    }


@pytest.mark.parametrize("name", ["GQA 8:1", "head_dim 256"])
def test_kernels_are_loaded_while_ranks_wait_for_each_other(pool, name):
    check(CASES[name], pool.run(first_run_on_rank, name), "cuda")


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_every_case_by_loopback_on_one_gpu(size, name):
    case = CASES[name]
    check(case, Loopback(size).run(lambda transport: run_case(case, size, transport, "cuda")), "cuda")


def transport_on_rank():
    return type(process_group_transport(dist.group.WORLD)) is PeerTransport


def test_ranks_of_one_machine_use_peer_memory(pool):
    assert all(pool.run(transport_on_rank))


def ended_on_rank():
    """Whether a transport let go of its memory with its group; bytes that came free on the device; its memory."""
    travel_by("written")
    group = dist.new_group(list(range(dist.get_world_size())))
    run_case(CASES["GQA 64:8"], dist.get_world_size(), group, "cuda")
    transport = process_group_transport(group)
    held = transport.num_bytes
    torch.cuda.synchronize()
    dist.barrier()
    before = torch.cuda.mem_get_info()[0]
    dist.destroy_process_group(group)
    del group
    gc.collect()
    dist.barrier()
    return transport.memory is None, torch.cuda.mem_get_info()[0] - before, held


def test_symmetric_memory_ends_with_its_group(pool):
    for ended, freed, held in pool.run(ended_on_rank):
        assert ended
        assert freed >= held


def grown_on_rank(keep):
    """What an exchange that grows raises when PyTorch's allocator has nearly all of the GPU: "" or the error.

    keep: whether rank 0 uses that memory, or it lies in the cache of all ranks.
    """
    travel_by("written")
    group, size = dist.new_group(list(range(dist.get_world_size()))), dist.get_world_size()
    run_case(CASES["GQA 64:8"], size, group, "cuda")
    held = process_group_transport(group).num_bytes
    tokens = 2**16  # K/V of 256 MiB: slots of 2 GiB together
    plan = magi.make_plan(magi.varlen_causal([0, tokens * size]), tokens * size, size, 0)
    k = torch.randn(tokens, 8, 128, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    left = 5 * 2**26 if keep else 2**30
    filling = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda")
    if not (keep and dist.get_rank() == 0):
        del filling
    try:
        with torch.no_grad():
            magi.cp_varlen_attn(k, k, k, plan, group)
        torch.cuda.synchronize()
        assert process_group_transport(group).num_bytes > held
    except RuntimeError as error:
        return str(error)
    finally:
        filling = None
        torch.cuda.empty_cache()  # for what NCCL takes in the tests to come
    return ""


def test_rows_find_memory_that_the_allocator_keeps(pool):
    assert set(pool.run(grown_on_rank, False)) == {""}


def test_a_rank_without_memory_for_rows_ends_all(pool):
    for error in pool.run(grown_on_rank, True):
        assert "MiB of each GPU outside PyTorch's allocator, and one has only" in error


def deterministic_step(case):
    """A forward and a backward of this rank: out, lse, dq, dk, dv."""
    plan = magi.make_plan(case.slices, len(case.mask), dist.get_world_size(), case.stages)
    rank = dist.get_rank()
    device = torch.device("cuda", rank)
    block_attn = choose_block_attn("ffa", device, deterministic=True)
    bound = bind_plan(plan, dist.group.WORLD, block_attn, *case.heads, device)
    handle = PlanHandle(bound).tensor
    local = [x[plan.ranks[rank].tokens % len(x)].to(device) for x in inputs(case)]
    q, k, v = (x.requires_grad_() for x in local[:3])

    def step():
        out, lse = attention_op(q, k, v, handle, case.head_dim**-0.5)
        return (out, lse, *torch.autograd.grad(out, (q, k, v), local[3]))

    return step


def repeat_on_rank(cases, times, way):
    """The same bits from `times` runs of attention by turns, without the host ever waiting for the device."""
    travel_by(way)
    steps = [deterministic_step(case) for case in cases]
    first = []
    for step in steps:
        first.append(step())
        torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        runs = [(i, steps[i]()) for _ in range(times) for i in range(len(steps))]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return all(torch.equal(a, b) for i, run in runs for a, b in zip(run, first[i], strict=True))


@pytest.mark.parametrize("way", ["written", "fetched", "pieces"])
@pytest.mark.parametrize("name", ["GQA 64:8", "GQA 8:1", "no overlap"])
def test_fifty_deterministic_runs_give_the_same_bits_and_never_wait_for_the_device(pool, name, way):
    assert all(pool.run(repeat_on_rank, [CASES[name]], 50, way))


def test_exchanges_of_all_sizes_follow_each_other(pool):
    """One, two, and many pieces, written and fetched, on the same slots."""
    sizes = [[900, 211, 400], [64], [100], [7], [1900], [150], [70]]
    cases = [documents(lengths, heads=(8, 2), **BF16, stages=0) for lengths in sizes]
    assert all(pool.run(repeat_on_rank, cases, 10, "mixed"))


def memory_on_rank(num_stages):
    """Bytes at the peak of a layer's forward and of its backward beyond its inputs, and what they may be."""
    travel_by("written")
    heads, head_dim, tokens = (64, 8), 128, 4096
    total = tokens * dist.get_world_size()
    plan = magi.make_plan(magi.varlen_causal([0, total]), total, dist.get_world_size(), num_stages)
    rank, device = dist.get_rank(), torch.device("cuda", dist.get_rank())
    handle = PlanHandle(bind_plan(plan, dist.group.WORLD, choose_block_attn("ffa", device), *heads, device)).tensor
    q, k, v, dout = (
        torch.randn(tokens, n, head_dim, device=device, dtype=torch.bfloat16)
        for n in (heads[0], *heads[1:] * 2, heads[0])
    )
    q, k, v = (x.requires_grad_() for x in (q, k, v))

    def peak_of(run):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        return torch.cuda.max_memory_allocated() - before, result

    peaks = []
    for _ in range(2):  # the first one also makes what stays
        forward, (out, _) = peak_of(lambda: attention_op(q, k, v, handle, head_dim**-0.5))
        backward, _ = peak_of(lambda out=out: torch.autograd.grad(out, (q, k, v), dout))
        peaks = forward, backward
    stages = plan.ranks[rank].forward
    arriving = sorted((sum(map(len, (e.send_rows for e in s.exchanges))), s.num_rows) for s in stages if s.exchanges)
    row = 2 * heads[1] * head_dim  # elements of a K/V row
    sent, received = max(n for n, _ in arriving), sum(n for _, n in arriving[-2:])
    lse_bytes, local = tokens * heads[0] * 4, q.numel()
    may_forward = 2 * local + lse_bytes + 4 * local + 2 * row * (sent + received)
    own = tokens * row * (2 + 4)  # dk, dv, and their sums
    may_backward = (4 + 2) * local + lse_bytes + own + 2 * row * (2 * sent + 2 * received)
    return *peaks, may_forward, may_backward


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_layer_takes_the_memory_of_two_stages(pool, num_stages):
    for forward, backward, may_forward, may_backward in pool.run(memory_on_rank, num_stages):
        assert forward <= 1.01 * may_forward
        assert backward <= 1.01 * may_backward
