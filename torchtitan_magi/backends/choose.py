"""Which attention a stage gets: our kernel (ffa), or torch's flex_attention (flex). The one place that chooses."""

import torch

from torchtitan_magi.backends.interface import BlockAttn
from torchtitan_magi.wording import quoted

BACKENDS = ("auto", "ffa", "flex")


def choose_block_attn(backend: str, device: torch.device, deterministic: bool = False) -> BlockAttn:
    """The block attention of a backend: "ffa" (our Hopper kernel), "flex" (flex_attention), or "auto".

    "auto" is ffa on CUDA and flex on CPU; it never falls back from one to the other on its own. With `deterministic`,
    runs repeat bit for bit; flex always does.

    Raises:
        ValueError: an unknown backend, or ffa without a Hopper GPU.
    """
    check_backend(backend)
    if backend == "flex" or (backend == "auto" and device.type == "cpu"):
        from torchtitan_magi.backends.flex import FlexBlockAttn

        return FlexBlockAttn()
    from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn

    return FfaBlockAttn(device, deterministic)


def check_backend(backend: str) -> None:
    """Raises ValueError for an unknown backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {quoted(backend)}; use one of {', '.join(map(repr, BACKENDS))}")


def check_switch(value: object, name: str) -> None:
    """Raises ValueError for what is neither True nor False."""
    if value is not True and value is not False:
        raise ValueError(f"{name} is {quoted(value)}; use True or False")
