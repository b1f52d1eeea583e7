"""Plans made ahead of time by a thread: the same batches, the state of what was given out, errors, and an end."""

import threading
import time

import pytest
import torch

from torchtitan_magi.planning.cost_model import Heads
from torchtitan_magi.training.batches.planned_loader import PlannedLoader
from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount
from torchtitan_magi.training.settings.options import Magi


class Numbers:
    """A stateful loader of the numbers below `end`."""

    def __init__(self, end, fails_at=None):
        self.end, self.fails_at, self.number = end, fails_at, 0

    def __iter__(self):
        while self.number < self.end:
            if self.number == self.fails_at:
                raise ValueError("line 7 is not JSON")
            self.number += 1
            yield {"input": self.number - 1}, None

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


def planned(numbers, waits=None, seconds=0.0):
    def plan(inputs, labels):
        time.sleep(seconds)
        return inputs | {"planned": 10 * inputs["input"]}

    return PlannedLoader(numbers, plan, (waits if waits is not None else []).append)


def test_every_batch_comes_once_in_order_with_its_plan():
    assert [inputs for inputs, _ in planned(Numbers(5))] == [{"input": i, "planned": 10 * i} for i in range(5)]


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize("taken", [0, 1, 3, 5])
def test_the_state_is_that_of_the_batches_given_out(taken, at_once):
    loader = planned(Numbers(6))
    loader.at_once = at_once
    batches = iter(loader)
    for _ in range(taken):
        next(batches)
    resumed = planned(Numbers(6))
    resumed.load_state_dict(loader.state_dict())
    assert [inputs["input"] for inputs, _ in resumed] == list(range(taken, 6))


@pytest.mark.parametrize("at_once", [1, 8])
def test_batches_of_the_next_step_and_one_are_loaded_while_the_consumer_works(at_once):
    numbers, waits = Numbers(30), []
    loader = planned(numbers, waits, seconds=0.02)
    loader.at_once = at_once
    batches = iter(loader)
    for _ in range(at_once):
        next(batches)
    deadline = time.monotonic() + 600
    while numbers.number < 2 * at_once + 1:  # without another call of next
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.1)
    assert numbers.number == 2 * at_once + 1
    assert len(waits) == at_once
    assert waits[0] > 0


def test_an_error_of_the_loader_reaches_the_consumer_in_its_turn():
    batches = iter(planned(Numbers(5, fails_at=2)))
    assert [next(batches)[0]["input"] for _ in range(2)] == [0, 1]
    with pytest.raises(ValueError, match="line 7 is not JSON"):
        next(batches)


def test_what_nobody_takes_is_not_planned_at_the_end():
    numbers = Numbers(100)
    loader = planned(numbers, seconds=0.02)
    loader.at_once = 50
    batches = iter(loader)
    next(batches)
    batches.close()
    assert numbers.number < 50


def test_no_thread_outlives_its_consumer():
    batches = iter(planned(Numbers(5)))
    next(batches)
    assert any(thread.name.startswith("plan_") for thread in threading.enumerate())
    batches.close()
    assert not any(thread.name.startswith("plan_") for thread in threading.enumerate())


def test_the_fingerprint_of_a_plan_is_made_ahead_as_well():
    runtime = MagiRuntime(Magi(), None, Heads(4, 2, 8), torch.device("cpu"), WorkCount())
    inputs = {"input": torch.tensor([[5, 6, 1, 7, 8, 1]])}
    planned = runtime.plan_ahead(inputs, None, eos_id=1)
    assert "fingerprint" in vars(planned.plans[0])  # kept: asking for it takes no time
