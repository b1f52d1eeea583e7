"""What K/V rows of other ranks, and their gradients, take of each rank's memory in one layer.

Forward: rows of a stage in use and of one under way; with several stages also results in float32. Backward: besides,
gradients of a stage as they are computed, and of the stage before on their way back; of an only stage float32 sums.

Not counted: what a rank takes however the rows are cut, such as sums of its own rows; peer memory, which has a bound of
its own (exchange/peer_memory.py).
"""

import numpy as np

from torchtitan_magi.planning.cost_model import FloatArray, Heads
from torchtitan_magi.planning.relays import Spans
from torchtitan_magi.planning.timeline import Workload, rounds_at_once

FLOAT32 = 4  # bytes


def memory_of_rows(work: Workload, heads: Heads, spans: Spans, backward: bool, element: int = 2) -> FloatArray:
    """Bytes on each rank, float64 [ranks], at the moment that takes the most; where rows are relayed an upper bound.

    Args:
        element: bytes of an element of K and V.
    """
    take = _all_at_once if len(spans) == 1 else _stage_by_stage
    return take(work, heads, spans, backward, element)


def _elements(heads: Heads) -> int:
    """Elements of a row that travels."""
    return heads.row_bytes // 2


def _all_at_once(work: Workload, heads: Heads, spans: Spans, backward: bool, element: int) -> FloatArray:
    """Inside a node rows leave from peer memory, and only what arrives takes other memory."""
    if work.is_inside_a_node:
        rows = np.maximum(work.arriving, work.leaving) if backward else work.arriving
    else:
        rows = work.arriving + work.leaving
    if not backward:
        return rows * _elements(heads) * element
    summed = element if rounds_at_once(work, heads, spans) and not work.is_relayed else FLOAT32
    return (rows * element + work.arriving * summed) * _elements(heads)


def _stage_by_stage(work: Workload, heads: Heads, spans: Spans, backward: bool, element: int) -> FloatArray:
    fractions = [float(end - start) for start, end in spans]
    num_live = min(2, sum(fraction > 0 for fraction in fractions))
    arriving, leaving = (num_live * max(fractions) * rows for rows in (work.arriving, work.leaving))
    rows = (arriving + leaving) * element
    if heads.latent:  # of the stage in use also K and V, the product that they are made of, and their gradients
        each = heads.with_whole_rows.row_bytes / heads.row_bytes
        rows += max(fractions) * work.received * each * element * (4 if backward else 2)
    if not backward:
        return rows * _elements(heads) + work.tokens * heads.out_elements * FLOAT32
    # Relayed rows get gradients from others before theirs are rounded, for which they are copied.
    rows += arriving * (FLOAT32 + element / 2 if work.is_relayed else element)
    return rows * _elements(heads)
