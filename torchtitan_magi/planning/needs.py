"""What a placement costs: attention work of each rank, K/V rows that each receives and sends."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, IntArray, clip_rows, intersecting, slice_areas, union
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.topology import Nodes


class Parts(NamedTuple):
    """The token ranges of all ranks in ascending order; together they cover the pack."""

    ranges: IntArray  # [n, 2]
    owner: IntArray  # [n]: the rank, or the node, that owns each


class CutMask(NamedTuple):
    """A mask whose slices are cut at parts."""

    table: IntArray  # [n, 5]: slices
    owner: IntArray  # [n]: who owns the queries of each


def parts_of(owned: Sequence[IntArray]) -> Parts:
    """The parts of ranks that own these token ranges, [n, 2] each."""
    rank = np.repeat(np.arange(len(owned)), [len(ranges) for ranges in owned])
    ranges = np.concatenate(owned)
    order = np.argsort(ranges[:, 0], kind="stable")
    return Parts(ranges[order], rank[order])


def cut_at_parts(slices: AttnSlices, parts: Parts) -> CutMask:
    """The mask, with the queries of each slice in one part."""
    table = slices.canonical().table.astype(np.int64)
    which, part = intersecting(table[:, 0], table[:, 1], *parts.ranges.T)
    return CutMask(clip_rows(table[which], *parts.ranges[part].T), parts.owner[part])


def key_needs(mask: CutMask, parts: Parts) -> Int64Array:
    """The keys that each owner needs, int64 [m, 3]: owner, first token, end token; disjoint and sorted."""
    limit = int(parts.ranges[:, 1].max(initial=0))
    return union(mask.owner, mask.table[:, 2], mask.table[:, 3], limit)


def transfers_of(needs: Int64Array, parts: Parts) -> Int64Array:
    """Which K/V rows travel: those of ``key_needs`` that somebody else owns.

    Returns:
        int64 [k, 4]: destination, source, first token, end token; by destination, then token.
    """
    need, part = intersecting(needs[:, 1], needs[:, 2], *parts.ranges.T)
    start, end = np.maximum(needs[need, 1], parts.ranges[part, 0]), np.minimum(needs[need, 2], parts.ranges[part, 1])
    table = np.stack([needs[need, 0], parts.owner[part], start, end], 1)
    return table[table[:, 0] != table[:, 1]]


def traffic(slices: AttnSlices, owned: Sequence[IntArray]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(query, key) pairs computed, K/V rows received and K/V rows sent by each rank; int64 [ranks] each."""
    parts = parts_of(owned)
    mask = cut_at_parts(slices, parts)
    destination, source, start, end = transfers_of(key_needs(mask, parts), parts).T
    counts = ((mask.owner, slice_areas(mask.table)), (destination, end - start), (source, end - start))
    area, received, sent = (sums(which, values, len(owned)) for which, values in counts)
    return area, received, sent


def node_traffic(slices: AttnSlices, owned: Sequence[IntArray], nodes: Nodes) -> tuple[Int64Array, Int64Array]:
    """K/V rows that cross between nodes, each row counted once per node that needs it.

    Returns:
        rows that reach each node, divided (rounded up) by its ranks, int64 [nodes]; rows that each rank sends to
        other nodes, int64 [ranks].
    """
    parts = parts_of(owned)
    by_node = parts._replace(owner=nodes.node[parts.owner])
    needs = key_needs(cut_at_parts(slices, by_node), by_node)
    need, part = intersecting(needs[:, 1], needs[:, 2], *parts.ranges.T)
    crosses = needs[need, 0] != by_node.owner[part]
    need, part = need[crosses], part[crosses]
    rows = np.minimum(needs[need, 2], parts.ranges[part, 1]) - np.maximum(needs[need, 1], parts.ranges[part, 0])
    received = sums(needs[need, 0], rows, len(nodes))
    return -(-received // np.array(nodes.sizes)), sums(parts.owner[part], rows, len(owned))


def sums(which: IntArray, values: IntArray, size: int) -> Int64Array:
    """Sum of the values of each group; exact integers."""
    total = np.zeros(size, np.int64)
    np.add.at(total, which, values)
    return total
