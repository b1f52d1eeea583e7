"""Gradients that FSDP2 reduces into memory of the computing stream: the same, and free for activations afterwards."""

import contextlib
import importlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.gpus import needs_hopper
from support.runs import ADAPTER, IS_0_3, train
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from torchtitan_magi.training import reductions

from test_experts import arguments  # isort: skip

LAYERS, DIM = 8, 4096  # each gradient is a block of the allocator by itself
CAST = _fsdp_collectives._to_dtype_if_needed  # FSDP2's own
MODELS = f"{ADAPTER}.models" if IS_0_3 else f"{ADAPTER}.spec"


def late(allocate):
    """Memory of a reduction that a GPU starts late, so that what is freed too early would be written over."""
    computing = torch.cuda.current_stream()

    def allocate_late(self, *arguments, **options):
        if torch.cuda.current_stream() != computing:
            torch.cuda._sleep(20_000_000)
        return allocate(self, *arguments, **options)

    return allocate_late


def trained(model, look=lambda: None):
    """Gradients of each step, of two backwards; look() is called after each."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), lr=1e-3)
    device = next(model.parameters()).device
    for step in range(3):
        for microbatch in range(2):
            torch.manual_seed(2 * step + microbatch)
            width = model[0].in_features
            model(torch.randn(256, width, device=device)).square().mean().backward()
            look()
        found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def sharded(dtype, width, device):
    """Layers of a dtype, each a group of parameters of its own."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False, device=device, dtype=dtype) for _ in range(LAYERS)))
    for part in (*layers, layers):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    return layers


def both(backend, device, dtype, width, monkeypatch, measured):
    """What is measured of a model as FSDP2 reduces its gradients, and as ours does."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(_fsdp_collectives, "_to_dtype_if_needed", CAST)
    try:
        results = []
        for ours in (False, True):
            model = sharded(dtype, width, device)
            for module in model.modules() if ours else ():
                if isinstance(module, FSDPModule):
                    reductions.reduce_in_memory_of_activations(module)
            results.append(measured(model))
        return results
    finally:
        dist.destroy_process_group()


def gradients_and_memory(model):
    """Gradients; bytes that the allocator had at most; and those that it has to take afterwards for as much memory as
    gradients had."""
    torch.cuda.empty_cache()  # what other tests left would serve as well
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    kind = type(model[0]._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm)
    with mock.patch.object(kind, "allocate", late(kind.allocate)):
        found = trained(model)
    torch.cuda.synchronize()
    most, before = torch.cuda.max_memory_reserved() - before, torch.cuda.memory_reserved()
    kept = [torch.empty_like(grad) for grad in found[:LAYERS]]
    taken = torch.cuda.memory_reserved() - before
    del kept
    torch.cuda.empty_cache()
    return found, most, taken


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # of weights
@pytest.mark.parametrize("beside", [False, True])  # on another stream than the default one
def test_gradients_are_the_same_and_their_memory_serves_activations(monkeypatch, dtype, beside):
    with torch.cuda.stream(torch.cuda.Stream()) if beside else contextlib.nullcontext():
        plain, ours = both("nccl", "cuda", dtype, DIM, monkeypatch, gradients_and_memory)
    (expected, of_plain, apart), (found, of_ours, together) = plain, ours
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    gradients = dtype.itemsize * DIM * DIM * LAYERS
    assert apart >= gradients // 2
    assert together <= gradients // 4
    assert of_ours <= of_plain + gradients // 4  # what does not stay does not pile up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hooked", [False, True])  # by what may free gradients in the backward
def test_only_results_that_stay_take_memory_of_the_stream_that_computes(monkeypatch, dtype, hooked):
    def recorded(context, stream, make):
        taken.append((torch.cpu.current_stream() is context.reduce_scatter_stream, stream is computing))
        made = on_another_stream(context, stream, make)
        assert made.dtype == dtype
        return made

    def measured(model):
        for parameter in model.parameters() if hooked else ():
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        look = lambda: (of_backwards.append(taken[:]), taken.clear())  # noqa: E731
        return trained(model, look)

    taken, of_backwards, computing = [], [], torch.cpu.current_stream()
    on_another_stream = reductions._on_another_stream
    monkeypatch.setattr(reductions, "_on_another_stream", recorded)
    expected, found = both("gloo", "cpu", dtype, 64, monkeypatch, measured)
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    of_plain, of_ours = of_backwards[:6], of_backwards[6:]
    assert of_plain == [[]] * 6
    of_first = [] if hooked else [(True, True)] * LAYERS
    assert of_ours == [of_first, []] * 3  # those of the second backward are added to the first one's


def as_on_gpus(report):
    """Has a run reduce as on GPUs, in the CPU's memory; reports how FSDP2's groups of each module do."""

    def reduce(module):
        module.set_force_sum_reduction_for_comms(True)
        reductions.reduce_in_memory_of_activations(module)
        groups = module._get_fsdp_state()._fsdp_param_groups
        report("groups", [type(group._reduce_scatter_comm).__name__ for group in groups])

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
