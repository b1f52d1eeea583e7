"""What the host hands to the kernels, without GPUs: the driver's calls are written down instead of made."""

import ctypes
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from torchtitan_magi import driver, jit, launch, varlen_causal
from torchtitan_magi.ffa import FfaBlockAttn
from torchtitan_magi.transport import Arrival, Flag, LateKeys

TOKENS, HEADS_Q, HEADS_KV, DIM = 256, 8, 2, 64
SCALE = 0.125


class Recorder:
    """Launches with a copy of what their arguments point to."""

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
        # The first row of the first tensor, as it is when the kernel is launched.
        first = (ctypes.c_int16 * DIM).from_address(maps[0][0])
        self.launches.append(SimpleNamespace(name=name, maps=maps, params=params, blocks=blocks, first=list(first)))
        return 0


class HostAttn(FfaBlockAttn):
    """Takes tensors on the CPU for those of a device."""

    def __init__(self, deterministic=False):
        self.deterministic = deterministic


@pytest.fixture
def recorder(monkeypatch):
    recorder = Recorder()
    counters = torch.zeros(launch.NUM_COUNTERS, launch.COUNTER_WORDS, dtype=torch.int32)
    numbers = itertools.count()
    types = {"ffa_forward": launch.ForwardParams, "ffa_backward": launch.BackwardParams}
    monkeypatch.setattr(driver, "function", recorder.function)
    monkeypatch.setattr(jit, "load_kernel", lambda _, function, *__: (function, types[function]))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(launch, "current_device", lambda: None)
    monkeypatch.setattr(launch, "num_sms", lambda device: 132)
    monkeypatch.setattr(launch, "_counters", lambda device: (counters, counters.data_ptr(), numbers))
    caches = launch.load, launch.maps_over
    for cache in caches:
        cache.cache_clear()
    yield recorder
    for cache in caches:
        cache.cache_clear()


def mask_of(attn, late_from=None):
    cu_seqlens = [0, late_from or 100, TOKENS]
    lists = attn.prepare(varlen_causal(cu_seqlens), TOKENS, TOKENS, HEADS_Q, HEADS_KV, late_from=late_from)
    return lists.to(torch.from_numpy(lists.words))


def tensors(*heads):
    return [torch.randn(TOKENS, n, DIM).bfloat16() for n in heads]


def bits(row):
    return row.contiguous().view(torch.int16).tolist()


def test_a_launch_is_kept_and_takes_new_tensors(recorder):
    attn = HostAttn()
    mask = mask_of(attn)
    for _ in range(3):
        q, k, v = tensors(HEADS_Q, HEADS_KV, HEADS_KV)
        out, lse = attn.forward(q, k, v, mask, SCALE)
        last = recorder.launches[-1]
        addresses = [x.data_ptr() for x in (q, k, v, k, v, out)]
        assert [at[0] for at in last.maps] == addresses
        assert [at[2:5] for at in last.maps] == [(DIM, x.shape[1], TOKENS) for x in (q, k, v, k, v, out)]
        assert last.params.lse == lse.data_ptr()
        assert last.params.scale_log2 == pytest.approx(SCALE * 1.4426950408889634)
        assert last.blocks == min(132, mask.sizes.num_forward_items * last.params.schedule.num_heads)
    assert len(mask.launches) == 1
    assert len({launched.params.counter for launched in recorder.launches}) == 3
    attn.forward(q, k, v, mask, SCALE, sm_margin=130)
    assert recorder.launches[-1].blocks == 2


def test_what_the_copy_engine_cannot_read_is_copied(recorder):
    attn = HostAttn()
    mask = mask_of(attn)
    k, v = tensors(HEADS_KV, HEADS_KV)
    shifted = torch.randn(TOKENS * HEADS_Q * DIM + 1).bfloat16()[1:].view(TOKENS, HEADS_Q, DIM)
    odd_rows = torch.randn(TOKENS, HEADS_Q * DIM + 4).bfloat16()[:, : HEADS_Q * DIM].view(TOKENS, HEADS_Q, DIM)
    columns_apart = torch.randn(TOKENS, DIM, HEADS_Q).bfloat16().transpose(1, 2)
    for q in (shifted, odd_rows, columns_apart, shifted):
        attn.forward(q, k, v, mask, SCALE)
        last = recorder.launches[-1]
        assert last.maps[0][0] != q.data_ptr()
        assert last.first == bits(q[0, 0])
    fused = torch.randn(TOKENS, 3, HEADS_Q, DIM).bfloat16()
    attn.forward(fused[:, 1], k, v, mask, SCALE)
    assert recorder.launches[-1].maps[0][0] == fused[:, 1].data_ptr()  # aligned views are read in place
    assert recorder.launches[-1].maps[0][5] == 2 * 3 * HEADS_Q * DIM


def test_gradients_go_where_the_caller_wants_them(recorder):
    attn = HostAttn()
    mask = mask_of(attn)
    q, k, v, dout = tensors(HEADS_Q, HEADS_KV, HEADS_KV, HEADS_Q)
    lse, delta = torch.zeros(2, TOKENS, HEADS_Q)
    dq = torch.zeros(TOKENS, HEADS_Q, DIM)
    for dtype in (torch.float32, torch.bfloat16):
        fused = torch.empty(TOKENS, 2, HEADS_KV, DIM, dtype=dtype)
        pair = torch.empty(TOKENS, HEADS_KV, DIM, dtype=dtype), torch.empty(TOKENS, HEADS_KV, DIM, dtype=dtype)
        for dkv, dk, dv in ((fused, fused[:, 0], fused[:, 1]), (pair, *pair)):
            attn.backward(dout, q, k, v, lse, delta, mask, SCALE, dq, dkv)
            params, maps = recorder.launches[-1].params, recorder.launches[-1].maps
            assert [at[0] for at in maps[:4]] == [x.data_ptr() for x in (q, dout, k, v)]
            assert maps[6][0] == dq.data_ptr()
            assert (params.lse, params.delta) == (lse.data_ptr(), delta.data_ptr())
            if mask.sizes.is_split and dtype == torch.bfloat16:
                assert params.dk_token_stride == 2 * HEADS_KV * DIM
                assert params.dk != dk.data_ptr()  # summed elsewhere in float32 first
            else:
                assert (params.dk, params.dv) == (dk.data_ptr(), dv.data_ptr())
                assert (params.dk_token_stride, params.dv_token_stride) == (dk.stride(0), dv.stride(0))


def test_late_keys_have_maps_and_a_flag(recorder):
    attn = HostAttn()
    own, waits = TOKENS // 2, []
    mask = mask_of(attn, late_from=own)
    q, k, v = tensors(HEADS_Q, HEADS_KV, HEADS_KV)
    assert mask.sizes.forward_awaits
    for flag in (Flag(4096, 7), None):
        kv = torch.randn(TOKENS - own, 2, HEADS_KV, DIM).bfloat16()
        late = LateKeys(kv, Arrival(lambda: waits.append(1), lambda flag=flag: flag))
        attn.forward(q, k[:own], v[:own], mask, SCALE, late=late)
        last = recorder.launches[-1]
        assert [at[0] for at in last.maps[3:5]] == [kv.data_ptr(), kv[:, 1].data_ptr()]
        assert last.params.late.first == own
        assert (last.params.late.arrived, last.params.late.number) == (flag or (None, 0))
    assert len(waits) == 1  # the stream, where the kernel sees no flag


def test_each_thread_has_launches_of_its_own(recorder):
    attn = HostAttn()
    mask = mask_of(attn)
    inputs = tensors(HEADS_Q, HEADS_KV, HEADS_KV)
    attn.forward(*inputs, mask, SCALE)
    thread = threading.Thread(target=lambda: attn.forward(*inputs, mask, SCALE))
    thread.start()
    thread.join()
    assert len(mask.launches) == len(recorder.launches) == 2


def test_maps_that_are_given_up_live_on_until_they_are_used(recorder, monkeypatch):
    monkeypatch.setattr(launch.Maps, "KEPT", 4)
    maps = launch.Maps(launch.MapLayout((TOKENS, HEADS_Q, DIM), (HEADS_Q * DIM, DIM, 1), torch.bfloat16, 1, 64))
    places = [maps[16 * i] for i in range(1, 9)]
    _others = [(ctypes.c_ulonglong * 24)(*[1] * 24) for _ in range(100)]  # where memory is free
    assert [ctypes.c_uint64.from_address(place).value for place in places] == [16 * i for i in range(1, 9)]
    assert maps[16 * 8] == places[-1]
    assert len(maps) == 4
