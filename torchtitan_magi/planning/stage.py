"""What one rank does in each overlap stage: the K/V rows that travel, and the slices that it computes."""

import functools
from dataclasses import dataclass, field

import numpy as np

from torchtitan_magi.masks.geometry import (
    Int64Array,
    IntArray,
    clip_keys,
    clip_rows,
    expand,
    frozen,
    groups,
    intersecting,
)
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.relays import ALL, NONE, Routes, Span, Spans, cut


@dataclass(frozen=True, eq=False)
class Exchange:
    """One rank's part in one all-to-all-v of K/V rows. Rows travel in ascending token order, rank after rank.

    The same rows, as gradients, go back in its reverse.
    """

    rank: int
    send_rows: Int64Array  # by destination rank; what they number, see Stage
    send_splits: tuple[int, ...]  # rows sent to each rank
    recv_splits: tuple[int, ...]  # rows received from each rank
    hops: Int64Array | None  # all ranks' [n, 6], see Routes; None where rows go through relays
    span: Span  # of the hops

    def splits(self, back: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Rows received from and sent to each rank; of the reverse if `back`."""
        return (self.send_splits, self.recv_splits) if back else (self.recv_splits, self.send_splits)

    @functools.cached_property
    def between(self) -> Int64Array:
        """All ranks' rows by receiver and source: int64 [ranks, ranks]."""
        assert self.hops is not None
        receiver, source, start, end = cut(self.hops, self.span).T
        size = len(self.send_splits)
        return frozen(np.bincount(receiver * size + source, end - start, size * size).reshape(size, size).astype(int))

    @property
    def is_whole(self) -> bool:
        """Whether everything that travels does so at once."""
        return self.span == (NONE, ALL)


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


def sent_before(i: int, travels: bool, num_stages: int) -> int:
    """How many stages' K/V are sent before stage i runs, so that at most two stages of them take memory.

    As many as possible: an exchange begins when the last rank has come to it, and ranks come to their later stages at
    different times, as some have more work with their own K/V than others.

    Args:
        travels: whether any of stage i's own K/V do; the others' all travel.
    """
    return min(i + (2 if travels else 3), num_stages)


@dataclass(frozen=True, eq=False)
class RankShare:
    """What one rank owns and does."""

    rank: int
    _slices: AttnSlices = field(repr=False)  # canonical, over the whole pack
    _routes: Routes = field(repr=False)
    _spans: tuple[Spans, Spans]  # of the forward's stages and the backward's
    _stages: dict[tuple[bool, Span], Stage] = field(default_factory=dict, repr=False)

    @property
    def ranges(self) -> Int64Array:
        """Half-open token ranges that this rank owns, int64 [n, 2], ascending. Their order is the local token order."""
        return self._routes.owned[self.rank]

    @functools.cached_property
    def tokens(self) -> Int64Array:
        """The token behind each local token number, int64 [tokens_per_rank]."""
        return frozen(expand(self.ranges[:, 0], self.ranges[:, 1]))

    @property
    def forward(self) -> tuple[Stage, ...]:
        """The stages of a layer's forward."""
        return self._stages_of(self._spans[0])

    @property
    def backward(self) -> tuple[Stage, ...]:
        """The stages of a layer's backward; a stage that both have is the same object."""
        return self._stages_of(self._spans[1])

    def _stages_of(self, spans: Spans) -> tuple[Stage, ...]:
        keys = [(i == 0, span) for i, span in enumerate(spans)]
        for key in keys:
            if key not in self._stages:  # of threads that both make it, all get what the first one puts in
                self._stages.setdefault(key, make_stage(self._slices, self._routes, self.rank, *key))
        return tuple(self._stages[key] for key in keys)


def make_stage(slices: AttnSlices, routes: Routes, rank: int, holds_local: bool, span: Span) -> Stage:
    """One rank's stage, from the mask over the whole pack."""
    own = routes.owned[rank]
    exchanges, received = exchanges_of(routes, rank, span)
    rows = numbered(np.concatenate([own if holds_local else own[:0], *received]))
    num_rows = int((rows[:, 1] - rows[:, 0]).sum())
    num_own = int((own[:, 1] - own[:, 0]).sum()) if holds_local else 0
    table = _join_keys(_renumbered(slices, numbered(own), rows), num_own)
    return Stage(AttnSlices._trusted(table), holds_local, num_rows, tuple(exchanges))


def numbered(ranges: Int64Array) -> Int64Array:
    """Token ranges [n, 2] that follow each other in a buffer, in ascending order with the buffer row of each.

    Returns:
        int64 [n, 3]: first token, end token, row of the first token.
    """
    rows = ranges[:, 1] - ranges[:, 0]
    table = np.column_stack([ranges, rows.cumsum() - rows])
    return table[np.argsort(table[:, 0])]


def exchanges_of(routes: Routes, rank: int, span: Span) -> tuple[list[Exchange], list[Int64Array]]:
    """A rank's exchanges of one stage, and the token ranges [n, 2] that each brings, in the order of the rows.

    From rank to rank rows travel in ascending order, so sender and receiver agree without talking.
    """
    if span[0] == span[1]:
        return [], []
    hops = cut(routes.hops_concerning(rank), span)
    received = hops[hops[:, 0] == rank, 2:]
    all_hops = None if routes.has_relays else routes.hops
    first = Exchange(rank, *_sent_and_received(hops, rank, routes.owned[rank], routes.cp_size), all_hops, span)
    if not routes.has_relays:
        return [first], [received]
    passed = routes.second_hops(hops, int(routes.nodes.node[rank]))
    second = Exchange(rank, *_sent_and_received(passed, rank, received, routes.cp_size), None, span)
    return [first, second], [received, passed[passed[:, 0] == rank, 2:]]


def _sent_and_received(
    hops: Int64Array, rank: int, held: Int64Array, cp_size: int
) -> tuple[Int64Array, tuple[int, ...], tuple[int, ...]]:
    """send_rows, send_splits and recv_splits of a rank's exchange.

    Args:
        hops: int64 [n, 4], sorted: receiver, sender, first token, end token.
        held: the token ranges [m, 2] that the rank can send, in the order of its rows.
    """
    sent, received = hops[hops[:, 1] == rank], hops[hops[:, 0] == rank]
    rows = numbered(held)
    which = np.searchsorted(rows[:, 0], sent[:, 2], side="right") - 1
    shift = rows[which, 2] - rows[which, 0]
    send_rows = frozen(expand(sent[:, 2] + shift, sent[:, 3] + shift))
    return send_rows, _rows_per_rank(sent[:, 0], sent, cp_size), _rows_per_rank(received[:, 1], received, cp_size)


def _rows_per_rank(rank: Int64Array, hops: Int64Array, cp_size: int) -> tuple[int, ...]:
    return tuple(np.bincount(rank, hops[:, 3] - hops[:, 2], cp_size).astype(int).tolist())


def _renumbered(slices: AttnSlices, queries: Int64Array, keys: Int64Array) -> IntArray:
    """A mask over tokens restricted to queries and keys, with rows of their buffers in place of tokens.

    Args:
        queries, keys: from ``numbered``.

    Returns:
        a slice table sorted by q_start, then k_start.
    """
    table: IntArray = slices.table.astype(np.int64)
    which, part = intersecting(table[:, 0], table[:, 1], queries[:, 0], queries[:, 1])
    table = clip_rows(table[which], queries[part, 0], queries[part, 1])
    table[:, :2] += (queries[:, 2] - queries[:, 0])[part, None]
    which, part = intersecting(table[:, 2], table[:, 3], keys[:, 0], keys[:, 1])
    table, origin = clip_keys(table[which], keys[part, 0], keys[part, 1])
    table[:, 2:4] += (keys[:, 2] - keys[:, 0])[part][origin, None]
    return table[np.lexsort((table[:, 2], table[:, 0]))]


def _join_keys(table: IntArray, apart: int) -> IntArray:
    """Slices of the same rows whose keys follow each other as one, where one has the bounds of both. Sorted tables.

    Keys before `apart` and after it stay apart: they do not come at the same time.
    """
    q_start, q_end, k_start, k_end, mask_type = table.T
    goes_on = (q_start[1:] == q_start[:-1]) & (q_end[1:] == q_end[:-1]) & (k_start[1:] == k_end[:-1])
    goes_on &= (mask_type[:-1] & 1 == 0) & (mask_type[1:] & 2 == 0)  # neither bound moves where they meet
    goes_on &= k_start[1:] != apart
    first, last = groups(goes_on, len(table))
    joined_type = (mask_type[first] & 2) | (mask_type[last] & 1)
    return np.stack([q_start[first], q_end[first], k_start[first], k_end[last], joined_type], 1)
