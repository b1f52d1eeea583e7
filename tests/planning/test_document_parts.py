"""Which maps and rows travel, token by token from the definitions."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.masks import dense_mask
from support.recurrence import placements, plan_of, plan_of_mask, tree_placements

import torchtitan_magi as magi
from torchtitan_magi.linear.maps import exchange_of
from torchtitan_magi.linear.short_conv import ConvRows

PLANS = st.one_of(placements(), tree_placements()).map(lambda case: case[1])


def owners(plan):
    """The rank of each token."""
    owner = np.empty(plan.padded_tokens, int)
    for rank, share in enumerate(plan.ranks):
        owner[share.tokens] = rank
    return owner.tolist()


def tokens_before(plan):
    """The token that each one goes on from, None where a document begins; tokens of no document are left out."""
    mask = dense_mask(plan.slices.table, plan.total_tokens, plan.total_tokens)
    return {
        int(row): max(np.flatnonzero(mask[row, :row]).tolist(), default=None) for row in np.flatnonzero(mask.any(1))
    }


def parts_of_tokens(before, owner):
    """Each part's tokens: they follow each other in the pack and in the document, on one rank, and none but the last
    has more than one that goes on from it."""
    followers = [t for t in before.values() if t is not None]
    parts = []
    for t in sorted(before):
        if parts and before[t] == t - 1 == parts[-1][-1] and owner[t] == owner[t - 1] and followers.count(t - 1) == 1:
            parts[-1].append(t)
        else:
            parts.append([t])
    return parts


def ways_of_parts(parts, before):
    """Of each part the numbers of those on the way from the root to it, itself included."""
    number = {t: i for i, part in enumerate(parts) for t in part}
    ways = []
    for i, part in enumerate(parts):
        above = before[part[0]]
        ways.append([*(ways[number[above]] if above is not None else []), i])
    return ways


@given(PLANS)
def test_parts_are_runs_of_tokens_of_one_document_on_one_rank(plan):
    before, owner = tokens_before(plan), owners(plan)
    parts, expected = plan.document_parts, parts_of_tokens(before, owner)
    assert [list(range(*tokens)) for tokens in parts.ranges.tolist()] == expected
    assert parts.rank.tolist() == [owner[tokens[0]] for tokens in expected]
    ways = ways_of_parts(expected, before)
    assert parts.parent.tolist() == [way[-2] if len(way) > 1 else -1 for way in ways]
    for rank, view in enumerate(parts.ranks):
        tokens = plan.ranks[rank].tokens
        for number in view.numbers:
            assert tokens[slice(*view.rows[number])].tolist() == expected[number]


@given(PLANS)
def test_a_map_travels_once_to_each_rank_that_needs_it(plan):
    """One that is not needed: what a part that waits for nobody passes on to another one that waits for nobody."""
    before, owner = tokens_before(plan), owners(plan)
    tokens = parts_of_tokens(before, owner)
    ways, rank = ways_of_parts(tokens, before), [owner[part[0]] for part in tokens]
    pairs = [(way[i], way[j], way) for way in ways for i, j in itertools.combinations(range(len(way)), 2)]
    waits = [{b for a, b, _ in pairs if rank[a] != rank[b]}, {a for a, b, _ in pairs if rank[a] != rank[b]}]
    needed = [set(), set()]
    for a, b, way in pairs:
        if rank[a] != rank[b]:
            first, last = way[way.index(a) + 1], way[way.index(b) - 1]
            if first in waits[0]:
                needed[0].add((rank[b], rank[a], a))
            if last in waits[1]:
                needed[1].add((rank[a], rank[b], b))
    parts = plan.document_parts
    for back in (False, True):
        assert list(map(tuple, parts.carries(back).tolist())) == sorted(needed[back])
        assert np.flatnonzero(parts.waits(back)).tolist() == sorted(waits[back])


@given(PLANS)
def test_numbers_sent_are_those_of_the_maps(plan):
    """H (V + K) K of a map; of a part that waits for nobody just the state: H V K."""
    parts, (heads, key_dim, value_dim) = plan.document_parts, (4, 5, 3)
    for back in (False, True):
        expected = np.zeros((plan.cp_size, plan.cp_size), int)
        for receiver, source, part in parts.carries(back):
            extra = key_dim if parts.waits(back)[part] else 0
            expected[receiver, source] += heads * key_dim * (value_dim + extra)
        exchanges = [exchange_of(view, back, (heads, key_dim, value_dim)) for view in parts.ranks]
        assert [list(exchange.recv_splits) for exchange in exchanges] == expected.tolist()
        assert [list(exchange.send_splits) for exchange in exchanges] == expected.T.tolist()


@given(PLANS)
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_row_before_a_part_travels_once_to_each_rank_that_needs_it(width, plan):
    before, owner, needed = tokens_before(plan), owners(plan), set()
    for t, s in before.items():
        for _ in range(width - 1):
            if s is not None:
                needed |= {(owner[t], s)} if owner[s] != owner[t] else set()
                s = before[s]
    rows = [ConvRows.of(parts, width, torch.device("cpu")) for parts in plan.document_parts.ranks]
    assert {each.exchange is not None for each in rows} == {bool(needed)}
    travelled = []
    for source, each in enumerate(rows):
        tokens = iter(plan.ranks[source].tokens[each.sent.numpy()].tolist())
        for receiver, number in enumerate(each.exchange.send_splits if each.exchange else ()):
            travelled += [(receiver, next(tokens)) for _ in range(number)]
    assert len(travelled) == len(set(travelled))
    assert set(travelled) == needed
    for each, parts in zip(rows, plan.document_parts.ranks, strict=True):
        assert each.num_received <= (width - 1) * parts.counts.cut


def test_parts_that_touch_on_one_rank_are_one():
    parts = plan_of([0, 5, 8], [0, 0, 1, 1, 0, 0, 0, 1]).document_parts
    assert parts.ranges.tolist() == [[0, 2], [2, 4], [4, 5], [5, 7], [7, 8]]
    assert parts.ranks[0].folded(back=False) == [0, 1]
    assert parts.ranks[0].folded(back=True) == [4, 2, 1]


def test_a_prompt_travels_once_however_many_answers_another_rank_has():
    """Rank 0 has the prompt and the first answer, rank 1 three more."""
    mask = magi.tree_causal([4, 2, 2, 2, 2], [-1, 0, 0, 0, 0])
    parts = plan_of_mask(mask, [0] * 6 + [1] * 6).document_parts
    assert parts.ranges.tolist() == [[0, 4], [4, 6], [6, 8], [8, 10], [10, 12]]
    assert parts.parent.tolist() == [-1, 0, 0, 0, 0]
    assert parts.carries(back=False).tolist() == [[1, 0, 0]]
    assert parts.carries(back=True).tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]


def test_a_tree_on_one_rank_sends_nothing():
    mask = magi.tree_causal([4, 2, 2, 2, 5], [-1, 0, 0, 2, -1])
    parts = plan_of_mask(mask, [0] * 10 + [1] * 10).document_parts
    assert not len(parts.carries(back=False)) + len(parts.carries(back=True))


def test_a_window_as_long_as_the_documents_is_causal():
    plan = magi.make_plan(magi.sliding_window([0, 3, 10], 7), 10, 2)
    assert (plan.document_parts.parent < 0).sum() == 2


def test_other_masks_are_refused_by_their_slice():
    plan = magi.make_plan(magi.sliding_window([0, 6], 2), 6, 2)
    with pytest.raises(ValueError, match=r"the plan's mask has the slice .*, which is no causal document"):
        plan.document_parts  # noqa: B018
