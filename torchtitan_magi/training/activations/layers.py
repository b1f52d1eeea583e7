"""Layers of a model that keep all, and those that offload what they keep."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper, CheckpointWrapper

from torchtitan_magi.sizing.keeping.kinds import ATTENTION, Keeping
from torchtitan_magi.training.activations.offload import Offloader


class KeepsAll(ActivationWrapper):
    """A layer that keeps all, wrapped like those that do not: torchtitan 0.3 draws the first weights of wrapped layers
    after those of others, so that these would depend on what is kept."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's."""
        return self._checkpoint_wrapped_module(*args, **kwargs)


class KeepsAttention(CheckpointWrapper):
    """A selective checkpoint that keeps what attention puts out alone, see ``told_apart``."""


def told_apart(checkpoint: nn.Module, kept: str) -> nn.Module:
    """The wrapper of a layer, of a type of its own by what it keeps. torch.compile takes two of one type for the same
    if their functions differ only in what they close over, and a layer would keep what one before it does.

    Args:
        kept: ``Keeping.kept`` of the layer.
    """
    if kept == ATTENTION:
        checkpoint.__class__ = KeepsAttention
    return checkpoint


_offloaders: dict[torch.device, Offloader] = {}


def offload_layers(model: nn.Module, keepings: Sequence[Keeping], device: torch.device) -> None:
    """Lets the layers that do so offload what they keep.

    Args:
        model: or a part of it for a pipeline, parallelized; its ``layers`` have their number in the whole for a name.
        keepings: of all layers of the whole model.
    """
    layers: Any = model.get_submodule("layers")
    chosen = [layer for name, layer in layers.named_children() if keepings[int(name)].offloaded]
    if chosen:
        _offloaders.setdefault(device, Offloader(device)).wrap(chosen, model)


def stop_offloading() -> None:
    """Frees the host's memory at the end of a run."""
    while _offloaders:
        _offloaders.popitem()[1].close()
