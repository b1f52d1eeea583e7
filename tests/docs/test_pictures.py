"""Pictures of the documentation are drawn from real plans."""

import numpy as np
import pytest
from support import runs as training  # noqa: F401  # puts scripts/ on the path
from support.recurrence import plan_of

from torchtitan_magi import make_plan, tree_causal, varlen_causal

pytest.importorskip("matplotlib")
from matplotlib.text import Annotation  # isort: skip
from draw_plans import (
    MASKS,
    draw_idea,
    draw_ownership,
    draw_parts,
    draw_tree,
    names_of,
    order_of,
    pairs_of,
    sees,
    spans,
)  # isort: skip


def test_the_idea_shows_the_tokens_that_queries_see():
    plan = make_plan(varlen_causal([0, 5, 5, 64]), 64, 2)
    own = np.zeros(64, dtype=bool)
    own[[3, 10]] = True
    assert np.flatnonzero(sees(plan, own)).tolist() == [*range(4), *range(5, 11)]
    assert spans(own).tolist() == [[3, 4], [10, 11]]
    texts = [text.get_text() for text in draw_idea(plan, np.array([0, 5, 64])).axes[0].texts]
    assert {"pack", "GPU 0", "GPU 1"} <= set(texts)


@pytest.mark.parametrize("slices", MASKS.values(), ids=MASKS)
def test_the_masks_are_those_of_their_slices(slices):
    pairs = np.logical_or.reduce([pairs_of(slice_, np.arange(64)) for slice_ in slices.table])
    assert pairs.sum() == slices.area
    assert (pairs.sum(1) == slices.row_cost(64)).all()


def test_the_ownership_shows_what_each_gpu_computes_and_receives():
    plan = make_plan(varlen_causal([0, 5, 5, 64]), 64, 2)
    (legend,) = [axes.get_legend() for axes in draw_ownership(plan).axes if axes.get_legend()]
    texts = [text.get_text() for text in legend.get_texts()]
    assert [f"receives {rows} rows" in text for rows, text in zip(plan.received_rows, texts, strict=False)] == [
        True
    ] * 2


def test_the_parts_are_those_of_the_plan_in_the_order_of_a_layer():
    plan = plan_of([0, 15, 18, 21, 24], [0] * 5 + [1] * 5 + [2] * 5 + [0] * 3 + [1] * 3 + [2] * 3)
    parts = plan.document_parts
    assert names_of(parts) == ["A1", "A2", "A3", "B", "C", "D"]
    first, inner, last = (order_of(parts, rank) for rank in range(3))
    assert first == [[(0, True)], [(0, False), (3, False)]]
    assert inner == [[(1, True)], [(1, False), (4, False)]]
    assert last == [[], [(2, False), (5, False)]]
    above, below = draw_parts(plan).axes
    arrows = [text for text in above.texts if isinstance(text, Annotation)]
    assert len(arrows) == len(parts.carries(False)) == 3
    assert [text.get_text() for text in below.texts].count("A2") == 2


def test_the_tree_shows_each_node_and_what_it_saves():
    lengths, parents = np.array([32, 16, 8, 8]), np.array([-1, 0, 0, 0])
    left, right = draw_tree(make_plan(tree_causal(lengths, parents), 64, 2), list("abcd"), lengths, parents).axes
    assert [text.get_text() for text in left.texts] == ["a, 32 tokens", "b, 16 tokens", "c, 8 tokens", "d, 8 tokens"]
    assert right.get_title(loc="left").startswith("64 tokens in place of 128:")
