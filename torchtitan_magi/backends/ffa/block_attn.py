"""Host half of the FFA kernel: tensor maps, launches, and attention over work lists as a differentiable function.

Shapes: Tq queries, Tk keys, Hq query heads, Hk K/V heads, D head_dim, Dv that of v. Nothing CUDA is imported until
a kernel is needed.
"""

from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from torchtitan_magi.backends.ffa import params as ffa
from torchtitan_magi.backends.ffa.row_kernels import CudaRowMover
from torchtitan_magi.backends.ffa.segments import FAR
from torchtitan_magi.backends.ffa.worklists import DeviceLists, ListSizes, WorkLists, build_worklists
from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs, StageMask, check_scale, check_softcap
from torchtitan_magi.cuda import jit, launch
from torchtitan_magi.exchange.in_flight import KeysAndValues, LateKeys, RowShape, keys_and_values
from torchtitan_magi.tiles import BACKWARD_ROWS, KEYS, forward_rows, is_wide

LARGE_SUMS = 32 << 20  # bytes of sums of dk and dv that are worth a launch more to do without


class FfaBlockAttn:
    """Attention of one stage's queries over its K/V rows with our Hopper kernel; see `interface.BlockAttn`.

    Args:
        device: a CUDA device of compute capability 9.0.
        deterministic: the backward adds to dq in a fixed order, so that runs repeat bit for bit.

    Raises:
        ValueError: any other device.
    """

    name = "ffa"

    def check(self, head_dim: int, dtype: torch.dtype, value_dim: int | None = None) -> None:
        """Raises ValueError for what the kernel does not take."""
        ffa.check_supported(head_dim, dtype, value_dim)

    def row_mover(self) -> CudaRowMover:
        """Our own kernels."""
        return CudaRowMover()

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

    def prepare(self, mask: StageMask) -> WorkLists:
        """Work lists on the host; their `.to(words_on_device)` is the `mask` of the calls below.

        Raises:
            ValueError: head counts do not divide, or a slice reaches beyond num_q or num_k.
        """
        return build_worklists(mask, deterministic=self.deterministic)

    def forward(
        self, inputs: StageInputs, earlier: tuple[Tensor, Tensor] | None = None, more: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Attention over k, v, late rows and the keys of earlier stages.

        Args:
            inputs: bf16 or fp16.
            earlier: result of the call for the stages before, with `more`; overwritten.
            more: further stages follow.

        Returns:
            out [Tq, Hq, Dv], contiguous, in the dtype of q; or, if more stages follow, fp32 in an order of columns that
            the next stage expects. lse fp32 [Tq, Hq], natural logarithms. Rows that have seen no key have out 0 and
            lse -inf.

        Raises:
            ValueError: head_dim, dtype, scale or shapes that the kernel does not take.
        """
        q, k, v, mask, softmax_scale, late, softcap, sinks = inputs
        if more:
            sinks = None
        s = mask.sizes
        read_late = late if s.forward.awaits else None
        key = (
            get_ident(), q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
            earlier is None, more, late is None, softcap, sinks is None,
        )  # fmt: skip
        prepared = mask.launches.get(key)
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if prepared is None or (q_at | k_at | v_at) % 16:
            _check_inputs(q, k, v, late, s)
            if not launch.are_copyable(q, k, v):
                q, k, v = map(launch.copyable, (q, k, v))
                return self.forward(inputs._replace(q=q, k=k, v=v), earlier, more)
            prepared = mask.launches[key] = self._forward_launch(inputs._replace(late=read_late), earlier, more)
        check_scale(softmax_scale)
        check_softcap(softcap)
        if more and earlier is not None:
            out, lse = earlier
        else:
            dtype = torch.float32 if more else q.dtype
            out = torch.empty(*q.shape[:2], v.shape[2], dtype=dtype, device=q.device)
            lse = earlier[1] if earlier else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        params = prepared.params
        params.lse, params.counter = lse.data_ptr(), launch.next_counter(prepared.device)
        _set_scales(params, softmax_scale, softcap)
        params.out = out.data_ptr()
        if sinks is not None:
            assert sinks.shape == q.shape[1:2]
            sinks = sinks.float().contiguous()
            params.sinks = sinks.data_ptr()
        if s.num_k == 0:
            k_at = v_at = q_at
        maps = [q_at, k_at, v_at, *_late_addresses(read_late, k, v, k_at, v_at, params), params.out]
        if earlier is not None:
            params.earlier = earlier[0].data_ptr()
            maps.append(params.earlier)
        if s.forward.num_chunks:
            _, value_dim = ffa.padded_dims(q.shape[2], v.shape[2])
            words = s.forward.num_chunks, params.schedule.num_heads, s.forward.rows, value_dim + 8
            parts = out.new_empty(words, dtype=torch.float32)
            params.parts = parts.data_ptr()
        prepared(*maps)
        if late is not None:
            late.arrival.settle(s.forward.awaits)
        return out, lse

    def _forward_launch(self, inputs: StageInputs, earlier: tuple[Tensor, Tensor] | None, more: bool) -> launch.Launch:
        q, k, v, mask, _, late, softcap, sinks = inputs
        s, f, dims = mask.sizes, mask.sizes.forward, ffa.padded_dims(q.shape[2], v.shape[2])
        assert f.heads_per_tile  # else the lists were made for the backward only
        if f.rows != forward_rows(*dims) or (is_wide(*dims) and f.num_chunks):
            raise ValueError(
                f"q has head_dim {q.shape[2]} and v {v.shape[2]} but the work lists are for other heads; "
                "plan with heads=Heads(..)"
            )
        variant = ffa.forward_variant(
            dims, f.heads_per_tile, q.dtype, earlier is not None, more,
            softcap=softcap, sinks=sinks is not None and not more,
        )  # fmt: skip
        num_groups = s.num_heads_q // f.heads_per_tile
        in_place = earlier is not None and more  # rows of items without work stay as they are
        num_items = f.num_items_with_work if in_place else f.num_items
        params = ffa.ForwardParams(
            items=mask.pointer(f.items),
            segments=mask.pointer(f.segments),
            bands=mask.bands.data_ptr(),
            schedule=ffa.Schedule(f.num_early, num_items - f.num_early, 0, num_groups, f.heads_per_wave),
            groups_per_kv=num_groups // s.num_heads_kv,
            num_q=s.num_q,
            num_heads_q=s.num_heads_q,
            parts_per_tile=f.chunks_per_tile,
            late=ffa.LateKeys(None, 0, FAR if late is None else k.shape[0]),
            value_dim=v.shape[2],
        )
        box = f.heads_per_tile, f.rows // f.heads_per_tile
        out_shape = *q.shape[:2], v.shape[2]
        if s.num_k == 0:
            k = v = q  # something to point at, which is never read
        maps = [_layout_of(q, *box), *_key_layouts(k, v, late, ffa.forward_keys(dims))]
        maps.append(_contiguous_layout(out_shape, torch.float32 if more else q.dtype, *box))
        if earlier is not None:
            maps.append(_contiguous_layout(out_shape, torch.float32, *box))
        kernel = launch.load("ffa_forward.cu", "ffa_forward", variant, ffa.forward_threads(dims))
        blocks = min(params.schedule.num_items, launch.num_sms(q.device.index))
        return launch.Launch(kernel, q.device.index, blocks, maps, params)

    def backward(self, inputs: StageInputs, out_grads: OutGrads, grads: Gradients) -> None:
        """Gradients of one stage.

        P = exp(S - lse), dS = P * (dout v^T - delta): the FlashAttention-2 backward (arXiv 2307.08691). S is
        scale * q k^T; with a softcap it is softcap * tanh of that / softcap, and dS has a factor 1 - (S / softcap)^2.

        Args:
            inputs: bf16 or fp16.
            out_grads: dout in the dtype of q, lse and delta in fp32.
            grads: dS K is added to dq (fp32, contiguous), without softmax_scale and in an order of columns of the
                kernel's own; `CudaRowMover.round` or `finish` makes gradients of it. dkv is fp32 or has the
                dtype of k; its innermost dimension is contiguous, its rows are 16-byte aligned.

        Raises:
            ValueError: head_dim, dtype, scale or shapes that the kernel does not take.
        """
        q, k, v, mask, softmax_scale, late, softcap, _ = inputs
        (dout, lse, delta), (dq, dkv, zeroed, marks) = out_grads, grads
        s, b = mask.sizes, mask.sizes.backward
        read_late = late if b.awaits else None
        pair = dkv if isinstance(dkv, tuple) else (dkv, dkv)
        is_float, shape = pair[0].dtype == torch.float32, RowShape.of(k, v)
        key = (
            get_ident(), q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), dout.stride(),
            q.dtype, k.dtype, v.dtype, dout.dtype, pair[0].stride(), pair[1].stride(), is_float, late is None,
            softcap == 0, marks is None,
        )  # fmt: skip
        prepared = mask.launches.get(key)
        q_at, dout_at, k_at, v_at = q.data_ptr(), dout.data_ptr(), k.data_ptr(), v.data_ptr()
        if prepared is None or (q_at | dout_at | k_at | v_at) % 16:
            _check_inputs(q, k, v, late, s)
            assert dout.dtype == q.dtype
            if not launch.are_copyable(dout, q, k, v):
                dout, q, k, v = map(launch.copyable, (dout, q, k, v))
                return self.backward(inputs._replace(q=q, k=k, v=v), out_grads._replace(dout=dout), grads)
            prepared = mask.launches[key] = self._backward_launches(
                inputs._replace(late=read_late), dout, dkv, begins=b.deterministic and marks is not None
            )
        check_scale(softmax_scale)
        check_softcap(softcap)
        assert dq.dtype == lse.dtype == delta.dtype == torch.float32
        assert dq.is_contiguous()
        assert lse.is_contiguous()
        assert delta.is_contiguous()
        if s.num_k == 0:
            return
        if s.num_q == 0:
            if late is not None:
                late.arrival.settle(b.awaits)
            _zero(dkv)
            return
        to, sums = dkv, None
        if b.is_split:  # chunks of a tile add to fp32 sums
            if not is_float:
                to = sums = torch.zeros(s.num_k, shape.width, dtype=torch.float32, device=k.device)
            elif not zeroed:
                _zero(dkv)
        semaphores = self._semaphores(s, len(prepared), k.device, marks) if b.deterministic else None
        for i, kernel in enumerate(prepared):
            params = kernel.params
            if semaphores is not None:
                params.semaphores, params.part_semaphores = semaphores[0].data_ptr(), semaphores[1 + i].data_ptr()
            params.lse, params.delta, params.dq = lse.data_ptr(), delta.data_ptr(), dq.data_ptr()
            params.marks = None if marks is None else marks.data_ptr()
            params.dk, params.dv = _addresses_of(to, shape)
            params.counter = launch.next_counter(kernel.device)
            params.softmax_scale = softmax_scale
            _set_scales(params, softmax_scale, softcap)
            maps = [q_at, dout_at, k_at, v_at, *_late_addresses(read_late, k, v, k_at, v_at, params), params.dq]
            kernel(*maps, *((params.dk, params.dv) if b.is_split else maps[-1:] * 2))
            if i == 0 and late is not None:  # loading the next kernel waits for this one, which may await these rows
                late.arrival.settle(b.awaits)
        if sums is not None:
            for x, wide in zip(keys_and_values(dkv, shape), shape.split(sums), strict=True):
                x.copy_(wide)

    def _semaphores(
        self, s: ListSizes, num_launches: int, device: torch.device, marks: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Zeros, those of `marks` if given: what orders additions to dq, and for each launch those to dk and dv."""
        of_queries, of_keys = _semaphore_counts(s)
        sizes = of_queries, *(of_keys,) * num_launches
        words = torch.zeros(sum(sizes), dtype=torch.int32, device=device) if marks is None else marks[: sum(sizes)]
        return words.split(sizes)

    def _backward_launches(
        self, inputs: StageInputs, dout: Tensor, dkv: KeysAndValues, begins: bool
    ) -> tuple[launch.Launch, ...]:
        """One for each of `ffa.backward_variants`."""
        q, k, v, mask, _, late, softcap, _ = inputs
        s, b, shape = mask.sizes, mask.sizes.backward, RowShape.of(k, v)
        assert b.heads_per_tile  # else the lists were made for the forward only
        dims = ffa.padded_dims(shape.head_dim, shape.value_dim)
        variants = ffa.backward_variants(dims, b.heads_per_tile, q.dtype, b.deterministic, begins, softcap=softcap)
        num_main = b.num_items - b.num_early - b.num_tail
        params = ffa.BackwardParams(
            items=mask.pointer(b.items),
            segments=mask.pointer(b.segments),
            bands=mask.bands.data_ptr(),
            components=mask.pointer(b.components),
            schedule=ffa.Schedule(b.num_early, num_main, b.num_tail, s.num_heads_kv, b.heads_per_wave),
            num_packs=s.num_heads_q // s.num_heads_kv // b.heads_per_tile,
            num_q=s.num_q,
            num_heads_q=s.num_heads_q,
            head_dim=shape.head_dim,
            num_q_blocks=b.num_q_blocks,
            late=ffa.LateKeys(None, 0, FAR if late is None else k.shape[0]),
            value_dim=shape.value_dim,
        )
        is_float = (dkv[0] if isinstance(dkv, tuple) else dkv).dtype == torch.float32
        params.store = ffa.ADD_FLOAT if b.is_split else ffa.STORE_FLOAT if is_float else ffa.STORE_PACKED
        own_sums = b.is_split and not is_float  # made for each call
        dk, dv = _contiguous_strides(shape) if own_sums else _strides_of(dkv, shape)
        params.dk_token_stride, params.dk_head_stride, _ = dk
        params.dv_token_stride, params.dv_head_stride, _ = dv
        box = b.heads_per_tile, BACKWARD_ROWS // b.heads_per_tile
        of_dq = _contiguous_layout(tuple(q.shape), torch.float32, *box)
        maps = [_layout_of(q, *box), _layout_of(dout, *box), *_key_layouts(k, v, late, KEYS), of_dq]
        if b.is_split:
            maps += [
                launch.MapLayout((s.num_k, s.num_heads_kv, dim), strides, torch.float32, 1, BACKWARD_ROWS)
                for dim, strides in ((shape.head_dim, dk), (shape.value_dim, dv))
            ]
        else:
            maps += [of_dq] * 2  # unused
        device = q.device.index
        threads = ffa.backward_threads(dims)
        kernels = [launch.load("ffa_backward.cu", "ffa_backward", variant, threads) for variant in variants]
        blocks = min(params.schedule.num_items, launch.num_sms(device))
        return tuple(
            launch.Launch(kernel, device, blocks, maps, ffa.BackwardParams.from_buffer_copy(params))
            for kernel in kernels
        )

    def marks(self, mask: DeviceLists, k: Tensor, v: Tensor) -> Tensor | None:
        """Two marks for each pack of heads of a query block, in deterministic mode all of its semaphores; None where dq
        starts from zeros."""
        b = mask.sizes.backward
        if not b.begins_queries or ffa.has_wide_values(ffa.padded_dims(k.shape[2], v.shape[2])):
            return None
        of_queries, of_keys = _semaphore_counts(mask.sizes)
        count = of_queries + of_keys * b.deterministic
        return torch.empty(-(-count // 8) * 8, dtype=torch.float32, device=k.device)

    def adds_keys(self, mask: DeviceLists) -> bool:
        """Whether tiles of keys are split, so that the backward adds to sums of dk and dv."""
        return mask.sizes.backward.is_split

    def key_sums(self, mask: DeviceLists, k: Tensor, v: Tensor, spare: Tensor) -> Tensor | None:
        """Memory for sums of dk and dv, float32 [Tk, width], where large in `spare` if they fit; None where tiles stay
        whole."""
        if not self.adds_keys(mask):
            return None
        shape = k.shape[0], RowShape.of(k, v).width
        count = shape[0] * shape[1]
        if not LARGE_SUMS < 4 * count <= spare.nbytes:
            return torch.empty(shape, dtype=torch.float32, device=k.device)
        return spare.flatten().view(torch.float32)[:count].view(shape)


def _semaphore_counts(s: ListSizes) -> tuple[int, int]:
    """Two for each pack of heads of a query block, and two for each k-tile and K/V head."""
    b = s.backward
    return 2 * b.num_q_blocks * s.num_heads_q // b.heads_per_tile, 2 * b.num_k_tiles * s.num_heads_kv


def _set_scales(params: Any, softmax_scale: float, softcap: float) -> None:
    params.scale_log2 = (softcap or softmax_scale) * ffa.LOG2_E
    if softcap:
        params.cap_scale = softmax_scale / softcap


def _contiguous_layout(shape: tuple[int, ...], dtype: torch.dtype, heads: int, tokens: int) -> launch.MapLayout:
    """Layout of a contiguous tensor [T, H, D]."""
    _, num_heads, head_dim = shape
    return launch.MapLayout(shape, (num_heads * head_dim, head_dim, 1), dtype, heads, tokens)


def _addresses_of(both: KeysAndValues, shape: RowShape) -> tuple[int, int]:
    """Addresses of K and of V, without the host time of making views."""
    if isinstance(both, tuple):
        return both[0].data_ptr(), both[1].data_ptr()
    address = both.data_ptr()
    return address, address + shape.key_width * both.element_size()


def _contiguous_strides(shape: RowShape) -> list[tuple[int, ...]]:
    """Strides of K and of V in rows that follow each other."""
    return [(shape.width, dim, 1) for dim in (shape.head_dim, shape.value_dim)]


def _strides_of(both: KeysAndValues, shape: RowShape) -> list[tuple[int, ...]]:
    if isinstance(both, tuple):
        return [x.stride() for x in both]
    assert both.is_contiguous()
    return _contiguous_strides(shape)


def _layout_of(x: Tensor, heads: int, tokens: int) -> launch.MapLayout:
    return launch.MapLayout(tuple(x.shape), x.stride(), x.dtype, heads, tokens)


def _zero(both: KeysAndValues) -> None:
    for x in both if isinstance(both, tuple) else (both,):
        x.zero_()


def _key_layouts(k: Tensor, v: Tensor, late: LateKeys | None, keys: int) -> list[launch.MapLayout]:
    """Layouts of K and V, and of late K and V; without late ones, the first two again. `keys`: those of a box."""
    own = [_layout_of(x, 1, keys) for x in (k, v)]
    if late is None:
        return own * 2
    rows, shape = late.kv.shape[0], RowShape.of(k, v)
    return own + [
        launch.MapLayout((rows, shape.num_heads, strides[1]), strides, late.kv.dtype, 1, keys)
        for strides in _contiguous_strides(shape)
    ]


def _late_addresses(late: LateKeys | None, k: Tensor, v: Tensor, k_at: int, v_at: int, params: Any) -> tuple[int, int]:
    """Addresses of late K and V, in the order of `_key_layouts`; sets the flag that the kernel awaits."""
    if late is None:
        return k_at, v_at
    params.late.arrived, params.late.number = late.arrival.flag_or_wait() or (None, 0)
    return _addresses_of(late.kv, RowShape.of(k, v))


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, late: LateKeys | None, s: ListSizes) -> None:
    head_dim, value_dim, dtype = q.shape[2], v.shape[2], q.dtype
    ffa.check_supported(head_dim, dtype, value_dim)
    if not dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v are {dtype}, {k.dtype}, {v.dtype}; give all three the same dtype")
    num_late = 0 if late is None else late.kv.shape[0]
    want_q, want_k = (s.num_q, s.num_heads_q, head_dim), (s.num_k - num_late, s.num_heads_kv, head_dim)
    want_v = *want_k[:2], value_dim
    if q.shape != want_q or k.shape != want_k or v.shape != want_v:
        shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
        raise ValueError(f"q, k, v have shapes {shapes}; the work lists are for {want_q}, {want_k}, {want_v}")
