"""Layers that offload what they save: gradients are those of layers that do not, and the GPU's memory is freed."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.gpus import needs_hopper
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_magi.training.activations import offload
from torchtitan_magi.training.activations.host_memory import Copies, HostMemory, as_bytes
from torchtitan_magi.training.activations.offload import Offloader

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_hopper])]
LAYERS, DIM = 8, 64
MIB = 1 << 20


class Block(nn.Module):
    """A feed-forward whose input is scaled by something that all blocks get."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x, scale):
        return x + self.second(functional.silu(self.first(x * scale)))


def products_kept(ctx, func, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if func == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


KEPT = {
    "all": lambda block: block,
    "products": lambda block: checkpoint_wrapper(
        block, context_fn=lambda: create_selective_checkpoint_contexts(products_kept), early_stop=False
    ),
    "inputs": lambda block: checkpoint_wrapper(block, early_stop=False),
}


def blocks(kept, device, compiled=""):
    torch.manual_seed(0)
    found = [KEPT[kept](Block().to(device)) for _ in range(LAYERS)]
    if compiled == "by torch.compile":
        return nn.ModuleList(torch.compile(block, fullgraph=True) for block in found)
    for block in found if compiled else ():
        block.compile(fullgraph=True)
    return nn.ModuleList(found)


def train(model, device, tokens=32, steps=3, aside=lambda: None):
    """Gradients of all weights and of the input after some steps, and the most memory of the last one.

    Args:
        aside: what is done before each forward, and again before its backward.
    """
    peak = 0
    for step in range(steps):
        aside()
        torch.manual_seed(step)
        first, scale = torch.randn(2, tokens, DIM, device=device)
        x = first.requires_grad_()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for block in model:
            x = block(x, scale)
        aside()
        x.square().mean().backward()
        if device == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
    return [first.grad, *(weight.grad for weight in model.parameters())], peak


@pytest.fixture
def small(monkeypatch):
    """Small tensors leave as well, and copies of a GPU lag behind as those of large ones do."""
    copy = Copies._copy

    def late(copies, way, to, source):
        for stream in copies._streams[way : way + 1]:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1 << 19)  # a quarter of a millisecond
        return copy(copies, way, to, source)

    monkeypatch.setattr(Copies, "_copy", late)
    monkeypatch.setattr(offload, "SMALL", 16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", ["", "in place", "by torch.compile"])
@pytest.mark.parametrize("kept", KEPT)
def test_gradients_are_those_of_layers_that_do_not_offload(kept, compiled, device, small):
    expected, _ = train(blocks(kept, device, compiled), device)
    model, offloader = blocks(kept, device, compiled), Offloader(torch.device(device))
    offloader.wrap(list(model[:-2]), model)
    found, _ = train(model, device)
    assert all(map(torch.equal, found, expected))
    taken = offloader.num_bytes
    assert taken > 0
    memory = offloader._copies.memory
    gc.collect()
    assert len(memory._free) == len(memory._all)  # all given back
    train(model, device)
    assert offloader.num_bytes == taken  # and used again
    offloader.close()
    assert offloader.num_bytes == 0


def test_what_all_layers_save_leaves_once_and_weights_stay(small):
    model, offloader = blocks("inputs", "cpu"), Offloader(torch.device("cpu"))
    offloader.wrap(list(model), model)
    train(model, "cpu")
    assert offloader.num_bytes == (LAYERS + 1) * 32 * DIM * 4  # an input of each, and the scale
    everything = Offloader(torch.device("cpu"))
    model = blocks("all", "cpu")
    everything.wrap(list(model), model)
    train(model, "cpu")
    weights = sum(weight.numel() for weight in model.parameters()) * 4
    saved = LAYERS * 32 * DIM * 4 * (1 + 4 + 4) + 32 * DIM * 4  # inputs of both products and of the activation; scale
    assert everything.num_bytes == saved < saved + weights
    shared = Offloader(torch.device("cpu"))
    model = blocks("inputs", "cpu")
    shared.wrap(list(model), model)
    model.register_buffer("scale", torch.ones(32, DIM))  # as what a model gets its memory for when layers are wrapped
    x = torch.randn(32, DIM, requires_grad=True)
    for block in list(model):
        x = block(x, model.scale)
    x.sum().backward()
    assert shared.num_bytes == LAYERS * 32 * DIM * 4  # a buffer of the model stays


def test_several_forwards_may_wait_for_their_backward(small):
    """As in a pipeline, and in any order."""
    model, plain = blocks("inputs", "cpu"), blocks("inputs", "cpu")
    Offloader(torch.device("cpu")).wrap(list(model), model)
    found = []
    for blocks_of in (model, plain):
        torch.manual_seed(0)
        outs = []
        for _ in range(3):
            x = torch.randn(32, DIM)
            for block in blocks_of:
                x = block(x, torch.ones(()))
            outs.append(x.square().sum())
        for number in (1, 0, 2):
            outs[number].backward()
        found.append([weight.grad for weight in blocks_of.parameters()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("with_backward", [True, False])
def test_memory_is_freed_only_behind_the_copies_that_read_it(with_backward, small, monkeypatch):
    """That of the last layers as well, which comes back from the GPU, and that of a forward without a backward."""
    departures, waited, copy = [], [], Copies._copy

    def numbered(copies, way, to, source):
        copy(copies, way, to, source)
        departures.extend([len(departures)] * (way == 0))
        return None if way else departures[-1]

    monkeypatch.setattr(Copies, "_copy", numbered)
    monkeypatch.setattr(Copies, "wait", lambda copies, event: waited.append(event))
    model = blocks("all", "cpu")
    Offloader(torch.device("cpu")).wrap(list(model), model)
    x = torch.randn(32, DIM)
    for block in model:
        x = block(x, torch.ones(()))
    if with_backward:
        x.sum().backward()
    del x
    gc.collect()
    assert len(departures) > 2 * LAYERS
    assert set(departures) == set(waited) - {None}


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kept", KEPT)
def test_a_forward_without_gradients_leaves_those_with_alone(kept, without_gradients, small):
    """As a reference's or a validation's: before the first with gradients, and between others and their backward."""
    model, offloader = blocks(kept, "cpu"), Offloader(torch.device("cpu"))
    offloader.wrap(list(model), model)

    def aside():
        before = offloader.num_bytes, [*offloader._recent]
        with without_gradients():
            for block in model:
                block(torch.randn(32, DIM), torch.ones(()))
        assert (offloader.num_bytes, [*offloader._recent]) == before

    aside()
    assert offloader.num_bytes == 0
    expected, _ = train(blocks(kept, "cpu"), "cpu")
    found, _ = train(model, "cpu", aside=aside)
    assert all(map(torch.equal, found, expected))


class Saving(torch.autograd.Function):
    """x, which saves another tensor and tells in the backward what came back."""

    @staticmethod
    def forward(ctx, x, saved, came_back):
        ctx.save_for_backward(saved)
        ctx.came_back = came_back
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.came_back.extend(ctx.saved_tensors)
        return grad, None, None


def distributed(*placements, **read):
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), _init_backend=False, _rank=0)
    whole = TensorMeta(torch.Size([16, DIM]), (DIM, 1), torch.float32)
    local = torch.randn(4, DIM)
    return DTensor(local, DTensorSpec(mesh, placements, whole, **read), requires_grad=False)


MADE_OF_OTHERS = {
    "strided shards that are no order": lambda: distributed(
        _StridedShard(0, split_factor=4), Shard(0), use_strided_shard_as_shard_order=False
    ),
    "strided shards that are an order": lambda: distributed(_StridedShard(0, split_factor=2), Shard(0)),
    "an order of shards": lambda: distributed(Shard(0), Shard(0), shard_order=(ShardOrderEntry(0, (1, 0)),)),
    "another kind": lambda: TwoTensor(torch.randn(4, DIM), torch.randn(4, DIM)),
}


def tensors_of(made):
    return [name for name in made.__tensor_flatten__()[0] if isinstance(getattr(made, name), torch.Tensor)]


@pytest.mark.parametrize("make", MADE_OF_OTHERS.values(), ids=MADE_OF_OTHERS)
def test_a_tensor_made_of_others_comes_back_as_it_was(make, small):
    saved, came_back, offloader = [make() for _ in range(LAYERS)], [], Offloader(torch.device("cpu"))
    model = nn.ModuleList(nn.Module() for _ in saved)
    x = torch.randn(4, requires_grad=True)
    for layer in model:
        layer.forward = lambda x, each: Saving.apply(x, each, came_back)
    offloader.wrap(list(model), model)
    for layer, each in zip(model, saved, strict=True):
        x = layer(x, each)
    x.sum().backward()
    assert offloader.num_bytes >= LAYERS * 4 * DIM * 4
    for found, expected in zip(reversed(came_back), saved, strict=True):
        assert type(found) is type(expected)
        assert getattr(found, "_spec", None) == getattr(expected, "_spec", None)
        assert all(torch.equal(getattr(found, name), getattr(expected, name)) for name in tensors_of(expected))


def test_buffers_serve_tensors_of_about_their_size_and_any_strides():
    memory = HostMemory(False)
    large = memory.take(1000)
    memory.give(large)
    assert memory.take(900) is large
    assert memory.take(500).numel() == 500


@pytest.mark.parametrize(("sizes", "spread", "most"), [((1000,), 0.02, 1.3), ((200, 1000, 4000), 0.3, 1.6)])
def test_sizes_that_change_from_step_to_step_pile_nothing_up(sizes, spread, most):
    """As many bytes as experts' tokens have: the memory was sized for one step's."""
    random, memory, new, peak = np.random.default_rng(0), HostMemory(False), 0, 0
    for step in range(300):
        wanted = (np.resize(sizes, 64) * random.lognormal(0, spread, 64)).astype(int)
        peak, before = max(peak, wanted.sum()), {id(buffer) for buffer in memory._all}
        held = [memory.take(int(num_bytes)) for num_bytes in wanted]
        assert all(len(buffer) >= num_bytes for buffer, num_bytes in zip(held, wanted, strict=True))
        assert len(set(map(id, held))) == 64
        new += len({id(buffer) for buffer in memory._all} - before) if step else 0
        for buffer in reversed(held):
            memory.give(buffer)
    assert memory.num_bytes < most * peak
    assert new < 0.01 * 299 * 64  # to pin memory takes long


def test_copies_are_done_before_a_buffer_makes_way(monkeypatch):
    done = []
    register = {"cudaHostRegister": lambda *_: 0, "cudaHostUnregister": lambda _: done.append("unpinned")}
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(**register), raising=False)
    monkeypatch.setattr(torch.cuda, "check_error", lambda _: None, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    memory = HostMemory(True)
    memory.give(memory.take(1000))
    assert memory.take(1100).numel() == memory.num_bytes == 1100
    assert done == ["waited", "unpinned"]


class Rotated(torch.autograd.Function):
    """x * turn, which saves ``turn`` conjugated, as a compiled layer does, and something negated."""

    @staticmethod
    def forward(ctx, x, turn):
        ctx.save_for_backward(turn, turn.conj(), torch._neg_view(turn.abs()))
        return x * turn

    @staticmethod
    def backward(ctx, grad):
        turn, conjugated, negated = ctx.saved_tensors
        assert torch.equal(turn.abs(), -negated)
        return grad * conjugated, None


class Rotating(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, scale):
        turn = torch.polar(torch.ones_like(scale), scale)
        return torch.view_as_real(Rotated.apply(torch.complex(self.first(x), x), turn)).sum(-1)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_read_conjugated_comes_back_right(device, small):
    """PyTorch conjugates what it copies to the host there, before an asynchronous copy has arrived."""
    found = []
    for offloads in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleList(Rotating() for _ in range(LAYERS)).to(device)
        if offloads:
            Offloader(torch.device(device)).wrap(list(model), model)
        found.append(train(model, device, tokens=4096)[0])
    assert all(map(torch.equal, *found))


def test_copies_are_of_memory_in_its_own_order():
    x, copies = torch.arange(6.0).reshape(2, 3).t(), Copies(torch.device("cpu"))
    buffer, _ = copies.to_host(x)
    assert torch.equal(buffer.view(torch.float32), torch.arange(6.0))
    back = torch.empty_like(x)
    copies.from_host(back, buffer)
    assert back.stride() == x.stride()
    assert torch.equal(back, x)
    with pytest.raises(RuntimeError, match="conj"):
        as_bytes(torch.ones(2, dtype=torch.complex64).conj())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("compiled", ["", "in place"])
@pytest.mark.parametrize("kept", KEPT)
def test_the_gpu_holds_two_layers_less_what_is_on_its_way(kept, compiled):
    tokens = 1 << 18  # 64 MiB of inputs
    _, whole = train(blocks(kept, "cuda", compiled), "cuda", tokens)
    model, offloader = blocks(kept, "cuda", compiled), Offloader(torch.device("cuda"))
    offloader.wrap(list(model), model)
    _, some = train(model, "cuda", tokens)
    held = offloader.num_bytes
    assert held > LAYERS * 60 * MIB
    assert whole - some > 0.4 * held * (LAYERS - 4) / LAYERS
    offloader.close()
    assert offloader.num_bytes == 0
