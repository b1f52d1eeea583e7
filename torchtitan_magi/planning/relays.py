"""Which way K/V rows travel: straight from their owner to who needs them, or over the network once per node.

With relays, a row that ranks of another node need crosses to one of the node's ranks, its relay, which passes it on.
The relays of a node divide its rows evenly, whether they need them or not, so that all network links carry the same.
That saves most where many ranks need the same rows, as of long documents; it costs a second exchange.
"""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from torchtitan_magi.masks.geometry import Int64Array, frozen, intersecting, union
from torchtitan_magi.planning.topology import Nodes

Span = tuple[Fraction, Fraction]  # a stage's cut of the remote K/V: from which to which fraction of the rows
Spans = tuple[Span, ...]  # of all stages; the first stage also holds the rank's own K/V

NONE, ALL = Fraction(0), Fraction(1)
RESIDENT: Spans = ((NONE, NONE),)  # nothing travels


@dataclass(frozen=True, eq=False)
class Routes:
    """Who owns which tokens, and which way K/V rows travel. The arrays are read-only.

    Attributes:
        owned: per rank int64 [n, 2] token ranges, ascending.
        nodes: which ranks sit in which node.
        transfers: what each rank needs of each other, int64 [n, 4]: destination, source, first token, end token.
        hops: what every rank receives straight from the rows' owners, int64 [m, 6], sorted: receiver, source, first
            token, end token; rows of the same receiver and source that come before; all rows of the two.
        has_relays: whether rows that cross between nodes pass through relays.
    """

    owned: tuple[Int64Array, ...]
    nodes: Nodes
    transfers: Int64Array
    hops: Int64Array
    has_relays: bool = False

    @classmethod
    def of(
        cls, owned: tuple[Int64Array, ...], nodes: Nodes, transfers: Int64Array, has_relays: bool = False
    ) -> "Routes":
        """Those of these transfers, in any order."""
        hops = _to_relays(transfers, len(owned), nodes) if has_relays else transfers
        return cls(owned, nodes, frozen(transfers), frozen(_counted(hops, len(owned))), has_relays)

    @property
    def cp_size(self) -> int:
        """Number of context-parallel ranks."""
        return len(self.owned)

    @property
    def can_be_relayed(self) -> bool:
        """Whether any row crosses between nodes that can have relays."""
        destination, source = self.transfers[:, :2].T
        return self.nodes.can_relay and bool((self.nodes.node[destination] != self.nodes.node[source]).any())

    @property
    def relayed(self) -> "Routes":
        """The same transfers through relays."""
        return Routes.of(self.owned, self.nodes, self.transfers, has_relays=True)

    def hops_concerning(self, rank: int) -> Int64Array:
        """The hops to and from a rank, and with relays those to its node."""
        receiver, source = self.hops[:, 0], self.hops[:, 1]
        concerns = (receiver == rank) | (source == rank)
        if self.has_relays:
            concerns |= self.nodes.node[receiver] == self.nodes.node[rank]
        return self.hops[concerns]

    def second_hops(self, hops: Int64Array, node: int) -> Int64Array:
        """What the relays of a node pass on, when what the hops to the node say has arrived.

        Returns:
            int64 [k, 4], sorted: destination, relay, first token, end token; without what relays keep for themselves.
        """
        of = self.nodes.node
        relayed, needs = (
            table[(of[table[:, 0]] == node) & (of[table[:, 1]] != node)] for table in (hops, self.transfers)
        )
        relay, _, start, end = relayed[np.argsort(relayed[:, 2])].T
        which, held = intersecting(needs[:, 2], needs[:, 3], start, end)
        lo, hi = np.maximum(needs[which, 2], start[held]), np.minimum(needs[which, 3], end[held])
        passed = np.stack([needs[which, 0], relay[held], lo, hi], 1)
        passed = passed[passed[:, 0] != passed[:, 1]]
        return passed[np.lexsort((passed[:, 2], passed[:, 1], passed[:, 0]))]


def _counted(hops: Int64Array, cp_size: int) -> Int64Array:
    """Hops int64 [m, 4] in the order of ``Routes.hops``, with its counts of rows."""
    receiver, source, start, end = hops[np.lexsort((hops[:, 2], hops[:, 1], hops[:, 0]))].T
    rows = end - start
    before = rows.cumsum() - rows
    pair = receiver * cp_size + source
    is_new = np.append(True, pair[1:] != pair[:-1])[: len(pair)]
    number = is_new.cumsum() - 1
    total = np.bincount(number, rows).astype(np.int64)[number]
    return np.stack([receiver, source, start, end, before - before[is_new][number], total], 1)


def _to_relays(transfers: Int64Array, cp_size: int, nodes: Nodes) -> Int64Array:
    """The same rows, those of other nodes each once per node, to its relays; int64 [m, 4]: as `transfers`."""
    crosses = nodes.node[transfers[:, 0]] != nodes.node[transfers[:, 1]]
    inside, transfers = transfers[~crosses], transfers[crosses]

    # Step 1: each row once per node, by the source's place in its own node: relay and source then often have the same.
    limit = int(transfers[:, 3].max(initial=0))
    node = nodes.node[transfers[:, 0]]
    once = union(node * cp_size + transfers[:, 1], transfers[:, 2], transfers[:, 3], limit)
    node, source = once[:, 0] // cp_size, once[:, 0] % cp_size
    order = np.lexsort((once[:, 1], source, nodes.place[source], node))
    node, source, start, end = node[order], source[order], once[order, 1], once[order, 2]

    # Step 2: the rows of a node in this order, divided evenly among its ranks.
    rows = end - start
    before = rows.cumsum() - rows
    of_node = np.bincount(node, rows, len(nodes)).astype(np.int64)
    edges = np.append(0, of_node.cumsum())
    first = edges[nodes.node] + of_node[nodes.node] * nodes.place // np.array(nodes.sizes)[nodes.node]
    last = np.append(first[1:], edges[-1])
    which, relay = intersecting(before, before + rows, first, last)
    shift = (start - before)[which]
    lo = np.maximum(before[which], first[relay]) + shift
    hi = np.minimum((before + rows)[which], last[relay]) + shift
    return np.concatenate([inside, np.stack([relay, source[which], lo, hi], 1)[lo < hi]])


def cut(hops: Int64Array, span: Span) -> Int64Array:
    """A span of what every receiver gets from every source, in the order of its tokens.

    Returns:
        int64 [m, 4]: receiver, source, first token, end token.
    """
    receiver, source, start, end, before, total = hops.T
    first, last = (total * edge.numerator // edge.denominator - before for edge in span)
    rows = end - start
    lo, hi = start + np.clip(first, 0, rows), start + np.clip(last, 0, rows)
    return np.stack([receiver, source, lo, hi], 1)[lo < hi]
