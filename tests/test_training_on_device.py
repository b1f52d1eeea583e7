"""What FSDP2 does on a GPU only: it moves the root module's inputs, and with them all tensors of the metadata."""

import pytest
from training import train


def move_inputs_as_on_a_gpu(report):
    """torch moves inputs to CUDA devices; here to a device that equals the CPU but is not the same, so it copies."""
    import torch
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    from torch.distributed.utils import _to_kwargs

    from torchtitan_magi.titan.wrapper import VarlenAttentionWrapper

    pre_forward, attend = FSDPState._root_pre_forward, VarlenAttentionWrapper.forward

    def move(self, module, args, kwargs):
        is_root = self._state_ctx.iter_forward_root is None
        args, kwargs = pre_forward(self, module, args, kwargs)
        if is_root:
            (args,), (kwargs,) = _to_kwargs(args, kwargs, torch.device("cpu", 0), False)
            report("moved", len(args))
        return args, kwargs

    def attend_and_report(self, xq, xk, xv, attention_masks, **kwargs):
        report("owns its plan", hasattr(attention_masks.handle, "bound_plan"))
        return attend(self, xq, xk, xv, attention_masks, **kwargs)

    FSDPState._root_pre_forward, VarlenAttentionWrapper.forward = move, attend_and_report


@pytest.mark.parametrize("entry", ["torchtitan.train", "torchtitan_magi.train"])
def test_the_plan_reaches_the_layers_and_their_backward_although_inputs_are_moved(entry):
    arguments = ["--parallelism.context_parallel_degree", "2", "--training.steps", "2"]
    run = train(2, arguments, entry=entry, setup=move_inputs_as_on_a_gpu)
    assert len(run.losses) == 2
    assert run.of("moved")
    assert run.of("owns its plan")
    assert all(owns for (owns,) in run.of("owns its plan"))
