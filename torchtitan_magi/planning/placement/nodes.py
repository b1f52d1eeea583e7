"""Which rank number each share of a placement gets, so that ranks that need the same document sit in one node."""

import itertools
from collections.abc import Sequence

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, intersecting
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.needs import cut_at_parts, key_needs, node_traffic, parts_of, transfers_of
from torchtitan_magi.planning.topology import Nodes

SWAP_NODES = 16  # that receive least: with whose shares swaps are tried


def seat_in_nodes(
    slices: AttnSlices, document_starts: Int64Array, owned: tuple[Int64Array, ...], nodes: Nodes
) -> tuple[Int64Array, ...]:
    """Reorders the shares, so that few rows cross any rank's network link.

    Args:
        document_starts: first tokens of the documents, ascending.

    Returns:
        the shares in their new order.
    """
    reach, held = _documents_of_shares(slices, document_starts, owned)
    seats = [list(range(len(owned))), _by_document(reach, held, nodes)]
    if nodes.can_relay and nodes.are_equal:
        seats.append(_swap_seats(seats[1], reach, held, nodes.sizes[0]))
    candidates = [tuple(owned[share] for share in order) for order in seats]
    return min(candidates, key=lambda shares: _most_across(slices, shares, nodes))


def _most_across(slices: AttnSlices, owned: tuple[Int64Array, ...], nodes: Nodes) -> int:
    """The most rows that a rank receives from other nodes, or sends to them."""
    received, sent = node_traffic(slices, owned, nodes)
    return max(int(received.max()), int(sent.max()))


def _documents_of_shares(
    slices: AttnSlices, document_starts: Int64Array, owned: Sequence[Int64Array]
) -> tuple[Int64Array, Int64Array]:
    """What each share has to do with each document that travels, int64 [shares, documents] each.

    Returns:
        reach: keys from the document's first to the last one that the share needs; 0 if it receives none of them.
        held: tokens of the document that the share owns.
    """
    parts = parts_of(owned)
    needs = key_needs(cut_at_parts(slices, parts), parts)
    rank, _, start, _ = transfers_of(needs, parts).T
    document = np.searchsorted(document_starts, start, side="right") - 1
    travelling, column = np.unique(document, return_inverse=True)
    first = document_starts[travelling]
    end = np.append(document_starts, parts.ranges[-1, 1])[travelling + 1]
    reach, held = np.zeros((2, len(owned), len(travelling)), np.int64)
    which, document = intersecting(needs[:, 1], needs[:, 2], first, end)
    np.maximum.at(reach, (needs[which, 0], document), np.minimum(needs[which, 2], end[document]) - first[document])
    which, document = intersecting(parts.ranges[:, 0], parts.ranges[:, 1], first, end)
    start, stop = parts.ranges[which].T
    rows = np.minimum(stop, end[document]) - np.maximum(start, first[document])
    np.add.at(held, (parts.owner[which], document), rows)
    receives = np.zeros(reach.shape, bool)
    receives[rank, column] = True
    return np.where(receives, reach, 0), held


def _by_document(reach: Int64Array, held: Int64Array, nodes: Nodes) -> list[int]:
    """An order of the shares that keeps those together that need the same document.

    Shares that receive most of their rows from the same document form a group. A group larger than a node is cut into
    nodes by how far into the document its shares reach: those that reach far need the most keys, and all of them the
    same. What is left of the groups goes into nodes largest first; shares that receive nothing fill up.
    """
    num_shares, largest = len(reach), max(nodes.sizes)
    if reach.shape[1] == 0:
        return list(range(num_shares))
    received = np.maximum(reach - held, 0)
    main, each = received.argmax(1), np.arange(num_shares)
    receives = received[each, main] > 0
    order = np.lexsort((each, -reach[each, main], main)).tolist()
    groups: list[list[int]] = []
    for _, each_group in itertools.groupby([share for share in order if receives[share]], main.tolist().__getitem__):
        members = list(each_group)
        groups += [members[i : i + largest] for i in range(0, len(members), largest)]
    groups.sort(key=lambda group: (-len(group), group))
    groups += [[share] for share in order if not receives[share]]

    room = np.array(nodes.sizes)
    seated: list[list[int]] = [[] for _ in room]
    for group in groups:
        while group:
            fits = room >= len(group)
            i = int(np.where(fits, room, largest + 1).argmin() if fits.any() else room.argmax())
            taken = min(int(room[i]), len(group))
            seated[i] += group[:taken]
            group, room[i] = group[taken:], room[i] - taken
    return [share for node in seated for share in node]


def _swap_seats(order: list[int], reach: Int64Array, held: Int64Array, gpus_per_node: int) -> list[int]:
    """Swaps shares between the node that receives most and those that receive least while that lowers the larger of
    the two."""
    seats = np.array(order).reshape(-1, gpus_per_node)

    def received_by(nodes: Int64Array) -> Int64Array:
        """Rows that nodes receive, by their seats [nodes, gpus]."""
        return np.maximum(reach[nodes].max(1) - held[nodes].sum(1), 0).sum(1)

    received = received_by(seats)
    for _ in range(4 * len(seats)):
        *partners, node = received.argsort(kind="stable").tolist()
        partners = partners[:SWAP_NODES]
        mine, others = seats[node], seats[partners]
        shares = np.append(mine, others)
        concerned = np.flatnonzero((reach[shares] | held[shares]).any(0))  # others are 0 in all of them
        far, own = reach[:, concerned], held[:, concerned]
        without_mine = _reach_without(far[mine])  # [gpus, documents]
        without_other = _reach_without(far[others])  # [nodes - 1, gpus, documents]
        # Volumes of both nodes if share i of this node and share j of another one swap seats: [nodes - 1, i, j].
        moved = own[others][:, None] - own[mine][None, :, None]
        here = np.maximum(without_mine[None, :, None], far[others][:, None]) - own[mine].sum(0) - moved
        there = np.maximum(without_other[:, None], far[mine][None, :, None]) + moved
        there -= own[others].sum(1)[:, None, None]
        worse = np.maximum(np.maximum(here, 0).sum(3), np.maximum(there, 0).sum(3))
        other, i, j = np.unravel_index(int(worse.argmin()), worse.shape)
        if worse[other, i, j] >= received[node]:
            break
        swapped = [node, partners[other]]
        seats[node, i], seats[partners[other], j] = seats[partners[other], j], seats[node, i]
        received[swapped] = received_by(seats[swapped])
    return seats.ravel().tolist()


def _reach_without(reach: Int64Array) -> Int64Array:
    """For each share of nodes, [..., gpus, documents], the farthest reach of the others in its node."""
    second, first = np.moveaxis(np.sort(reach, -2)[..., -2:, :], -2, 0)
    is_first = np.arange(reach.shape[-2])[:, None] == reach.argmax(-2)[..., None, :]
    return np.where(is_first, second[..., None, :], first[..., None, :])
