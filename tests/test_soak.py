"""scripts/soak.py: a short case of it, that its cases have every blow and layout, and that it fails when it should."""

import itertools
from types import SimpleNamespace

import pytest
import training  # noqa: F401  # puts scripts/ on the path
from hf_models import make_hf_folder

from soak import DEGREES, MAX_GROWTH, SETTLED, Case, Soak, Watcher, make_case, row, run_case  # isort: skip

OPTIONS = "--activation_checkpoint.mode none --checkpoint.async_mode disabled"
ONE, CP2, DP2 = ({"dp": 1, "cp": 1, "tp": 1} | more for more in ({}, {"cp": 2}, {"dp": 2}))


def short_case(blows, degrees=CP2, other=DP2, steps=8):
    return Case(0, "sft", degrees, other, 128, OPTIONS, False, steps, 2, blows)


def test_a_run_killed_while_it_writes_a_checkpoint_continues_bit_for_bit_and_at_another_layout():
    case = short_case([("write", 5, 1, "killed")])
    outcome = run_case(case, make_hf_folder("llama"))
    assert outcome.failures == []
    assert outcome.struck == {("write", "killed"): 1}
    assert outcome.resumed_at == 3  # the checkpoint of step 4 was never finished
    assert outcome.equal_steps == 4 + 6
    assert "| equal |" in row(case, outcome)


def test_the_cases_have_every_layout_and_blow():
    cases = [make_case(0, number) for number in range(200)]
    layouts = {tuple(case.degrees.values()) for case in cases}
    assert layouts == set(itertools.product((1, 2), repeat=len(DEGREES)))
    assert all(case.degrees != case.other_degrees for case in cases)
    blows = {(phase, kind) for case in cases for phase, _, _, kind in case.blows}
    places = itertools.product(("forward", "backward", "write", "finish"), ("killed", "paused", "stopped"))
    assert blows == {*places, ("any", "killed")}
    assert make_case(0, 5) == cases[5]


def watched(losses, resources=()):
    """Of a run of one rank: losses from step 1 on."""
    watcher = Watcher()
    logged = [
        ("metrics", i, {"loss_metrics/global_avg_loss": loss, "grad_norm": 1.0}) for i, loss in enumerate(losses, 1)
    ]
    watcher.events = [[*logged, *(("resources", *used) for used in resources)]]
    return watcher


def test_a_step_with_another_last_digit_fails(tmp_path):
    soak = Soak(short_case([]), tmp_path, tmp_path)
    soak.whole = watched([0.5, 0.25, 0.125]).steps
    soak._compare(watched([0.5, 0.25]), None)
    assert (soak.outcome.failures, soak.outcome.equal_steps) == ([], 2)
    soak._compare(watched([0.5, 0.25 + 2**-54]), ("forward", 2, 0, "killed"))
    (failure,) = soak.outcome.failures
    assert failure.startswith(
        "step 2 is (0.25000000000000006, 1.0), uninterrupted (0.25, 1.0) (start with blow ('forward"
    )


def test_the_slowest_step_is_counted_from_the_end_of_the_first(monkeypatch):
    watcher, run = Watcher(), SimpleNamespace(events=[[], []])
    for now, events in ((50, []), (60, ["metrics"]), (61, ["resources", "metrics"]), (64, ["metrics"]), (99, ["end"])):
        monkeypatch.setattr("soak.time.monotonic", lambda now=now: now)
        run.events[0] += [(event, 0) for event in events]
        watcher(run)
    assert watcher.slowest_step == 3


@pytest.mark.parametrize(
    ("step", "failing"),
    [((0, 0, 0), None), ((1, 0, 0), None), ((MAX_GROWTH / 10, 0, 0), "growth of memory in KiB"),
     ((0, 1, 0), "descriptors"), ((0, 0, 1), "threads")],
)  # fmt: skip
def test_what_grows_fails(step, failing, tmp_path):
    soak = Soak(short_case([], steps=SETTLED), tmp_path, tmp_path)
    used = [tuple(100 + i * amount for amount in step) for i in range(SETTLED)]
    soak._check_resources(watched([], used))
    assert len(soak.outcome.failures) == (failing is not None)
    assert all(failure.startswith(f"rank 0: {failing} ") for failure in soak.outcome.failures)
