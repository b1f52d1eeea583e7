"""Plans made ahead of time: a thread loads the next batches and plans them while the current step runs."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from torchtitan_magi.training.batches.planner import MagiRuntime, WorkCount, check_tokens

Batch = tuple[dict[str, Any], Tensor]  # inputs, labels


class PlannedLoader:
    """A data loader whose batches come with their plan.

    Its state is that of the batches given out, not of those loaded ahead; so is ``longest``, the number of rotary
    positions that they need.

    Args:
        loader: an iterable of batches with ``state_dict`` and ``load_state_dict``; the former may be called after each
            batch.
        plan: inputs and labels of a batch -> the inputs with what planning adds; called in the thread.
        waited: called with the seconds that the consumer waited for each batch's plan.
        num_positions: the number of rotary positions that planned inputs need.

    Attributes:
        at_once: how many batches the consumer takes at a time, such as those of a step; set before iterating. They and
            one more are made ahead, so that none of them is waited for once they had the time of a step.
    """

    at_once = 1

    def __init__(
        self,
        loader: Any,
        plan: Callable[[dict[str, Any], Tensor], dict[str, Any]],
        waited: Callable[[float], None],
        num_positions: Callable[[dict[str, Any]], int] = lambda inputs: 0,
    ) -> None:
        self.loader, self.plan, self.waited, self.num_positions = loader, plan, waited, num_positions
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

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict() if self.state is None else self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
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
        return (inputs, labels), state, time.perf_counter() - started, self.num_positions(inputs)


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
        check_tokens(inputs["input"], labels, vocab_size)
        return planner.plan_ahead(inputs, labels, eos_id) | {"content": content(inputs, labels)}

    return PlannedLoader(loader, plan, count.wait, _num_positions)


def content(inputs: dict[str, Any], labels: Tensor) -> int:
    """63 bits that stand for a batch's tokens, labels and documents, by which ranks tell whether they have the same."""
    digest = hashlib.blake2b(digest_size=8)
    for array in (inputs["input"].numpy(), labels.numpy(), inputs.get("documents"), inputs.get("pairs")):
        if array is not None:
            digest.update(array.tobytes())
    return int.from_bytes(digest.digest()) >> 1


def _num_positions(inputs: dict[str, Any]) -> int:
    """Rotary positions of a batch. Without any given they run over the whole pack."""
    return 1 + int(inputs["positions"].max()) if "positions" in inputs else int(inputs["input"].shape[-1])
