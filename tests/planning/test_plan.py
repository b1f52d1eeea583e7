import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cp_case import SLOW_NETWORK
from support.errors import one_line
from support.masks import dense_mask, document_lengths, square_slice_lists, trees
from support.processes import python

from torchtitan_magi.exchange.pieces import Flow
from torchtitan_magi.masks.builders import sliding_window, tree_causal, varlen_causal, varlen_full
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning import stage
from torchtitan_magi.planning.cost_model import H200
from torchtitan_magi.planning.needs import node_traffic
from torchtitan_magi.planning.placement.place import placements
from torchtitan_magi.planning.plan import forget_plans, make_plan, make_plans

CP_SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])
STAGES = st.integers(-1, 4)
NODES = st.sampled_from([None, 1, 2, 3, 4])
COSTS = st.sampled_from([H200, SLOW_NETWORK])  # of which one has rows go straight, one through relays


def received_tokens(plan, number, s, exchange, rank, tokens_of):
    """The tokens that an exchange of stage s brings to a rank; tokens_of(source) is what the source sends from."""
    received = []
    for source in range(plan.cp_size):
        sent = stages_of(plan, number, source)[s].exchanges[exchange]
        first = sum(sent.send_splits[:rank])
        rows = sent.send_rows[first : first + sent.send_splits[rank]]
        assert len(rows) == stages_of(plan, number, rank)[s].exchanges[exchange].recv_splits[source]
        received.append(tokens_of(source)[rows])
    return np.concatenate(received)


def stages_of(plan, direction, rank):
    return getattr(plan.ranks[rank], direction)


def assert_plan_is_right(slices, total, cp_size, stages, gpus_per_node=None, cost=H200):
    plan = make_plan(slices, total, cp_size, stages, gpus_per_node=gpus_per_node, cost=cost)
    assert_is_right(plan, slices, total)
    return plan


def assert_is_right(plan, slices, total):
    """Each mask's plan by itself."""
    cp_size, mask = plan.cp_size, dense_mask(slices.table, plan.padded_tokens, plan.padded_tokens)
    owned = [share.tokens for share in plan.ranks]
    # Every token has one owner, and every rank the same number of them.
    assert sorted(np.concatenate(owned)) == list(range(plan.padded_tokens))
    assert {len(tokens) for tokens in owned} == {plan.tokens_per_rank}
    assert plan.padded_tokens - total in range(cp_size)
    for rank in range(cp_size):
        assert plan.areas[rank] == mask[owned[rank]].sum()
    for direction in ("forward", "backward") if plan.forward != plan.backward else ("forward",):
        assert_stages_are_right(plan, direction, mask, owned)


def assert_stages_are_right(plan, direction, mask, owned):
    ranks, node = range(plan.cp_size), plan.nodes.node
    need = [set(np.flatnonzero(mask[owned[rank]].any(0))) - set(owned[rank]) for rank in ranks]
    came = [[] for _ in ranks]  # rows for the rank's own attention
    crossed = [[] for _ in ranks]
    computed = [np.zeros_like(mask, int) for _ in ranks]
    for s in range(len(stages_of(plan, direction, 0))):
        stage = [stages_of(plan, direction, rank)[s] for rank in ranks]
        assert {len(one.exchanges) for one in stage} == {len(stage[0].exchanges)}
        first, second = [np.zeros(0, int)] * plan.cp_size, [np.zeros(0, int)] * plan.cp_size
        if stage[0].exchanges:
            first = [received_tokens(plan, direction, s, 0, rank, owned.__getitem__) for rank in ranks]
        if len(stage[0].exchanges) == 2:
            second = [received_tokens(plan, direction, s, 1, rank, first.__getitem__) for rank in ranks]
            for rank, one in enumerate(stage):
                assert not [d for d, rows in enumerate(one.exchanges[1].send_splits) if rows and node[d] != node[rank]]
        for rank, one in enumerate(stage):
            own = owned[rank] if one.holds_local else owned[rank][:0]
            buffer = np.concatenate([own, first[rank], second[rank]]).astype(int)
            assert len(buffer) == one.num_rows
            local = np.zeros((plan.tokens_per_rank, one.num_rows), int)
            for row in one.slices.table:
                local += dense_mask(row[None], *local.shape)
            computed[rank][np.ix_(owned[rank], buffer)] += local
            came[rank] += [token for token in (*first[rank], *second[rank]) if token in need[rank]]
            owner_node = np.zeros(plan.padded_tokens, int)
            for other in ranks:
                owner_node[owned[other]] = node[other]
            far = owner_node[first[rank]] != node[rank]
            crossed[rank] += first[rank][far].tolist()
            # Besides what it needs, a rank receives only what it passes on.
            extra = sorted(set(first[rank]) - need[rank])
            passed = set(first[rank][one.exchanges[1].send_rows]) if len(one.exchanges) == 2 else set()
            assert set(extra) <= passed
            assert not set(extra) & set(first[rank][~far])
            assert set(second[rank]) <= need[rank]
    for rank in ranks:
        # Zero redundancy: each row that is needed and not owned comes exactly once to the rank.
        assert sorted(came[rank]) == sorted(need[rank])
        assert plan.received_rows[rank] == len(need[rank])
        assert plan.rows_across_nodes[rank] == len(crossed[rank])
        assert plan.routes.has_relays or set(crossed[rank]) <= need[rank]
        # Each pair of the rank's rows is computed exactly once.
        assert (computed[rank][owned[rank]] == mask[owned[rank]]).all()
    for n in set(node.tolist()) if plan.routes.has_relays else ():
        # And exactly once to the node, shared evenly by its ranks.
        members = np.flatnonzero(node == n)
        held = set(np.concatenate([owned[rank] for rank in members]))
        rows = sorted(token for rank in members for token in crossed[rank])
        assert rows == sorted(set().union(*(need[rank] for rank in members)) - held)
        counts = [len(crossed[rank]) for rank in members]
        assert max(counts) - min(counts) <= 1


@given(document_lengths(200), CP_SIZES, STAGES, st.booleans(), st.integers(0, 30), NODES, COSTS)
@settings(max_examples=60)
def test_document_plans(lengths, cp_size, stages, causal, padding, nodes, cost):
    cu = np.cumsum([0, *lengths])
    slices = (varlen_causal if causal else varlen_full)(cu)
    assert_plan_is_right(slices, int(cu[-1]) + padding, cp_size, stages, nodes, cost)


@given(square_slice_lists(0, 70), CP_SIZES, STAGES, NODES, COSTS)
@settings(max_examples=120)
def test_any_slices(total_and_slices, cp_size, stages, nodes, cost):
    total, slices = total_and_slices
    assert_plan_is_right(slices, total, cp_size, stages, nodes, cost)


@given(trees(), CP_SIZES, STAGES, NODES, COSTS)
@settings(max_examples=60)
def test_a_row_of_an_ancestor_comes_once_to_each_rank_that_needs_it(tree, cp_size, stages, nodes, cost):
    *nodes_of_trees, total = tree
    assert_plan_is_right(tree_causal(*nodes_of_trees), total, cp_size, stages, nodes, cost)


def test_special_packs():
    assert_plan_is_right(varlen_causal([0, 1]), 1, 4, 1)  # ranks with nothing but padding
    assert_plan_is_right(varlen_causal(range(65)), 64, 8, 2)  # one-token documents
    assert_plan_is_right(varlen_causal([0, 256]), 256, 8, 3)  # one document over all ranks
    assert_plan_is_right(sliding_window([0, 100, 300], 16), 300, 4, 1)
    documents = varlen_causal(np.cumsum([0, 3, 90, 1, 33, 61, 100, 7]))
    relayed = set()
    for cp_size, gpus_per_node in ((5, 2), (12, 4), (12, 5), (96, 8), (5, [1, 4]), (12, [8, 4]), (9, [2, 6, 1])):
        for cost in (H200, SLOW_NETWORK):
            relayed |= {assert_plan_is_right(documents, 301, cp_size, 2, gpus_per_node, cost).routes.has_relays}
    assert relayed == {False, True}
    assert_plan_is_right(AttnSlices([]), 10, 3, 2)  # nothing attends to anything
    assert_plan_is_right(AttnSlices([]), 0, 2, 2)


def test_keys_that_follow_each_other_are_one_slice():
    plan = make_plan(varlen_causal([0, 4096]), 4096, 8, 1)
    for share in plan.ranks:
        local, remote = share.forward
        assert len(local.slices) <= 3
        assert len(remote.slices) <= 2  # of the rank's part of the front and of the tail
        assert remote.slices.table[-1, 2:4].tolist() == [0, remote.num_rows]  # the tail sees all that came


def test_a_row_crosses_to_a_node_once():
    cu = np.linspace(0, 16 * 512, 3).astype(int)
    plan = make_plan(varlen_causal(cu), 16 * 512, 16, gpus_per_node=4, cost=SLOW_NETWORK)
    relayed, _ = node_traffic(plan.slices, [share.ranges for share in plan.ranks], plan.nodes)
    flat = make_plan(varlen_causal(cu), 16 * 512, 16, gpus_per_node=1).rows_across_nodes
    assert plan.rows_across_nodes.reshape(4, 4).max(1).tolist() == relayed.tolist()
    assert plan.rows_across_nodes.sum() < 0.5 * flat.sum()


def test_rows_pass_through_relays_where_that_is_faster():
    full, window = varlen_causal([0, 1 << 17]), sliding_window([0, 1 << 17], 128)
    plans = make_plans([full, window], 1 << 17, 16, layers=[1, 1], gpus_per_node=8)
    assert [plan.routes.has_relays for plan in plans] == [True, False]
    assert all(plan.rows_across_nodes.any() for plan in plans)
    assert [{len(share.backward[-1].exchanges) for share in plan.ranks} for plan in plans] == [{2}, {1}]


def test_nothing_is_passed_on_where_nothing_crosses_between_nodes():
    plan = make_plan(varlen_causal([0, 4096, 8192]), 8192, 4, 1, gpus_per_node=2, cost=SLOW_NETWORK)
    assert plan.transfers.size
    assert not plan.rows_across_nodes.any()
    assert len(plan.ranks[0].forward[1].exchanges) == 1


def test_repeated_masks_are_planned_once(monkeypatch):
    placed = []
    monkeypatch.setattr(
        "torchtitan_magi.planning.plan.placements", lambda *args: placed.append(args) or placements(*args)
    )
    forget_plans()
    plans = [make_plan(varlen_causal([0, 7, 30]), 30, 2) for _ in range(3)]
    assert len(placed) == len({plan.fingerprint for plan in plans}) == 1


def test_a_fingerprint_tells_plans_apart():
    plans = [make_plan(varlen_causal(cu), 30, cp) for cu in ([0, 30], [0, 7, 30], [0, 7]) for cp in (1, 2)]
    plans += [make_plan(varlen_full([0, 30]), 30, 2), make_plan(varlen_causal([0, 30]), 31, 2)]
    plans += [make_plan(varlen_causal([0, 30]), 30, 2, stages) for stages in (1, 2)]
    plans += [make_plan(varlen_causal([0, 30]), 30, 2, gpus_per_node=1)]
    plans += [replace(plans[-1], routes=replace(plans[-1].routes, has_relays=True))]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert all(0 <= plan.fingerprint < 2**63 for plan in plans)


SEVERAL_PLANS = """
import hashlib, sys
import numpy as np
from torchtitan_magi import make_plan, varlen_causal
from torchtitan_magi.sizing.sample_packs import draw_pack
few = np.random.default_rng(5).integers(4000, 8000, 16)  # about 1.3 documents for each rank
for lengths, cp_size, gpus_per_node in (
    ([500, 20, 1300, 7, 81], 4, 2), (draw_pack("histogram", 96000, 5), 12, 4), (few, 12, 4)
):
    cu = np.cumsum([0, *lengths])
    plan = make_plan(varlen_causal(cu), int(cu[-1]), cp_size, gpus_per_node=gpus_per_node)
    arrays = plan.hops.tobytes(), *(share.tokens.tobytes() for share in plan.ranks)
    print(plan.forward, plan.backward, plan.fingerprint, hashlib.sha1(b"".join(arrays)).hexdigest())
"""


def test_plans_do_not_depend_on_the_process(capsys):
    """This one and two others, each with a hash seed of its own."""
    seen = set()
    for seed in ("1", "2"):
        seen.add(python("-c", SEVERAL_PLANS, PYTHONHASHSEED=seed).stdout)
    exec(SEVERAL_PLANS, {})
    seen.add(capsys.readouterr().out)
    assert len(seen) == 1
    assert seen.pop().count("\n") == 3


CAUSAL = varlen_causal([0, 4])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((AttnSlices([[0, 4, 0, 9, 0]]), 8, 2), {}, r"slice 0 is \[0, 4, 0, 9, 0\] but the pack has 8 tokens"),
        *(((CAUSAL, 4, size), {}, f"cp_size is {size!r} and") for size in (0, 2.0, True, "2", None)),
        *(((CAUSAL, total, 2), {}, f"total_tokens {total!r}; they must be integers") for total in (-1, 10.5, "4")),
        *(((CAUSAL, total, 2), {}, f"total_tokens is {total}; token numbers") for total in (2**31 - 1, 10**20)),
        *(((CAUSAL, 4, 2, stages), {}, f"overlap_stages is {stages!r}; use 0") for stages in (-2, 1.5, True)),
        ((CAUSAL, 4, 2, 17), {}, "overlap_stages is 17; use 0.*at most 16"),
        *(((CAUSAL, 4, 2), {"gpus_per_node": gpus}, f"gpus_per_node is {gpus!r}; use None") for gpus in (0, 2.5, "2")),
    ],
)
def test_a_bad_request_names_the_value(arguments, options, message):
    make_plan(CAUSAL, 4, 2)  # an equal number of another type must not find it
    with one_line(message):
        make_plan(*arguments, **options)


def test_a_prediction_needs_a_cost_model():
    with pytest.raises(ValueError, match="cost is 'h200'; give a CostModel, or leave it out"):
        make_plan(CAUSAL, 4, 2).predict("h200")


def test_sizes_may_be_integers_of_numpy():
    plan = make_plan(CAUSAL, np.int32(4), np.int64(2), np.int8(1), gpus_per_node=np.int16(1))
    assert plan.fingerprint == make_plan(CAUSAL, 4, 2, 1, gpus_per_node=1).fingerprint


def arrays_in(value, seen):
    """All arrays that can be reached from a value, with those that they are views of."""
    if id(value) in seen:
        return
    seen[id(value)] = value
    if isinstance(value, np.ndarray):
        yield value
        yield from arrays_in(value.base, seen)
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from arrays_in(item, seen)
    elif type(value).__module__.startswith("torchtitan_magi"):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        yield from arrays_in([getattr(value, name) for name in names], seen)


@pytest.mark.parametrize("gpus_per_node", [1, 2, None])
def test_every_array_of_a_plan_is_read_only(gpus_per_node):
    plan = make_plan(varlen_causal([0, 100, 130, 397]), 397, 4, 2, gpus_per_node=gpus_per_node)
    for share in plan.ranks:
        assert len(share.tokens) == 100
        for exchange in (e for some in (*share.forward, *share.backward) for e in some.exchanges):
            assert exchange.hops is None or bool(Flow.of(exchange, False).fetches()) == any(exchange.recv_splits)
    arrays = list(arrays_in(plan, {}))
    assert len(arrays) > 30
    assert not [array for array in arrays if array.flags.writeable]


def test_threads_that_first_use_a_plan_get_the_same_stages(monkeypatch):
    """Both threads find no stages and make them; what each gets must be what the plan keeps."""
    share = make_plan(varlen_causal([0, 64]), 64, 2, 1, cost=replace(H200, stage=1.0)).ranks[0]
    both, make = threading.Barrier(2, timeout=60), stage.make_stage

    def make_together(*arguments):
        if both.n_waiting or not share._stages:
            both.wait()
        return make(*arguments)

    monkeypatch.setattr(stage, "make_stage", make_together)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: (share.forward, share.backward), range(2)))
    kept = [id(one) for one in share.forward]
    assert all([id(one) for one in stages] == kept for pair in found for stages in pair)


@given(
    document_lengths(200),
    st.lists(st.integers(0, 40), min_size=1, max_size=3),
    CP_SIZES,
    STAGES,
    NODES,
    COSTS,
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
)
@settings(max_examples=60)
def test_several_masks_share_a_placement_and_receive_what_each_needs_once(
    lengths, windows, cp_size, stages, nodes, cost, layers
):  # fmt: skip
    """Windows of so many tokens; 0: all of the document."""
    cu = np.cumsum([0, *lengths])
    masks = [sliding_window(cu, window) if window else varlen_causal(cu) for window in windows]
    options = {"layers": layers[: len(masks)], "gpus_per_node": nodes, "cost": cost}
    plans = make_plans(masks, int(cu[-1]), cp_size, stages, **options)
    for plan, slices in zip(plans, masks, strict=True):
        assert_is_right(plan, slices, int(cu[-1]))
        for share, first in zip(plan.ranks, plans[0].ranks, strict=True):
            np.testing.assert_array_equal(share.ranges, first.ranges)


def test_one_mask_of_several_layers_is_placed_as_one_of_one():
    slices = varlen_causal([0, 500, 700, 1024])
    (several,), alone = make_plans([slices], 1024, 4, layers=[7]), make_plan(slices, 1024, 4)
    for one, other in zip(several.ranks, alone.ranks, strict=True):
        np.testing.assert_array_equal(one.ranges, other.ranges)


def test_the_work_of_all_layers_is_balanced_not_that_of_one_kind():
    cu, total = [0, 3000, 3100, 3300, 3400, 4096], 4096
    masks = [varlen_causal(cu), sliding_window(cu, 64)]
    plans = make_plans(masks, total, 4, layers=[1, 3])
    work = plans[0].areas + 3 * plans[1].areas
    assert work.max() < 1.05 * work.mean()
    window = plans[1].received_rows
    assert (window <= 64 * 4).all()  # a few cuts of a window
    assert window.sum() < plans[0].received_rows.sum()


@pytest.mark.parametrize(
    ("masks", "layers", "message"),
    [
        ([], None, "for 0 masks; give at least one"),
        ([varlen_causal([0, 9])], None, "slice 0 is .* but the pack has 8 tokens"),
        ([[0, 8]], None, "slices are a list; give AttnSlices"),
        *(
            (masks, None, f"masks are a {type(masks).__name__}; give a list of AttnSlices, one for each")
            for masks in (None, 3, CAUSAL, iter([CAUSAL]))
        ),
        *(
            ([CAUSAL], layers, rf"layers is {re.escape(repr(layers))} for 1 masks; give")
            for layers in (2, "1", [0], [1, 1], [1.0], {1: 1})
        ),
    ],
)
def test_misuse_of_several_masks(masks, layers, message):
    with one_line(message):
        make_plans(masks, 8, 2, layers=layers)
