"""Which way K/V rows travel: from their owner to who needs them, over the network once per node that needs them.

A row that several ranks of another node need crosses to one of the node's ranks, its relay, which passes it on. The
relays of a node share its rows evenly, whether they need them or not, so that all network links carry the same.
"""

from fractions import Fraction

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import intersecting, union

Int64Array = npt.NDArray[np.int64]


def first_hops(transfers: Int64Array, cp_size: int, gpus_per_node: int) -> Int64Array:
    """What every rank receives straight from the rows' owners.

    Args:
        transfers: int64 [n, 4]: destination, source, first token, end token: what each rank needs of each other.
        gpus_per_node: ranks [0, gpus_per_node) are one node, and so on.

    Returns:
        int64 [m, 6], sorted: receiver, source, first token, end token; rows of the same receiver and source that come
        before, and all rows of the two.
    """
    destination, source = transfers[:, 0], transfers[:, 1]
    if gpus_per_node > 1:
        node = destination // gpus_per_node
        crosses = node != source // gpus_per_node
        transfers = np.concatenate(
            [transfers[~crosses], _to_relays(transfers[crosses], node[crosses], cp_size, gpus_per_node)]
        )
    receiver, source, start, end = transfers[np.lexsort((transfers[:, 2], transfers[:, 1], transfers[:, 0]))].T
    rows = end - start
    before = rows.cumsum() - rows
    pair = receiver * cp_size + source
    is_new = np.append(True, pair[1:] != pair[:-1])[: len(pair)]
    number = is_new.cumsum() - 1
    total = np.bincount(number, rows).astype(np.int64)[number]
    return np.stack([receiver, source, start, end, before - before[is_new][number], total], 1)


def _to_relays(transfers: Int64Array, node: Int64Array, cp_size: int, gpus_per_node: int) -> Int64Array:
    """The same rows, each once per node, to the node's relays; int64 [m, 4]: relay, source, first token, end token."""
    # Step 1: each row once per node, by the source's place in its own node: relay and source then often have the same.
    limit = int(transfers[:, 3].max(initial=0))
    once = union(node * cp_size + transfers[:, 1], transfers[:, 2], transfers[:, 3], limit)
    node, source = once[:, 0] // cp_size, once[:, 0] % cp_size
    order = np.lexsort((once[:, 1], source // gpus_per_node, source % gpus_per_node, node))
    node, source, start, end = node[order], source[order], once[order, 1], once[order, 2]

    # Step 2: the rows of a node in this order, cut into equal parts.
    rows = end - start
    before = rows.cumsum() - rows
    rank = np.arange(cp_size)
    of_node = np.bincount(node, rows, -(-cp_size // gpus_per_node)).astype(np.int64)
    gpus = np.bincount(rank // gpus_per_node)[rank // gpus_per_node]
    edges = np.append(0, of_node.cumsum())
    part_start = edges[rank // gpus_per_node] + of_node[rank // gpus_per_node] * (rank % gpus_per_node) // gpus
    part_end = np.append(part_start[1:], edges[-1])
    which, relay = intersecting(before, before + rows, part_start, part_end)
    shift = (start - before)[which]
    lo = np.maximum(before[which], part_start[relay]) + shift
    hi = np.minimum((before + rows)[which], part_end[relay]) + shift
    return np.stack([relay, source[which], lo, hi], 1)[lo < hi]


def cut(hops: Int64Array, share: tuple[Fraction, Fraction]) -> Int64Array:
    """A share of what every receiver gets from every source, in the order of its tokens.

    Args:
        hops: from `first_hops`. share: from which to which part of the rows, both in [0, 1].

    Returns:
        int64 [m, 4]: receiver, source, first token, end token.
    """
    receiver, source, start, end, before, total = hops.T
    first, last = (total * part.numerator // part.denominator - before for part in share)
    rows = end - start
    lo, hi = start + np.clip(first, 0, rows), start + np.clip(last, 0, rows)
    return np.stack([receiver, source, lo, hi], 1)[lo < hi]


def second_hops(relayed: Int64Array, needs: Int64Array) -> Int64Array:
    """What the relays of a node pass on.

    Args:
        relayed: int64 [n, 4]: relay, source, first token, end token; what crosses to the node.
        needs: int64 [m, 4]: destination, source, first token, end token; what its ranks need from other nodes.

    Returns:
        int64 [k, 4], sorted: destination, relay, first token, end token; without what relays keep for themselves.
    """
    relay, _, start, end = relayed[np.argsort(relayed[:, 2])].T
    which, part = intersecting(needs[:, 2], needs[:, 3], start, end)
    lo, hi = np.maximum(needs[which, 2], start[part]), np.minimum(needs[which, 3], end[part])
    passed = np.stack([needs[which, 0], relay[part], lo, hi], 1)
    passed = passed[passed[:, 0] != passed[:, 1]]
    return passed[np.lexsort((passed[:, 2], passed[:, 1], passed[:, 0]))]
