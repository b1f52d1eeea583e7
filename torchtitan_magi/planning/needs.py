"""What a placement costs: attention work of each rank, K/V rows that each receives and sends."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import IntArray, clip_rows, intersecting, slice_areas, union
from torchtitan_magi.masks.slices import AttnSlices

Int64Array = npt.NDArray[np.int64]


def parts_of(owned: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """All owned ranges ascending, int64 [n, 2], and the rank that owns each, [n]."""
    rank = np.repeat(np.arange(len(owned)), [len(ranges) for ranges in owned])
    parts = np.concatenate(owned)
    order = np.argsort(parts[:, 0], kind="stable")
    return parts[order], rank[order]


def transfers(needs: IntArray, parts: IntArray, owner: IntArray) -> Int64Array:
    """Who sends what: the needed rows that somebody else owns.

    Args:
        needs: [n, 3]: rank (or group of ranks), first token, end token.
        parts: [m, 2] ascending ranges; owner: [m] the rank (or group) of each.

    Returns:
        [k, 4]: index of the part, destination, first token, end token.
    """
    which, part = intersecting(needs[:, 1], needs[:, 2], parts[:, 0], parts[:, 1])
    start, end = np.maximum(needs[which, 1], parts[part, 0]), np.minimum(needs[which, 2], parts[part, 1])
    table = np.stack([part, needs[which, 0], start, end], 1)
    return table[owner[part] != needs[which, 0]]


def key_needs(table: IntArray, parts: IntArray, owner: IntArray) -> tuple[IntArray, IntArray, Int64Array]:
    """A canonical slice table [n, 5] cut at the parts: rank of each piece, pieces, key ranges [m, 3] of each rank."""
    which, part = intersecting(table[:, 0], table[:, 1], parts[:, 0], parts[:, 1])
    pieces = clip_rows(table[which], parts[part, 0], parts[part, 1])
    limit = int(parts[:, 1].max(initial=0))
    return owner[part], pieces, union(owner[part], pieces[:, 2], pieces[:, 3], limit)


def traffic(slices: AttnSlices, owned: Sequence[IntArray]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(query, key) pairs computed, K/V rows received and K/V rows sent by each rank; int64 [ranks] each."""
    table = slices.canonical().table.astype(np.int64)
    parts, owner = parts_of(owned)
    rank, pieces, needs = key_needs(table, parts, owner)
    part, destination, start, end = transfers(needs, parts, owner).T
    counts = ((rank, slice_areas(pieces)), (destination, end - start), (owner[part], end - start))
    area, received, sent = (_sums(which, values, len(owned)) for which, values in counts)
    return area, received, sent


def node_traffic(slices: AttnSlices, owned: Sequence[IntArray], gpus_per_node: int) -> Int64Array:
    """K/V rows that reach each rank's node from other nodes, each row counted once per node, per rank of the node.

    Returns:
        int64 [nodes]: rows that cross the network to the node, divided (rounded up) by gpus_per_node.
    """
    table = slices.canonical().table.astype(np.int64)
    parts, owner = parts_of(owned)
    node = owner // gpus_per_node
    _, _, needs = key_needs(table, parts, node)
    _, destination, start, end = transfers(needs, parts, node).T
    return -(-_sums(destination, end - start, -(-len(owned) // gpus_per_node)) // gpus_per_node)


def _sums(which: IntArray, values: IntArray, size: int) -> Int64Array:
    """Sum of the values of each group; exact integers."""
    total = np.zeros(size, np.int64)
    np.add.at(total, which, values)
    return total
