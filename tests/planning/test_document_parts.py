"""Which maps and rows travel, token by token from the definitions."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from support.recurrence import placements, plan_of

import torchtitan_magi as magi
from torchtitan_magi.linear.maps import exchange_of
from torchtitan_magi.linear.short_conv import ConvRows


def owners(plan):
    """The rank of each token."""
    owner = np.empty(plan.padded_tokens, int)
    for rank, share in enumerate(plan.ranks):
        owner[share.tokens] = rank
    return owner.tolist()


def parts_of_documents(cu_seqlens, owner):
    """Of each document its parts: rank, first token, end token."""
    documents = []
    for first, end in itertools.pairwise(cu_seqlens):
        parts, at = [], first
        for rank, tokens in itertools.groupby(owner[first:end]):
            parts.append((rank, at, at := at + len(list(tokens))))
        documents.append(parts)
    return [parts for parts in documents if parts]


@given(placements())
def test_parts_are_runs_of_tokens_of_one_document_on_one_rank(case):
    cu_seqlens, plan = case
    documents = parts_of_documents(cu_seqlens, owners(plan))
    parts = plan.document_parts
    found = np.column_stack([parts.rank, parts.ranges]).tolist()
    assert found == [[*part] for document in documents for part in document]
    assert parts.begins.tolist() == [i == 0 for document in documents for i in range(len(document))]
    assert parts.ends.tolist() == [i == len(document) - 1 for document in documents for i in range(len(document))]
    for rank, view in enumerate(parts.ranks):
        tokens = plan.ranks[rank].tokens
        for number in view.numbers:
            assert tokens[view.tokens_of(np.array([number]))].tolist() == list(range(*parts.ranges[number]))


@given(placements())
def test_a_map_travels_once_to_each_rank_that_needs_it(case):
    cu_seqlens, plan = case
    documents = parts_of_documents(cu_seqlens, owners(plan))
    for back in (False, True):
        needed, number = set(), itertools.count()
        for document in documents:
            numbered = [(next(number), rank) for rank, _, _ in document]
            for (i, source), (j, receiver) in itertools.permutations(numbered, 2):
                if source != receiver and (j < i if back else i < j):
                    needed.add((receiver, source, i))
        assert list(map(tuple, plan.document_parts.carries(back).tolist())) == sorted(needed)


@given(placements())
def test_numbers_sent_are_those_of_the_maps(case):
    """H (V + K) K of a map; the first part that a state passes has no matrix: H V K."""
    _, plan = case
    parts, (heads, key_dim, value_dim) = plan.document_parts, (4, 5, 3)
    for back in (False, True):
        expected = np.zeros((plan.cp_size, plan.cp_size), int)
        for receiver, source, part in parts.carries(back):
            is_first = (parts.ends if back else parts.begins)[part]
            expected[receiver, source] += heads * key_dim * (value_dim + (0 if is_first else key_dim))
        exchanges = [exchange_of(view, back, (heads, key_dim, value_dim)) for view in parts.ranks]
        assert [list(exchange.recv_splits) for exchange in exchanges] == expected.tolist()
        assert [list(exchange.send_splits) for exchange in exchanges] == expected.T.tolist()


@given(placements())
@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_row_before_a_part_travels_once_to_each_rank_that_needs_it(width, case):
    cu_seqlens, plan = case
    owner, needed = owners(plan), set()
    for first, end in itertools.pairwise(cu_seqlens):
        for t in range(first, end):
            needed |= {(owner[t], s) for s in range(max(first, t - width + 1), t) if owner[s] != owner[t]}
    rows = [ConvRows.of(parts, width, torch.device("cpu")) for parts in plan.document_parts.ranks]
    assert {each.exchange is not None for each in rows} == {bool(needed)}
    travelled = []
    for source, each in enumerate(rows):
        tokens = iter(plan.ranks[source].tokens[each.sent.numpy()].tolist())
        for receiver, number in enumerate(each.exchange.send_splits if each.exchange else ()):
            travelled += [(receiver, next(tokens)) for _ in range(number)]
    assert len(travelled) == len(set(travelled))
    assert set(travelled) == needed


def test_parts_that_touch_on_one_rank_are_one():
    parts = plan_of([0, 5, 8], [0, 0, 1, 1, 0, 0, 0, 1]).document_parts
    assert parts.ranges.tolist() == [[0, 2], [2, 4], [4, 5], [5, 7], [7, 8]]
    assert parts.ranks[0].chains(back=False) == [[0, 1, 2], [3]]
    assert parts.ranks[0].chains(back=True) == [[2, 1, 0], [4, 3]]


def test_a_window_as_long_as_the_documents_is_causal():
    plan = magi.make_plan(magi.sliding_window([0, 3, 10], 7), 10, 2)
    assert plan.document_parts.begins.sum() == 2


@pytest.mark.parametrize(
    ("mask", "wrong"),
    [
        (magi.sliding_window([0, 6], 2), r"\[0, 2, 0, 2, 1\]|\[2, 6, 1, 6, 3\]"),
        (magi.varlen_full([0, 6]), r"\[0, 6, 0, 6, 0\]"),
        (magi.shared_prompt([[2, 2, 2]]), r"\[4, 6, 0, 2, 0\]"),
    ],
)
def test_other_masks_are_refused_by_their_slice(mask, wrong):
    plan = magi.make_plan(mask, 6, 2)
    with pytest.raises(ValueError, match=f"the plan's mask has the slice ({wrong}), which is no causal document"):
        plan.document_parts  # noqa: B018
