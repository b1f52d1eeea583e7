"""Random weights on a CPU: under every layout those of one process, so each shard has numbers of its own."""

import warnings

import pytest
import torch
from support.pool import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _random
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torchtitan.tools.utils import set_default_dtype

from torchtitan_magi.training.process.cpu import draw_whole_model, draw_whole_tensors

SIZE, SEED = (10, 7), 5  # which the ranks do not divide
PLACEMENTS = {
    "HSDP": [Replicate(), Shard(0)],
    "TP": [Replicate(), Shard(1)],
    "FSDP2 with TP": [Shard(0), Shard(1)],
    "FSDP2 with TP of the same rows": [_StridedShard(0, split_factor=2), Shard(0)],
    "EP with FSDP2": [Shard(1), Shard(0)],
    "replicated": [Replicate(), Replicate()],
}
INITS = {
    "normal": nn.init.normal_,
    "truncated": lambda x: nn.init.trunc_normal_(x, std=0.5),
    "as adapters": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
}


@pytest.fixture(scope="module")
def four_ranks():
    with RankPool(4) as pool:
        yield pool


def empty(mesh, placements):
    shape, _ = compute_local_shape_and_global_offset(SIZE, mesh, placements)
    local = torch.full(shape, torch.nan)
    x = DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(SIZE), stride=(SIZE[1], 1))
    return nn.Parameter(x)


def shard_and_place(x):
    """What this rank has, and where that lies in the whole, by what checkpoints are written with."""
    return x.to_local(), compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)[1]


def drawn():
    """By kind of numbers and placements, this rank's shard and its place."""
    draw_whole_tensors()
    mesh, found = init_device_mesh("cpu", (2, 2)), {}
    with warnings.catch_warnings(action="error", category=UserWarning), torch.no_grad():
        for kind, init in INITS.items():
            _random.manual_seed(SEED, mesh)
            for name, placements in PLACEMENTS.items():
                found[kind, name] = shard_and_place(init(empty(mesh, placements)))
    return found


def of_whole(whole, shard, place):
    return whole[tuple(slice(start, start + size) for start, size in zip(place, shard.shape, strict=True))]


def test_shards_are_parts_of_what_one_process_draws(four_ranks):
    ranks = four_ranks.run(drawn)
    for kind, init in INITS.items():
        torch.manual_seed(SEED)
        for name in PLACEMENTS:
            whole = init(torch.empty(SIZE))
            for found in ranks:
                shard, place = found[kind, name]
                assert torch.equal(shard, of_whole(whole, shard, place)), (kind, name)


class Model(nn.Module):
    """Two layers, of which a part has one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(SIZE[1], SIZE[0], bias=False) for name in ("0", "1")})

    def init_weights(self, **options):
        self.options = options
        for layer in self.layers.values():
            nn.init.normal_(layer.weight)


def drawn_by_parts():
    """This rank's shard and its place, of each part."""
    draw_whole_tensors()
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for stage in (0, 1):
        part = Model()
        del part.layers[str(1 - stage)]
        (layer,) = part.layers.values()
        layer.weight = empty(mesh, PLACEMENTS["HSDP"])
        torch.manual_seed(SEED + stage)
        draw_whole_model(part, Model, stage, set_default_dtype)
        with torch.no_grad():
            part.init_weights(buffer_device=None)
        assert part.options == {"buffer_device": None}
        found.append(shard_and_place(layer.weight.detach()))
    return found


def test_the_parts_of_a_pipeline_have_the_weights_of_one_process(four_ranks):
    torch.manual_seed(SEED)
    whole = Model()
    torch.manual_seed(SEED)
    whole.init_weights()
    for found in four_ranks.run(drawn_by_parts):
        for (shard, place), layer in zip(found, whole.layers.values(), strict=True):
            assert torch.equal(shard, of_whole(layer.weight, shard, place))
