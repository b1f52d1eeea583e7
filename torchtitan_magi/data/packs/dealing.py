"""The order in which a window's packs are dealt out: those of a step have nearly equal work.

Packs have equal numbers of tokens but not of (query, key) pairs, and the data-parallel ranks of a step wait for the
heaviest of the packs that run together.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class Deal(NamedTuple):
    """How some of a window's packs were dealt out.

    per_step: packs of a step; taken: how many of its first step came from the window before; given: packs so far.
    """

    per_step: int
    taken: int
    given: int


def order_of(pairs: Int64Array, deals: list[Deal], seed: list[int]) -> Int64Array:
    """int64 [n]: the packs of a window in the order in which they are given out.

    Args:
        pairs: [n], (query, key) pairs of each pack.
        deals: one after the other, each of the packs that those before it have left; the last one deals all.
        seed: of the order.
    """
    order, left = [], np.arange(len(pairs))
    for number, (per_step, taken, given) in enumerate(deals, 1):
        left = left[_dealt(pairs[left], per_step, taken, seed)]
        end = len(left) if number == len(deals) else given
        order.append(left[:end])
        left = left[end:]
    return np.concatenate(order)


def _dealt(pairs: Int64Array, per_step: int, taken: int, seed: list[int]) -> Int64Array:
    """The packs by steps of nearly equal work, in random order. A step that two windows share has packs of middling
    work from both."""
    if per_step == 1:
        return np.arange(len(pairs))
    random = np.random.default_rng(seed)
    ascending = random.permutation(len(pairs))  # of equal ones any may come first
    ascending = ascending[np.argsort(pairs[ascending], kind="stable")]
    first = min(-taken % per_step, len(pairs))
    shared = first + (len(pairs) - first) % per_step
    begin = (len(pairs) - shared) // 2
    middle, steps = ascending[begin : begin + shared], np.delete(ascending, slice(begin, begin + shared))
    steps = random.permutation(steps.reshape(-1, per_step))
    return np.concatenate([middle[:first], steps.ravel(), middle[first:]])
