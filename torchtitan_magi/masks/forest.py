"""Which token each token goes on from, read off a mask of causal documents or of trees of them."""

from typing import NamedTuple

import numpy as np

from torchtitan_magi.masks.geometry import CAUSAL, FULL, Bools, Int64Array, expand, first_true, intersecting, union
from torchtitan_magi.masks.slices import AttnSlices


class Runs(NamedTuple):
    """Runs of tokens, each of which goes on from the one before it."""

    ranges: Int64Array  # [n, 2]: first token and end token, ascending
    before: Int64Array  # [n]: the token, of an earlier run, that the first one goes on from; -1: none


def runs_of(slices: AttnSlices) -> Runs:
    """The runs of a mask whose tokens see their own document, or their tree's way from the root, up to themselves.

    Raises:
        ValueError: the mask is another one; or a token goes on from a later one.
    """
    table = slices.canonical().table.astype(np.int64)
    q_start, q_end, k_start, k_end, mask_type = table.T
    is_run = (k_end == q_end) & ((mask_type == CAUSAL) | (q_end - q_start == 1))
    runs = table[is_run, :2]
    if is_run.all() and (k_start == q_start).all():
        return Runs(runs, np.full(len(runs), -1))
    seen = _keys_before(table, is_run)
    before = np.full(len(runs), -1)
    np.maximum.at(before, seen[:, 0], seen[:, 2] - 1)
    _check_ways(table, runs, before, seen)
    first = np.flatnonzero(before != np.where(before < 0, 0, runs[:, 0] - 1))
    end = runs[np.append(first[1:], len(runs))[: len(first)] - 1, 1]
    return Runs(np.stack([runs[first, 0], end], 1), before[first])


def _keys_before(table: Int64Array, is_run: Bools) -> Int64Array:
    """What the rows of each run see before its first token, int64 [m, 3]: run, first key, end key; disjoint, sorted."""
    runs, others = table[is_run], table[~is_run]
    i, run = intersecting(*others[:, :2].T, *runs[:, :2].T)
    rows = np.bincount(i, runs[run, 1] - runs[run, 0], len(others))
    is_full = (others[:, 4] == FULL) | (others[:, 1] - others[:, 0] == 1)
    fits = is_full & (rows == others[:, 1] - others[:, 0])  # with the rows of whole runs
    np.logical_and.at(fits, i, others[i, 3] <= runs[run, 0])
    if (wrong := first_true(~fits)) is not None:
        raise _error(others[wrong])
    more = np.flatnonzero(runs[:, 2] < runs[:, 0])
    which, start = np.append(more, run), np.append(runs[more, 2], others[i, 2])
    return union(which, start, np.append(runs[more, 0], others[i, 3]), int(table[:, :4].max()))


def _check_ways(table: Int64Array, runs: Int64Array, before: Int64Array, seen: Int64Array) -> None:
    """Raises ValueError unless runs see before them just what the token sees that they go on from, and this token."""
    child = np.flatnonzero(before >= 0)
    parent = np.searchsorted(runs[:, 0], before[child], side="right") - 1
    inside = (parent >= 0) & (before[child] < runs[parent, 1])
    first, last = (np.searchsorted(seen[:, 0], parent, side=side) for side in ("left", "right"))
    above = expand(first, last)
    which, start = np.append(child, np.repeat(child, last - first)), np.append(runs[parent, 0], seen[above, 1])
    way = union(which, start, np.append(before[child] + 1, seen[above, 2]), int(table[:, :4].max()))
    if inside.all() and np.array_equal(way, seen):
        return
    differ = set(map(tuple, way.tolist())) ^ set(map(tuple, seen.tolist()))
    wrong = runs[min([run for run, *_ in differ] + child[~inside].tolist())]
    rows = (table[:, 0] < wrong[1]) & (wrong[0] < table[:, 1])
    raise _error(table[rows & (table[:, 2] < table[:, 0])][0])


def _error(row: Int64Array) -> ValueError:
    return ValueError(
        f"the plan's mask has the slice {row.tolist()}, which is no causal document nor a branch of a tree, and a "
        "state passes through nothing else; plan with varlen_causal(cu_seqlens) or tree_causal(lengths, parents), "
        "for several masks with make_plans"
    )
