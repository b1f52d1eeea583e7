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
            group._reduce_scatter_comm = ReduceScatter()
            _fsdp_collectives._to_dtype_if_needed = to_dtype  # gradients of 16 bits are copies of what it reduced


class ReduceScatter(DefaultReduceScatter):
    """FSDP2's, with the memory of its results taken from the default stream."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return _of_default_stream(partial(super().allocate, size, dtype=dtype, device=device))


def to_dtype(reduced: Tensor, dtype: torch.dtype | None) -> Tensor:
    """FSDP2's cast of what it reduced to the dtype of the weights, with memory taken from the default stream."""
    if dtype is None or dtype == reduced.dtype:
        return reduced
    return _of_default_stream(partial(torch.empty_like, reduced, dtype=dtype)).copy_(reduced)


def _of_default_stream(make: Callable[[], Tensor]) -> Tensor:
    """A tensor with memory of the default stream, for the stream that reduces.

    FSDP2 makes it while that stream is the current one. It waited for the default stream just before, so it may write
    what was freed there; and what it uses is not given out again until it is done.
    """
    reducing = torch.cuda.current_stream()
    with torch.cuda.stream(torch.cuda.default_stream()):
        made = make()
    made.record_stream(reducing)
    return made
