"""The public calls: attention of a rank's tokens by a plan, and attention under any mask on one device."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from torchtitan_magi.attention.bound_plan import BoundPlan, bind_plan, bind_slices
from torchtitan_magi.attention.dispatch import check_tensor
from torchtitan_magi.attention.op import PlanHandle, attend, check_transforms
from torchtitan_magi.backends.choose import check_backend, check_switch, choose_block_attn
from torchtitan_magi.backends.interface import BlockAttn, check_scale, check_softcap
from torchtitan_magi.cuda.tables import stream_of
from torchtitan_magi.exchange.mesh import Mesh, as_transport, at_end_of_transports
from torchtitan_magi.exchange.transport import Transport
from torchtitan_magi.masks.slices import AttnSlices, check_slices
from torchtitan_magi.planning.cost_model import Heads
from torchtitan_magi.planning.plan import AttnPlan, check_plan, forget_plans

CACHED_PLANS, CACHED_BYTES = 16, 256 << 20  # bound plans that the public calls keep, and their memory on the device


class _Handles(OrderedDict[Any, PlanHandle]):
    """Handles of the public calls' last bound plans: as many as CACHED_BYTES hold, at least one. Streams share none.

    A key ends with the transport, where there is one. What is bound to it goes when it ends.
    """

    lock = threading.RLock()  # of all threads that call; a group may end while this one binds

    def get_or_make(self, key: Any, bind: Callable[[], BoundPlan]) -> PlanHandle:
        """The handle under `key`, of what `bind` gives if there is none yet."""
        with self.lock:
            if key not in self:
                self[key] = PlanHandle(bind())
                total = sum(map(_size, list(self.values())))
                while len(self) > CACHED_PLANS or (len(self) > 1 and total > CACHED_BYTES):
                    total -= _size(self.popitem(last=False)[1])
            self.move_to_end(key)
            return self[key]

    def forget(self, transport: Transport) -> None:
        """Drops what is bound to a transport."""
        with self.lock:
            for key in [key for key in list(self) if key[-1] is transport]:
                self.pop(key, None)


def _size(handle: PlanHandle) -> int:
    return handle.bound_plan.num_bytes


_handles = _Handles()
at_end_of_transports(_handles.forget)


def clear_caches() -> None:
    """Forgets the plans of ``make_plan`` and what ``cp_varlen_attn`` and ``flex_flash_attn`` keep on devices.

    It gives back memory; nothing else needs it. What belongs to a process group is forgotten when the group ends.
    """
    with _handles.lock:
        _handles.clear()
    forget_plans()


@_disable_dynamo
def cp_varlen_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttnPlan,
    mesh: Mesh = None,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    deterministic: bool | None = None,
    fp32_reduce: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's tokens over all K/V their mask lets them see, wherever they are. Differentiable.

    Every rank of the mesh calls it with its share of the tokens, in the order of ``dispatch``.

    Args:
        q: [T, Hq, D] with T = plan.tokens_per_rank. k: [T, H, D], v: [T, H, Dv], Hq a multiple of H.
        plan: from ``make_plan``, the same on every rank; layers that share it also share its index data.
        mesh: the context-parallel mesh or group; None for a single rank.
        softmax_scale: factor of the scores, positive; default D ** -0.5.
        softcap: scores s become softcap * tanh(s / softcap); 0: they stay as they are.
        sinks: [Hq], any float dtype: a score for each query head that takes part in the softmax of all its rows,
            without a value. Differentiable; a rank's gradient is that of its own rows. -inf is no sink, with a gradient
            of 0; infinity and NaN spread, as in q, k and v.
        return_lse: also return lse, differentiable too.
        backend: "auto" (our kernel on CUDA, flex_attention on CPU), "ffa" or "flex".
        deterministic: repeat bit for bit. None: if torch.use_deterministic_algorithms asks for it.
        fp32_reduce: send dK/dV in float32 instead of the dtype of k.

    Returns:
        out [T, Hq, Dv] in the dtype of q; rows that see no key are 0. With `return_lse` also lse [T, Hq]: the natural
        logarithm of the sum of a row's exponentials, the sink's included, in float32 or wider; -inf if there are none.

    Every value of q, k and v must be finite, also in tokens that the mask leaves out: a masked score counts as 0, and
    0 times infinity or NaN is NaN. Fill padding with zeros, as ``dispatch`` does.

    Raises:
        ValueError: q, k, v or sinks are no tensors; shapes that do not fit each other, the plan or the mesh; dtypes or
            devices that differ; integers; no plan; a scale that is not positive; a negative softcap; an unknown or
            unusable backend.
        RuntimeError: inside torch.func's transforms or with forward-mode tangents; the mesh's process group has ended.
    """
    check_plan(plan)
    check_switch(fp32_reduce, "fp32_reduce")
    deterministic = _checked_options(backend, deterministic)
    _check_inputs(q, k, v, sinks, softcap)
    if not len(q) == len(k) == plan.tokens_per_rank:
        raise ValueError(
            f"q has {len(q)} rows but the plan gives each rank {plan.tokens_per_rank} tokens; dispatch them first"
        )
    # kept by transport, not by mesh: one like it may come after its groups have ended
    transport = as_transport(mesh, plan.cp_size, q.device)
    shapes = q.shape[1:], k.shape[1:], v.shape[1:]
    key = (plan, shapes, q.dtype, q.device, stream_of(q.device), backend, deterministic, fp32_reduce, transport)

    def bind() -> BoundPlan:
        heads, block_attn = _heads_of(q, k, v), _block_attn(backend, deterministic, q, v)
        return bind_plan(plan, transport, block_attn, *heads.counts, q.device, fp32_reduce, head_dims=heads.dims)

    handle = _handles.get_or_make(key, bind)
    out, lse = attend(q, k, v, handle, _scale(softmax_scale, q), sinks, float(softcap))
    return (out, lse) if return_lse else out


@_disable_dynamo
def flex_flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slices: AttnSlices,
    *,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    backend: str = "auto",
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention under any list of AttnSlices, on one device. ``out`` and ``lse`` are differentiable.

    Arguments that are not named below are those of ``cp_varlen_attn``.

    Args:
        q: [Tq, Hq, D].
        k: [Tk, H, D], Hq a multiple of H.
        v: [Tk, H, Dv].
        slices: the mask; queries in rows of q, keys in rows of k.

    Returns:
        out [Tq, Hq, Dv] in the dtype of q and lse [Tq, Hq], natural logarithms in float32 or wider; rows that no slice
        touches have out 0 and lse -inf, or their head's sink.

    Raises:
        ValueError: no tensors; shapes, dtypes or devices that do not fit; no AttnSlices, or one beyond Tq or Tk; an
            unknown or unusable backend.
    """
    check_slices(slices)
    deterministic = _checked_options(backend, deterministic)
    _check_inputs(q, k, v, sinks, softcap)
    key = (slices, q.shape, k.shape, v.shape, q.dtype, q.device, stream_of(q.device), backend, deterministic)

    def bind() -> BoundPlan:
        heads, block_attn = _heads_of(q, k, v), _block_attn(backend, deterministic, q, v)
        return bind_slices(slices, len(q), len(k), *heads.counts, block_attn, q.device, heads.dims)

    return attend(q, k, v, _handles.get_or_make(key, bind), _scale(softmax_scale, q), sinks, float(softcap))


def _heads_of(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    return Heads(q.shape[1], k.shape[1], q.shape[2], v.shape[2])


def _block_attn(backend: str, deterministic: bool, q: Tensor, v: Tensor) -> BlockAttn:
    """The backend's, which takes such q and v."""
    block_attn = choose_block_attn(backend, q.device, deterministic)
    block_attn.check(q.shape[2], q.dtype, v.shape[2])
    return block_attn


def _scale(softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        return float(q.shape[-1] ** -0.5)
    check_scale(softmax_scale)
    return float(softmax_scale)


def _checked_options(backend: str, deterministic: bool | None) -> bool:
    """Whether to repeat bit for bit."""
    check_backend(backend)
    if deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    check_switch(deterministic, "deterministic")
    return deterministic


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, softcap: float) -> None:
    for name, x in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        if x is not None or name != "sinks":
            check_tensor(x, name)
    check_transforms(q, k, v, sinks)
    check_softcap(softcap)
    fits = q.ndim == k.ndim == v.ndim == 3 and k.shape[:2] == v.shape[:2] and q.shape[2] == k.shape[2]
    if not fits or not q.shape[2] or not v.shape[2] or not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(
            f"q, k, v have shapes {shapes}; give [T, Hq, D], [T, H, D], [T, H, Dv]: Hq a multiple of H, D above 0"
        )
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}; give all three the same floating-point dtype, of 16 bits or "
            "more"
        )
    if not q.device == k.device == v.device or (sinks is not None and sinks.device != q.device):
        devices = ", ".join(str(x.device) for x in (q, k, v, sinks) if x is not None)
        raise ValueError(f"q, k, v{'' if sinks is None else ', sinks'} are on {devices}; move them to one device")
    if sinks is not None and (sinks.shape != q.shape[1:2] or not sinks.dtype.is_floating_point):
        raise ValueError(
            f"sinks are {sinks.dtype} {tuple(sinks.shape)} for {q.shape[1]} query heads; give one float for each"
        )
