"""The FFA kernel on a Hopper GPU, against an fp64 dense reference: cases and budget of benchmarks/check_kernel.py."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import runs  # noqa: F401  # puts benchmarks/ on the path
from support.gpus import needs_hopper

from check_kernel import named_cases, on_gpu, random_case, run_case  # isort: skip

from torchtitan_magi import AttnSlices, flex_flash_attn, sliding_window, varlen_causal
from torchtitan_magi.backends.ffa import backward_lists
from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.backends.interface import StageInputs, StageMask

pytestmark = [pytest.mark.gpu, needs_hopper]


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", range(5))
def test_random_slice_lists_are_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    for i in range(40):
        case = random_case(rng)
        _, problems = run_case(case, i)
        assert not problems, (case, problems)


def test_masks_users_have_are_within_the_budget() -> None:
    for case in named_cases():
        _, problems = run_case(case, 0)
        assert not problems, (case, problems)


def test_empty_inputs() -> None:
    for num_q, num_k, slices in ((0, 5, []), (5, 0, []), (0, 0, []), (130, 200, []), (1, 1, [[0, 1, 0, 1, 1]])):
        q, k, v = (torch.randn(n, 8, 64, device="cuda").bfloat16().requires_grad_() for n in (num_q, num_k, num_k))
        out, lse = flex_flash_attn(q, k, v, AttnSlices(slices), deterministic=False)
        out.sum().backward()
        if not slices:
            assert (out == 0).all()
            assert lse.isneginf().all()
        for x in (q, k, v):
            assert x.grad is not None
            assert not x.grad.isnan().any()


@pytest.mark.parametrize("backend", ["ffa", "flex"])
@pytest.mark.parametrize("slices", [[], [[5, 300, 5, 300, 1], [400, 470, 0, 9, 0]]])
def test_a_sink_of_minus_infinity_is_no_sink(backend: str, slices: list[list[int]]) -> None:
    """Also in rows that see nothing."""
    base = torch.randn(3, 500, 8, 64, device="cuda").bfloat16()
    results = []
    for first in (None, -torch.inf, 0.0):
        q, k, v = (x.clone().requires_grad_() for x in base)
        sinks = None if first is None else torch.linspace(-1, 1, 8, device="cuda")
        if first == -torch.inf:
            sinks[0] = first
        sinks = sinks if sinks is None else sinks.requires_grad_()
        out, lse = flex_flash_attn(q, k, v, AttnSlices(slices), sinks=sinks, backend=backend, deterministic=True)
        (out.float().sum() + lse[lse.isfinite()].sum()).backward()
        found = [out, *(x.grad for x in (q, k, v)), lse[..., None]]
        results.append((torch.cat(found, -1).detach(), sinks if sinks is None else sinks.grad))
    (without, _), (mixed, grads), (finite, other) = results
    torch.testing.assert_close(mixed[:, 0], without[:, 0], rtol=1e-2, atol=1e-2)
    assert torch.equal(mixed[:, 1:], finite[:, 1:])
    assert torch.equal(grads[1:], other[1:])
    assert grads[0] == 0


@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_a_sink_that_is_no_number_shows(head_dim: int) -> None:
    q, k, v = torch.randn(3, 200, 4, head_dim, device="cuda").bfloat16()
    sinks = torch.tensor([torch.nan, torch.inf, 0.0, -torch.inf], device="cuda")
    out, lse = flex_flash_attn(q, k, v, varlen_causal([0, 200]), sinks=sinks)
    assert out[:, 0].isnan().all()
    assert lse[:, 0].isnan().all()
    assert lse[:, 1].isposinf().all()
    assert out[:, 1:].isfinite().all()


def test_tensors_at_odd_addresses() -> None:
    def odd(*shape: int) -> torch.Tensor:
        return torch.randn(1 + math.prod(shape), device="cuda").bfloat16()[1:].view(shape)

    q, k, v, dout = (odd(100, heads, 64) for heads in (8, 2, 2, 8))
    results = []
    for move in (lambda x: x, torch.clone):
        inputs = [move(x).requires_grad_() for x in (q, k, v)]
        out, _ = flex_flash_attn(*inputs, varlen_causal([0, 30, 100]), deterministic=True)
        results.append((out, *torch.autograd.grad(out, inputs, move(dout))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_deterministic_backward_ends_while_another_kernel_holds_an_sm() -> None:
    """Items wait for earlier ones, so none may belong to a block that has no room yet: with NCCL that can deadlock."""
    q, k, v = (torch.randn(16384, heads, 128, device="cuda").bfloat16().requires_grad_() for heads in (8, 8, 8))
    out, _ = flex_flash_attn(q, k, v, varlen_causal([0, 16384]), deterministic=True)
    dout = torch.randn_like(out)
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(4_000_000_000)  # about two seconds
        awake = side.record_event()
    torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    torch.cuda.current_stream().synchronize()
    assert not awake.query()


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize(
    ("slices", "deterministic"),
    [
        (sliding_window([0, 16384], 120), False),
        (varlen_causal(range(0, 16385, 256)), False),
        (sliding_window([0, 16384], 120), True),
        (varlen_causal([0, 1000, *range(2000, 16385, 2048), 16384]), True),
    ],
)
def test_dq_that_is_stored_where_it_begins_is_that_added_to_zeros(
    dims: tuple[int, int], slices: AttnSlices, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tiles see a query, whose sum does not depend on who comes first; or there is an order. All SMs meet at the
    same queries."""
    if not deterministic and dims[0] <= backward_lists.WIDER_THAN:
        pytest.skip("starts from zeros")
    shapes = (64, dims[0]), (8, dims[0]), (8, dims[1])
    q, k, v = (torch.randn(16384, *shape, device="cuda").bfloat16().requires_grad_() for shape in shapes)
    out, _ = flex_flash_attn(q, k, v, slices, deterministic=deterministic)
    dout, marks, made = torch.randn_like(out), FfaBlockAttn.marks, []

    def noted(*of: Any) -> torch.Tensor | None:
        made.append(marks(*of))
        return made[-1]

    monkeypatch.setattr(FfaBlockAttn, "marks", lambda *_: None)
    (from_zeros,) = torch.autograd.grad(out, q, dout, retain_graph=True)
    monkeypatch.setattr(FfaBlockAttn, "marks", noted)
    for _ in range(20):
        (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
        assert torch.equal(dq, from_zeros)
    assert len(made) == 20
    assert all(x is not None for x in made)


def test_what_the_kernel_does_not_take_is_an_error() -> None:
    attn = FfaBlockAttn("cuda")
    mask = on_gpu(attn.prepare(StageMask(varlen_causal([0, 16]), 16, 16, 4, 4, head_dim=64)))

    def call(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, tokens: int = 16, scale: float = 0.1) -> None:
        q, k, v = (torch.randn(tokens, 4, head_dim, device="cuda").to(dtype) for _ in range(3))
        attn.forward(StageInputs(q, k, v, mask, scale))

    call()
    for wrong, match in (
        ({"dtype": torch.float32}, "bfloat16"),
        ({"head_dim": 264}, "head_dim"),
        ({"head_dim": 20}, "head_dim"),
        ({"tokens": 17}, "work lists"),
        ({"scale": 0.0}, "softmax_scale"),
    ):
        with pytest.raises(ValueError, match=match):
            call(**wrong)
    with pytest.raises(ValueError, match="flex"):
        FfaBlockAttn("cpu")
