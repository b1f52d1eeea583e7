import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import dense_mask, document_lengths, slice_lists

from torchtitan_magi.plan import make_plan
from torchtitan_magi.slices import AttnSlices, sliding_window, varlen_causal, varlen_full

CP_SIZES = st.sampled_from([1, 2, 3, 4, 8])
STAGES = st.integers(0, 4)


def assert_plan_is_right(slices, total, cp_size, stages):
    plan = make_plan(slices, total, cp_size, stages)
    mask = dense_mask(slices.table, plan.padded_tokens, plan.padded_tokens)
    owned = [share.tokens for share in plan.ranks]

    # Every token has one owner, and every rank the same number of them.
    assert sorted(np.concatenate(owned)) == list(range(plan.padded_tokens))
    assert {len(tokens) for tokens in owned} == {plan.tokens_per_rank}
    assert plan.padded_tokens - total in range(cp_size)
    assert [len(share.stages) for share in plan.ranks] == [len(plan.ranks[0].stages)] * cp_size

    for rank, share in enumerate(plan.ranks):
        needed = set(np.flatnonzero(mask[owned[rank]].any(0))) - set(owned[rank])
        received_all, computed = [], np.zeros_like(mask, int)
        for s, stage in enumerate(share.stages):
            assert stage.communicates == plan.ranks[0].stages[s].communicates
            received = []
            for source, other in enumerate(plan.ranks):
                sent = other.stages[s]
                first = sum(sent.send_splits[:rank])
                rows = sent.send_rows[first : first + sent.send_splits[rank]]
                assert len(rows) == stage.recv_splits[source]
                received += owned[source][rows].tolist()
            assert stage.communicates or not received
            received_all += received
            buffer = np.array((owned[rank].tolist() if stage.holds_local else []) + received, dtype=int)
            assert len(buffer) == stage.num_rows
            local = np.zeros((plan.tokens_per_rank, stage.num_rows), int)
            for row in stage.slices.table:
                local += dense_mask(row[None], *local.shape)
            computed[np.ix_(owned[rank], buffer)] += local
        # Zero redundancy: each row that is needed and not owned comes exactly once, and no other row comes.
        assert sorted(received_all) == sorted(needed)
        assert plan.received_rows[rank] == len(needed)
        # Each pair of the rank's rows is computed exactly once.
        assert (computed[owned[rank]] == mask[owned[rank]]).all()
        assert plan.areas[rank] == mask[owned[rank]].sum()


@given(document_lengths(200), CP_SIZES, STAGES, st.booleans(), st.integers(0, 30))
@settings(max_examples=60)
def test_document_plans(lengths, cp_size, stages, causal, padding):
    cu = np.cumsum([0, *lengths])
    assert_plan_is_right((varlen_causal if causal else varlen_full)(cu), int(cu[-1]) + padding, cp_size, stages)


@given(st.integers(0, 70).flatmap(lambda n: st.tuples(st.just(n), slice_lists(n, n))), CP_SIZES, STAGES)
@settings(max_examples=120)
def test_any_slices(total_and_slices, cp_size, stages):
    total, slices = total_and_slices
    assert_plan_is_right(slices, total, cp_size, stages)


def test_special_packs():
    assert_plan_is_right(varlen_causal([0, 1]), 1, 4, 1)  # ranks with nothing but padding
    assert_plan_is_right(varlen_causal(range(65)), 64, 8, 2)  # one-token documents
    assert_plan_is_right(varlen_causal([0, 256]), 256, 8, 3)  # one document over all ranks
    assert_plan_is_right(sliding_window([0, 100, 300], 16), 300, 4, 1)
    assert_plan_is_right(AttnSlices([]), 10, 3, 2)  # nothing attends to anything
    assert_plan_is_right(AttnSlices([]), 0, 2, 2)


def test_work_is_balanced():
    cu = np.cumsum([0, 30000, 9000, 8000, 7000, 400, 300, 10836])
    plan = make_plan(varlen_causal(cu), int(cu[-1]), 8)
    assert plan.areas.max() <= 1.05 * plan.areas.mean()
    assert plan.areas.sum() == plan.slices.area


def test_documents_that_stay_on_one_rank_move_nothing():
    plan = make_plan(varlen_causal(range(0, 4096 + 1, 1)), 4096, 4)
    assert len(plan.transfers) == 0
    assert len(plan.ranks[0].stages) == 1
    assert not plan.ranks[0].stages[0].communicates


def test_repeated_masks_are_planned_once():
    assert make_plan(varlen_causal([0, 7, 30]), 30, 2) is make_plan(varlen_causal([0, 7, 30]), 30, 2)


def test_a_fingerprint_tells_plans_apart():
    plans = [make_plan(varlen_causal(cu), 30, cp) for cu in ([0, 30], [0, 7, 30], [0, 7]) for cp in (1, 2)]
    plans += [make_plan(varlen_full([0, 30]), 30, 2), make_plan(varlen_causal([0, 30]), 31, 2)]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert all(0 <= plan.fingerprint < 2**63 for plan in plans)


def test_plans_do_not_depend_on_the_process():
    code = (
        "import numpy as np, hashlib; from torchtitan_magi.plan import make_plan; from torchtitan_magi.slices import *;"
        "cu = np.cumsum([0, 500, 20, 1300, 7, 81]); p = make_plan(varlen_causal(cu), 1908, 4, 2);"
        "print(hashlib.sha1(p.transfers.tobytes() + b''.join(r.tokens.tobytes() for r in p.ranks)).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((AttnSlices([[0, 4, 0, 9, 0]]), 8, 2), r"slice 0 is \[0, 4, 0, 9, 0\] but the pack has 8 tokens"),
        ((varlen_causal([0, 4]), 4, 0), "cp_size is 0"),
        ((varlen_causal([0, 4]), 4, 2, -1), "overlap_stages is -1"),
    ],
)
def test_a_bad_request_names_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_plan(*arguments)
