"""What all ranks of a job do together: who one is, what the others have, what rank 0 does for all."""

import contextlib
import itertools
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan_magi.exchange import transport
from torchtitan_magi.training.process.groups import rank_and_size_in
from torchtitan_magi.wording import quoted_path

T = TypeVar("T")
PATIENCE = timedelta(days=30)  # with a program of the user's
SILENCE = 300.0  # seconds without a sign of life, after which a rank is gone
_numbers = itertools.count()  # of what travels by the store, the same on all ranks


def rank_and_size() -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) in a process of its own."""
    return rank_and_size_in(dist.group.WORLD)


def is_first_rank() -> bool:
    """Whether this is rank 0, which speaks and writes for all."""
    return rank_and_size()[0] == 0


def gathered(mine: T) -> list[T]:
    """Every rank's value, by rank. A collective of all ranks."""
    return transport.gathered(mine, dist.group.WORLD)


def on_first_rank(function: Callable[[], T]) -> T:
    """function() of rank 0, on all ranks, so that all take the same path on a file system of any kind. A collective.

    Raises:
        ValueError, OSError: on all ranks what function raised, without its attributes.
    """
    outcome: list[Any] = [None, None]
    if is_first_rank():
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = error
    if rank_and_size()[1] > 1:
        dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def agreed(path: Any, make: Callable[[], T], identity: Callable[[T], Any]) -> T:
    """The result of make() on this rank. A collective of all ranks, each of which may take hours.

    Args:
        path: where the files are, for error texts.
        make: may raise ValueError.
        identity: of a result, what must be the same on every rank; it appears in the error text.

    Raises:
        ValueError: on all ranks, if make() raised on one of them or results differ.
        RuntimeError: a rank is gone.
    """
    with _Meeting() as meeting:
        result, problem = None, None
        try:
            result = make()
        except ValueError as error:
            problem = str(error)
        found = meeting.gathered((problem, None if result is None else identity(result)))
    for problem, _ in found:
        if problem is not None:
            raise ValueError(problem)
    for rank, (_, theirs) in enumerate(found):
        if theirs != found[0][1]:
            raise ValueError(
                f"{quoted_path(path)} has {found[0][1]} on rank 0, {theirs} on rank {rank}; give every rank the same "
                "data"
            )
    assert result is not None
    return result


class _Meeting:
    """What ranks tell each other by the store in which they met, however long one of them takes. While it is open each
    gives signs of life, so that one that is gone, with its machine, is not waited for. A context manager."""

    def __init__(self) -> None:
        (self.rank, self.size), self.over = rank_and_size(), threading.Event()
        if self.size > 1:
            self.store, self.key = dist.group.WORLD.get_group_store(), f"torchtitan_magi/agreed/{next(_numbers)}"
            self.life = threading.Thread(target=self._live, name="signs of life", daemon=True)

    def __enter__(self) -> "_Meeting":
        if self.size > 1:
            self.life.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.size > 1:
            self.life.join()

    def gathered(self, mine: T) -> list[T]:
        """Every rank's value, by rank: rank 0 collects what the others have, and they wait for what it found."""
        if self.size == 1:
            return [mine]
        if self.rank:
            self.store.set(f"{self.key}/{self.rank}", pickle.dumps(mine))
            return self._heard(0)
        found = [mine, *map(self._heard, range(1, self.size))]
        self.store.set(f"{self.key}/0", pickle.dumps(found))
        return found

    def _live(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, which the main thread will notice
            for number in itertools.count():
                self.store.set(f"{self.key}/{self.rank}/alive", str(number))
                if self.over.wait(SILENCE / 10):
                    return

    def _heard(self, rank: int) -> Any:
        """What a rank tells. Raises RuntimeError if it gives no sign of life for SILENCE seconds, or for as long as the
        ranks' first collectives wait, comm.init_timeout_seconds, if that is more."""
        patience = max(SILENCE, self.store.timeout.total_seconds())
        answer, life = f"{self.key}/{rank}", f"{self.key}/{rank}/alive"
        sign, since, pause = b"", time.monotonic(), 0.001
        while not self.store.check([answer]):
            now = self.store.get(life) if self.store.check([life]) else b""
            if now != sign:
                sign, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                raise RuntimeError(
                    f"rank {rank} has given no sign of life for {patience:.0f} s: see what it printed last"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.5)
        return pickle.loads(self.store.get(answer))


def of_first_rank(mine: T) -> T:
    """What rank 0 has, on all ranks. A collective of all ranks, for which rank 0 may come hours later."""
    if rank_and_size()[1] == 1:
        return mine
    store, key = dist.group.WORLD.get_group_store(), f"torchtitan_magi/first/{next(_numbers)}"
    if is_first_rank():
        store.set(key, pickle.dumps(mine))
    store.wait([key], PATIENCE)
    found = pickle.loads(store.get(key))
    dist.barrier()
    if is_first_rank():
        store.delete_key(key)
    return found
