"""Pieces that begin with the same tokens, as trees in which a common beginning stands once.

Two pieces have a position in common if they agree in all tokens up to it and in the token after it, which is its label.
The last token before they part has two targets, so it stands again at the beginning of both branches.

A tree is a list of its pieces, depth first, each with the number of positions that it has in common with the piece
before it; only the others stand in the pack. Of the branches of a fork the one with most pieces comes first: it lies
right behind what it goes on from. Each other branch has at most half of the fork's pieces, so what is above a position
lies in at most 1 + log2(pieces) runs, however deep the tree: few slices of the mask. The others follow in the order of
the window, not by their tokens, so that what lies together in a pack is as mixed as ever.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_magi.data.tokens.documents import num_common

SHORTEST = 128
"""Positions between two forks, at least, and between the beginning of a tree and its first: rows of a kernel's tile."""

Int64Array = npt.NDArray[np.int64]

_FACTORS = np.random.default_rng(0).integers(2**63, size=2**10, dtype=np.uint64) | np.uint64(1)


class Run(NamedTuple):
    """Pieces of one block: its tokens, int32 [t], and of n pieces the first token, the number of positions, and how
    many of the first ones it may share, int64 [n] each. A piece has one token more than positions."""

    tokens: np.ndarray
    first: np.ndarray
    length: np.ndarray
    sharable: np.ndarray


@dataclass(frozen=True)
class Trees:
    """Trees of n pieces; a piece that has nothing in common with others is one by itself.

    order: int64 [n], numbers of the pieces, tree by tree, depth first, by the lowest number in each tree; shared: int64
    [n], how many positions each has in common with the one before it; 0: it begins a tree.
    """

    order: np.ndarray
    shared: np.ndarray

    @classmethod
    def of_single(cls, num_pieces: int) -> "Trees":
        """A tree for each piece."""
        return cls(np.arange(num_pieces), np.zeros(num_pieces, np.int64))

    @functools.cached_property
    def bounds(self) -> np.ndarray:
        """int64 [trees + 1]: the first piece of each tree in ``order``, and n."""
        return np.append(np.flatnonzero(self.shared == 0), len(self.order))

    def lengths(self, length: np.ndarray) -> np.ndarray:
        """int64 [trees]: positions that each takes. length: int64 [n], of the pieces."""
        return np.diff(np.append(0, (length[self.order] - self.shared).cumsum())[self.bounds])

    def pieces_of(self, trees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of these trees, and what they share, int64 each."""
        first, count = self.bounds[trees], np.diff(self.bounds)[trees]
        where = np.repeat(first - (count.cumsum() - count), count) + np.arange(count.sum())
        return self.order[where], self.shared[where]

    def bounds_of(self, packs: Sequence[Sequence[int]]) -> np.ndarray:
        """int64 [packs + 1]: the first piece of each pack, which is a list of trees, and the number of all."""
        sizes = np.diff(self.bounds).tolist()
        return np.cumsum([0, *(sum(sizes[tree] for tree in pack) for pack in packs)])


def grow_trees(runs: Sequence[Run], seq_len: int) -> Trees:
    """The trees of pieces, which are numbered over all runs.

    One that would take more than seq_len positions is cut between two pieces; the second part begins anew.
    """
    lengths = np.concatenate([np.zeros(0, np.int64), *(run.length for run in runs)])
    tokens = _tokens_of_alike(runs)
    found = np.array(sorted(tokens, key=lambda number: tokens[number].astype(">i4").tobytes()), np.int64)
    agree = [num_common(tokens[one], tokens[two]) - 1 for one, two in pairwise(found.tolist())]
    order, shared = _depth_first(found, np.maximum(0, [0, *agree][: len(found)]))
    _cut(lengths[order], shared, seq_len)
    alone = np.setdiff1d(np.arange(len(lengths)), order)
    trees = Trees(np.concatenate([order, alone]), np.concatenate([shared, np.zeros_like(alone)]))
    lowest = np.minimum.reduceat(trees.order, trees.bounds[:-1]) if len(trees.order) else trees.order
    return Trees(*trees.pieces_of(np.argsort(lowest)))


def _tokens_of_alike(runs: Sequence[Run]) -> dict[int, np.ndarray]:
    """Number -> tokens that each piece may share, if the first of them may be those of another, by their hash."""
    keys = np.concatenate([np.zeros(0, np.uint64), *map(_keys, runs)])
    _, which, count = np.unique(keys, return_inverse=True, return_counts=True)
    alike = (count[which] > 1) & (keys != 0)
    found, before = {}, 0
    for tokens, first, _, sharable in runs:
        for number in np.flatnonzero(alike[before : before + len(first)]).tolist():
            found[before + number] = tokens[first[number] : first[number] + sharable[number] + 1]
        before += len(first)
    return found


def _keys(run: Run) -> np.ndarray:
    """uint64 [n]: a hash of the first SHORTEST + 1 tokens of each piece; 0 where it may share fewer."""
    keys = np.zeros(len(run.first), np.uint64)
    long = np.flatnonzero(run.sharable >= SHORTEST)
    if len(long):
        beginnings = np.lib.stride_tricks.sliding_window_view(run.tokens, SHORTEST + 1)[run.first[long]]
        keys[long] = (beginnings.astype(np.uint64) * _FACTORS[: SHORTEST + 1]).sum(1) | np.uint64(1)
    return keys


def _depth_first(numbers: np.ndarray, common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order and what each piece shares with the one before it, see `Trees`.

    Args:
        numbers: of pieces sorted by their tokens. common: positions that each has in common with the one before it.
    """
    order, shared = list[int](), list[int]()
    todo = [(0, len(numbers), 0, 0)] if len(numbers) else []
    while todo:  # pieces first:last, the fork where they part, and what the first of them shares
        first, last, fork, of_first = todo.pop()
        if last - first == 1:
            order.append(int(numbers[first]))
            shared.append(of_first)
            continue
        branches = sorted(_branches(common, first, last, fork), key=lambda found: int(numbers[slice(*found[:2])].min()))
        branches.insert(0, branches.pop(int(np.argmax([end - begin for begin, end, _ in branches]))))
        todo += [(*branch, fork if number else of_first) for number, branch in enumerate(branches)][::-1]
    return np.array(order, np.int64), np.array(shared, np.int64)


def _branches(common: np.ndarray, first: int, last: int, fork: int) -> list[tuple[int, int, int]]:
    """(first, last, fork of its own) of each branch of the pieces that part at a fork.

    One whose own fork lies less than SHORTEST behind this one is as many as it has branches.
    """
    found, todo = [], [(first, last)]
    while todo:
        first, last = todo.pop()
        depth = int(common[first + 1 : last].min(initial=np.iinfo(np.int64).max))
        if depth - fork >= SHORTEST:
            found.append((first, last, depth))
        else:
            cuts = (first + 1 + np.flatnonzero(common[first + 1 : last] == depth)).tolist()
            todo += pairwise([first, *cuts, last])
    return found


def paths_of(shared: Iterable[int], starts: Iterable[int]) -> Iterator[list[tuple[int, int]]]:
    """The runs that each piece lies in, its own last: how many of its positions stand before the run, and where the
    run begins.

    Args:
        shared: see `Trees`.
        starts: where the own positions of each piece begin.
    """
    path: list[tuple[int, int]] = []
    for common, start in zip(shared, starts, strict=True):
        path = [*(run for run in path if run[0] < common), (common, start)]
        yield path


def _cut(length: np.ndarray, shared: np.ndarray, seq_len: int) -> None:
    """Has a piece share nothing with the one before it where their tree would take more than seq_len positions."""
    total = 0
    for number, (whole, common) in enumerate(zip(length.tolist(), shared.tolist(), strict=True)):
        total = total + whole - common if common else whole
        if total > seq_len:
            shared[number], total = 0, whole


# ------------------------------------------------------------------------------------------------- trees in a batch

# There a tree is a list of branches, rows (start, end, shared) of int64: the tokens of a branch are the first `shared`
# ones of the branch before it, counted from where the tree begins, and its own in the range [start, end). A document by
# itself shares none. Of a prompt with several answers the first branch has the prompt, and the others share it.


def branches_of_documents(documents: npt.NDArray[np.int32]) -> Int64Array:
    """[n, 3] of documents [n, 2], token ranges, or [n, 3], which are branches."""
    return np.pad(documents, ((0, 0), (0, 3 - documents.shape[1]))).astype(np.int64)


class Nodes(NamedTuple):
    """The nodes of the trees, runs of tokens between forks; [m] each but ``last``.

    parent: the number of each node's parent, -1: it has none. last: int64 [n], the node that each branch ends with.
    """

    start: Int64Array
    end: Int64Array
    parent: Int64Array
    last: Int64Array


def nodes_of(branches: Int64Array) -> Nodes:
    """The nodes of branches [n, 3]."""
    start, end, shared = branches.T
    if not shared.any():
        return Nodes(start, end, np.full_like(start, -1), np.arange(len(start)))
    fork, has_own = _forks(branches), start < end
    cuts = np.unique(np.concatenate([start, end, fork[fork >= 0]]))
    row = np.flatnonzero(has_own)
    row = row[np.searchsorted(start[row], cuts, side="right") - 1]
    inside = np.flatnonzero((start[row] <= cuts) & (cuts < end[row]))
    begin, stop, row = cuts[inside], cuts[inside + 1], row[inside]
    parent = np.where(begin > start[row], np.arange(len(row)) - 1, _ending(stop, fork[row]))
    return Nodes(begin, stop, parent, _ending(stop, np.where(has_own, end, fork)))


def positions_of(branches: Int64Array, num_tokens: int) -> npt.NDArray[np.int32]:
    """int32 [num_tokens]: the place of each token in its branch; outside of them counted on."""
    start, _, before = branches[branches[:, 0] < branches[:, 1]].T
    first, shared = np.zeros((2, num_tokens), np.int64)  # own token of the branch, where that is
    first[start], shared[start] = start, before
    first = np.maximum.accumulate(first)
    return (np.arange(num_tokens) - first + shared[first]).astype(np.int32)


def _forks(branches: Int64Array) -> Int64Array:
    """int64 [n]: the token behind the last one that a branch shares; -1 if it shares none."""
    forks = np.full(len(branches), -1)
    starts, _, shared = branches.T.tolist()
    for number, (*above, (own, _)) in enumerate(paths_of(shared, starts)):
        if above:
            before, first = above[-1]
            forks[number] = first + own - before
    return forks


def _ending(ends: Int64Array, where: Int64Array) -> Int64Array:
    """The number of the node that ends there; -1 where ``where`` is negative. ends: ascending."""
    return np.where(where < 0, -1, np.searchsorted(ends, where))
