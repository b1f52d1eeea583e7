"""Fingerprints of weights: the same under every layout, and a reference that is known by one."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_magi.training.objectives.fingerprint import KnownWeights, fingerprint_of_model


def model(names=("first", "second", "third"), change=0.0):
    """Each layer with a bias, which is a buffer, and one with an adapter."""
    layers = nn.ModuleDict()
    for name in names:
        layers[name] = layer = nn.Linear(5, 7, bias=False)
        values = torch.arange(35.0).view(7, 5) / (1 + len(name))
        layer.weight = nn.Parameter(values + change * (name == "second"))
        layer.register_buffer("bias_of_choice", values[0].clone())
    if "first" in layers:
        layers["first"].lora_a = nn.Linear(5, 2, bias=False)
    return layers


def sharded_part():
    """Rank 0 has the first layer, rank 1 the second, rank 2 the third; the second also in shards of all ranks."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (3,))
    part = model(names=[("first", "second", "third")[rank]])
    whole = model()
    whole["second"].weight = nn.Parameter(distribute_tensor(whole["second"].weight.detach(), mesh, [Shard(0)]))
    return fingerprint_of_model([part], group=mesh.get_group()), fingerprint_of_model([whole])


def test_it_is_that_of_one_process_under_every_layout(three_ranks):
    expected = fingerprint_of_model([model()])  # adapters, which are random, are no part of it
    assert three_ranks.run(sharded_part) == [(expected, expected)] * 3
    assert fingerprint_of_model([model(["third"]), model(["first", "second"])]) == expected
    others = [fingerprint_of_model([model(change=0.5)]), fingerprint_of_model([model()], "bfloat16")]
    assert len({expected, *others}) == 3


def test_a_resumed_run_must_have_the_weights_it_began_with(caplog):
    begun, resumed = KnownWeights(), KnownWeights()
    begun.check_weights("'base'", "one", 0, "do this")
    resumed.load_state_dict(begun.state_dict() | {"step": 2})
    resumed.check_weights("'base'", "one", 2, "do this")
    with pytest.raises(ValueError) as error:
        resumed.check_weights("'base'", "two", 2, "do this")
    message = "'base' has the weights [two], but the reference of the run that resumes at step 2 has [one]; do this"
    assert str(error.value) == message

    older = KnownWeights()
    older.load_state_dict({"step": 2})
    with caplog.at_level(logging.WARNING):
        older.check_weights("'base'", "two", 2, "do this")
        older.check_weights("'base'", "two", 2, "do this")  # of validation
    assert [record.message.count("of an earlier version") for record in caplog.records] == [1]
    assert older.state_dict() == begun.state_dict() | {"reference_weights": "two"}
