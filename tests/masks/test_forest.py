"""Which token each token goes on from, against the dense mask."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import one_line
from support.masks import dense_mask, slice_lists
from support.recurrence import tree_placements

from torchtitan_magi.masks.builders import shared_prompt, sliding_window, tree_causal, varlen_causal, varlen_full
from torchtitan_magi.masks.forest import runs_of
from torchtitan_magi.masks.slices import AttnSlices


def tokens_before(mask):
    """The last token before itself that each row of a dense mask sees, or -1; None if the mask is no forest: a row sees
    itself, that token, and just what that token sees."""
    before = {}
    for row in np.flatnonzero(mask.any(1)).tolist():
        keys = np.flatnonzero(mask[row]).tolist()
        before[row] = keys[-2] if len(keys) > 1 else -1
        if keys[-1] != row or (len(keys) > 1 and keys[:-1] != np.flatnonzero(mask[keys[-2]]).tolist()):
            return None
    return before


def by_token(runs):
    """Of each token of runs the one that it goes on from."""
    return {
        token: first_from if token == start else token - 1
        for (start, end), first_from in zip(runs.ranges.tolist(), runs.before.tolist(), strict=True)
        for token in range(start, end)
    }


@given(tree_placements())
def test_trees(case):
    _, plan = case
    runs, total = runs_of(plan.slices), plan.total_tokens
    assert by_token(runs) == tokens_before(dense_mask(plan.slices.table, total, total))
    assert (runs.before != runs.ranges[:, 0] - 1)[1:].all()  # else it would go on in the run before it


@given(st.integers(1, 6).flatmap(lambda tokens: slice_lists(tokens, tokens, max_slices=6)))
@settings(max_examples=200)
def test_any_other_mask_is_read_right_or_refused(mask):
    try:
        found = by_token(runs_of(mask))
    except ValueError:
        return
    assert found == tokens_before(dense_mask(mask.table, 6, 6))


def test_a_prompt_and_its_first_answer_are_one_run():
    assert runs_of(shared_prompt([[4, 3, 2]])).ranges.tolist() == [[0, 7], [7, 9]]
    assert runs_of(shared_prompt([[4, 3, 2]])).before.tolist() == [-1, 3]


def test_a_document_in_several_slices_is_one_run():
    slices = AttnSlices([[0, 4, 0, 4, 1], [4, 6, 0, 4, 0], [4, 6, 4, 6, 1], [6, 9, 0, 9, 1]])
    assert runs_of(slices).ranges.tolist() == [[0, 9]]


@pytest.mark.parametrize(
    ("mask", "wrong"),
    [
        (sliding_window([0, 6], 2), [2, 6, 1, 6, 3]),
        (varlen_full([0, 6]), [0, 6, 0, 6, 0]),
        (AttnSlices([[0, 2, 0, 2, 1], [2, 4, 2, 4, 1], [4, 6, 4, 6, 1], [4, 6, 0, 4, 0]]), [4, 6, 0, 4, 0]),  # two ways
        (AttnSlices([[0, 4, 0, 4, 1], [4, 6, 4, 6, 1], [4, 6, 1, 3, 0]]), [4, 6, 1, 3, 0]),  # not from the root
        (AttnSlices([[0, 4, 0, 4, 1], [4, 6, 4, 6, 1], [5, 6, 0, 3, 0]]), [5, 6, 0, 3, 0]),  # the second token only
        (AttnSlices([[4, 6, 4, 6, 1], [4, 6, 0, 3, 0]]), [4, 6, 0, 3, 0]),  # of tokens that see nothing
        (tree_causal([2, 4], [-1, 0], [4, 0]), [0, 4, 4, 6, 0]),  # the child lies first
        (tree_causal([3, 2, 2], [-1, 0, 0], window=3), [3, 5, 1, 5, 3]),
    ],
)
def test_other_masks_are_refused_by_a_slice(mask, wrong):
    with one_line(rf"the plan's mask has the slice {wrong}, which is no causal document nor a".replace("[", r"\[")):
        runs_of(mask)


def test_documents_are_runs_from_nothing():
    runs = runs_of(varlen_causal([0, 3, 3, 7]))
    assert runs.ranges.tolist() == [[0, 3], [3, 7]]
    assert runs.before.tolist() == [-1, -1]
