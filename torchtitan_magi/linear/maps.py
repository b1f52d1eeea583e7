"""What a part of a document does to the state that comes to it, as a map that travels: S becomes matrix S + state.

A token maps the state affinely (see ``chunked``), so does a run of tokens, and the columns of S never mix. In the
backward the gradient of the state passes through the transposed maps, from parts to their parents.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.linear.backend import Backend, Tokens
from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.planning.document_parts import RankParts
from torchtitan_magi.planning.needs import sums
from torchtitan_magi.planning.relays import ALL, NONE
from torchtitan_magi.planning.stage import Exchange


class Map(NamedTuple):
    """One part's map in all H heads, in ``Tokens.wide``."""

    state: Tensor  # [H, K, V]
    matrix: Tensor | None = None  # [H, K, K]; None: the part waits for nobody, and the state is what it passes on

    def after(self, state: Tensor | None) -> Tensor:
        """What becomes of a state [H, K, V]."""
        return self.state if state is None or self.matrix is None else self.matrix @ state + self.state


def maps_of(tokens: Tokens, lengths: Sequence[int], backend: Backend) -> list[Map]:
    """The maps of parts of these lengths: with values [v, 0] the state [0, I] becomes [state, matrix]."""
    if not lengths:
        return []
    num_heads, key_dim, value_dim = tokens.state_shape
    values = torch.cat([tokens.v, tokens.v.new_zeros(len(tokens.v), num_heads, key_dim)], -1)
    one = torch.eye(key_dim, dtype=tokens.wide, device=values.device)
    first = torch.cat([one.new_zeros(key_dim, value_dim), one], 1).expand(len(lengths), num_heads, -1, -1)
    _, ends, _ = backend.forward(tokens._replace(v=values), lengths, 1.0, first, with_out=False)
    return [Map(end[..., :value_dim], end[..., value_dim:]) for end in ends]


def send(
    maps: dict[int, Map], parts: RankParts, back: bool, zero: Tensor, transport: Transport
) -> Callable[[], dict[int, Map]]:
    """Sends maps to the ranks that need them. Every rank takes part, also one that neither sends nor gets any.

    Args:
        maps: by part, this rank's; at least those that others need.
        back: whether they are transposed, of the backward.
        zero: [H, K, V], a state of zeros.

    Returns:
        what waits for the exchange, and gives the maps of this rank and of others.
    """
    if not len(parts.all.carries(back)):
        return lambda: maps
    exchange = exchange_of(parts, back, zero.shape)
    flat = [x.flatten() for part in parts.sent(back)[:, 1].tolist() for x in maps[part] if x is not None]
    output = zero.new_empty(sum(exchange.recv_splits))
    arrival = transport.all_to_all(output, torch.cat([zero.new_empty(0), *flat]), exchange, back=False)

    def arrived() -> dict[int, Map]:
        arrival.wait()
        return maps | _unpacked(output, parts, back, zero.shape)

    return arrived


def exchange_of(parts: RankParts, back: bool, shape: Sequence[int]) -> Exchange:
    """A rank's exchange of maps in one direction; its rows are single numbers.

    Args:
        shape: of a state, [H, K, V].
    """
    sent, received = parts.sent(back), parts.received(back)
    sizes, cp_size = _sizes(parts, back, shape), len(parts.all.owned)

    def per_rank(table: Int64Array) -> tuple[int, ...]:
        return tuple(sums(table[:, 0], sizes[table[:, 1]], cp_size).tolist())

    return Exchange(parts.rank, sent[:, 1], per_rank(sent), per_rank(received), None, (NONE, ALL))


def _sizes(parts: RankParts, back: bool, shape: Sequence[int]) -> Int64Array:
    """Numbers in the map of each part: one that waits for nobody has no matrix."""
    num_heads, key_dim, value_dim = shape
    return num_heads * key_dim * np.where(parts.all.waits(back), value_dim + key_dim, value_dim)


def _unpacked(output: Tensor, parts: RankParts, back: bool, shape: Sequence[int]) -> dict[int, Map]:
    """The maps that arrived, by part."""
    numbers = parts.received(back)[:, 1]
    num_heads, key_dim, _ = shape
    each = output.split(_sizes(parts, back, shape)[numbers].tolist())
    found = {}
    for part, numbers_of in zip(numbers.tolist(), each, strict=True):
        state, matrix = numbers_of.tensor_split([math.prod(shape)])
        found[part] = Map(state.view(shape), matrix.view(num_heads, key_dim, key_dim) if len(matrix) else None)
    return found


def folded(maps: dict[int, Map], parts: RankParts, back: bool) -> dict[int, Tensor]:
    """What the rank's parts wait for: the states behind parents on other ranks, [H, K, V] by part; in the backward the
    gradients of those before children.

    Args:
        maps: of all parts that lead there.
    """
    passed: dict[int, Tensor] = {}
    for part in parts.folded(back):
        passed[part] = maps[part].after(total(passed, parts.all.sources(back)[part]))
    return passed


def total(passed: dict[int, Tensor], sources: Sequence[int]) -> Tensor | None:
    """The sum of what these parts pass on, in their order; None if none of them does."""
    found = [passed[part] for part in sources if part in passed]
    return functools.reduce(torch.add, found) if found else None
