"""What kernels do not take is named; their results are checked on GPUs by test_kernels_gpu.py."""

import re
from unittest import mock

import pytest
import torch
from support import stages
from support.errors import one_line
from support.recurrence import layer_inputs

from torchtitan_magi.linear import kernels
from torchtitan_magi.linear.backend import Tokens
from torchtitan_magi.linear.choose import check_heads, choose_backend
from torchtitan_magi.linear.chunked import Chunked


def tokens_of(dims=(128, 128), dtype=torch.bfloat16):
    *inputs, _ = layer_inputs(3, dims=dims, dtype=dtype)
    return Tokens(*inputs)


def check_on(capability, dims=(128, 128)):
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        check_heads(dims, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_cpus_run_plain_torch(dtype):
    assert isinstance(choose_backend(tokens_of(dtype=dtype)), Chunked)


def test_a_model_that_runs_plain_torch_may_have_any_heads():
    check_heads((96, 64), torch.float32, torch.device("cuda"))
    check_heads((96, 64), torch.bfloat16, torch.device("cpu"))


def test_heads_gpus_and_packages_that_do_not_fit_are_named(monkeypatch):
    with one_line("q, k, v are torch.bfloat16 on a GPU, with heads of 128 and 64; the kernels take heads of 128"):
        check_on((9, 0), (128, 64))
    with one_line(re.escape("a GPU of compute capability 8.0; the kernels need 9.0 (Hopper) or later, give float32")):
        check_on((8, 0))
    missing = mock.Mock(side_effect=ImportError("none", name="flash_qla"))
    monkeypatch.setattr(kernels, "_library", missing)
    with one_line(re.escape("needs the package flash_qla; pip install torchtitan_magi[linear], or give float32")):
        check_on((9, 0))
    monkeypatch.setattr(kernels, "_library", lambda: None)
    monkeypatch.setattr(kernels, "_finds_compiler", lambda: False)
    with one_line(re.escape("nvcc compiles, which is not there; pip install torchtitan_magi[linear]")):
        check_on((9, 0))
    monkeypatch.setattr(kernels, "_finds_compiler", lambda: True)
    check_on((9, 0))


@pytest.mark.parametrize("forgets", [0.01, 3.0, 20.0])
@pytest.mark.parametrize(
    ("lengths", "mapped"),
    [
        ([3, 9, 1], []),
        ([3, 9, 1], [0, 2]),
        ([9, 8, 5], [1]),
        ([9, 3, 2, 10, 3, 4], [0, 1, 3, 5]),
        ([41], [0]),
        ([30], []),
        ([13, 32, 2, 19], [0, 1, 3]),
        ([2, 30, 3, 5, 13, 2], [3, 4]),
    ],
)
def test_stages_make_the_rule(monkeypatch, lengths, mapped, forgets):
    """In both directions, with maps and states, of sequences with and without fragments. Gates are in float32."""
    stages.stand_in(monkeypatch)
    *inputs, dout = layer_inputs(sum(lengths), (2, 4), (6, 6))
    tokens = Tokens(*inputs[:3], forgets * inputs[3].float().double(), inputs[4].float().double())
    both = torch.randn(2, len(lengths), 4, 6, 6, generator=torch.Generator().manual_seed(0)).double()
    states, dends = (dict(enumerate(x)) for x in both)
    every = range(len(lengths))

    def found(backend, states, dends):
        started = backend.start(tokens, lengths, 0.3, mapped)
        maps = [*map(torch.stack, started.maps())] if mapped else []
        started.prepare(states)
        out, kept = started.finish(states)
        started = backend.start_backward(tokens, lengths, 0.3, states, kept, dout, mapped)
        dstates = [torch.stack([*started.state_grads()])] if mapped else []
        started.prepare(every)
        return [x.double() for x in (out, *maps, *dstates, *started.finish(dends))]

    for some in ((states, dends), ({0: states[0]}, {len(lengths) - 1: dends[len(lengths) - 1]}), ({}, {})):
        torch.testing.assert_close(
            found(kernels.Kernels(), *some), found(Chunked(), *some), rtol=1e-4, atol=1e-5 * max(1, forgets)
        )


@pytest.mark.parametrize(
    ("lengths", "mapped", "rows", "sequences"),
    [
        ([3, 9, 2, 10, 3], [1, 3], [14, 22, 24, 3, 11, 12], [3, -1, 1]),  # for the scan alone, the last ones first
        ([3, 9, 2], [], [0], []),
        ([17, 3, 9], [], [20, 28, 29, 0, 8, 16, 17], [2, -1, 0]),  # in fragments
        ([17, 3, 9], [0, 1], [0, 8, 16, 17, 20, 28, 29], [0, 1, 2]),  # neighbours
    ],
)
def test_what_is_scanned_for_maps(monkeypatch, lengths, mapped, rows, sequences):
    stages.stand_in(monkeypatch)
    found = kernels.Fragments.of(lengths, mapped, 4, torch.device("cpu"), back=False)
    assert found.rows.tolist() == rows
    assert found.scanned == sequences
    assert [sequences[place] for place in found.mapped] == mapped


def test_each_stream_has_fragments_of_its_own(monkeypatch):
    stages.stand_in(monkeypatch)
    *inputs, _ = layer_inputs(13, (2, 4), (6, 6))
    found = []
    for stream in (1, 2, 1):
        monkeypatch.setattr(kernels, "stream_of", lambda device, stream=stream: stream)
        found.append(kernels.Kernels().start(Tokens(*inputs), [3, 10], 1.0).inputs.fragments)
    assert found[0] is found[2] is not found[1]
