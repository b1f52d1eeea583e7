"""How long collectives may take, in the first step and after it."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_magi.exchange.mesh import process_group_transport


def set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """Sets the time-outs of collectives, in place of torchtitan's function of this name. A collective of all ranks.

    It sets those of our communicators as well, and of all dimensions of meshes of several (the "tp" beside "fsdp" is
    another group than the "tp" alone); without an accelerator too (gloo's barrier takes no device ids), and before
    torch 2.14 (0.3 wants ``torch.distributed.set_timeout``). Groups that may wait for long, and that no step waits for,
    keep theirs: an asynchronous checkpoint's, that of plans.

    Args:
        parallel_dims: torchtitan's.
    """
    if torch.accelerator.is_available():
        dist.barrier(device_ids=[torch.accelerator.current_device_index()])
        torch.accelerator.synchronize()
    else:
        dist.barrier()
    meshes = [*parallel_dims.get_all_one_dimensional_meshes().values(), *parallel_dims._global_meshes.values()]
    groups = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
    for group in groups:
        if dist.get_backend(group) != "fake":  # of a dimension that is not used
            group.set_timeout(timeout)
    if parallel_dims.cp_enabled:
        process_group_transport(parallel_dims.get_mesh("cp").get_group()).set_timeout(timeout)
