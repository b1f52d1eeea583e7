"""Host half of the FFA kernel: tensor maps, launches, and attention over work lists as a differentiable function.

Shapes: Tq queries, Tk keys, Hq query heads, Hk K/V heads, D head_dim. Nothing CUDA is imported until a kernel is
needed.
"""

import math
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from torchtitan_magi.backends.ffa.row_kernels import CudaRows, write_bands
from torchtitan_magi.backends.ffa.segments import FAR
from torchtitan_magi.backends.ffa.worklists import ListSizes, WorkLists, build_worklists
from torchtitan_magi.cuda import jit, launch
from torchtitan_magi.cuda.memory import empty, layout
from torchtitan_magi.exchange.transport import KeysAndValues, LateKeys, keys_and_values
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.tiles import BACKWARD_ROWS, KEYS, ROWS

LOG2_E = math.log2(math.e)


# ------------------------------------------------------------ lists
@dataclass(frozen=True, eq=False)
class DeviceLists:
    """Work lists of one mask on a device; `words` int32 [n], 16-byte aligned; `bands` int32 [layers * rows, 2]."""

    words: Tensor
    bands: Tensor
    sizes: ListSizes
    launches: dict[Any, launch.Launch] = field(default_factory=dict)  # what repeats from call to call

    def pointer(self, offset: int) -> int:
        return self.words.data_ptr() + 4 * offset


@dataclass(frozen=True, eq=False)
class HostLists:
    """Work lists of one mask, made on the host; upload `words` (int32 [n]) and call `to`."""

    lists: WorkLists

    @property
    def words(self) -> Any:
        return self.lists.words

    def to(self, device_words: Tensor) -> DeviceLists:
        """The lists around `device_words`, a copy of `words` on the device; cloned when not 16-byte aligned."""
        assert device_words.dtype == torch.int32
        assert len(device_words) == len(self.words)
        s = self.lists.sizes
        aligned = device_words.data_ptr() % 16 == 0 and device_words.is_contiguous()
        words = device_words if aligned else device_words.clone()
        bands = empty((s.num_bands, 2), torch.int32, words.device)
        write_bands(words[s.slices :][: 5 * s.num_slices].view(-1, 5), bands)
        return DeviceLists(words, bands, s)


# ------------------------------------------------------------ the attention
class FfaBlockAttn:
    """Attention of one stage's queries over its K/V buffer with our Hopper kernel; `reference.FlexBlockAttn`'s methods.

    Args:
        device: a CUDA device of compute capability 9.0.
        deterministic: the backward adds to dq in a fixed order, so that runs repeat bit for bit.

    Raises:
        ValueError: any other device.
    """

    name = "ffa"

    def check(self, head_dim: int, dtype: torch.dtype) -> None:
        """Raises ValueError for what the kernel does not take."""
        launch.check_supported(head_dim, dtype)

    def rows(self) -> CudaRows:
        return CudaRows()

    def __init__(self, device: torch.device | str = "cuda", deterministic: bool = False) -> None:
        self.deterministic, device = deterministic, torch.device(device)
        if device.type != "cuda" or not torch.cuda.is_available():
            raise ValueError(f'backend "ffa" needs a Hopper GPU (sm_90), not {device}; use backend = "flex"')
        index = torch.cuda.current_device() if device.index is None else device.index
        if not jit.is_hopper(index):
            name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
            raise ValueError(
                f'backend "ffa" needs a Hopper GPU (sm_90); {name} is sm_{capability[0]}{capability[1]}: '
                'use backend = "flex"'
            )

    def prepare(
        self,
        slices: AttnSlices,
        num_q: int,
        num_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        forward: bool = True,
        backward: bool = True,
        late_from: int | None = None,
    ) -> HostLists:
        """Work lists on the host; their `.to(words_on_device)` is the `mask` of the calls below.

        Args:
            forward, backward: whether such calls will be made.
            late_from: keys from this one on come as `late`; work on the others is done first.

        Raises:
            ValueError: head counts do not divide, or a slice reaches beyond num_q or num_k.
        """
        return HostLists(
            build_worklists(
                slices, num_q, num_k, num_heads_q, num_heads_kv, forward=forward, backward=backward,
                deterministic=self.deterministic, late_from=late_from,
            )
        )  # fmt: skip

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: DeviceLists,
        softmax_scale: float,
        earlier: tuple[Tensor, Tensor] | None = None,
        more: bool = False,
        late: LateKeys | None = None,
        sm_margin: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Attention over k, v and over the keys of earlier stages.

        Args:
            q: [Tq, Hq, D] bf16 or fp16. k, v: [Tk, Hk, D], the same dtype. Strided views are read in place.
            earlier: what the call for the stages before returned, with `more`; overwritten.
            more: further stages follow.
            late: rows of k and v that follow; the kernel waits for them.
            softmax_scale: > 0.
            sm_margin: SMs to leave to others.

        Returns:
            out [Tq, Hq, D], contiguous, in the dtype of q; or, if more stages follow, fp32 with the even columns of
            each 8 before the odd ones. lse fp32 [Tq, Hq], natural logarithms. Rows that have seen no key have out 0 and
            lse -inf.

        Raises:
            ValueError: head_dim, dtype, scale or shapes that the kernel does not take.
        """
        s = mask.sizes
        read_late = late if s.forward_awaits else None
        key = (
            get_ident(), q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            earlier is None, more, late is None, sm_margin,
        )  # fmt: skip
        prepared = mask.launches.get(key)
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if prepared is None or (q_at | k_at | v_at) % 16:
            _check_inputs(q, k, v, late, s)
            if not launch.are_copyable(q, k, v):
                q, k, v = map(launch.copyable, (q, k, v))
                return self.forward(q, k, v, mask, softmax_scale, earlier, more, late, sm_margin)
            prepared = mask.launches[key] = self._forward_launch(mask, q, k, v, earlier, more, read_late, sm_margin)
        _check_scale(softmax_scale)
        if more and earlier is not None:
            out, lse = earlier
        else:
            dtype = torch.float32 if more else q.dtype
            out = empty(q.shape, dtype, q.device)
            lse = earlier[1] if earlier else empty((s.num_q, s.num_heads_q), torch.float32, q.device)
        params = prepared.params
        params.lse, params.counter = lse.data_ptr(), launch.next_counter(prepared.device)
        params.scale_log2 = softmax_scale * LOG2_E
        if s.num_k == 0:
            k_at = v_at = q_at
        maps = [q_at, k_at, v_at, *_late_addresses(read_late, k_at, v_at, params), out.data_ptr()]
        if earlier is not None:
            maps.append(earlier[0].data_ptr())
        if s.num_forward_parts:
            words = s.num_forward_parts, params.schedule.num_heads, ROWS, launch.padded_head_dim(q.shape[2]) + 8
            parts = empty(words, torch.float32, q.device)
            params.parts = parts.data_ptr()
        prepared(*maps)
        _settle(late, s.forward_awaits)
        return out, lse

    def _forward_launch(
        self,
        mask: DeviceLists,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        earlier: tuple[Tensor, Tensor] | None,
        more: bool,
        late: LateKeys | None,
        sm_margin: int,
    ) -> launch.Launch:
        s = mask.sizes
        assert s.forward_pack  # else the lists were made for the backward only
        variant, shared = launch.forward_variant(q.shape[2], s.forward_pack, q.dtype, earlier is not None, more)
        num_groups = s.num_heads_q // s.forward_pack
        num_items = (
            s.num_forward_items_with_work if earlier is not None and more else s.num_forward_items
        )  # the others stay as they are
        params = launch.ForwardParams(
            items=mask.pointer(s.forward_items),
            segments=mask.pointer(s.forward_segments),
            bands=mask.bands.data_ptr(),
            schedule=launch.Schedule(
                s.num_forward_early, num_items - s.num_forward_early, 0, num_groups, s.forward_heads_per_wave
            ),
            groups_per_kv=num_groups // s.num_heads_kv,
            num_q=s.num_q,
            num_heads_q=s.num_heads_q,
            parts_per_tile=s.forward_parts_per_tile,
            late=launch.LateKeys(None, 0, FAR if late is None else k.shape[0]),
        )
        if s.num_k == 0:
            k = v = q  # something to point at, which is never read
        box = s.forward_pack, ROWS // s.forward_pack
        shape, (_, strides) = tuple(q.shape), layout(q.shape)
        maps = [_layout_of(q, *box), *_key_layouts(k, v, late)]
        maps.append(launch.MapLayout(shape, strides, torch.float32 if more else q.dtype, *box))
        if earlier is not None:
            maps.append(launch.MapLayout(shape, strides, torch.float32, *box))
        kernel = launch.load("ffa_forward.cu", "ffa_forward", variant, launch.THREADS, shared)
        blocks = min(params.schedule.num_items, max(1, launch.num_sms(q.device.index) - sm_margin))
        return launch.Launch(kernel, q.device.index, blocks, maps, params)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        mask: DeviceLists,
        softmax_scale: float,
        dq: Tensor,
        dkv: KeysAndValues,
        zeroed: bool = False,
        late: LateKeys | None = None,
        sm_margin: int = 0,
    ) -> None:
        """Gradients of one stage.

        P = exp(scale * q k^T - lse), dS = P * (dout v^T - delta): the FlashAttention-2 backward (arXiv 2307.08691).

        Args:
            dout, q: [Tq, Hq, D]. k, v: [Tk, Hk, D]. bf16 or fp16, all alike; strided views are read in place.
            lse, delta: fp32 [Tq, Hq] contiguous, final over all stages; delta = rowsum(out * dout).
            dq: fp32 [Tq, Hq, D] contiguous: dS K is added to it, without softmax_scale, and with the even columns of
            each 8 before the odd ones; `CudaRows.round` or `finish` makes gradients of it.
            dkv: of Tk and late rows, overwritten; fp32 or the dtype of k, innermost dimension contiguous, rows 16-byte
            aligned.
            zeroed: dkv holds zeros.
            late: as in forward.
            sm_margin: SMs to leave to others.

        Raises:
            ValueError: head_dim, dtype, scale or shapes that the kernel does not take.
        """
        s = mask.sizes
        read_late = late if s.backward_awaits else None
        pair = dkv if isinstance(dkv, tuple) else (dkv, dkv)
        is_float = pair[0].dtype == torch.float32
        key = (
            get_ident(), q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), dout.stride(),
            q.dtype, k.dtype, v.dtype, dout.dtype, pair[0].stride(), pair[1].stride(), is_float, late is None,
            sm_margin,
        )  # fmt: skip
        prepared = mask.launches.get(key)
        q_at, dout_at, k_at, v_at = q.data_ptr(), dout.data_ptr(), k.data_ptr(), v.data_ptr()
        if prepared is None or (q_at | dout_at | k_at | v_at) % 16:
            _check_inputs(q, k, v, late, s)
            assert dout.dtype == q.dtype
            if not launch.are_copyable(dout, q, k, v):
                dout, q, k, v = map(launch.copyable, (dout, q, k, v))
                return self.backward(dout, q, k, v, lse, delta, mask, softmax_scale, dq, dkv, zeroed, late, sm_margin)
            prepared = mask.launches[key] = self._backward_launch(mask, dout, q, k, v, dkv, read_late, sm_margin)
        _check_scale(softmax_scale)
        assert dq.dtype == lse.dtype == delta.dtype == torch.float32
        assert dq.is_contiguous()
        assert lse.is_contiguous()
        assert delta.is_contiguous()
        if s.num_k == 0:
            return
        if s.num_q == 0:
            _settle(late, s.backward_awaits)
            _zero(dkv)
            return
        params = prepared.params
        to, sums = dkv, None
        if s.is_split:  # parts of a tile add to fp32 sums
            if not is_float:
                to = sums = torch.zeros(s.num_k, 2, s.num_heads_kv, q.shape[2], dtype=torch.float32, device=k.device)
            elif not zeroed:
                _zero(dkv)
        if s.deterministic:
            counts = 2 * s.num_q_blocks * (s.num_heads_q // s.backward_pack), 2 * s.num_k_tiles * s.num_heads_kv
            semaphores = torch.zeros(sum(counts), dtype=torch.int32, device=k.device)
            params.semaphores = semaphores.data_ptr()
            params.part_semaphores = semaphores.data_ptr() + 4 * counts[0]
        params.lse, params.delta = lse.data_ptr(), delta.data_ptr()
        params.dk, params.dv = _addresses_of(to)
        params.counter = launch.next_counter(prepared.device)
        params.softmax_scale, params.scale_log2 = softmax_scale, softmax_scale * LOG2_E
        maps = [q_at, dout_at, k_at, v_at, *_late_addresses(read_late, k_at, v_at, params), dq.data_ptr()]
        if s.is_split:
            prepared(*maps, params.dk, params.dv)
        else:
            prepared(*maps, maps[-1], maps[-1])
        _settle(late, s.backward_awaits)
        if sums is not None:
            for x, wide in zip(keys_and_values(dkv), keys_and_values(sums), strict=True):
                x.copy_(wide)

    def _backward_launch(
        self,
        mask: DeviceLists,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dkv: KeysAndValues,
        late: LateKeys | None,
        sm_margin: int,
    ) -> launch.Launch:
        s, head_dim = mask.sizes, q.shape[2]
        assert s.backward_pack  # else the lists were made for the forward only
        variant, shared = launch.backward_variant(head_dim, s.backward_pack, q.dtype, s.deterministic)
        params = launch.BackwardParams(
            items=mask.pointer(s.backward_items),
            segments=mask.pointer(s.backward_segments),
            bands=mask.bands.data_ptr(),
            components=mask.pointer(s.components),
            schedule=launch.Schedule(
                s.num_backward_early,
                s.num_backward_items - s.num_backward_early - s.num_backward_tail,
                s.num_backward_tail,
                s.num_heads_kv,
                s.backward_heads_per_wave,
            ),
            num_packs=s.num_heads_q // s.num_heads_kv // s.backward_pack,
            num_q=s.num_q,
            num_heads_q=s.num_heads_q,
            head_dim=head_dim,
            num_q_blocks=s.num_q_blocks,
            late=launch.LateKeys(None, 0, FAR if late is None else k.shape[0]),
        )
        is_float = (dkv[0] if isinstance(dkv, tuple) else dkv).dtype == torch.float32
        params.store = launch.ADD_FLOAT if s.is_split else launch.STORE_FLOAT if is_float else launch.STORE_PACKED
        own_sums = s.is_split and not is_float  # made for each call
        dk, dv = [(2 * s.num_heads_kv * head_dim, head_dim, 1)] * 2 if own_sums else _strides_of(dkv)
        params.dk_token_stride, params.dk_head_stride, _ = dk
        params.dv_token_stride, params.dv_head_stride, _ = dv
        box = s.backward_pack, BACKWARD_ROWS // s.backward_pack
        of_dq = launch.MapLayout(tuple(q.shape), layout(q.shape)[1], torch.float32, *box)
        maps = [_layout_of(q, *box), _layout_of(dout, *box), *_key_layouts(k, v, late), of_dq]
        if s.is_split:
            shape = s.num_k, s.num_heads_kv, head_dim
            maps += [launch.MapLayout(shape, strides, torch.float32, 1, BACKWARD_ROWS) for strides in (dk, dv)]
        else:
            maps += [of_dq] * 2  # unused
        kernel = launch.load("ffa_backward.cu", "ffa_backward", variant, launch.THREADS, shared)
        blocks = min(params.schedule.num_items, max(1, launch.num_sms(q.device.index) - sm_margin))
        return launch.Launch(kernel, q.device.index, blocks, maps, params)

    def adds_keys(self, mask: DeviceLists) -> bool:
        """Whether the backward adds parts of dk and dv up, to zeros."""
        return mask.sizes.is_split

    def sums(self, mask: DeviceLists, k: Tensor, spare: Tensor) -> Tensor | None:
        """Memory for dk and dv, fp32 [Tk, 2, Hk, D], where the backward adds up parts and they must be zeroed before.

        In `spare`, contiguous, where they fit.
        """
        if not self.adds_keys(mask):
            return None
        shape = (k.shape[0], 2, *k.shape[1:])
        if spare.nbytes < 8 * k.numel():
            return empty(shape, torch.float32, k.device)
        return spare.view(torch.float32).as_strided(shape, layout(shape)[1])


def _check_scale(softmax_scale: float) -> None:
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale is {softmax_scale}; it must be positive")


def _addresses_of(both: KeysAndValues) -> tuple[int, int]:
    """Of K and of V; views of a tensor would take long to make."""
    if isinstance(both, tuple):
        return both[0].data_ptr(), both[1].data_ptr()
    address = both.data_ptr()
    return address, address + both.stride(1) * both.element_size()


def _strides_of(both: KeysAndValues) -> list[tuple[int, ...]]:
    if isinstance(both, tuple):
        return [x.stride() for x in both]
    token, _, head, column = both.stride()
    return [(token, head, column)] * 2


def _layout_of(x: Tensor, heads: int, tokens: int) -> launch.MapLayout:
    return launch.MapLayout(tuple(x.shape), x.stride(), x.dtype, heads, tokens)


def _zero(both: KeysAndValues) -> None:
    for x in both if isinstance(both, tuple) else (both,):
        x.zero_()


def _key_layouts(k: Tensor, v: Tensor, late: LateKeys | None) -> list[launch.MapLayout]:
    """Of K and V, and of those that follow; without any, the first two again."""
    own = [_layout_of(x, 1, KEYS) for x in (k, v)]
    if late is None:
        return own * 2
    rows, _, *head = late.kv.shape
    return own + [launch.MapLayout((rows, *head), at, late.kv.dtype, 1, KEYS) for at in _strides_of(late.kv)]


def _late_addresses(late: LateKeys | None, k: int, v: int, params: Any) -> tuple[int, int]:
    """Of late K and V, as `_key_layouts` has them; tells the kernel of them."""
    if late is None:
        return k, v
    if (flag := late.arrival.flag()) is None:
        late.arrival.wait()
    params.late.arrived, params.late.number = flag or (None, 0)
    return _addresses_of(late.kv)


def _settle(late: LateKeys | None, awaits: bool) -> None:
    """After the launch. If the kernel does not wait for late keys, the stream does: then their memory is used again."""
    if late is not None:
        late.arrival.begin()
        if not awaits:
            late.arrival.wait()


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, late: LateKeys | None, s: ListSizes) -> None:
    head_dim, dtype = q.shape[2], q.dtype
    launch.check_supported(head_dim, dtype)
    if not dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {dtype}, {k.dtype}, {v.dtype}; give all three the same dtype")
    num_late = 0 if late is None else late.kv.shape[0]
    want_q, want_k = (s.num_q, s.num_heads_q, head_dim), (s.num_k - num_late, s.num_heads_kv, head_dim)
    if q.shape != want_q or k.shape != want_k or v.shape != want_k:
        shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
        raise ValueError(f"q, k, v have shapes {shapes}; the work lists are for {want_q}, {want_k}, {want_k}")
