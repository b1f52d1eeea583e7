"""What K/V rows and states of other ranks, and the exchanges that bring them, take on each rank."""

import functools

from torchtitan_magi.exchange.peer_memory import memory_bytes
from torchtitan_magi.masks.builders import varlen_causal
from torchtitan_magi.planning.choose_stages import equal_stages
from torchtitan_magi.planning.cost_model import H200
from torchtitan_magi.planning.plan import AttnPlan, PlanSpec, plan_afresh
from torchtitan_magi.planning.row_memory import memory_of_rows
from torchtitan_magi.planning.topology import Nodes
from torchtitan_magi.sizing.run_setup import FLOAT32, Setup


def fullest_plan(setup: Setup) -> AttnPlan:
    """The plan of one document that fills a rank's packs: no other brings a rank as many rows."""
    nodes, total = Nodes.of(setup.cp_per_machine, setup.cp), setup.seq_len * setup.packs
    return _plan_of_one_document(PlanSpec(total, setup.cp, setup.overlap_stages, setup.heads, nodes, H200))


@functools.lru_cache(maxsize=16)
def _plan_of_one_document(spec: PlanSpec) -> AttnPlan:
    return plan_afresh(varlen_causal([0, spec.total_tokens]), spec)


def rows_and_sums(setup: Setup) -> int:
    """Bytes of received rows and their gradients, see ``memory_of_rows``, and float32 sums of own rows' dK and dV."""
    if setup.cp == 1:
        return 0
    plan = fullest_plan(setup)
    most = max(
        memory_of_rows(plan.work, plan.heads, spans, backward, setup.compute_bytes).max()
        for spans, backward in ((plan.forward, False), (plan.backward, True))
    )
    return int(most) + setup.tokens * plan.heads.row_bytes // 2 * FLOAT32


def rows_in_flight(setup: Setup) -> int:
    """Bytes outside PyTorch's allocator for exchanges inside a machine, of rows that all travel at once."""
    if setup.cp == 1 or not setup.gpu:
        return 0
    plan = fullest_plan(setup)
    if not plan.work.is_inside_a_node or equal_stages(0) not in (plan.forward, plan.backward):
        return 0
    return memory_bytes(int(plan.work.inside.max()) * plan.heads.row_bytes // 2 * setup.compute_bytes)


def states_of_parts(setup: Setup) -> int:
    """Bytes that linear attention keeps for its backward of one document that fills a rank's packs: a state and a map
    for each of the rank's parts (see ``linear.maps``), in float32."""
    return 0 if setup.cp == 1 else -(-_num_parts(setup) // setup.cp) * _map_bytes(setup)


def maps_held(setup: Setup) -> int:
    """Bytes of the maps that a rank puts together for its last part of such a document: those of all parts before."""
    return 0 if setup.cp == 1 else _num_parts(setup) * _map_bytes(setup)


def _num_parts(setup: Setup) -> int:
    return len(fullest_plan(setup).document_parts)


def _map_bytes(setup: Setup) -> int:
    """Bytes of one part's map: [H, K, V + K] in float32."""
    linear = setup.model.linear
    assert linear is not None
    return linear.num_heads_v // setup.tp * linear.head_dim * (linear.value_dim + linear.head_dim) * FLOAT32
