"""Plans made ahead of time: a thread loads the next batches and plans them while the current step runs."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from torchtitan_magi.training.batches.microbatch import MICROBATCH, Batch
from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount

Plan = Callable[[dict[str, Any], Tensor], dict[str, Any]]  # inputs and labels -> the inputs with what planning adds


class PlannedLoader:
    """A data loader whose batches come with their plan.

    Its state is that of the batches given out, not of those loaded ahead; so is ``longest``, the number of rotary
    positions that they need.

    Args:
        loader: an iterable of batches with ``state_dict`` and ``load_state_dict``; the former may be called after each
            batch.
        plan: called for each batch, in the thread.
        waited: called with the seconds that the consumer waited for each batch's plan.

    Attributes:
        at_once: how many batches the consumer takes at a time, such as those of a step; set before iterating. They and
            one more are made ahead, so that none of them is waited for once they had the time of a step.
    """

    at_once = 1

    def __init__(self, loader: Any, plan: Plan, waited: Callable[[float], None]) -> None:
        self.loader, self.plan, self.waited = loader, plan, waited
        self.state: dict[str, Any] | None = None  # after the last batch given out; None: before the first
        self.longest = 0

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        with ThreadPoolExecutor(1, thread_name_prefix="plan") as thread:
            ahead = deque(thread.submit(self._next, batches) for _ in range(self.at_once + 1))
            try:
                while True:
                    started = time.perf_counter()
                    result = ahead.popleft().result()
                    if result is None:
                        return
                    batch, self.state, planning, length = result
                    self.longest = max(self.longest, length)
                    self.waited(min(time.perf_counter() - started, planning))
                    ahead.append(thread.submit(self._next, batches))
                    yield batch
            finally:
                for untaken in ahead:
                    untaken.cancel()

    def planned(self, inputs: dict[str, Any], labels: Tensor) -> Batch:
        """A batch that did not come from the loader, with its plan."""
        inputs = self.plan(inputs, labels)
        self.longest = max(self.longest, _num_positions(inputs))
        return inputs, labels

    def state_dict(self) -> dict[str, Any]:
        """The loader's, after the last batch given out."""
        return self.loader.state_dict() if self.state is None else self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Has the loader continue from there."""
        self.loader.load_state_dict(state_dict)
        self.state = None

    def _next(self, batches: Iterator[Batch]) -> tuple[Batch, dict[str, Any], float, int] | None:
        """The next batch, the loader's state after it, the seconds that planning took, and the number of positions;
        None at the end."""
        try:
            inputs, labels = next(batches)
        except StopIteration:
            return None
        state = self.loader.state_dict()
        started = time.perf_counter()
        inputs = self.plan(inputs, labels)
        return (inputs, labels), state, time.perf_counter() - started, _num_positions(inputs)


def _num_positions(inputs: dict[str, Any]) -> int:
    return inputs[MICROBATCH].num_positions if MICROBATCH in inputs else 0


def with_plans(
    loader: Any, runtime: Callable[[], MagiRuntime | None], count: WorkCount, vocab_size: int, eos_id: int | None
) -> PlannedLoader:
    """The loader with plans made ahead, and tokens and labels checked.

    Args:
        runtime: returns the runtime, which is there when the loader is iterated.
        count: accumulates the waits for plans.
        eos_id: see ``MagiRuntime.plan_ahead``.
    """

    def plan(inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
        planner = runtime()
        assert planner is not None
        batch = planner.plan_ahead(inputs, labels, eos_id)
        batch.check_tokens(vocab_size)
        batch.content = batch.digest()
        return {"input": inputs["input"], MICROBATCH: batch}

    return PlannedLoader(loader, plan, count.wait)
