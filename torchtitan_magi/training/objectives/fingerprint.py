"""Fingerprints of weights, by which a resumed run has the same reference as before."""

import hashlib
import itertools
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan_magi.exchange.transport import gathered
from torchtitan_magi.models.names import ADAPTERS, plain_name
from torchtitan_magi.training.objectives.objective import Reference
from torchtitan_magi.training.process.groups import Group

logger = logging.getLogger(__name__)

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
ENTRY = "reference_weights"  # of a checkpoint's train state


def fingerprint_of_model(parts: Sequence[nn.Module], precision: str = "", group: Group = None) -> str:
    """Fingerprint of all parameters but those of adapters, and of the layers' precision; the same under every layout.

    Parameters enter by the sum of their bit patterns as integers, which is exact in any order. A collective of all
    ranks.

    Args:
        parts: the parts of the model on this rank.
        group: the ranks that have the other parts.
    """
    found = gathered([line for part in parts for line in _lines(part)], group)
    lines = dict(itertools.chain(*found))
    content = precision + "".join(lines[name] for name in sorted(lines))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _lines(part: nn.Module) -> list[tuple[str, str]]:
    """Name and line of each tensor, in the order of names: sums are collectives."""
    state = {plain_name(name): value for name, value in part.state_dict().items()}
    return [(name, _line(name, value)) for name, value in sorted(state.items()) if not ADAPTERS.search(name)]


def _line(name: str, value: Tensor) -> str:
    local = value.to_local() if isinstance(value, DTensor) else value
    total = local.view(BITS[local.element_size()]).sum(dtype=torch.int64)
    if isinstance(value, DTensor):
        for axis, placement in enumerate(value.placements):
            if not placement.is_replicate():
                dist.all_reduce(total, group=value.device_mesh.get_group(axis))
    return f"{name} {tuple(value.shape)} {local.dtype} {total.item()}\n"


class KnownWeights(Reference):
    """A reference that is a model: a checkpoint keeps the fingerprint of its weights."""

    fingerprint = ""  # of the run that is continued; an earlier version kept none

    def check_weights(self, source: str, found: str, step: int, remedy: str) -> None:
        """Compares the reference's weights with those that the run began with, if it is resumed.

        Args:
            source: where they are from.
            found: their fingerprint.
            remedy: what to do if they are others.

        Raises:
            ValueError: they are others; one line.
        """
        if step > 0 and not self.fingerprint:
            logger.warning(
                f"The checkpoint of step {step} is of an earlier version, which did not keep the fingerprint of the "
                f"reference: nothing tells whether {source}, [{found}], has the weights that the run began with"
            )
        elif step > 0 and found != self.fingerprint:
            raise ValueError(
                f"{source} has the weights [{found}], but the reference of the run that resumes at step {step} has "
                f"[{self.fingerprint}]; {remedy}"
            )
        self.fingerprint = found

    def state_dict(self) -> dict[str, Any]:
        return {ENTRY: self.fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fingerprint = state_dict.get(ENTRY, "")
