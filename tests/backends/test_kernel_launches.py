"""What the host hands to the kernels, without GPUs: the driver's calls are written down instead of made."""

import ctypes
import functools
import itertools
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torchtitan_magi import varlen_causal
from torchtitan_magi.backends.ffa import params as ffa
from torchtitan_magi.backends.ffa import row_kernels as rows
from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.backends.ffa.row_kernels import CudaRowMover
from torchtitan_magi.backends.ffa.worklists import build_worklists
from torchtitan_magi.backends.interface import Gradients, OutGrads, StageInputs, StageMask
from torchtitan_magi.cuda import driver, jit, launch
from torchtitan_magi.exchange import in_flight

TOKENS, HEADS_Q, HEADS, DIM = 256, 8, 2, 64
SHAPE = in_flight.RowShape(HEADS, DIM, DIM)
ROW = SHAPE.width
SCALE = 0.125
PARAMS = {
    "ffa_forward": ffa.ForwardParams,
    "ffa_backward": ffa.BackwardParams,
    "write_bands": rows._BandsParams,
    "gather_rows": rows._GatherParams,
    "finish_grads": rows._FinishParams,
    "sum_sinks": rows._SinksParams,
    "add_rows": rows._AddParams,
}


class Recorder:
    """Launches with copies of their maps (address, type, sizes, bytes from token to token), of their parameters, and of
    the first 16 bytes that they read.
    """

    def __init__(self):
        self.launches = []

    def function(self, name):
        return {"cuLaunchKernelEx": self.launch, "cuTensorMapEncodeTiled": self.encode}[name]

    def encode(self, to, kind, rank, address, sizes, strides, box, steps, *options):
        assert to % 64 == 0
        assert address % 16 == 0
        assert all(stride % 16 == 0 for stride in strides)
        ctypes.memmove(to, (ctypes.c_uint64 * 6)(address, kind, *sizes, strides[1]), 48)
        return 0

    def launch(self, config, function, arguments, extra):
        name, params_type = function
        maps = [tuple((ctypes.c_uint64 * 6).from_address(at)) for at in arguments[: len(arguments) - 1]]
        params = params_type.from_buffer_copy(params_type.from_address(arguments[len(arguments) - 1]))
        blocks = driver.LaunchConfig.from_address(config).num_blocks
        address = maps[0][0] if maps else getattr(params, "k", None)
        first = list((ctypes.c_int16 * 8).from_address(address)) if address else None
        self.launches.append(SimpleNamespace(name=name, maps=maps, params=params, blocks=blocks, first=first))
        return 0


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    counters = torch.zeros(launch.NUM_COUNTERS, launch.COUNTER_WORDS, dtype=torch.int32)
    monkeypatch.setattr(driver, "function", recorder.function)
    monkeypatch.setattr(jit, "load_kernel", lambda _, function, *__: (function, PARAMS[function]))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(launch, "_make_context", lambda device: None)
    addresses = itertools.cycle(row.data_ptr() for row in counters)
    monkeypatch.setattr(launch, "_counters", lambda device, stream: (addresses, counters))
    caches = launch.load, launch.maps_over, rows._kernel, rows._sums_launch, rows._rounding
    for cache in caches:
        cache.cache_clear()
    yield recorder
    for cache in caches:
        cache.cache_clear()


# ------------------------------------------------------------ attention
class HostAttn(FfaBlockAttn):
    """Takes tensors on the CPU for those of a device."""

    def __init__(self):
        self.deterministic = False


ATTN = HostAttn()


def mask_of(*cu_seqlens, num_q=TOKENS, late_from=None, dims=(DIM, DIM)):
    options = {"late_from": late_from, "head_dim": dims[0], "value_dim": dims[1]}
    lists = ATTN.prepare(StageMask(varlen_causal(cu_seqlens), num_q, TOKENS, HEADS_Q, HEADS, **options))
    return lists.to(torch.from_numpy(lists.words))


@pytest.fixture
def mask(recorder):
    return mask_of(0, 100, TOKENS)


def tensors(*heads):
    return [torch.randn(TOKENS, n, DIM).bfloat16() for n in heads]


def bits(row):
    return row[:8].contiguous().view(torch.int16).tolist()


def unreadable(heads):
    """Tensors that are not read in place: at an odd address, with rows at odd distances."""
    shifted = torch.randn(TOKENS * heads * DIM + 1).bfloat16()[1:]
    odd_rows = torch.randn(TOKENS, heads * DIM + 4).bfloat16()[:, : heads * DIM]
    return [x.view(TOKENS, heads, DIM) for x in (shifted, odd_rows)]


def test_row_bands_are_made_once_of_the_slices(recorder, mask):
    (made,) = recorder.launches
    s = mask.sizes
    assert (made.name, made.params.num_slices, made.params.num_bands) == ("write_bands", s.num_slices, s.num_bands)
    assert 256 * made.blocks >= TOKENS == s.num_bands > 256 * (made.blocks - 1)
    assert made.params.slices == mask.words[s.slices :].data_ptr()
    ATTN.forward(StageInputs(*tensors(HEADS_Q, HEADS, HEADS), mask, SCALE))
    assert recorder.launches[-1].params.bands == made.params.bands == mask.bands.data_ptr()
    assert len(recorder.launches) == 2


def test_a_launch_is_kept_and_takes_new_tensors(recorder, mask):
    for _ in range(3):
        q, k, v = tensors(HEADS_Q, HEADS, HEADS)
        out, lse = ATTN.forward(StageInputs(q, k, v, mask, SCALE))
        last = recorder.launches[-1]
        addresses = [x.data_ptr() for x in (q, k, v, k, v, out)]
        assert [at[0] for at in last.maps] == addresses
        assert [at[2:5] for at in last.maps] == [(DIM, x.shape[1], TOKENS) for x in (q, k, v, k, v, out)]
        assert last.params.lse == lse.data_ptr()
        assert last.params.scale_log2 == pytest.approx(SCALE * 1.4426950408889634)
        assert last.blocks == min(132, mask.sizes.forward.num_items * last.params.schedule.num_heads)
    assert len(mask.launches) == 1
    assert len({launched.params.counter for launched in recorder.launches[1:]}) == 3


def test_what_the_copy_engine_cannot_read_is_copied(recorder, mask):
    k, v = tensors(HEADS, HEADS)
    shifted, odd_rows = unreadable(HEADS_Q)
    columns_apart = torch.randn(TOKENS, DIM, HEADS_Q).bfloat16().transpose(1, 2)
    for q in (shifted, odd_rows, columns_apart, shifted):
        ATTN.forward(StageInputs(q, k, v, mask, SCALE))
        last = recorder.launches[-1]
        assert last.maps[0][0] != q.data_ptr()
        assert last.first == bits(q[0, 0])
    fused = torch.randn(TOKENS, 3, HEADS_Q, DIM).bfloat16()
    ATTN.forward(StageInputs(fused[:, 1], k, v, mask, SCALE))
    assert recorder.launches[-1].maps[0][0] == fused[:, 1].data_ptr()  # aligned views are read in place
    assert recorder.launches[-1].maps[0][5] == 2 * 3 * HEADS_Q * DIM


def test_gradients_go_where_the_caller_wants_them(recorder, mask):
    q, k, v, dout = tensors(HEADS_Q, HEADS, HEADS, HEADS_Q)
    lse, delta = torch.zeros(2, TOKENS, HEADS_Q)
    dq = torch.zeros(TOKENS, HEADS_Q, DIM)
    for dtype in (torch.float32, torch.bfloat16):
        fused = torch.empty(TOKENS, ROW, dtype=dtype)
        pair = torch.empty(TOKENS, HEADS, DIM, dtype=dtype), torch.empty(TOKENS, HEADS, DIM, dtype=dtype)
        for dkv, dk, dv in ((fused, *SHAPE.split(fused)), (pair, *pair)):
            inputs = StageInputs(q, k, v, mask, SCALE)
            ATTN.backward(inputs, OutGrads(dout, lse, delta), Gradients(dq, dkv))
            params, maps = recorder.launches[-1].params, recorder.launches[-1].maps
            assert [at[0] for at in maps[:4]] == [x.data_ptr() for x in (q, dout, k, v)]
            assert maps[6][0] == dq.data_ptr()
            assert (params.lse, params.delta) == (lse.data_ptr(), delta.data_ptr())
            if mask.sizes.backward.is_split and dtype == torch.bfloat16:
                assert params.dk_token_stride == ROW
                assert params.dk != dk.data_ptr()  # summed elsewhere in float32 first
            else:
                assert (params.dk, params.dv) == (dk.data_ptr(), dv.data_ptr())
                assert (params.dk_token_stride, params.dv_token_stride) == (dk.stride(0), dv.stride(0))


def test_deterministic_turns_are_zeroed_as_marks_and_the_first_stores(recorder, monkeypatch):
    monkeypatch.setattr(ATTN, "deterministic", True)
    q, k, v, dout = tensors(HEADS_Q, HEADS, HEADS, HEADS_Q)
    lse, delta = torch.zeros(2, TOKENS, HEADS_Q)
    dq, dkv = torch.zeros(TOKENS, HEADS_Q, DIM), torch.zeros(TOKENS, ROW)
    for whole in (True, False):  # else some queries see nothing, and dq starts from zeros
        mask = mask_of(0, 100, TOKENS) if whole else mask_of(0, 100)
        marks = ATTN.marks(mask, k, v)
        ATTN.backward(StageInputs(q, k, v, mask, SCALE), OutGrads(dout, lse, delta), Gradients(dq, dkv, marks=marks))
        params, b = recorder.launches[-1].params, mask.sizes.backward
        of_queries = 2 * b.num_q_blocks * HEADS_Q // b.heads_per_tile
        assert params.part_semaphores == params.semaphores + 4 * of_queries
        assert params.marks == (params.semaphores if whole else None)
        if whole:
            assert params.marks == marks.data_ptr()
            assert len(marks) >= of_queries + 2 * b.num_k_tiles * HEADS


def test_sinks_softcap_and_the_gradient_of_lse_reach_the_kernels(recorder, mask):
    q, k, v, dout = tensors(HEADS_Q, HEADS, HEADS, HEADS_Q)
    sinks = torch.randn(HEADS_Q)
    for more in (True, False):
        ATTN.forward(StageInputs(q, k, v, mask, SCALE, None, 5.0, sinks), None, more)
        params = recorder.launches[-1].params
        assert params.sinks == (None if more else sinks.data_ptr())
        assert (params.scale_log2, params.cap_scale) == pytest.approx((5 / np.log(2), SCALE / 5))
    lse, delta, dlse = torch.zeros(3, TOKENS, HEADS_Q)
    dq, dkv = torch.zeros(TOKENS, HEADS_Q, DIM), torch.zeros(TOKENS, ROW)
    ATTN.backward(StageInputs(q, k, v, mask, SCALE, None, 5.0), OutGrads(dout, lse, delta), Gradients(dq, dkv))
    params = recorder.launches[-1].params
    assert (params.softmax_scale, params.scale_log2) == pytest.approx((SCALE, 5 / np.log(2)))
    for given, seen in ((dlse, dlse.data_ptr()), (None, None)):
        MOVER.sum(in_flight.RowSums(dout, dout, delta, (dq,), given))
        assert recorder.launches[-1].params.sums.dlse == seen


def test_dq_needs_no_zeros_where_few_tiles_see_each_query(recorder):
    mask = mask_of(0, 100, TOKENS, dims=(128, 128))
    q, k, v, dout = (torch.randn(TOKENS, heads, 128).bfloat16() for heads in (HEADS_Q, HEADS, HEADS, HEADS_Q))
    lse, delta = torch.zeros(2, TOKENS, HEADS_Q)
    dq, dkv, marks = torch.empty(TOKENS, HEADS_Q, 128), torch.zeros(TOKENS, HEADS * 256), ATTN.marks(mask, k, v)
    assert marks.shape == (2 * TOKENS * HEADS_Q // 64,)  # two pieces of each block of 64 rows
    for given, seen in ((marks, marks.data_ptr()), (None, None)):
        ATTN.backward(StageInputs(q, k, v, mask, SCALE), OutGrads(dout, lse, delta), Gradients(dq, dkv, True, given))
        assert recorder.launches[-1].params.marks == seen
    for other in (mask_of(0, TOKENS - 64, dims=(128, 128)), mask_of(0, TOKENS)):  # queries without keys; narrow heads
        assert ATTN.marks(other, k, v) is None
    wide = torch.empty(TOKENS, HEADS, 256)  # their dq leaves registers directly
    assert ATTN.marks(mask, wide, wide) is None


@pytest.mark.parametrize(("value_dim", "launches"), [(128, 1), (192, 2)])
def test_wide_heads_have_rows_of_their_own_widths(value_dim, launches, recorder):
    """And the backward takes two launches if registers do not hold dk and dv at once."""
    mask = mask_of(0, 100, TOKENS, dims=(192, value_dim))
    shapes = (HEADS_Q, 192), (HEADS, 192), (HEADS, value_dim), (HEADS_Q, value_dim)
    q, k, v, dout = (torch.randn(TOKENS, *shape).bfloat16() for shape in shapes)
    out, lse = ATTN.forward(StageInputs(q, k, v, mask, SCALE))
    assert out.shape == (TOKENS, HEADS_Q, value_dim)
    assert (recorder.launches[-1].params.out, recorder.launches[-1].params.value_dim) == (out.data_ptr(), value_dim)
    shape, dq = in_flight.RowShape.of(k, v), torch.zeros(TOKENS, HEADS_Q, 192)
    dkv, before = torch.zeros(TOKENS, shape.width), len(recorder.launches)
    ATTN.backward(StageInputs(q, k, v, mask, SCALE), OutGrads(dout, lse, lse.clone()), Gradients(dq, dkv, zeroed=True))
    launched = recorder.launches[before:]
    assert [each.name for each in launched] == ["ffa_backward"] * launches
    for params in (each.params for each in launched):
        assert (params.dq, params.head_dim, params.value_dim) == (dq.data_ptr(), 192, value_dim)
        assert (params.dk, params.dv) == tuple(part.data_ptr() for part in shape.split(dkv))
        assert (params.dk_head_stride, params.dv_head_stride, params.dv_token_stride) == (192, value_dim, shape.width)
    assert len({each.params.counter for each in launched}) == launches


@pytest.mark.parametrize(("listed", "called"), [(128, 256), (64, 128), (128, 64)])
def test_lists_of_some_heads_do_not_serve_others(listed, called, recorder):
    mask = StageMask(varlen_causal([0, TOKENS]), TOKENS, TOKENS, 1, 1, head_dim=listed)
    lists = build_worklists(mask, chunks_per_tile=2)
    inputs = *torch.randn(3, TOKENS, 1, called).bfloat16(), lists.to(torch.from_numpy(lists.words))
    with pytest.raises(ValueError, match=f"head_dim {called} and v {called} but the work lists are for other heads"):
        ATTN.forward(StageInputs(*inputs, SCALE))


def test_late_keys_have_maps_and_a_flag(recorder):
    own, waits = TOKENS // 2, []
    mask = mask_of(0, own, TOKENS, late_from=own)
    q, k, v = tensors(HEADS_Q, HEADS, HEADS)
    assert mask.sizes.forward.awaits
    for flag in (in_flight.Flag(4096, 7), None):
        kv = torch.randn(TOKENS - own, ROW).bfloat16()
        late = in_flight.LateKeys(kv, in_flight.Arrival(lambda: waits.append(1), lambda flag=flag: flag))
        ATTN.forward(StageInputs(q, k[:own], v[:own], mask, SCALE, late))
        last = recorder.launches[-1]
        assert [at[0] for at in last.maps[3:5]] == [part.data_ptr() for part in SHAPE.split(kv)]
        assert last.params.late.first == own
        schedule, sizes = last.params.schedule, mask.sizes.forward
        assert schedule.num_early == sizes.num_early > 0
        assert schedule.num_early + schedule.num_tiles == sizes.num_items
        assert (last.params.late.arrived, last.params.late.number) == (flag or (None, 0))
    assert len(waits) == 1  # the stream, where the kernel sees no flag


def test_rows_are_under_way_before_a_second_launch_may_wait_for_the_first(recorder):
    """The driver may load its kernel only when the first one has ended, which awaits the rows."""
    own, begun = TOKENS // 2, []
    mask, shape = mask_of(0, own, TOKENS, late_from=own, dims=(192, 192)), in_flight.RowShape(HEADS, 192, 192)
    assert mask.sizes.backward.awaits
    q, k, v, dout = (torch.randn(n, heads, 192).bfloat16() for n, heads in zip(
        (TOKENS, own, own, TOKENS), (HEADS_Q, HEADS, HEADS, HEADS_Q), strict=True
    ))  # fmt: skip
    arrival = in_flight.Arrival(
        lambda: None, lambda: in_flight.Flag(4096, 7), lambda: begun.append(len(recorder.launches))
    )
    late = in_flight.LateKeys(torch.randn(TOKENS - own, shape.width).bfloat16(), arrival)
    lse, delta = torch.zeros(2, TOKENS, HEADS_Q)
    grads = Gradients(torch.zeros(TOKENS, HEADS_Q, 192), torch.zeros(TOKENS, shape.width), zeroed=True)
    before = len(recorder.launches)
    ATTN.backward(StageInputs(q, k, v, mask, SCALE, late), OutGrads(dout, lse, delta), grads)
    assert [len(recorder.launches), *begun] == [before + 2, before + 1]


def test_without_queries_or_work_nothing_is_launched(recorder):
    q, k, v = tensors(HEADS_Q, HEADS, HEADS)
    out, lse = ATTN.forward(StageInputs(q[:0], k, v, mask_of(0, num_q=0), SCALE))
    assert (out.shape, lse.shape) == ((0, HEADS_Q, DIM), (0, HEADS_Q))
    assert not recorder.launches
    earlier = torch.zeros(TOKENS, HEADS_Q, DIM), torch.zeros(TOKENS, HEADS_Q)
    assert ATTN.forward(StageInputs(q, k, v, mask_of(0), SCALE), earlier, more=True) == earlier
    assert [launched.name for launched in recorder.launches] == ["write_bands"]


def test_each_thread_has_launches_of_its_own(recorder, mask):
    inputs = StageInputs(*tensors(HEADS_Q, HEADS, HEADS), mask, SCALE)
    ATTN.forward(inputs)
    thread = threading.Thread(target=ATTN.forward, args=(inputs,))
    thread.start()
    thread.join()
    assert len(mask.launches) == len(recorder.launches[1:]) == 2


def test_forgotten_maps_live_on_until_they_are_used(recorder, monkeypatch):
    monkeypatch.setattr(launch.Maps, "KEPT", 4)
    maps = launch.Maps(launch.MapLayout((TOKENS, HEADS_Q, DIM), (HEADS_Q * DIM, DIM, 1), torch.bfloat16, 1, 64))
    places = [maps[16 * i] for i in range(1, 9)]
    _others = [(ctypes.c_ulonglong * 24)(*[1] * 24) for _ in range(100)]  # where memory is free
    assert [ctypes.c_uint64.from_address(place).value for place in places] == [16 * i for i in range(1, 9)]
    assert maps[16 * 8] == places[-1]
    assert len(maps) == 4


# ------------------------------------------------------------ around attention
MOVER = CudaRowMover()


def places_of_two():
    return in_flight.Places([5, 12], [1 << 20, 2 << 20], 5, [64, 128])


def sums_of(zeros=1):
    out, dout = torch.randn(2, TOKENS, HEADS_Q, DIM).bfloat16()
    memory = torch.empty(TOKENS, HEADS_Q, DIM), torch.empty(TOKENS, ROW)
    return in_flight.RowSums(out, dout, torch.empty(TOKENS, HEADS_Q), memory[:zeros])


def index_of(num_rows):
    exchange = SimpleNamespace(send_rows=np.arange(num_rows) % 7)
    return [torch.from_numpy(part.astype(np.int32)) for part in MOVER.index(exchange)], exchange


def test_gathering_to_places_is_kept_and_takes_new_tensors(recorder):
    places, (index, _) = places_of_two(), index_of(12)
    for zeros in (0, 1, 2, 1):
        k, v = torch.randn(2, TOKENS, HEADS, DIM).bfloat16()
        sums = sums_of(zeros) if zeros else None
        MOVER.gather(k, v, index, places, sums)
        params = recorder.launches[-1].params
        assert (params.k, params.v, params.rows) == (k.data_ptr(), v.data_ptr(), index[0].data_ptr())
        assert list(params.places.to[:2]) == places.addresses
        assert list(params.places.ends[:2]) == places.ends
        assert list(params.places.flags[:2]) == places.flags
        assert (params.places.begin, params.places.num_flags, params.num_rows) == (5, 2, 12)
        assert (params.k_token_stride, params.k_head_stride) == (HEADS * DIM // 8, DIM // 8)
        assert recorder.launches[-1].blocks - params.num_blocks == (0 if sums is None else TOKENS * HEADS_Q // 16)
        if sums is not None:
            named = params.sums.out, params.sums.dout, params.sums.delta, params.sums.zero, params.sums.more_zero
            tensors = [sums.out, sums.dout, sums.delta, *sums.zeros]
            assert named == (*(x.data_ptr() for x in tensors), *(None,) * (5 - len(tensors)))
            sizes = params.sums.num_rows, params.sums.num_zero, params.sums.num_more_zero
            assert sizes == (TOKENS * HEADS_Q, sums.out.numel(), TOKENS * ROW if zeros == 2 else 0)
    sums, marks = sums_of(2), torch.empty(16)
    MOVER.gather(k, v, index, places, sums._replace(zeros=(marks, sums.zeros[1])))
    params = recorder.launches[-1].params.sums
    assert (params.zero, params.num_zero, params.num_more_zero) == (marks.data_ptr(), 16, TOKENS * ROW)
    assert len(places.prepared) == 4
    assert len({launched.params.places.blocks_done for launched in recorder.launches}) == 5


def test_rows_that_cannot_be_read_in_units_are_copied(recorder):
    (index, _), v = index_of(12), torch.randn(TOKENS, HEADS, DIM).bfloat16()
    places = places_of_two()
    MOVER.gather(v, v, index, places)
    for k in unreadable(HEADS):
        MOVER.gather(k, v, index, places)
        last = recorder.launches[-1]
        assert last.params.k != k.data_ptr()
        assert last.first == bits(k[0, 0])
        assert last.params.k_token_stride == HEADS * DIM // 8


def test_gathering_into_one_tensor_tells_nobody(recorder):
    (index, _), k = index_of(12), torch.randn(TOKENS, HEADS, DIM).bfloat16()
    sent = torch.empty(12, ROW, dtype=torch.bfloat16)
    MOVER.gather(k, k, index, sent)
    params = recorder.launches[-1].params
    assert (params.places.to[0], params.places.ends[0], params.places.num_flags) == (sent.data_ptr(), 12, 0)
    MOVER.gather(k, k, index_of(0)[0], sent[:0])
    assert len(recorder.launches) == 1
    MOVER.gather(k, k, index_of(0)[0], sent[:0], sums_of())
    assert (recorder.launches[-1].params.num_blocks, recorder.launches[-1].blocks) == (0, TOKENS * HEADS_Q // 16)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", [None, (), (slice(3, 5),), (slice(0, 0), slice(2, 7), slice(11, 12))])
def test_a_piece_of_gradients_is_rounded_to_its_slot_before_it_is_counted(recorder, wire, parts):
    grad = torch.randn(12, ROW)
    want = grad[[i for part in parts or () for i in range(part.start, part.stop)]] if parts is not None else grad
    slot = torch.full((len(want), ROW), torch.nan, dtype=wire)
    places = in_flight.Places([len(want)], [slot.data_ptr()], 0, [64, 128])
    MOVER.round_to(grad, in_flight.Piece(parts, places, slot, None))
    assert torch.equal(slot, want.to(wire))
    (launched,) = recorder.launches
    params = launched.params
    assert (launched.name, launched.blocks, params.num_blocks, params.num_rows) == ("gather_rows", 1, 1, 0)
    assert (list(params.places.flags[:2]), params.places.num_flags) == ([64, 128], 2)
    assert params.places.blocks_done
    assert not params.sums.num_rows


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
def test_the_end_of_a_backward(recorder, wire):
    (index, exchange), places, waits = index_of(12), places_of_two(), []
    dq = torch.randn(TOKENS, HEADS_Q, DIM)
    first = 45  # rows before belong to this rank and to nobody
    for flag in (in_flight.Flag(64, 3), in_flight.Flag(64, 4), None):
        dkv = torch.randn(first + 12, ROW)
        received = torch.empty(12, ROW, dtype=wire)
        arrival = in_flight.Arrival(lambda: waits.append(1), lambda flag=flag: flag)
        returned = in_flight.Returned(received, index, exchange, arrival, in_flight.Unsent(dkv, first, places))
        results = MOVER.finish(returned, in_flight.LeftGrads(dq, dkv, SHAPE, 0.5, torch.bfloat16))
        params = recorder.launches[-1].params
        assert (params.dq_to, params.dk_to, params.dv_to) == tuple(x.data_ptr() for x in results)
        assert [x.shape for x in results] == [(TOKENS, HEADS_Q, DIM), *[(TOKENS, HEADS, DIM)] * 2]
        assert (params.dq, params.dkv, params.softmax_scale) == (dq.data_ptr(), dkv.data_ptr(), 0.5)
        assert params.unsent == dkv[first:].data_ptr()
        units = params.unsent_units, params.dq_units, params.dkv_units, params.returned.units
        assert units == (12 * ROW // 8, dq.numel() // 8, TOKENS * ROW // 8, ROW // 8)
        assert (params.returned.rows, params.returned.num_tokens) == (received.data_ptr(), 7)
        assert params.places.blocks_done == params.started + 4
        assert (params.arrived, params.number) == (flag or (None, params.number))
    assert len(waits) == 1  # the stream, where the kernel sees no flag
    assert len(places.prepared) == 1
    assert len({launched.params.started for launched in recorder.launches}) == 3


def test_the_end_of_a_backward_that_rounded_its_gradients(recorder):
    """Nothing of the rank's own is read but rows to which something returns, and what is sent lies behind them."""
    (index, exchange), places = index_of(12), places_of_two()
    dq, received = torch.randn(TOKENS, HEADS_Q, DIM), torch.empty(12, ROW, dtype=torch.bfloat16)
    dk, dv = torch.randn(2, TOKENS + 12, HEADS, DIM).bfloat16()
    unsent = in_flight.Unsent((dk, dv), TOKENS, places)
    returned = in_flight.Returned(received, index, exchange, in_flight.Arrival(lambda: None), unsent)
    results = MOVER.finish(returned, in_flight.LeftGrads(dq, (dk, dv), SHAPE, 0.5, torch.bfloat16))
    params = recorder.launches[-1].params
    assert [x.data_ptr() for x in results[1:]] == [dk.data_ptr(), dv.data_ptr()] == [params.dk_to, params.dv_to]
    assert [x.shape for x in results[1:]] == [(TOKENS, HEADS, DIM)] * 2
    assert (params.unsent, params.dkv, params.num_own) == (None, None, TOKENS)
    assert (params.unsent_units, params.dkv_units) == (12 * ROW // 8, 7 * ROW // 8)


def test_an_end_with_nothing_to_send_or_to_add(recorder):
    dq, dkv = torch.randn(TOKENS, HEADS_Q, DIM), torch.randn(TOKENS, ROW)
    rounded = torch.empty(dq.shape, dtype=torch.bfloat16)
    dk, dv = MOVER.round_keys(dkv, SHAPE, torch.bfloat16)
    assert MOVER.round(dq, (dk, dv), SHAPE, 0.25, rounded) == (dk, dv)
    of_both = MOVER.round(dq, dkv, SHAPE, 0.5, rounded)
    keys, queries, both = (launched.params for launched in recorder.launches)
    assert [params.started for params in (keys, queries, both)] == [None] * 3
    assert [params.returned.num_tokens for params in (keys, queries, both)] == [0] * 3
    units, key_units = dq.numel() // 8, dkv.numel() // 8
    assert (keys.dq_units, keys.dkv_units, keys.dkv, keys.dk_to) == (0, key_units, dkv.data_ptr(), dk.data_ptr())
    assert (queries.dq_units, queries.dkv_units, queries.dq_to) == (units, 0, rounded.data_ptr())
    assert (both.dq_units, both.dkv_units, both.dq_to, both.dkv) == (units, key_units, queries.dq_to, keys.dkv)
    assert [both.dk_to, both.dv_to] == [x.data_ptr() for x in of_both]
    assert (queries.softmax_scale, both.softmax_scale) == (0.25, 0.5)
    assert [x.shape for x in (dk, dv, *of_both)] == [(TOKENS, HEADS, DIM)] * 4
    empty = torch.empty(0, HEADS_Q, DIM)
    MOVER.round(empty, (dk, dv), SHAPE, 0.25, empty.bfloat16())
    assert len(recorder.launches) == 3


def test_only_large_sums_lie_in_the_memory_of_the_rounded_dq(mask, monkeypatch):
    k, v, spare = *tensors(HEADS, HEADS), torch.empty(TOKENS, 2 * HEADS_Q, DIM, dtype=torch.bfloat16)
    monkeypatch.setattr(ATTN, "adds_keys", lambda mask: True, raising=False)
    assert ATTN.key_sums(mask, k, v, spare).data_ptr() != spare.data_ptr()
    monkeypatch.setattr("torchtitan_magi.backends.ffa.block_attn.LARGE_SUMS", 0)
    sums = ATTN.key_sums(mask, k, v, spare)
    assert (sums.data_ptr(), sums.shape, sums.dtype) == (spare.data_ptr(), (TOKENS, ROW), torch.float32)
    assert ATTN.key_sums(mask, k, v, spare[:1]).data_ptr() != spare.data_ptr()


def test_more_units_than_kernels_count_are_refused(recorder):
    """Gradients of 128 GiB, which take no memory on the meta device; `end` in add_rows would be 0."""
    half = torch.empty(1 << 31, 16, device="meta")
    with pytest.raises(ValueError, match=rf"gradient: {1 << 32}; the ffa kernels count to"):
        MOVER.round_keys(half, in_flight.RowShape(1, 8, 8), torch.bfloat16)
    with pytest.raises(ValueError, match="the ffa kernels count to"):
        MOVER.round(half.unflatten(1, (2, 8)), (half, half), SHAPE, 1.0, half)
    index = [None, torch.empty((1 << 31) + 1, device="meta"), torch.empty(0, device="meta")]
    returned = in_flight.Returned(half.bfloat16(), index, None, in_flight.Arrival(lambda: None))
    with pytest.raises(ValueError, match="the ffa kernels count to"):
        MOVER.add(returned, half)
    assert not recorder.launches


def test_a_stream_takes_no_counter_of_another_however_far_ahead_it_is(monkeypatch):
    """Two launches that run at the same time would hand out each other's items."""
    zeros, current = torch.zeros, []
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: current[-1], raising=False)
    monkeypatch.setattr(launch, "_counters", functools.cache(launch._counters.__wrapped__))
    taken = {}
    for current[:] in ([1], [2], [1]):
        found = (launch.next_counter(0) for _ in range(launch.NUM_COUNTERS))
        taken.setdefault(current[0], set()).update(found)
    assert not taken[1] & taken[2]
    assert {len(counters) for counters in taken.values()} == {launch.NUM_COUNTERS}


def test_counters_are_taken_in_turn(recorder):
    taken = {launch.next_counter(0) for _ in range(2 * launch.NUM_COUNTERS)}
    assert len(taken) == launch.NUM_COUNTERS
