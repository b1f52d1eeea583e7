"""Pictures of the documentation are drawn from real plans."""

import numpy as np
import pytest
import training  # noqa: F401  # puts scripts/ on the path

from torchtitan_magi import make_plan, varlen_causal

pytest.importorskip("matplotlib")
from draw_idea import draw, sees, spans  # isort: skip


def test_the_idea_shows_the_tokens_that_queries_see():
    plan = make_plan(varlen_causal([0, 5, 5, 64]), 64, 2)
    own = np.zeros(64, dtype=bool)
    own[[3, 10]] = True
    assert np.flatnonzero(sees(plan, own)).tolist() == [*range(4), *range(5, 11)]
    assert spans(own).tolist() == [[3, 4], [10, 11]]
    texts = [text.get_text() for text in draw(plan, np.array([0, 5, 64])).axes[0].texts]
    assert {"pack", "GPU 0", "GPU 1"} <= set(texts)
