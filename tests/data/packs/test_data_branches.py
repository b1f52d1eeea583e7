"""Documents and pairs as branches: their nodes, positions and masks, by definition."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.masks import dense_mask

from torchtitan_magi.data.packs.prefix_trees import branches_of_documents, nodes_of, positions_of
from torchtitan_magi.losses.boundaries import branch_numbers
from torchtitan_magi.masks.builders import causal_ranges, shared_prompt
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.training.batches.microbatch import Microbatch


@st.composite
def forests(draw):
    """Branches by their rows, and the tokens of each; with gaps and empty branches."""
    rows, tokens, place = [], [], 0
    for _ in range(draw(st.integers(0, 12))):
        shared = draw(st.integers(0, len(tokens[-1]))) if tokens and draw(st.booleans()) else 0
        place += draw(st.integers(0, 2)) if shared == 0 else 0
        own = draw(st.integers(0 if shared else 1, 5))
        rows.append([place, place + own, shared])
        tokens.append([*(tokens[-1][:shared] if shared else []), *range(place, place + own)])
        place += own
    return np.array(rows, np.int64).reshape(-1, 3), tokens, place + draw(st.integers(0, 3))


@given(forests())
def test_nodes_positions_and_numbers_are_those_of_each_branch(case):
    branches, tokens, size = case
    start, end, parent, last = nodes_of(branches)
    assert (parent < np.arange(len(parent))).all()
    for branch, wanted in enumerate(tokens):
        found, node = [], int(last[branch])
        while node >= 0:
            found, node = [*range(start[node], end[node]), *found], int(parent[node])
        assert found == wanted
    positions, numbers = positions_of(branches, size), branch_numbers(branches, size)
    for branch, (first, stop, shared) in enumerate(branches.tolist()):
        assert positions[first:stop].tolist() == list(range(shared, shared + stop - first))
        assert numbers[first:stop].tolist() == [branch] * (stop - first)
        assert tokens[branch][shared:] == list(range(first, stop))


def microbatch(size, **inputs):
    return Microbatch.of({"input": torch.zeros(1, size, dtype=torch.int64), **inputs}, None, None)


@given(forests(), st.sampled_from([0, 1, 3]))
def test_a_token_sees_what_is_before_it_in_its_branch(case, window):
    branches, tokens, size = case
    (mask,) = microbatch(size, documents=branches.astype(np.int32)).masks([window])
    seen = np.zeros((size, size), bool)
    for branch in tokens:
        for place, token in enumerate(branch):
            seen[token, branch[max(0, place + 1 - window) if window else 0 : place + 1]] = True
    np.testing.assert_array_equal(dense_mask(mask.table, size, size), seen)


def test_documents_and_answers_have_their_masks():
    documents = np.array([[0, 5], [5, 8], [9, 20]], np.int32)
    prompts = np.array([[0, 3, 5, 8], [8, 8, 10, 12], [12, 13, 15, 20]])  # where prompt, chosen and rejected begin
    answers = np.array([[0, 5, 0], [5, 8, 3], [8, 10, 0], [10, 12, 0], [12, 15, 0], [15, 20, 1]], np.int32)
    for window in (0, 4):
        (of_flat,) = microbatch(20, documents=documents).masks([window])
        assert of_flat == AttnSlices(causal_ranges(*documents.astype(np.int64).T, window or None))
        (paired,) = microbatch(20, documents=answers).masks([window])
        assert paired == shared_prompt(np.diff(prompts, axis=1), prompts[:, 0], window or None)
    assert branches_of_documents(documents).tolist() == [[0, 5, 0], [5, 8, 0], [9, 20, 0]]
