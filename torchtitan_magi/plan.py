"""The dispatch plan of one microbatch: who owns which tokens, who sends which K/V rows when, who computes what.

A plan is a pure function of replicated input. Every rank computes the same one, without a process group or a
collective, and any rank's share can be computed anywhere. It is made once per microbatch and shared by all layers.
"""

import functools
import hashlib
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchtitan_magi.placement import place
from torchtitan_magi.ranges import expand, intersecting
from torchtitan_magi.slices import AttnSlices, IntArray, clip_keys, clip_rows
from torchtitan_magi.traffic import key_needs, parts_of
from torchtitan_magi.traffic import transfers as transfers_of

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Stage:
    """One rank's part in one stage: the K/V rows that travel, then attention over the stage's K/V buffer.

    The buffer holds the rank's own tokens first if ``holds_local``, then the received rows by source rank and, from one
    source, by ascending token.
    """

    slices: AttnSlices  # queries in local token numbers, keys in rows of the stage's buffer
    holds_local: bool
    num_rows: int  # rows of the stage's K/V buffer
    communicates: bool  # whether any rank sends anything in this stage; the same on every rank
    send_rows: Int64Array  # local token numbers of the rows this rank sends, by destination rank
    send_splits: tuple[int, ...]  # rows sent to each rank
    recv_splits: tuple[int, ...]  # rows received from each rank


@dataclass(frozen=True, eq=False)
class _Tables:
    """What all ranks' shares are computed from."""

    slices: AttnSlices  # canonical, over the whole pack
    owned: tuple[Int64Array, ...]  # per rank [n, 2] token ranges
    transfers: Int64Array  # [n, 5]: stage, destination rank, source rank, first token, end token; sorted
    num_stages: int
    local_stage_communicates: bool


@dataclass(frozen=True, eq=False)
class RankShare:
    """What one rank owns and does."""

    rank: int
    _tables: _Tables

    @property
    def ranges(self) -> Int64Array:
        """Half-open token ranges that this rank owns, int64 [n, 2], ascending. Their order is the local token order."""
        return self._tables.owned[self.rank]

    @functools.cached_property
    def tokens(self) -> Int64Array:
        """The token behind each local token number, int64 [tokens_per_rank]."""
        return expand(self.ranges[:, 0], self.ranges[:, 1])

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        return tuple(_stage(self._tables, self.rank, stage) for stage in range(self._tables.num_stages))


@dataclass(frozen=True, eq=False)
class AttnPlan:
    """The plan of one microbatch. Immutable, and the same on every rank.

    Attributes:
        slices: the mask over the pack's tokens, canonical.
        total_tokens: tokens of the pack.
        padded_tokens: the same, rounded up to a multiple of cp_size; the padding comes last and takes part in nothing.
        cp_size: number of context-parallel ranks.
        ranks: per rank its share (``ranges``, ``tokens``, ``stages``).
        areas: (query, key) pairs that each rank computes, int64 [cp_size].
        transfers: K/V row ranges that travel, int64 [n, 5]: stage, destination, source, first token, end token.
    """

    slices: AttnSlices
    total_tokens: int
    padded_tokens: int
    cp_size: int
    ranks: tuple[RankShare, ...] = field(repr=False)
    areas: Int64Array = field(repr=False)
    transfers: Int64Array = field(repr=False)

    @property
    def tokens_per_rank(self) -> int:
        return self.padded_tokens // self.cp_size

    @functools.cached_property
    def fingerprint(self) -> int:
        """A number that differs between different plans, in 63 bits."""
        digest = hashlib.blake2b(digest_size=8)
        for array in (self.slices.table, self.transfers, *(share.ranges for share in self.ranks)):
            digest.update(np.ascontiguousarray(array).tobytes())
        digest.update(f"{self.total_tokens} {self.cp_size}".encode())
        return int.from_bytes(digest.digest()) >> 1

    @property
    def received_rows(self) -> Int64Array:
        """K/V rows that each rank receives, int64 [cp_size]."""
        _, destination, _, start, end = self.transfers.T
        return np.bincount(destination, end - start, self.cp_size).astype(np.int64)


@functools.lru_cache(maxsize=16)
def make_plan(slices: AttnSlices, total_tokens: int, cp_size: int, overlap_stages: int = 1) -> AttnPlan:
    """Plans one microbatch.

    Args:
        slices: the mask over the pack; rows that no slice touches (padding) attend to nothing and cost nothing.
        total_tokens: tokens of the pack; any number. When it does not divide by cp_size the plan pads at the end.
        cp_size: number of context-parallel ranks.
        overlap_stages: into how many stages the remote K/V is cut. The first is on its way while a rank attends to its
            own K/V, each next one while the one before is attended to. 0: no overlap, one attention call over all K/V.

    Raises:
        ValueError: a slice reaches beyond total_tokens; a size below 1 (stages: below 0).
    """
    if cp_size < 1 or total_tokens < 0:
        raise ValueError(f"cp_size is {cp_size} and total_tokens {total_tokens}; they must be at least 1 and 0")
    if overlap_stages < 0:
        raise ValueError(f"overlap_stages is {overlap_stages}; use 0 for no overlap or the number of stages")
    _check_range(slices, total_tokens)
    slices = slices.canonical()
    padded_tokens = -(-total_tokens // cp_size) * cp_size
    return plan_ownership(slices, total_tokens, place(slices, padded_tokens, cp_size), overlap_stages)


def plan_ownership(
    slices: AttnSlices, total_tokens: int, owned: tuple[Int64Array, ...], overlap_stages: int
) -> AttnPlan:
    """The plan that follows from who owns which tokens.

    Args:
        slices: canonical.
        owned: per rank int64 [n, 2] token ranges, ascending; together they cover the padded pack, equally many each.
        overlap_stages: as in ``make_plan``.
    """
    cp_size = len(owned)
    padded_tokens = int(sum((ranges[:, 1] - ranges[:, 0]).sum() for ranges in owned))

    parts, owner = parts_of(owned)
    rank, pairs, needs = key_needs(slices.table.astype(np.int64), parts, owner)
    areas = np.bincount(rank, pairs, cp_size).astype(np.int64)
    part, destination, start, end = transfers_of(needs, parts, owner).T
    transfers = np.stack([destination, owner[part], start, end], 1)
    transfers = _cut_into_stages(transfers, overlap_stages)

    num_stages = 1 + (overlap_stages if len(transfers) else 0)
    tables = _Tables(slices, owned, transfers, num_stages, overlap_stages == 0 and len(transfers) > 0)
    ranks = tuple(RankShare(rank, tables) for rank in range(cp_size))
    return AttnPlan(slices, total_tokens, padded_tokens, cp_size, ranks, areas, transfers)


def _check_range(slices: AttnSlices, total_tokens: int) -> None:
    reach = slices.table[:, [1, 3]].max(1, initial=0)
    if (reach > total_tokens).any():
        i = int((reach > total_tokens).argmax())
        raise ValueError(
            f"slice {i} is {slices.table[i].tolist()} but the pack has {total_tokens} tokens; cut it to fit"
        )


def _cut_into_stages(transfers: Int64Array, overlap_stages: int) -> Int64Array:
    """Adds the stage: of the rows from one source to one destination, every stage carries the same share, in order.

    Args:
        transfers: [n, 4]: destination, source, first token, end token.

    Returns:
        [m, 5]: stage, destination, source, first token, end token; sorted.
    """
    transfers = transfers[np.lexsort((transfers[:, 2], transfers[:, 1], transfers[:, 0]))]
    stages = [transfers]
    if overlap_stages > 1 and len(transfers):
        destination, source, start, end = transfers.T
        rows = end - start
        before = rows.cumsum() - rows
        new_pair = np.append(True, (np.diff(destination) != 0) | (np.diff(source) != 0))
        pair = new_pair.cumsum() - 1
        before -= before[new_pair][pair]
        total = np.bincount(pair, rows).astype(np.int64)[pair]
        stages = []
        for stage in range(overlap_stages):
            first, last = total * stage // overlap_stages, total * (stage + 1) // overlap_stages
            cut_start = start + np.clip(first - before, 0, rows)
            cut_end = start + np.clip(last - before, 0, rows)
            stages.append(np.stack([destination, source, cut_start, cut_end], 1)[cut_start < cut_end])
    first_stage = 1 if overlap_stages else 0
    return np.concatenate([np.insert(rows, 0, stage, 1) for stage, rows in enumerate(stages, first_stage)])


def _stage(tables: _Tables, rank: int, stage: int) -> Stage:
    own = tables.owned[rank]
    own_rows = own[:, 1] - own[:, 0]
    own_offset = own_rows.cumsum() - own_rows
    holds_local = stage == 0
    transfers = tables.transfers[tables.transfers[:, 0] == stage, 1:]

    # What travels. A source keeps its rows in ascending order, so sender and receiver agree without talking.
    received = transfers[transfers[:, 0] == rank]
    sent = transfers[transfers[:, 1] == rank]
    part = np.searchsorted(own[:, 0], sent[:, 2], side="right") - 1
    to_local = own_offset[part] - own[part, 0]
    send_rows = expand(sent[:, 2] + to_local, sent[:, 3] + to_local)

    # The stage's buffer: ranges of tokens and the row at which each begins.
    start, end = received[:, 2], received[:, 3]
    if holds_local:
        start, end = np.append(own[:, 0], start), np.append(own[:, 1], end)
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

    cp_size = len(tables.owned)
    return Stage(
        slices=AttnSlices._trusted(table),
        holds_local=holds_local,
        num_rows=num_rows,
        communicates=tables.local_stage_communicates if holds_local else True,
        send_rows=send_rows,
        send_splits=_rows_per_rank(sent[:, 0], sent, cp_size),
        recv_splits=_rows_per_rank(received[:, 1], received, cp_size),
    )


def _rows_per_rank(rank: Int64Array, transfers: Int64Array, cp_size: int) -> tuple[int, ...]:
    return tuple(np.bincount(rank, transfers[:, 3] - transfers[:, 2], cp_size).astype(int).tolist())
