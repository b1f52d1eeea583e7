"""soak.py: a short case of it, that its cases have every blow and layout, and that it fails when it should."""

import itertools
from types import SimpleNamespace

import pytest
from support import runs as training  # noqa: F401  # puts scripts/ on the path
from support.hf_models import make_hf_folder

from soak import AT_END, DEGREES, MAX_GROWTH, SETTLED, Case, Soak, Watcher, make_case, row, run_case  # isort: skip

OPTIONS = "--activation_checkpoint.mode none --checkpoint.async_mode disabled"
ONE, CP2, DP2 = ({"dp": 1, "cp": 1, "tp": 1} | more for more in ({}, {"cp": 2}, {"dp": 2}))


def short_case(blows, degrees=CP2, other=DP2, steps=8, **more):
    return Case(**{"task": "sft", "options": OPTIONS} | more, number=0, degrees=degrees, other_degrees=other,
                seq_len=128, accumulated=False, steps=steps, interval=2, blows=blows)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return make_hf_folder("llama")


def test_a_run_killed_while_it_writes_a_checkpoint_continues_bit_for_bit_and_at_another_layout(model):
    case = short_case([("write", 5, 1, "killed")])
    outcome = run_case(case, model)
    assert outcome.failures == []
    assert outcome.struck == {("write", "killed"): 1}
    assert outcome.resumed_at == 3  # the checkpoint of step 4 was never finished
    assert outcome.equal_steps == 4 + 6
    assert "| equal |" in row(case, outcome)


def struck(model, *blow, degrees=ONE, steps=4, **more):
    """The outcome of a run that ends by a blow; it is not resumed at another layout."""
    soak_without_other = short_case([blow], degrees, degrees, steps, **more)
    outcome = run_case(soak_without_other, model)
    assert outcome.failures == []
    assert outcome.struck == {(blow[0], blow[-1]): 1}
    return outcome


@pytest.mark.parametrize("phase", ["export", "merge"])
def test_a_run_killed_in_its_export_exports_the_same_at_its_next_start(phase, model):
    outcome = struck(model, phase, 3, 0, "killed", steps=3, exports=True)
    assert outcome.export == "6 files equal"
    assert outcome.equal_steps == 3 + 1


def test_a_run_killed_in_a_validation_pass_has_equal_validation_losses(model):
    outcome = struck(model, "validation", 4, 0, "killed", validates=3)
    assert (outcome.equal_steps, outcome.equal_validations) == (3 + 2, 2)  # after steps 1 and 3


def test_preference_training_killed_in_its_reference_resumes_with_equal_losses(model):
    options = f"{OPTIONS} --magi.dpo.reference model"
    outcome = struck(model, "reference", 4, 0, "killed", task="dpo", options=options)
    assert outcome.equal_steps == 3 + 2


def test_a_rank_that_is_stopped_ends_the_run_which_resumes_with_equal_losses(model):
    outcome = struck(model, "backward", 4, 1, "stopped", degrees=CP2)
    assert outcome.equal_steps == 3 + 2


def test_the_cases_have_every_layout_and_blow():
    cases = [make_case(0, number) for number in range(500)]
    layouts = {tuple(case.degrees.values()) for case in cases}
    assert layouts == set(itertools.product((1, 2), repeat=len(DEGREES)))
    assert all(case.degrees != case.other_degrees for case in cases)
    for task, more in (("sft", ()), ("dpo", ("reference",))):
        blows = {(phase, kind) for case in cases if case.task == task for phase, _, _, kind in case.blows}
        phases = ("forward", "backward", "write", "finish", "validation", *AT_END, *more)
        places = itertools.product(phases, ("killed", "paused", "stopped"))
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
