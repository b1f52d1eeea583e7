"""One rank's stages: which K/V rows travel in each, and the slices it computes."""

import functools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from torchtitan_magi.masks.geometry import IntArray, clip_keys, clip_rows, expand, intersecting
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.relays import cut, second_hops
from torchtitan_magi.planning.timeline import ALL, NONE, Share, Shares

Int64Array = npt.NDArray[np.int64]


class Parcel(NamedTuple):
    """The rows that one rank sends to another one."""

    other: int  # the rank at the other end
    first: int  # row in what is sent
    rows: int
    place: int  # row in what is received


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's part in one all-to-all-v of K/V rows. Rows travel in ascending token order, rank after rank.

    The same rows, as gradients, go back in its reverse.
    """

    rank: int
    send_rows: Int64Array  # by destination rank; what they number, see Stage
    send_splits: tuple[int, ...]  # rows sent to each rank
    recv_splits: tuple[int, ...]  # rows received from each rank
    hops: Int64Array | None  # [n, 4+], of all ranks: receiver, source, ...; None where rows go through relays
    share: Share  # of the hops

    def splits(self, back: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows received from and sent to each rank; of the reverse if `back`."""
        return (self.send_splits, self.recv_splits) if back else (self.recv_splits, self.send_splits)

    @functools.cached_property
    def between(self) -> Int64Array:
        """Rows by receiver and source, of all ranks: int64 [ranks, ranks]."""
        assert self.hops is not None
        receiver, source, start, end = cut(self.hops, self.share).T
        size = len(self.send_splits)
        return np.bincount(receiver * size + source, end - start, size * size).astype(np.int64).reshape(size, size)

    @property
    def is_whole(self) -> bool:
        """Whether everything that travels does so at once."""
        return self.share == (NONE, ALL)

    def most_sent(self, back: bool) -> int:
        """Rows that the rank sends that sends most."""
        return self._both_ways[back][0]

    def fetches(self, back: bool) -> tuple[Parcel, ...]:
        """What this rank receives, from the next rank on, so that not all begin with the same one."""
        return self._both_ways[back][1]

    def deliveries(self, back: bool) -> tuple[Parcel, ...]:
        """What this rank sends, in the order of the rows."""
        return self._both_ways[back][2]

    @functools.cached_property
    def _both_ways(self) -> tuple[tuple[int, tuple[Parcel, ...], tuple[Parcel, ...]], ...]:
        both = self.between, self.between.T
        return tuple((int(x.sum(0).max()), _fetches(x, self.rank), _deliveries(x, self.rank)) for x in both)


def _fetches(between: Int64Array, rank: int) -> tuple[Parcel, ...]:
    """What `rank` receives of rows [receiver, source]: a source has them ready by receiver."""
    first = between[:rank].sum(0)
    rows = between[rank]
    place = rows.cumsum() - rows
    sources = [source % len(rows) for source in range(rank + 1, rank + len(rows))]
    return tuple(Parcel(i, int(first[i]), int(rows[i]), int(place[i])) for i in sources if rows[i])


def _deliveries(between: Int64Array, rank: int) -> tuple[Parcel, ...]:
    """What `rank` sends of rows [receiver, source]."""
    rows = between[:, rank]
    first = rows.cumsum() - rows
    place = between[:, :rank].sum(1)
    return tuple(Parcel(i, int(first[i]), int(rows[i]), int(place[i])) for i in range(len(rows)) if rows[i])


@dataclass(frozen=True, eq=False)
class Stage:
    """One rank's part in one stage: the K/V rows that travel, then attention over the stage's K/V rows.

    These are the rank's own tokens first if ``holds_local``, then what each exchange brings. The first exchange
    sends tokens of the rank, by local number. In a plan for several nodes there is a second one, inside the nodes: it
    passes on rows that the first one brought, numbered as it brought them. All ranks take part in the same exchanges.
    """

    slices: AttnSlices  # queries in local token numbers, keys in rows of the stage
    holds_local: bool
    num_rows: int  # K/V rows of the stage
    exchanges: tuple[Exchange, ...]

    @property
    def late_from(self) -> int | None:
        """The first row that comes from others, where they follow the rank's own."""
        return self.arriving[0][0] if self.holds_local and self.exchanges else None

    @functools.cached_property
    def arriving(self) -> tuple[tuple[int, int], ...]:
        """First row, and number of rows, of each exchange; they come last."""
        rows = [sum(exchange.recv_splits) for exchange in self.exchanges]
        return tuple((self.num_rows - sum(rows[i:]), rows[i]) for i in range(len(rows)))


@dataclass(frozen=True, eq=False)
class _Tables:
    """What all ranks' shares are computed from."""

    slices: AttnSlices  # canonical, over the whole pack
    owned: tuple[Int64Array, ...]  # per rank [n, 2] token ranges
    transfers: Int64Array  # [n, 4]: destination, source, first token, end token
    hops: Int64Array  # [n, 6]: from `routes.first_hops`
    gpus_per_node: int
    forward: Shares
    backward: Shares


@dataclass(frozen=True, eq=False)
class RankShare:
    """What one rank owns and does."""

    rank: int
    _tables: _Tables
    _stages: dict[tuple[bool, Share], Stage] = field(default_factory=dict, repr=False)

    @property
    def ranges(self) -> Int64Array:
        """Half-open token ranges that this rank owns, int64 [n, 2], ascending. Their order is the local token order."""
        return self._tables.owned[self.rank]

    @functools.cached_property
    def tokens(self) -> Int64Array:
        """The token behind each local token number, int64 [tokens_per_rank]."""
        return expand(self.ranges[:, 0], self.ranges[:, 1])

    @property
    def forward(self) -> tuple[Stage, ...]:
        """The stages of a layer's forward."""
        return self._stages_of(self._tables.forward)

    @property
    def backward(self) -> tuple[Stage, ...]:
        """The stages of a layer's backward; a stage that both have is the same object."""
        return self._stages_of(self._tables.backward)

    def _stages_of(self, shares: Shares) -> tuple[Stage, ...]:
        keys = [(i == 0, share) for i, share in enumerate(shares)]
        for key in keys:
            if key not in self._stages:
                self._stages[key] = _stage(self._tables, self.rank, *key)
        return tuple(self._stages[key] for key in keys)


def _stage(tables: _Tables, rank: int, holds_local: bool, share: Share) -> Stage:
    own, cp_size = tables.owned[rank], len(tables.owned)
    own_rows = own[:, 1] - own[:, 0]
    own_offset = own_rows.cumsum() - own_rows

    # What travels, and the stage's buffer: ranges of tokens, one after another. From rank to rank rows travel in
    # ascending order, so sender and receiver agree without talking.
    exchanges = []
    buffer = [own if holds_local else own[:0]]
    if share[0] < share[1]:
        node = rank // tables.gpus_per_node
        hops = cut(_concerning(tables, rank, node), share)
        received = hops[hops[:, 0] == rank]
        relays = 1 < tables.gpus_per_node < cp_size
        all_hops = None if relays else tables.hops
        exchanges.append(_exchange(rank, hops, own[:, 0], own_offset, cp_size, all_hops, share))
        buffer.append(received[:, 2:])
        if relays:
            relayed = hops[(hops[:, 0] // tables.gpus_per_node == node) & (hops[:, 1] // tables.gpus_per_node != node)]
            passed = second_hops(relayed, _from_other_nodes(tables, node))
            rows = received[:, 3] - received[:, 2]
            by_token = np.argsort(received[:, 2])
            first_row = (rows.cumsum() - rows)[by_token]
            exchanges.append(_exchange(rank, passed, received[by_token, 2], first_row, cp_size, None, share))
            buffer.append(passed[passed[:, 0] == rank, 2:])
    start, end = np.concatenate(buffer).T
    row = (end - start).cumsum() - (end - start)
    num_rows = int((end - start).sum())
    order = np.argsort(start)
    start, end, row = start[order], end[order], row[order]

    # The rank's slices: rows cut at its token ranges, keys cut at the buffer's ranges, both renumbered.
    table: IntArray = tables.slices.table.astype(np.int64)
    which, part = intersecting(table[:, 0], table[:, 1], own[:, 0], own[:, 1])
    table = clip_rows(table[which], own[part, 0], own[part, 1])
    table[:, :2] += (own_offset - own[:, 0])[part, None]
    which, part = intersecting(table[:, 2], table[:, 3], start, end)
    table, origin = clip_keys(table[which], start[part], end[part])
    table[:, 2:4] += (row - start)[part][origin, None]
    table = table[np.lexsort((table[:, 2], table[:, 0]))]
    own_end = int(own_rows.sum()) if holds_local else 0
    return Stage(AttnSlices._trusted(_join_keys(table, own_end)), holds_local, num_rows, tuple(exchanges))


def _join_keys(table: IntArray, apart: int) -> IntArray:
    """Slices of the same rows whose keys follow each other as one, where one has the bounds of both. Sorted tables.

    Keys before `apart` and after it stay apart: they do not come at the same time.
    """
    q_start, q_end, k_start, k_end, mask_type = table.T
    goes_on = (q_start[1:] == q_start[:-1]) & (q_end[1:] == q_end[:-1]) & (k_start[1:] == k_end[:-1])
    goes_on &= (mask_type[:-1] & 1 == 0) & (mask_type[1:] & 2 == 0)  # neither bound moves where they meet
    goes_on &= k_start[1:] != apart
    first = np.flatnonzero(np.append(True, ~goes_on)[: len(table)])
    last = np.append(first[1:], len(table))[: len(first)] - 1
    joined_type = (mask_type[first] & 2) | (mask_type[last] & 1)
    return np.stack([q_start[first], q_end[first], k_start[first], k_end[last], joined_type], 1)


def _concerning(tables: _Tables, rank: int, node: int) -> Int64Array:
    """The hops to and from a rank, and those to its node from other nodes."""
    receiver, source = tables.hops[:, 0], tables.hops[:, 1]
    mine = (receiver == rank) | (source == rank)
    if 1 < tables.gpus_per_node < len(tables.owned):
        mine |= receiver // tables.gpus_per_node == node
    return tables.hops[mine]


def _from_other_nodes(tables: _Tables, node: int) -> Int64Array:
    """What the ranks of a node need from other nodes: destination, source, first token, end token."""
    destination, source = tables.transfers[:, 0] // tables.gpus_per_node, tables.transfers[:, 1] // tables.gpus_per_node
    return tables.transfers[(destination == node) & (source != node)]


def _exchange(
    rank: int,
    hops: Int64Array,
    starts: Int64Array,
    rows: Int64Array,
    cp_size: int,
    all_hops: Int64Array | None,
    share: Share,
) -> Exchange:
    """A rank's part in hops [n, 4]: receiver, sender, first token, end token; sorted.

    Args:
        starts, rows: first token, ascending, and first row number of each range of tokens that the rank can send.
        all_hops, share: see Exchange.
    """
    sent, received = hops[hops[:, 1] == rank], hops[hops[:, 0] == rank]
    part = np.searchsorted(starts, sent[:, 2], side="right") - 1
    shift = (rows[part] - starts[part]) if len(part) else part
    send_rows = expand(sent[:, 2] + shift, sent[:, 3] + shift)
    splits = _rows_per_rank(sent[:, 0], sent, cp_size), _rows_per_rank(received[:, 1], received, cp_size)
    return Exchange(rank, send_rows, *splits, all_hops, share)


def _rows_per_rank(rank: Int64Array, hops: Int64Array, cp_size: int) -> tuple[int, ...]:
    return tuple(np.bincount(rank, hops[:, 3] - hops[:, 2], cp_size).astype(int).tolist())
