"""What a part of a document does to the state that comes to it, as a map that travels: S becomes matrix S + state.

A token maps the state affinely (see ``chunked``), so does a run of tokens, and the columns of S never mix. In the
backward the gradient of the state passes through the transposed maps, from parts to their parents.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchtitan_magi.exchange.transport import Transport
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


def send(
    maps: dict[int, Map], parts: RankParts, back: bool, none: Tensor, transport: Transport
) -> Callable[[], dict[int, Map]]:
    """Sends maps to the ranks that need them. Every rank takes part, also one that neither sends nor gets any.

    Args:
        maps: by part, this rank's; at least those that others need.
        back: whether they are transposed, of the backward.
        none: [0, H, K, V], no states.

    Returns:
        what waits for the exchange, and gives the maps of this rank and of others.
    """
    if not len(parts.all.carries(back)):
        return lambda: maps
    shape = none.shape[1:]
    exchange = exchange_of(parts, back, shape)
    flat = [x.flatten() for part in parts.sent(back)[:, 1].tolist() for x in maps[part] if x is not None]
    output = none.new_empty(sum(exchange.recv_splits))
    sent = flat[0] if len(flat) == 1 else torch.cat([none.new_empty(0), *flat])
    arrival = transport.all_to_all(output, sent, exchange, back=False)

    def arrived() -> dict[int, Map]:
        arrival.wait()
        return maps | _unpacked(output, parts, back, shape)

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


def pass_on(
    maps: dict[int, Map], parts: RankParts, back: bool, none: Tensor, transport: Transport,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[int, Tensor]:  # fmt: skip
    """The state behind each part that the rank's parts follow, [H, K, V]; in the backward the gradient of that before
    each. A collective where documents are cut.

    Args:
        maps: of the rank's parts that others follow; in the backward of those that follow others.
        back, none: as in ``send``.
        meanwhile: is called while maps travel.
    """
    sources, waits = parts.all.sources(back), parts.all.waits(back)
    order = sorted(maps, reverse=back)
    passed: dict[int, Tensor] = {}
    for part in order:
        if not waits[part]:
            passed[part] = maps[part].after(_total(passed, sources[part]))
    known = {part: Map(state) for part, state in passed.items()}
    arrived = send(maps | known, parts, back, none, transport)
    meanwhile()
    found = arrived()
    for part in parts.folded(back):
        passed[part] = found[part].after(_total(passed, sources[part]))
    for part in order:
        if part not in passed:
            passed[part] = maps[part].after(_total(passed, sources[part]))
    return passed


def totals(passed: dict[int, Tensor], sources: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
    """What comes to each of `sources`, the sum of what these parts pass on."""
    found = {i: _total(passed, of_one) for i, of_one in sources.items()}
    return {i: state for i, state in found.items() if state is not None}


def _total(passed: dict[int, Tensor], sources: Sequence[int]) -> Tensor | None:
    """The sum of what these parts pass on, in their order; None if none of them does."""
    found = [passed[part] for part in sources if part in passed]
    return functools.reduce(torch.add, found) if found else None
