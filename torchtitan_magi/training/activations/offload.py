"""Keeps what layers save for their backward in the host's memory, copied beside the computation.

Each layer's tensors leave the GPU while the next layers are computed, and come back one layer ahead of their backward.
Autograd hands them over by its hooks for saved tensors. What a selective checkpoint holds while nothing is compiled is
not saved that way; it is exchanged in the checkpoint's own storage.
"""

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from torchtitan_magi.sizing.keeping.kinds import AHEAD
from torchtitan_magi.training.activations.host_memory import Copies

SMALL = 1 << 20  # bytes of a tensor below which it stays on the GPU


class _Away:
    """A tensor in the host's memory, and perhaps on its way back."""

    def __init__(self, x: Tensor, copies: Copies) -> None:
        self._copies, self._device = copies, x.device
        self._like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        self._here: Tensor | None = x
        self._arrival: Any = None  # of what comes back
        self._buffer, self._departure = copies.to_host(x)
        weakref.finalize(self, copies.end, self._buffer, self._departure).atexit = False

    def leave(self) -> None:
        """Frees what is on the device, as soon as its copy is on the host."""
        self._copies.wait(self._departure)
        self._here = None

    def fetch(self) -> None:
        """Starts its way back, unless it is here."""
        if self._here is None:
            self._here = torch.empty_like(self._like, device=self._device)
            self._arrival = self._copies.from_host(self._here, self._buffer)

    def get(self) -> Tensor:
        """The tensor, for what comes next on the current stream."""
        self.fetch()
        self._copies.wait(self._arrival)
        assert self._here is not None
        return self._here


class _Record:
    """What one layer hands over in one forward.

    Args:
        before: the record of the layer before it that offloads; None for the first.
        stays: gives where the memory of tensors begins that stay where they are.
    """

    def __init__(self, layer: nn.Module, before: "_Record | None", stays: Callable[[], set[int]]) -> None:
        self._layer, self._before, self._stays = layer, before, stays
        self._away: dict[Any, weakref.ref[_Away]] = {}  # by memory, shape and version; alive while autograd needs them
        self._has_left = self._is_fetched = False

    def hand_over(self, x: Tensor, copies: Copies) -> Any:
        """What autograd keeps in place of x, for ``_give_back``."""
        if isinstance(x, AsyncCollectiveTensor):
            x = x.trigger_wait()  # a copy would not wait for what is still to arrive
        if type(x) is DTensor:
            return _Distributed(x, self.hand_over(x._local_tensor, copies))
        if is_traceable_wrapper_subclass(x):
            return _Inner(x, lambda part: self.hand_over(part, copies))
        if x.numel() * x.element_size() < SMALL or not _is_dense(x) or self._is_to_stay(x):
            return x
        x = x.resolve_conj().resolve_neg()  # only memory travels, and not how it is to be read
        key = x.data_ptr(), x.shape, x.stride(), x.dtype, x._version
        away = self._find(key) or (self._before and self._before._find(key)) or _Away(x, copies)
        self._away[key] = weakref.ref(away)
        return self, away

    def _find(self, key: Any) -> _Away | None:
        """What was handed over already, while it holds its memory."""
        return self._away[key]() if key in self._away and not self._has_left else None

    def _is_to_stay(self, x: Tensor) -> bool:
        """Whether x lies in the memory of weights, which FSDP2 frees and gathers by itself, or of a model's buffers."""
        where = _memory_of(x)
        return where in self._stays() or any(_memory_of(weight) == where for weight in self._layer.parameters())

    def leave(self, later: Sequence["_Record"]) -> None:
        """Frees what is on the device, but for what later layers have handed over as well."""
        self._has_left = True
        for key, away in self._living():
            if not any(key in record._away for record in later):
                away.leave()

    def fetch(self) -> None:
        """Starts the way back of all that is needed, and then of what the layer before needs."""
        for record in (self, self._before):
            if record is not None and not record._is_fetched:
                record._is_fetched = True
                for _, away in record._living():
                    away.fetch()

    def _living(self) -> Iterator[tuple[Any, _Away]]:
        for key, reference in self._away.items():
            if (away := reference()) is not None:
                yield key, away


class _Distributed:
    """A DTensor with this rank's part handed over, which gets its own spec back.

    ``__tensor_unflatten__`` makes another one: that loses the order of shards (PyTorch 2.11), or refuses the strided
    shards that views make (2.13).
    """

    def __init__(self, x: DTensor, part: Any) -> None:
        self._part, self._spec, self._requires_grad = part, x._spec, x.requires_grad

    def get(self) -> Tensor:
        """The tensor."""
        whole: Tensor = DTensor(_give_back(self._part), self._spec, requires_grad=self._requires_grad)
        return whole


class _Inner:
    """A tensor made of others, with these handed over."""

    def __init__(self, x: Any, hand_over: Callable[[Tensor], Any]) -> None:
        names, self._context = x.__tensor_flatten__()
        self._kind, self._size, self._stride = type(x), x.size(), x.stride()
        parts = {name: getattr(x, name) for name in names}  # not all need be tensors
        self._parts = {name: hand_over(part) if isinstance(part, Tensor) else part for name, part in parts.items()}

    def get(self) -> Tensor:
        """The tensor."""
        parts = {name: _give_back(part) for name, part in self._parts.items()}
        whole: Tensor = self._kind.__tensor_unflatten__(parts, self._context, self._size, self._stride)
        return whole


def _give_back(kept: Any) -> Any:
    """The tensor that ``_Record.hand_over`` was given."""
    if isinstance(kept, tuple):
        record, away = kept
        record.fetch()
        return away.get()
    return kept.get() if isinstance(kept, _Distributed | _Inner) else kept


class Offloader:
    """Moves what layers save for their backward to the host, and back.

    Args:
        device: of the layers.
    """

    def __init__(self, device: torch.device) -> None:
        self._copies = Copies(device)
        self._recent: deque[_Record] = deque()  # the last ones, of which nothing has left

    @property
    def num_bytes(self) -> int:
        """Bytes of the host's memory that are taken."""
        return self._copies.memory.num_bytes

    def close(self) -> None:
        """Frees the host's memory."""
        self._recent.clear()
        self._copies.memory.close()

    def wrap(self, layers: Sequence[nn.Module], model: nn.Module) -> None:
        """Lets the calls of layers, compiled or not, hand over what they save.

        Args:
            layers: some of those of the model, in the order in which they run.
            model: or a part of it, with a memory yet or not. Its buffers stay where they are.
        """
        stays = functools.cache(lambda: {_memory_of(x) for x in model.buffers()})  # asked for when layers run
        for number, layer in enumerate(layers):
            call: Any = layer._compiled_call_impl
            checkpoint: Any = getattr(layer, "checkpoint_fn", None)
            is_compiled = call is not None or hasattr(layer, "_orig_mod")
            if checkpoint is not None and "context_fn" in checkpoint.keywords and not is_compiled:
                contexts = functools.partial(self._contexts, checkpoint.keywords["context_fn"])
                layer.checkpoint_fn = functools.partial(checkpoint, context_fn=contexts)
            # nn.Module calls this in place of itself. Set as an attribute, a compiled module would hand it on inside.
            own = functools.partial(self._call, call or layer._call_impl, layer, not number, stays)
            layer.__dict__["_compiled_call_impl"] = own

    def _call(
        self, call: Any, layer: nn.Module, is_first: bool, stays: Callable[[], set[int]], *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        record = _Record(layer, self._recent[-1] if self._recent and not is_first else None, stays)
        if len(self._recent) == AHEAD:
            self._recent.popleft().leave(self._recent)
        self._recent.append(record)
        with saved_tensors_hooks(functools.partial(record.hand_over, copies=self._copies), _give_back):
            return call(*args, **kwargs)

    def _contexts(self, stock: Callable[[], tuple[Any, Any]]) -> tuple[AbstractContextManager[None], ...]:
        """A selective checkpoint's contexts of forward and recomputation, with what they hold handed over between."""
        keep, use = stock()
        if not torch.is_grad_enabled():  # so this forward has no record
            return keep, use
        return self._keeping(keep, self._recent[-1]), _using(use)

    @contextmanager
    def _keeping(self, keep: Any, record: _Record) -> Iterator[None]:
        with keep:
            yield
        for held in _held(keep):
            held.val = record.hand_over(held.val, self._copies)


@contextmanager
def _using(use: Any) -> Iterator[None]:
    for held in _held(use):
        held.val = _give_back(held.val)
        held.version = held.val._version
    with use:
        yield


def _held(mode: Any) -> list[Any]:
    """What a selective checkpoint holds, each with a ``val`` and its ``version``; other values are no tensors."""
    return [leaf for leaf in tree_leaves(dict(mode.storage)) if getattr(leaf, "version", None) is not None]


def _memory_of(x: Tensor) -> int:
    """Where the memory begins that a tensor lies in; of a DTensor that of this rank's part."""
    return getattr(x, "_local_tensor", x).untyped_storage().data_ptr()


def _is_dense(x: Tensor) -> bool:
    """Whether elements lie side by side, in whatever order."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return span == x.numel()
