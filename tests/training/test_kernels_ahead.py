"""A run of several ranks compiles the kernels of its layers before the first step."""

import sys
from unittest import mock

import pytest
import torch
from support import stages
from support.recurrence import layer_inputs

from torchtitan_magi.linear import kernels
from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.training import kernels_ahead
from torchtitan_magi.training.kernels_ahead import compile_ahead

CASE = (1, 2), torch.bfloat16


@pytest.fixture(autouse=True)
def tilelang(monkeypatch):
    monkeypatch.setitem(sys.modules, "tilelang", mock.Mock())


def test_kernels_are_called_for_all_kinds_of_sequences(monkeypatch):
    stages.stand_in(monkeypatch)
    monkeypatch.setattr(kernels_ahead, "CHUNK", stages.CHUNK_SIZE)
    monkeypatch.setattr(kernels_ahead, "MOST", 8)
    monkeypatch.setattr(kernels_ahead, "_tokens", lambda num, *_: Tokens(*layer_inputs(num, (1, 2), (6, 6))[:5]))
    found, finish = set(), kernels.KernelsBackward.finish

    def note(backward, dends):
        fragments = backward.inputs.fragments
        found.add((len(fragments.sequences) - 1, fragments.is_cut, len(fragments.mapped) > 0, len(dends) > 0))
        return finish(backward, dends)

    monkeypatch.setattr(kernels.KernelsBackward, "finish", note)
    compile_ahead(*CASE, torch.device("cpu"), 2)
    of_sequences = {(1, False), (1, True), (2, False), (4, False), (8, False)}
    assert found == {(*kind, linked, linked) for kind in of_sequences for linked in (False, True)}


def test_ranks_of_a_node_begin_with_different_kinds(monkeypatch):
    run = mock.Mock()
    monkeypatch.setattr(kernels_ahead, "_tokens", lambda *_: None)
    monkeypatch.setattr(kernels_ahead, "_run", run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    orders = []
    for rank in range(4):
        compile_ahead(*CASE, torch.device("cuda", rank), 4)
        orders.append([call.args for call in run.call_args_list])
        run.reset_mock()
    assert len({str(order[0]) for order in orders}) == 4
    assert all(sorted(order, key=str) == sorted(orders[0], key=str) for order in orders)


def test_a_rank_alone_compiles_in_its_steps(monkeypatch):
    monkeypatch.setattr(kernels_ahead, "_run", mock.Mock(side_effect=AssertionError))
    compile_ahead(*CASE, torch.device("cuda", 0), 1)
