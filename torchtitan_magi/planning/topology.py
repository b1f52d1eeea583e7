"""Which ranks sit in which node."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, frozen
from torchtitan_magi.masks.slices import is_integer
from torchtitan_magi.wording import quoted


@dataclass(frozen=True)
class Nodes:
    """Nodes of consecutive ranks.

    Args:
        sizes: ranks of each node; the first ``sizes[0]`` ranks are the first node, and so on.
    """

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, gpus_per_node: int | Sequence[int] | None, num_ranks: int) -> "Nodes":
        """Nodes of so many ranks each, the last perhaps of fewer; or of these numbers of ranks; None: one node.

        Raises:
            ValueError: no such numbers, or they do not add up to ``num_ranks``.
        """
        if gpus_per_node is None:
            return cls((num_ranks,))
        if is_integer(gpus_per_node, 1):
            size = int(gpus_per_node)  # type: ignore[arg-type]
            return cls(tuple(min(size, num_ranks - first) for first in range(0, num_ranks, size)))
        sizes = tuple(gpus_per_node) if isinstance(gpus_per_node, list | tuple | np.ndarray) else ()
        if not all(is_integer(size, 1) for size in sizes) or sum(sizes) != num_ranks:
            raise ValueError(
                f"gpus_per_node is {quoted(gpus_per_node)}; use None for one node, the ranks of each node, or a list "
                f"of them that adds up to cp_size, {num_ranks}"
            )
        return cls(tuple(map(int, sizes)))

    def __len__(self) -> int:
        return len(self.sizes)

    @functools.cached_property
    def node(self) -> Int64Array:
        """The node of each rank, int64 [ranks]."""
        return frozen(np.repeat(np.arange(len(self)), self.sizes))

    @functools.cached_property
    def place(self) -> Int64Array:
        """The place of each rank in its node, from 0, int64 [ranks]."""
        return frozen(np.concatenate([np.arange(size) for size in self.sizes]))

    @property
    def can_relay(self) -> bool:
        """Whether rows can pass through relays: there are several nodes, and in some several ranks."""
        return len(self) > 1 and max(self.sizes) > 1

    @property
    def are_equal(self) -> bool:
        """Whether all have as many ranks."""
        return len(set(self.sizes)) == 1
