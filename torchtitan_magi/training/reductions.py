"""How FSDP2 reduces gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter


def fit_reductions(model: nn.Module, device_type: str, is_replicated: bool) -> None:
    """Fits how FSDP2 reduces a parallelized model's gradients to gloo, or to the memory of GPUs.

    By gloo they are sums: it does not know NCCL's pre-multiplied ones. On GPUs their memory is that of activations.

    Args:
        is_replicated: whether shards have replicas (HSDP). A third stream uses their gradients, whose memory stays as
            FSDP2 has it.
    """
    for module in model.modules():
        if not isinstance(module, FSDPModule):
            continue
        if device_type == "cpu":
            module.set_force_sum_reduction_for_comms(True)
        elif not is_replicated:
            reduce_in_memory_of_activations(module)


def reduce_in_memory_of_activations(module: FSDPModule) -> None:
    """Has gradients take memory of the stream that computes, where activations have it until the backward needs it.

    PyTorch's allocator keeps apart what each stream has freed, and FSDP2 takes gradients from the stream that reduces:
    4 bytes of each parameter of a rank, 16 GiB of 8B over two GPUs, stand free while activations are most. They serve
    another stream only after they went back to the GPU, for which all work has to end.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # several where experts are shared out; PyTorch 2.11 has one
    for group in [state._fsdp_param_group] if groups is None else groups:
        if group is not None and type(group._reduce_scatter_comm) is DefaultReduceScatter:  # not symmetric memory
            group._reduce_scatter_comm = ReduceScatter(group)
            _fsdp_collectives._to_dtype_if_needed = to_dtype


class ReduceScatter(DefaultReduceScatter):
    """FSDP2's, with memory of the stream that computes for results that stay as gradients.

    Others are added to gradients, copied to another dtype or to the host, or used up by a hook. They may be freed in
    the backward, so they stay in memory of the stream that reduces, as FSDP2 has them. A gradient is freed after the
    backward, at whose end the stream that computes waits for the one that reduces: no event has to guard its memory.
    (`record_stream` would keep it for as long as the host is ahead, so a second set of gradients piled up.)

    Args:
        group: FSDP2's, of the parameters whose gradients it reduces.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._computing: Any = None  # stream

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is to be reduced, then, on the stream that reduces, for the result."""
        make, context = partial(super().allocate, size, dtype=dtype, device=device), self._group.comm_ctx
        if (current := context.device_handle.current_stream()) != context.reduce_scatter_stream:
            self._computing = current
            return make()
        stays = not any(
            each.offload_to_cpu
            or each.sharded_param.grad is not None
            or getattr(each.sharded_param, "_post_accumulate_grad_hooks", None)
            for each in self._group.fsdp_params
        )
        on_computing = partial(_on_another_stream, context, self._computing)
        if stays and dtype == self._group._orig_dtype:
            return on_computing(make)
        result = make()
        if stays:
            setattr(result, COPIED, on_computing)
        return result


COPIED = "_torchtitan_magi_copied"  # attribute of a result whose copy of another dtype stays as a gradient
_to_dtype = _fsdp_collectives._to_dtype_if_needed


def to_dtype(result: Tensor, dtype: torch.dtype | None) -> Tensor:
    """FSDP2's copy of a result in the dtype of the weights; one that stays takes memory of the stream that computes."""
    if (on_computing := getattr(result, COPIED, None)) is None or dtype is None:
        return _to_dtype(result, dtype)
    copied: Tensor = on_computing(partial(torch.empty_like, result, dtype=dtype)).copy_(result)
    return copied


def _on_another_stream(context: Any, stream: Any, make: Callable[[], Tensor]) -> Tensor:
    """A tensor with memory of another stream for the current one, which waited for it just before: it may write what
    was freed there."""
    with context.device_handle.stream(stream):
        return make()
