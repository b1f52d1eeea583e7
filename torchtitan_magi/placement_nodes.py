"""Which rank number each share of a placement gets, so that ranks that need the same document sit in one node."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from torchtitan_magi.slices import AttnSlices
from torchtitan_magi.traffic import key_needs, node_traffic, parts_of, transfers

Int64Array = npt.NDArray[np.int64]


def seat_in_nodes(
    slices: AttnSlices, document_starts: Int64Array, owned: tuple[Int64Array, ...], gpus_per_node: int
) -> tuple[tuple[Int64Array, ...], int]:
    """Reorders the shares, if that helps, for nodes of consecutive ranks.

    Args:
        document_starts: first tokens of the documents, ascending.

    Returns:
        the shares by rank, and the most rows per rank that reach any node from other nodes.
    """
    orders = (owned, tuple(owned[share] for share in _by_document(slices, document_starts, owned, gpus_per_node)))
    across = [int(node_traffic(slices, shares, gpus_per_node).max()) for shares in orders]
    best = int(across[1] < across[0])
    return orders[best], across[best]


def _by_document(
    slices: AttnSlices, document_starts: Int64Array, owned: Sequence[Int64Array], gpus_per_node: int
) -> list[int]:
    """An order of the shares that keeps those together that need the same document.

    Shares that receive most of their rows from the same document form a group. A group larger than a node is cut into
    nodes by how far into the document its shares reach: those that reach far need the most keys, and all of them the
    same. What is left of the groups goes into nodes largest first; shares that receive nothing fill up.
    """
    # Step 1: per share the document it receives most from, how much, and how far it reaches.
    table = slices.canonical().table.astype(np.int64)
    parts, owner = parts_of(owned)
    _, _, needs = key_needs(table, parts, owner)
    _, rank, start, end = transfers(needs, parts, owner).T
    document = np.searchsorted(document_starts, start, side="right") - 1
    rows = np.zeros((len(owned), len(document_starts)), np.int64)
    reach = rows.copy()
    np.add.at(rows, (rank, document), end - start)
    np.maximum.at(reach, (needs[:, 0], np.searchsorted(document_starts, needs[:, 1], side="right") - 1), needs[:, 2])
    main = rows.argmax(1)
    each = np.arange(len(owned))
    order = np.lexsort((each, -reach[each, main], main))
    receives = rows[each, main] > 0

    # Step 2: full nodes of one document each; the rest of every group stays together as far as it can.
    free = [min(gpus_per_node, len(owned) - first) for first in range(0, len(owned), gpus_per_node)]
    nodes: list[list[int]] = [[] for _ in free]
    rests: list[list[int]] = []
    for name in np.unique(main[receives]).tolist():
        group = [r for r in order.tolist() if main[r] == name and receives[r]]
        full = len(group) // gpus_per_node * gpus_per_node
        rests += [group[i : i + gpus_per_node] for i in range(0, full, gpus_per_node)]
        rests += [group[full:]] if group[full:] else []
    rests.sort(key=lambda group: (-len(group), group))
    loners = [r for r in order.tolist() if not receives[r]]
    for group in [*rests, *([r] for r in loners)]:
        while group:
            room = [size - len(node) for size, node in zip(free, nodes, strict=True)]
            fitting = [i for i, n in enumerate(room) if n >= len(group)]
            i = min(fitting, key=lambda i: room[i]) if fitting else max(range(len(room)), key=lambda i: room[i])
            nodes[i] += group[: room[i]]
            group = group[room[i] :]
    return [r for node in nodes for r in node]
