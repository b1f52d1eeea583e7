"""What happens on a GPU only, and can be had on a CPU: FSDP2 moves the inputs, autocast runs norms in float32."""

import pytest
from support.runs import call, train, watch


def move_inputs_as_on_a_gpu(report):
    """torch moves inputs to CUDA devices; here to a device that equals the CPU but is not the same, so it copies."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.utils import _to_kwargs

    from torchtitan_magi.titan.v02.attention import VarlenAttentionWrapper

    pre_forward = FSDPState._root_pre_forward

    def move(self, module, args, kwargs):
        is_root = self._state_ctx.iter_forward_root is None
        args, kwargs = pre_forward(self, module, args, kwargs)
        if is_root:
            (args,), (kwargs,) = _to_kwargs(args, kwargs, torch.device("cpu", 0), False)
            report("moved", len(args))
        return args, kwargs

    def report_plan(_, attention, xq, xk, xv, attention_masks, **kwargs):
        report("owns its plan", hasattr(attention_masks.handle.tensor, "bound_plan"))

    FSDPState._root_pre_forward = move
    watch(VarlenAttentionWrapper, "forward", report_plan)


@pytest.mark.parametrize("entry", ["torchtitan.train", "torchtitan_magi.train"])
def test_the_plan_reaches_the_layers_and_their_backward_although_inputs_are_moved(entry):
    arguments = ["--parallelism.context_parallel_degree", "2", "--training.steps", "2"]
    run = train(2, arguments, entry=entry, setup=move_inputs_as_on_a_gpu)
    assert len(run.losses) == 2
    assert run.of("moved")
    assert run.of("owns its plan")
    assert all(owns for (owns,) in run.of("owns its plan"))


def attend_to_normed_queries():
    """dtypes of the output and of the gradients of float32 q and k and bfloat16 v; whether rounding q and k first gives
    the same output."""
    import torch

    from torchtitan_magi.planning.cost_model import Heads
    from torchtitan_magi.titan.v02.attention import VarlenAttentionWrapper, attention_metadata
    from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount
    from torchtitan_magi.training.settings.options import Magi

    runtime = MagiRuntime(Magi(), None, Heads(4, 2, 8), torch.device("cpu"), WorkCount())
    tokens = torch.zeros(1, 32, dtype=torch.int64)
    metadata = attention_metadata(runtime, tokens, None, {"documents": torch.tensor([[0, 20], [20, 32]]).int().numpy()})
    q, k, v = (torch.randn(1, heads, 32, 8) for heads in (4, 2, 2))
    inputs = [x.requires_grad_() for x in (q, k, v.bfloat16())]
    attend = VarlenAttentionWrapper()
    out = attend(*inputs, metadata)
    out.sum().backward()
    same = torch.equal(out, attend(*(x.bfloat16() for x in inputs), metadata))
    return [str(x.dtype) for x in (out, *(x.grad for x in inputs))], same


def test_queries_and_keys_that_autocast_left_in_float32_attend_in_the_dtype_of_the_values():
    dtypes, same = call(attend_to_normed_queries)
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32", "torch.bfloat16"]
    assert same


def a_kernel_without_float32(report):
    """flex_attention under the name of our kernel, as the choice of the dtype sees it."""
    from torchtitan_magi.backends.flex import FlexBlockAttn
    from torchtitan_magi.titan.v02 import attention as wrapper

    FlexBlockAttn.name = "ffa"
    FlexBlockAttn.check = lambda self, head_dim, dtype: report("checked", str(dtype))
    watch(wrapper, "attend", lambda result, q, k, v, *_: report("in", *(str(x.dtype) for x in (q, k, v))))
    watch(wrapper.VarlenAttentionWrapper, "forward", lambda out, *_, **__: report("out", str(out.dtype)))


def test_tensor_parallelism_without_fsdp_attends_in_the_dtype_of_mixed_precision():
    """torchtitan leaves the model in float32 there, which our kernel does not take."""
    degree = ["--parallelism.tensor_parallel_degree", "2", "--training.steps", "2"]
    reference = train(2, degree)
    run = train(2, [*degree, "--training.mixed_precision_param", "bfloat16"], setup=a_kernel_without_float32)
    assert run.of("checked") == [("torch.bfloat16",)]
    assert set(run.of("in")) == {("torch.bfloat16",) * 3}
    assert set(run.of("out")) == {("torch.float32",)}
    said = "Tensor parallelism without FSDP leaves layers in torch.float32; their attention runs in torch.bfloat16"
    assert run.output.count(said) == 1
    assert said not in reference.output
    assert run.losses != reference.losses
    assert run.losses == pytest.approx(reference.losses, rel=1e-2)
