"""Tables that kernels read: how they come to a device, and for which of its streams they are."""

import torch
from torch import Tensor


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """x, mostly of the host, on a device; the host does not wait. For memory that is not pinned CUDA may wait until the
    stream has done all that was asked of it."""
    leaves_host = device.type == "cuda" and x.device.type == "cpu"
    return (x.pin_memory() if leaves_host else x).to(device, non_blocking=True)


def stream_of(device: torch.device) -> int:
    """The device's current stream; 0 on the CPU. What is kept on a device is kept by it: another stream could read
    tables before they are written, or when their memory is another's."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
