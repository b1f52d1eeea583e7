"""What all ranks of a job do together: who one is, what the others have, what rank 0 does for all."""

import itertools
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan_magi.exchange import transport
from torchtitan_magi.training.process.groups import rank_and_size_in
from torchtitan_magi.wording import quoted_path

T = TypeVar("T")
PATIENCE = timedelta(days=30)
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
    """The result of make() on this rank. A collective of all ranks, which may come hours apart: files take their time.

    Args:
        path: where the files are, for error texts.
        make: may raise ValueError.
        identity: of a result, what must be the same on every rank; it appears in the error text.

    Raises:
        ValueError: on all ranks, if make() raised on one of them or results differ.
    """
    result, problem = None, None
    try:
        result = make()
    except ValueError as error:
        problem = str(error)
    mine = problem, None if result is None else identity(result)
    found = _gathered_by_store(mine)
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


def _gathered_by_store(mine: Any) -> list[Any]:
    """As ``gathered``, without a time-out: rank 0 collects what the others have, and they wait for what it found."""
    if rank_and_size()[1] == 1:
        return [mine]
    store, key = dist.group.WORLD.get_group_store(), f"torchtitan_magi/agreed/{next(_numbers)}"
    store.set(f"{key}/{dist.get_rank()}", pickle.dumps(mine))
    if dist.get_rank() == 0:
        found = [_awaited(store, f"{key}/{rank}") for rank in range(dist.get_world_size())]
        store.set(key, pickle.dumps(found))
    return _awaited(store, key)


def of_first_rank(mine: T) -> T:
    """What rank 0 has, on all ranks. A collective of all ranks, for which rank 0 may come hours later."""
    if rank_and_size()[1] == 1:
        return mine
    store, key = dist.group.WORLD.get_group_store(), f"torchtitan_magi/first/{next(_numbers)}"
    if is_first_rank():
        store.set(key, pickle.dumps(mine))
    found = _awaited(store, key)
    dist.barrier()
    if is_first_rank():
        store.delete_key(key)
    return found


def _awaited(store: dist.Store, key: str) -> Any:
    store.wait([key], PATIENCE)
    return pickle.loads(store.get(key))
