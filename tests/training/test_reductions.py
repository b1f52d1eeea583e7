"""Gradients that FSDP2 reduces into memory of the computing stream: the same, and free for activations afterwards."""

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
from support.gpus import needs_hopper
from support.runs import ADAPTER, IS_0_3, train
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from torchtitan_magi.training import reductions
from torchtitan_magi.training.reductions import ReduceScatter, fit_reductions

from test_experts import arguments  # isort: skip

LAYERS, DIM = 8, 2048
CAST = _fsdp_collectives._to_dtype_if_needed  # FSDP2's own
MODELS = f"{ADAPTER}.models" if IS_0_3 else f"{ADAPTER}.spec"


def late(kind):
    """A reduction that a GPU starts late, so that what is freed too early would be written over."""

    class Late(kind):
        def allocate(self, *arguments, **options):
            if torch.cuda.current_stream() != torch.cuda.default_stream():
                torch.cuda._sleep(20_000_000)
            return super().allocate(*arguments, **options)

    return Late


def trained(model):
    """Gradients of each step, of two backwards, and bytes that the allocator has to take afterwards for as much memory
    as they had."""
    torch.cuda.empty_cache()  # what other tests left would serve as well
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(3):
        for microbatch in range(2):
            torch.manual_seed(2 * step + microbatch)
            model(torch.randn(256, DIM, device="cuda")).square().mean().backward()
        found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    kept = [torch.empty_like(grad) for grad in found[:LAYERS]]
    taken = torch.cuda.memory_reserved() - before
    del kept
    torch.cuda.empty_cache()
    return found, taken


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of weights
def test_gradients_are_the_same_and_their_memory_serves_activations(monkeypatch, dtype):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False, device="cuda", dtype=dtype) for _ in range(LAYERS)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        results = []
        for kind, cast in ((DefaultReduceScatter, CAST), (ReduceScatter, reductions.to_dtype)):
            monkeypatch.setattr(reductions, "ReduceScatter", late(kind))
            monkeypatch.setattr(reductions, "to_dtype", cast)
            model = copy.deepcopy(layers)
            for part in (*model, model):
                fully_shard(part, mp_policy=policy)
            fit_reductions(model, "cuda", is_replicated=False)
            results.append(trained(model))
    finally:
        dist.destroy_process_group()
    (expected, apart), (found, beside) = results
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    gradients = dtype.itemsize * DIM * DIM * LAYERS
    assert apart >= gradients // 2
    assert beside <= gradients // 4


def as_on_gpus(report):
    """Has a run reduce as on GPUs, in the CPU's memory; reports how FSDP2's groups of each module do."""

    def reduce(module):
        module.set_force_sum_reduction_for_comms(True)
        reductions.reduce_in_memory_of_activations(module)
        groups = module._get_fsdp_state()._fsdp_param_groups
        report("groups", [type(group._reduce_scatter_comm).__name__ for group in groups])

    ReduceScatter.allocate = DefaultReduceScatter.allocate
    importlib.import_module(MODELS).fit_reductions = lambda model, *_: [
        reduce(module) for module in model.modules() if isinstance(module, FSDPModule)
    ]


@pytest.mark.either
def test_all_groups_of_parameters_reduce_so_those_of_experts_too():
    options = arguments({"dp": 2, "ep": 2})
    plain, ours = train(2, options), train(2, options, setup=as_on_gpus)
    assert ours.losses == plain.losses
    groups = [groups for (groups,) in ours.of("groups", 0)]
    assert {kind for kinds in groups for kind in kinds} == {"ReduceScatter"}
    assert max(map(len, groups)) == 1 + IS_0_3  # experts and the rest of a block
