"""How long collectives may take once the first step is over."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_magi.exchange.mesh import process_group_transport


def set_pg_timeouts(timeout: timedelta, parallel_dims: Any) -> None:
    """In place of torchtitan's function of this name: of our communicators as well, without an accelerator too (gloo's
    barrier takes no device ids), and on the torch that this package runs on (0.3 wants ``set_timeout`` of a newer one).
    A collective of all ranks.

    Args:
        parallel_dims: torchtitan's.
    """
    if torch.accelerator.is_available():
        dist.barrier(device_ids=[torch.accelerator.current_device_index()])
        torch.accelerator.synchronize()
    else:
        dist.barrier()
    groups = [mesh.get_group() for mesh in parallel_dims.get_all_one_dimensional_meshes().values()]
    for group in [*groups, None]:
        dist.distributed_c10d._set_pg_timeout(timeout, group)
    if parallel_dims.cp_enabled:
        process_group_transport(parallel_dims.get_mesh("cp").get_group()).set_timeout(timeout)
