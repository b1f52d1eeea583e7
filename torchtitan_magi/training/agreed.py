"""What every rank makes by itself from files, once all ranks are known to have made the same."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from torchtitan_magi.wording import quoted_path

T = TypeVar("T")


def agreed(path: Any, make: Callable[[], T], identity: Callable[[T], Any]) -> T:
    """The result of make() on this rank. A collective of all ranks.

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
    found: list[Any] = [(problem, None if result is None else identity(result))]
    if dist.is_initialized() and dist.get_world_size() > 1:
        mine, found = found[0], [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
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
