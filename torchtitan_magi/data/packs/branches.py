"""Documents and preference pairs as trees: branches that begin as the branch before them does.

A branch is a row (start, end, shared) of int64: its tokens are the first ``shared`` ones of the branch before it,
counted from where its tree begins, and its own in the range [start, end) of a batch. A document by itself shares none;
a pair is two branches, prompt and chosen, and rejected, which shares the prompt.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def of_documents(documents: npt.NDArray[np.int32]) -> Int64Array:
    """[n, 3] of documents [n, 2], token ranges, or [n, 3], which are branches."""
    return np.pad(documents, ((0, 0), (0, 3 - documents.shape[1]))).astype(np.int64)


def of_pairs(pairs: npt.NDArray[np.int32]) -> Int64Array:
    """[2 n, 3] of pairs [n, 4]: start of the prompt, of chosen and of rejected, and the end."""
    start, chosen, rejected, end = pairs.astype(np.int64).T
    sides = [start, rejected, np.zeros_like(start)], [rejected, end, chosen - start]
    return np.stack([np.stack(side, 1) for side in sides], 1).reshape(-1, 3)


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
    path: list[tuple[int, int]] = []  # (tokens of the branch before it, its first own token) of the runs it lies in
    for number, (start, _, shared) in enumerate(branches.tolist()):
        path = [run for run in path if run[0] < shared]
        if shared:
            before, first = path[-1]
            forks[number] = first + shared - before
        path.append((shared, start))
    return forks


def _ending(ends: Int64Array, where: Int64Array) -> Int64Array:
    """The number of the node that ends there; -1 where ``where`` is negative. ends: ascending."""
    return np.where(where < 0, -1, np.searchsorted(ends, where))
