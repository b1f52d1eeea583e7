"""What every rank makes by itself from files, once all ranks are known to have made the same."""

import itertools
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan_magi.wording import quoted_path

T = TypeVar("T")
PATIENCE = timedelta(days=30)
_numbers = itertools.count()  # of the calls of _gathered_patiently, the same on all ranks


def agreed(path: Any, make: Callable[[], T], identity: Callable[[T], Any], patient: bool = False) -> T:
    """The result of make() on this rank. A collective of all ranks.

    Args:
        path: where the files are, for error texts.
        make: may raise ValueError.
        identity: of a result, what must be the same on every rank; it appears in the error text.
        patient: whether ranks may come hours apart, which no collective waits for.

    Raises:
        ValueError: on all ranks, if make() raised on one of them or results differ.
    """
    result, problem = None, None
    try:
        result = make()
    except ValueError as error:
        problem = str(error)
    found: list[Any] = [(problem, None if result is None else identity(result))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        found = _gathered_patiently(found[0]) if patient else _gathered(found[0])
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


def _gathered(mine: Any) -> list[Any]:
    """By rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _gathered_patiently(mine: Any) -> list[Any]:
    """The same by the store in which the ranks met: rank 0 collects, and the others wait for what it found."""
    store, key = dist.distributed_c10d._get_default_store(), f"torchtitan_magi/agreed/{next(_numbers)}"
    store.set(f"{key}/{dist.get_rank()}", pickle.dumps(mine))
    if dist.get_rank() == 0:
        found = [_awaited(store, f"{key}/{rank}") for rank in range(dist.get_world_size())]
        store.set(key, pickle.dumps(found))
    return _awaited(store, key)


def _awaited(store: dist.Store, key: str) -> Any:
    store.wait([key], PATIENCE)
    return pickle.loads(store.get(key))
