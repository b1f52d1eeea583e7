"""Log-probabilities from chunks and from shares of the vocabulary are those of log_softmax."""

import pytest
import torch
from support.errors import value_errors
from support.processes import python
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_magi.losses.logprobs import LogitCap, _rounded_in_place, summed_logprobs, token_logprobs

VOCABULARY, WIDTH = 24, 5


def case(num_tokens, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator, dtype=torch.float64) for n in (num_tokens, VOCABULARY))
    targets = torch.randint(0, VOCABULARY, (num_tokens,), generator=generator)
    targets[::3] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def plain(hidden, weight, targets, cap=None):
    logits = hidden @ weight.T
    if cap is not None:
        logits = cap.limit * torch.tanh(cap.scale * logits / cap.limit)
    logprobs = logits.log_softmax(1)
    picked = logprobs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return picked.where(targets != -100, 0)


def scale(targets):
    """Another weight for each token."""
    return torch.arange(1.0, len(targets) + 1)


def plain_sum(hidden, weight, targets, **options):
    return (plain(hidden, weight, targets, **options) * scale(targets)).sum()


def scaled_sum(hidden, weight, targets, **options):
    return summed_logprobs(hidden, weight, targets, scale(targets), **options)


def with_gradients(function, hidden, weight, targets, **options):
    """Log-probabilities or their scaled sum, and the gradients of a sum of them in which each has another weight."""
    logprobs = function(hidden, weight, targets, **options)
    return [logprobs.detach(), *torch.autograd.grad((logprobs * scale(targets)).sum(), (hidden, weight))]


NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOTH = [(token_logprobs, plain), (scaled_sum, plain_sum)]


def test_the_sum_counts_tokens_alike_without_a_scale_and_needs_no_gradient():
    hidden, weight, targets = case(10)
    with torch.no_grad():
        assert not summed_logprobs(hidden, weight, targets).requires_grad
    torch.testing.assert_close(summed_logprobs(hidden, weight, targets), plain(hidden, weight, targets).sum())
    frozen = summed_logprobs(hidden, weight.detach(), targets)
    (gradient,) = torch.autograd.grad(frozen, hidden)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain(hidden, weight, targets).sum(), hidden)[0])


@pytest.mark.parametrize(("function", "reference"), BOTH)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 7, 100, None])
def test_it_is_log_softmax_whatever_the_chunk(chunk, compiled, function, reference):
    got = with_gradients(function, *case(10), chunk=chunk, compiled=compiled)
    for ours, exact in zip(got, with_gradients(reference, *case(10)), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("function", "reference"), BOTH)
@pytest.mark.parametrize("compiled", [False, True])
def test_capped_logits(compiled, function, reference):
    cap = LogitCap(0.7, 1.5)  # of products up to about 5
    got = with_gradients(function, *case(10), chunk=4, compiled=compiled, cap=cap)
    for ours, exact in zip(got, with_gradients(reference, *case(10), cap=cap), strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("function", [token_logprobs, summed_logprobs])
@pytest.mark.parametrize("odd", [VOCABULARY, -1, -101])
def test_a_target_outside_the_vocabulary_is_an_error(odd, function):
    hidden, weight, targets = case(7)
    targets[4] = odd
    with pytest.raises(ValueError, match=rf"^target {odd} is outside the vocabulary of {VOCABULARY} tokens; .* -100$"):
        function(hidden, weight, targets, chunk=3)


@pytest.mark.parametrize("num_tokens", [0, 6])
def test_no_target_gives_zeros(num_tokens):
    hidden, weight, targets = case(num_tokens)
    for tensor in with_gradients(token_logprobs, hidden, weight, torch.full_like(targets, -100), chunk=4):
        assert not tensor.any()
    assert with_gradients(token_logprobs, hidden, weight, targets)[1].shape == hidden.shape


@pytest.mark.parametrize(("function", "reference"), BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_gives_float32_and_gradients_in_the_inputs_dtype(dtype, function, reference):
    got = with_gradients(function, *case(10, dtype), chunk=3)
    assert [tensor.dtype for tensor in got] == [torch.float32, dtype, dtype]
    hidden, weight, targets = case(10, dtype)
    wanted = with_gradients(reference, hidden.double(), weight.double(), targets)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, exact in zip(got, wanted, strict=True):
        assert (ours.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize("function", [token_logprobs, summed_logprobs])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_second_derivatives_are_refused(dtype, function):
    hidden, weight, targets = case(10, dtype)
    logprobs = function(hidden.detach(), weight, targets)
    with pytest.raises(RuntimeError, match="log-probabilities have no second derivatives; take"):
        torch.autograd.grad(logprobs.sum(), weight, create_graph=True)


@pytest.mark.parametrize("function", [token_logprobs, scaled_sum])
def test_a_weight_may_lie_transposed_in_memory(function):
    hidden, weight, targets = case(10, torch.bfloat16)
    transposed = weight.detach().T.contiguous().T.requires_grad_()
    expected = with_gradients(function, hidden, weight, targets)
    torch.testing.assert_close(with_gradients(function, hidden, transposed, targets), expected)


def test_autocast_decides_the_dtype_of_the_logits():
    hidden, weight, targets = case(10, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs = token_logprobs(hidden, weight, targets)
    assert torch.equal(logprobs, token_logprobs(hidden.bfloat16(), weight.bfloat16(), targets))
    gradients = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 2


def test_large_logits_stay_finite():
    hidden, weight, targets = case(9, torch.float32)
    got = with_gradients(token_logprobs, 1e4 * hidden, weight, targets, chunk=2)
    assert all(tensor.isfinite().all() for tensor in got)


class NewMemory(TorchDispatchMode):
    """Elements of the largest tensor in memory of its own that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(
    ("function", "options", "tokens"),
    [(token_logprobs, {"chunk": 25}, 25), (scaled_sum, {"chunk": 25}, 25), (plain, {}, 100)],
)
def test_no_more_logits_than_those_of_a_chunk_exist_at_a_time(function, options, tokens):
    inputs = case(100)
    with NewMemory() as new:
        with_gradients(function, *inputs, **options)
    assert new.elements == tokens * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_backward_of_a_sum_makes_no_copy_of_the_weights_gradient(dtype):
    hidden, weight, targets = case(10, dtype)
    total = scaled_sum(hidden, weight, targets, chunk=3)
    with NewMemory() as new:
        (gradient,) = torch.autograd.grad(total, weight)
    assert new.elements <= WIDTH
    assert gradient.shape == weight.shape
    assert gradient.dtype == dtype
    with pytest.raises(RuntimeError, match="runs backward once"):
        torch.autograd.grad(total, weight)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 21])
def test_sums_are_rounded_where_they_lie(rows):
    wide = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
    wanted = wide.bfloat16()
    assert torch.equal(_rounded_in_place(wide, torch.bfloat16), wanted)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("function", [scaled_sum, token_logprobs])
def test_a_large_weight_on_a_gpu_has_one_wide_gradient(function):
    vocabulary, width, tokens, chunk = 32768, 2048, 512, 128
    generator = torch.Generator("cuda").manual_seed(0)
    hidden, weight = (
        torch.randn(n, width, generator=generator, device="cuda").div_(width**0.25).bfloat16().requires_grad_()
        for n in (tokens, vocabulary)
    )
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator, device="cuda")
    reference = plain_sum if function is scaled_sum else plain
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    scales = torch.arange(1.0, tokens + 1, device="cuda")

    def gradients(value, inputs):
        return torch.autograd.grad((value if value.ndim == 0 else value * scales).sum(), inputs)

    with torch.device("cuda"):
        exact = gradients(reference(*wide, targets), wide)
        low = gradients(reference(hidden, weight, targets), (hidden, weight))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = gradients(function(hidden, weight, targets, chunk=chunk), (hidden, weight))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 4 * vocabulary * width + 20 * chunk * vocabulary + 2**24  # 2**24: hidden, and cuBLAS
    for ours, plainly, right in zip(found, low, exact, strict=True):
        assert (ours.double() - right).norm() <= 2 * (plainly.double() - right).norm()


OUTSIDE = """
import torch
from torchtitan_magi.losses.logprobs import summed_logprobs
hidden, weight = torch.randn(4, 8, device="cuda"), torch.randn(6, 8, device="cuda")
summed_logprobs(hidden, weight, torch.tensor([1, -100, 6, 2], device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@NEEDS_GPU
def test_a_target_outside_the_vocabulary_on_a_gpu_is_a_failed_assertion():
    ended = python("-c", OUTSIDE, CUDA_VISIBLE_DEVICES="0")
    assert ended.returncode != 0
    assert "a target is outside the vocabulary of 6 tokens" in ended.stdout + ended.stderr


# ------------------------------------------------------------------------------------------- a vocabulary in shares


def on_a_rank(num_tokens, chunk):
    import torch.distributed as dist

    hidden, weight, targets = case(num_tokens)
    rows = VOCABULARY // dist.get_world_size()
    share = weight.detach()[dist.get_rank() * rows :][:rows].clone().requires_grad_()
    options = {"group": dist.group.WORLD, "chunk": chunk}
    return [with_gradients(function, hidden, share, targets, **options) for function, _ in BOTH]


@pytest.mark.parametrize(("num_tokens", "chunk"), [(10, 4), (10, None), (1, 1), (0, 4)])
def test_ranks_that_share_the_vocabulary_get_what_one_gets(three_ranks, num_tokens, chunk):
    results = zip(*three_ranks.run(on_a_rank, num_tokens, chunk), strict=True)
    for of_ranks, (_, reference) in zip(results, BOTH, strict=True):
        logprobs, grad_hidden, grad_weight = with_gradients(reference, *case(num_tokens))
        for ours, _, _ in of_ranks:
            torch.testing.assert_close(ours, logprobs, rtol=1e-12, atol=1e-12)
        added = sum(result[1] for result in of_ranks)
        torch.testing.assert_close(added, grad_hidden, rtol=1e-12, atol=1e-12)
        gathered = torch.cat([result[2] for result in of_ranks])
        torch.testing.assert_close(gathered, grad_weight, rtol=1e-12, atol=1e-12)


def odd_targets_on_a_rank():
    import torch.distributed as dist

    hidden, weight, targets = case(7)
    share = weight.detach()[: VOCABULARY // dist.get_world_size()]

    def logprobs_of(odd):
        targets[4] = odd
        token_logprobs(hidden, share, targets, group=dist.group.WORLD)

    return value_errors(logprobs_of, [(VOCABULARY,), (-1,), (VOCABULARY - 1,)])


def test_a_target_outside_a_shared_vocabulary_is_an_error_on_all_ranks(three_ranks):
    for large, negative, last in three_ranks.run(odd_targets_on_a_rank):
        assert large.startswith(f"target {VOCABULARY} is outside the vocabulary of {VOCABULARY} tokens")
        assert negative.startswith("target -1 is outside")
        assert last is None
