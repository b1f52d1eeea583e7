"""From a mesh or a process group to the transport of its ranks."""

import itertools
import logging
import weakref
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_magi.exchange.gloo_exit import let_gloo_finish_at_exit
from torchtitan_magi.exchange.peer_memory import PeerTransport, can_reach_each_other, machine
from torchtitan_magi.exchange.transport import SINGLE_RANK, ProcessGroupTransport, Transport, gathered
from torchtitan_magi.wording import quoted

logger = logging.getLogger(__name__)

Mesh: TypeAlias = DeviceMesh | dist.ProcessGroup | Transport | None

# torch owns the groups; a transport holds its group weakly and ends with it.
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupTransport] = weakref.WeakKeyDictionary()
_ENDED = "the process group of the mesh has ended; make a mesh of the groups that there are now"
_at_end: list[Callable[[Transport], None]] = []


def at_end_of_transports(forget: Callable[[Transport], None]) -> None:
    """Has ``forget`` called with each transport that ends with its group, for what is kept by transport."""
    _at_end.append(forget)


def _end(transport: ProcessGroupTransport) -> None:
    transport.close()
    for forget in _at_end:
        forget(transport)


def process_group_transport(group: dist.ProcessGroup) -> ProcessGroupTransport:
    """The one transport of a group. Its first call is a collective of the group's ranks.

    It ends with the group: once ``destroy_process_group`` was called, its memory is given back when the last
    reference to the group goes, or when a transport of another group is made.

    Raises:
        RuntimeError: the group has ended.
    """
    transport, alive = _transports.get(group), dist.distributed_c10d._world.pg_map
    if group not in alive:
        raise RuntimeError(_ENDED)
    if transport is None:
        for ended in [other for other in _transports if other not in alive]:
            _end(_transports.pop(ended))
        backends = dist.get_backend_config(group)
        if "gloo" in backends:
            let_gloo_finish_at_exit()
        is_nccl = "nccl" in backends and dist.get_world_size(group) > 1
        kind = PeerTransport if is_nccl and can_reach_each_other(group) else ProcessGroupTransport
        transport = _transports[group] = kind(group)
        weakref.finalize(group, _end, transport).atexit = False
    return transport


def as_transport(mesh: Mesh, cp_size: int, device: torch.device | None = None) -> Transport:
    """The transport of a one-dimensional mesh, a process group, or None (a single rank).

    Args:
        device: of the tensors that will travel.

    Raises:
        ValueError: no mesh; it has several dimensions, not cp_size ranks, not this one, or no backend for the device.
        RuntimeError: its process group has ended.
    """
    if mesh is None:
        transport: Transport = SINGLE_RANK
    elif isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"the mesh has dimensions {mesh.mesh_dim_names}; pass the context-parallel one, mesh['cp']"
            )
        transport = process_group_transport(_group_of(mesh))
    elif isinstance(mesh, dist.ProcessGroup):
        transport = process_group_transport(mesh)
    elif mesh is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to other ranks
        raise ValueError("this rank is not in the process group that mesh is to be; call it on the group's ranks")
    elif hasattr(mesh, "all_to_all"):
        transport = mesh
    else:
        raise ValueError(f"mesh is {quoted(mesh)}; pass the context-parallel DeviceMesh, its process group, or None")
    if transport.size != cp_size:
        raise ValueError(
            f"the plan is for {cp_size} ranks but the mesh has {transport.size}; plan with cp_size of the mesh"
        )
    if (
        device is not None
        and isinstance(transport, ProcessGroupTransport)
        and device.type not in transport.device_types
    ):
        raise ValueError(
            f"the tensors are on {device}, but the mesh's backend {transport.way} is for "
            f"{' and '.join(sorted(transport.device_types))}; move them there, or make a mesh of their device"
        )
    return transport


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.get_coordinate() is None:
        raise ValueError(f"this rank is not in the mesh of ranks {mesh.mesh.tolist()}; call it on these")
    try:
        return mesh.get_group()
    except RuntimeError:
        raise RuntimeError(_ENDED) from None


def ranks_per_node(group: dist.ProcessGroup) -> list[int] | None:
    """How many ranks of a group sit in each machine, for ``make_plan``; None if all sit in one. A collective.

    Machines are told apart by themselves, so that any launcher will do. Where the group's ranks go back to a machine
    that they have left, the plan takes all for one, and a warning says so.
    """
    machines = gathered(machine(), group)
    sizes = [len(list(ranks)) for _, ranks in itertools.groupby(machines)]
    if len(sizes) > len(set(machines)):
        logger.warning(
            "context-parallel ranks go to and fro between machines, so every row that two ranks share may cross the "
            "network; start all ranks of a machine one after another"
        )
        return None
    return sizes if len(sizes) > 1 else None
