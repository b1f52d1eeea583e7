"""The parts of documents on ranks, for linear attention: whose state goes to whom, in both directions.

The state of a document passes through its parts: from the first to the last in the forward, back in the backward. Parts
are numbered in the order of the pack, on all ranks alike.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from torchtitan_magi.masks.geometry import CAUSAL, Bools, Int64Array, expand, first_true, frozen, intersecting
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.needs import parts_of
from torchtitan_magi.planning.stage import numbered

_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class DocumentParts:
    """The parts of a pack's documents: consecutive tokens of one document on one rank, as many as there are.

    Attributes:
        document: number of each part's document, int64 [n], ascending.
        ranges: first token and end token, int64 [n, 2], ascending.
        rank: who owns each, int64 [n].
        owned: per rank int64 [m, 2] token ranges, ascending.
    """

    document: Int64Array
    ranges: Int64Array
    rank: Int64Array
    owned: tuple[Int64Array, ...] = field(repr=False)

    @classmethod
    def of(cls, slices: AttnSlices, owned: tuple[Int64Array, ...]) -> "DocumentParts":
        """Those of a canonical mask.

        Raises:
            ValueError: the mask is not causal attention inside documents.
        """
        documents, parts = _documents(slices), parts_of(owned)
        document, which = intersecting(*documents.T, *parts.ranges.T)
        start = np.maximum(documents[document, 0], parts.ranges[which, 0])
        end = np.minimum(documents[document, 1], parts.ranges[which, 1])
        rank = parts.owner[which]
        goes_on = (document[1:] == document[:-1]) & (rank[1:] == rank[:-1])
        first = np.flatnonzero(np.append(True, ~goes_on)[: len(start)])
        last = np.append(first[1:], len(start))[: len(first)] - 1
        ranges = np.stack([start[first], end[last]], 1)
        return cls(frozen(document[first]), frozen(ranges), frozen(rank[first].astype(np.int64)), owned)

    def __len__(self) -> int:
        return len(self.document)

    @functools.cached_property
    def begins(self) -> Bools:
        """Whether a document begins with the part, [n]."""
        return frozen(np.append(True, self.document[1:] != self.document[:-1])[: len(self)])

    @functools.cached_property
    def ends(self) -> Bools:
        """Whether a document ends with the part, [n]."""
        return frozen(np.append(self.document[1:] != self.document[:-1], True)[: len(self)])

    @functools.cached_property
    def origins(self) -> Int64Array:
        """The first token of each part's document, int64 [n]."""
        return frozen(self.ranges[self.begins, 0][self.begins.cumsum() - 1])

    def carries(self, back: bool) -> Int64Array:
        """Which part's map travels where: once to each other rank with a later part of the document, or an earlier one.

        Args:
            back: of the backward, in which the state's gradient passes from the last part to the first.

        Returns:
            int64 [m, 3], sorted: receiver, source, part.
        """
        return self._carries[back]

    @functools.cached_property
    def _carries(self) -> tuple[Int64Array, Int64Array]:
        return self._carried(back=False), self._carried(back=True)

    def _carried(self, back: bool) -> Int64Array:
        found = [np.zeros((0, 3), np.int64)]
        for parts in self._cut_documents(back):
            owner = self.rank[parts]
            receivers, from_behind = np.unique(owner[::-1], return_index=True)
            last = len(parts) - 1 - from_behind  # of each receiver
            i, j = np.nonzero((np.arange(len(parts))[:, None] < last) & (owner[:, None] != receivers))
            found.append(np.stack([receivers[j], owner[i], parts[i]], 1))
        table = np.concatenate(found)
        return frozen(table[np.lexsort(table.T[::-1])])

    def _cut_documents(self, back: bool) -> Iterator[Int64Array]:
        """The parts of each document that has several, as the state passes through them."""
        for first in np.flatnonzero(self.begins & ~self.ends):
            parts = np.arange(first, first + 1 + self.ends[first:].argmax())
            yield parts[::-1] if back else parts

    @functools.cached_property
    def ranks(self) -> tuple["RankParts", ...]:
        """Each rank's view."""
        return tuple(RankParts(rank, self) for rank in range(len(self.owned)))


@dataclass(frozen=True, eq=False)
class RankParts:
    """The parts of documents on one rank, and what of others it needs."""

    rank: int
    all: DocumentParts = field(repr=False)
    _made: dict[Any, Any] = field(default_factory=dict, repr=False)

    def made_once(self, key: Any, make: Callable[[], _Made]) -> _Made:
        """What `make` gives, once for all layers that ask for it by this key."""
        if key not in self._made:
            self._made[key] = make()
        made: _Made = self._made[key]
        return made

    @functools.cached_property
    def numbers(self) -> Int64Array:
        """The rank's parts, int64 [n], ascending."""
        return frozen(np.flatnonzero(self.all.rank == self.rank))

    @functools.cached_property
    def rows(self) -> Int64Array:
        """First and end local token number of all parts, int64 [len(all), 2]; -1 for those of other ranks."""
        held, ranges = numbered(self.all.owned[self.rank]), self.all.ranges[self.numbers]
        which = np.searchsorted(held[:, 0], ranges[:, 0], side="right") - 1
        rows = np.full((len(self.all), 2), -1)
        rows[self.numbers] = ranges + (held[which, 2] - held[which, 0])[:, None]
        return frozen(rows)

    def tokens_of(self, parts: Int64Array) -> Int64Array:
        """Local token numbers of some of the rank's parts, one part after the other."""
        return expand(*self.rows[parts].T)

    def select(self, begins: bool, ends: bool) -> Int64Array:
        """The rank's parts with which a document begins, or does not, and ends, or does not; ascending."""
        numbers = self.numbers
        return numbers[(self.all.begins[numbers] == begins) & (self.all.ends[numbers] == ends)]

    def sent(self, back: bool) -> Int64Array:
        """Maps that the rank sends, int64 [m, 2], in this order: receiver, part."""
        table = self.all.carries(back)
        return table[table[:, 1] == self.rank][:, [0, 2]]

    def received(self, back: bool) -> Int64Array:
        """Maps that the rank gets, int64 [m, 2], in this order: source, part."""
        table = self.all.carries(back)
        return table[table[:, 0] == self.rank][:, 1:]

    def chains(self, back: bool) -> list[list[int]]:
        """Of each cut document here, its parts up to the last one of this rank, as the state passes through them."""
        chains = []
        for parts in self.all._cut_documents(back):
            if (own := np.flatnonzero(self.all.rank[parts] == self.rank)).size:
                chains.append(parts[: own[-1] + 1].tolist())
        return chains


def _documents(slices: AttnSlices) -> Int64Array:
    """First token and end token of each document of a canonical mask, int64 [n, 2].

    Raises:
        ValueError: the mask is not causal attention inside documents.
    """
    table = slices.table.astype(np.int64)
    q_start, q_end, k_start, k_end, mask_type = table.T
    is_document = (q_start == k_start) & (q_end == k_end) & ((mask_type == CAUSAL) | (q_end - q_start == 1))
    if (i := first_true(~is_document)) is not None:
        raise ValueError(
            f"the plan's mask has the slice {table[i].tolist()}, which is no causal document, and a state passes "
            "through nothing else; plan with varlen_causal(cu_seqlens), for several masks with make_plans"
        )
    return np.stack([q_start, q_end], 1)
