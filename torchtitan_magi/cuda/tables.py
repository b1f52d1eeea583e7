"""Tables that kernels read, kept from call to call: for which of a device's streams they are."""

import torch


def stream_of(device: torch.device) -> int:
    """The device's current stream; 0 on the CPU. What is kept on a device is kept by it: another stream could read
    tables before they are written, or when their memory is another's."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
