"""The parts of documents on ranks, for linear attention: whose state goes to whom, in both directions.

A document is a chain of parts, or a tree where several share a beginning. In the forward a part goes on from the state
behind its parent. In the backward the gradient of the state behind a part is the sum of those before its children.
Parts are numbered in the order of the pack, on all ranks alike; parents come before their children.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from torchtitan_magi.masks.forest import Runs, runs_of
from torchtitan_magi.masks.geometry import Bools, Int64Array, frozen, groups, intersecting
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.needs import parts_of
from torchtitan_magi.planning.stage import numbered

_Made = TypeVar("_Made")


class _Ways(NamedTuple):
    """Every part of the documents that are cut, with every part above it, int64 [m] each."""

    above: Int64Array
    below: Int64Array
    first: Int64Array  # the child of `above` on the way to `below`


@dataclass(frozen=True, eq=False)
class DocumentParts:
    """The parts of a pack's documents: consecutive tokens on one rank, up to a fork, as many as there are.

    Attributes:
        parent: the part that each goes on from, int64 [n]; -1: a document begins.
        ranges: first token and end token, int64 [n, 2], ascending.
        rank: who owns each, int64 [n].
        owned: per rank int64 [m, 2] token ranges, ascending.
    """

    parent: Int64Array
    ranges: Int64Array
    rank: Int64Array
    owned: tuple[Int64Array, ...] = field(repr=False)

    @classmethod
    def of(cls, slices: AttnSlices, owned: tuple[Int64Array, ...]) -> "DocumentParts":
        """Those of a canonical mask.

        Raises:
            ValueError: the mask is neither of causal documents nor of trees of them.
        """
        runs, shares = runs_of(slices), parts_of(owned)
        nodes = _cut_at_forks(runs)
        node, which = intersecting(*nodes.T, *shares.ranges.T)
        start = np.maximum(nodes[node, 0], shares.ranges[which, 0])
        end = np.minimum(nodes[node, 1], shares.ranges[which, 1])
        rank = shares.owner[which]
        goes_on = (node[1:] == node[:-1]) & (rank[1:] == rank[:-1])
        first, last = groups(goes_on, len(start))
        ranges = np.stack([start[first], end[last]], 1)
        return cls(frozen(_parents(ranges, runs)), frozen(ranges), frozen(rank[first].astype(np.int64)), owned)

    def __len__(self) -> int:
        return len(self.parent)

    def waits(self, back: bool) -> Bools:
        """Whether what comes to each part depends on other ranks, [n]: those above it, or in the backward those below
        it are not all on its rank."""
        return self._waits[back]

    def sources(self, back: bool) -> list[list[int]]:
        """What the state comes from, of each part: its parent, if it has one; in the backward its children."""
        return self._sources[back]

    def carries(self, back: bool) -> Int64Array:
        """Which part's map travels where: once to each other rank that needs it.

        Those ranks have a part below it, or in the backward above it. If it waits for nobody, they need only what it
        passes to parts that wait.

        Returns:
            int64 [m, 3], sorted: receiver, source, part.
        """
        return self._carries[back]

    def tokens_before(self, count: int) -> Int64Array:
        """The tokens that each part follows, int64 [n, count], the nearest first; -1 before the document."""
        start, end = (np.append(self.ranges, [[-1, 0]], 0)).T  # part -1 leads from token -1 to token -1
        parent, part, token = np.append(self.parent, -1), np.arange(len(self)), self.ranges[:, 0]
        columns = np.full((count, len(self)), -1)
        for i in range(count):
            leaves = token == start[part]
            part = np.where(leaves, parent[part], part)
            columns[i] = token = np.where(leaves, end[part], token) - 1
        return columns.T

    @functools.cached_property
    def ranks(self) -> tuple["RankParts", ...]:
        """Each rank's view."""
        return tuple(RankParts(rank, self) for rank in range(len(self.owned)))

    @functools.cached_property
    def is_cut(self) -> Bools:
        """Whether each part's parent lies on another rank."""
        return (self.parent >= 0) & (self.rank[self.parent] != self.rank)

    @functools.cached_property
    def _ways(self) -> _Ways:
        number = np.arange(len(self))
        root = np.where(self.parent < 0, number, self.parent)
        while (root[root] != root).any():
            root = root[root]
        first = below = number[np.isin(root, root[self.is_cut])]
        found = [np.zeros((3, 0), np.int64)]
        while len(below):
            above = self.parent[first]
            above, below, first = (x[above >= 0] for x in (above, below, first))
            found.append(np.stack([above, below, first]))
            first = above
        return _Ways(*np.concatenate(found, 1))

    @functools.cached_property
    def _waits(self) -> tuple[Bools, Bools]:
        above, below, _ = self._ways
        apart = self.rank[above] != self.rank[below]
        waits = np.zeros((2, len(self)), bool)
        waits[0, below[apart]] = waits[1, above[apart]] = True
        return frozen(waits[0]), frozen(waits[1])

    @functools.cached_property
    def _sources(self) -> tuple[list[list[int]], list[list[int]]]:
        parents: list[list[int]] = []
        children: list[list[int]] = [[] for _ in range(len(self))]
        for part, parent in enumerate(self.parent.tolist()):
            parents.append([parent] if parent >= 0 else [])
            if parent >= 0:
                children[parent].append(part)
        return parents, children

    @functools.cached_property
    def _carries(self) -> tuple[Int64Array, Int64Array]:
        above, below, first = self._ways
        apart = self.rank[above] != self.rank[below]
        down = apart & self.waits(False)[first]
        up = apart & self.waits(True)[self.parent[below]]
        return self._carried(above[down], below[down]), self._carried(below[up], above[up])

    def _carried(self, part: Int64Array, receiver: Int64Array) -> Int64Array:
        """The table of ``carries``, of maps of parts and the parts that need them."""
        return frozen(np.unique(np.stack([self.rank[receiver], self.rank[part], part], 1), axis=0))


class Counts(NamedTuple):
    """Numbers that say how much a rank keeps of a layer for the backward."""

    states: int  # parts, on any rank, that its own go on from
    matrices: int  # its parts that go on from one and that others go on from
    cut: int  # its parts whose parent lies on another rank


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
    def parents(self) -> list[int]:
        """The parts, on any rank, that the rank's parts go on from; each once, ascending."""
        parents = np.unique(self.all.parent[self.numbers])
        return parents[parents >= 0].tolist()

    @property
    def counts(self) -> Counts:
        """How many parts leave something to keep."""
        own, parent = self.numbers, self.all.parent
        inner = (parent[own] >= 0) & np.isin(own, parent)
        return Counts(len(self.parents), int(inner.sum()), int(self.all.is_cut[own].sum()))

    @functools.cached_property
    def rows(self) -> Int64Array:
        """First and end local token number of all parts, int64 [len(all), 2]; -1 for those of other ranks."""
        held, ranges = numbered(self.all.owned[self.rank]), self.all.ranges[self.numbers]
        which = np.searchsorted(held[:, 0], ranges[:, 0], side="right") - 1
        rows = np.full((len(self.all), 2), -1)
        rows[self.numbers] = ranges + (held[which, 2] - held[which, 0])[:, None]
        return frozen(rows)

    def sent(self, back: bool) -> Int64Array:
        """Maps that the rank sends, int64 [m, 2], in this order: receiver, part."""
        table = self.all.carries(back)
        return table[table[:, 1] == self.rank][:, [0, 2]]

    def received(self, back: bool) -> Int64Array:
        """Maps that the rank gets, int64 [m, 2], in this order: source, part."""
        table = self.all.carries(back)
        return table[table[:, 0] == self.rank][:, 1:]

    def folded(self, back: bool) -> list[int]:
        """The parts, on any rank, whose maps lead to the rank's parts that follow those of others; as the state passes
        through them."""
        return self._folded[back]

    @functools.cached_property
    def _folded(self) -> tuple[list[int], list[int]]:
        (above, below, first), rank, parent = self.all._ways, self.all.rank, self.all.parent
        down = (rank[below] == self.rank) & (rank[parent[below]] != self.rank) & self.all.waits(False)[first]
        up = (rank[above] == self.rank) & (rank[first] != self.rank) & self.all.waits(True)[parent[below]]
        return np.unique(above[down]).tolist(), np.unique(below[up])[::-1].tolist()


def _cut_at_forks(runs: Runs) -> Int64Array:
    """First token and end token of each node, int64 [n, 2], ascending: runs, cut where others branch off."""
    start, end = runs.ranges.T
    forks = runs.before[runs.before >= 0] + 1
    inside = forks < end[np.searchsorted(start, forks, side="right") - 1]
    first = np.union1d(start, forks[inside])
    last = end[np.searchsorted(start, first, side="right") - 1]
    return np.stack([first, np.minimum(np.append(first[1:], last[-1:]), last)], 1)


def _parents(ranges: Int64Array, runs: Runs) -> Int64Array:
    """The part that each goes on from, int64 [n]; -1: none."""
    run = np.searchsorted(runs.ranges[:, 0], ranges[:, 0], side="right") - 1
    above = np.searchsorted(ranges[:, 0], runs.before[run], side="right") - 1
    return np.where(ranges[:, 0] == runs.ranges[run, 0], above, np.arange(len(ranges)) - 1)
