"""Compiles variants of the kernels, without a GPU, and reads the compiler's log; asks it where things lie and how many.

Every head_dim, direction and switch; not every combination, which benchmarks/check_kernel.py compiles on a GPU.
"""

import ctypes
import functools
import itertools
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
pytest.importorskip("cuda.bindings", reason="NVRTC is reached through cuda-bindings")

from torchtitan_magi.backends.ffa import params as ffa
from torchtitan_magi.backends.ffa import row_kernels as rows
from torchtitan_magi.cuda import jit, launch
from torchtitan_magi.linear import conv_kernels
from torchtitan_magi.tiles import forward_rows, is_wide

# Lines with a number of this kind are expected and harmless:
#   C7519  "warpgroup.arrive is injected": ptxas orders register operands of wgmma itself; nothing waits because of it
#   C7517  "warpgroup.wait is injected": after the loop of a backward that computes dv alone, where nothing is under way
ALLOWED = {"C7519", "C7517"}

# Bytes that wide variants may spill, by head_dim: addresses and row numbers, which the forward needs once per item.
MOST_SPILLED = {192: 240, 256: 168}
OF_FORWARD_64 = 208  # nearly all by its producer, which has 32 registers
WITH_SOFTCAP = 12  # of backward, by the compiler of CUDA 13.2, which comes with torch 2.15; 13.0 spills none

FORWARD_GROUPS, BACKWARD_GROUPS = range(1, 17), range(1, 9)  # heads per tile that the work lists may ask for
SOME_GROUPS = (1, 8)  # no grouping; heads 64:8


STRUCTS = {
    "ffa_forward.cu": [ffa.ForwardParams],
    "ffa_backward.cu": [ffa.BackwardParams],
    "rows.cu": [rows._BandsParams, rows._GatherParams, rows._AddParams, rows._FinishParams, rows._SinksParams],
    "short_conv.cu": [conv_kernels.ConvParams],
}


def variants() -> Iterator[tuple[str, launch.Variant]]:
    on_or_off = list(itertools.product((False, True), repeat=2))
    bf16 = torch.bfloat16
    for dims, dtype in itertools.product(((64, 64), (128, 128)), (bf16, torch.float16)):
        hardest, groups = dims == (128, 128) and dtype == bf16, SOME_GROUPS if dtype == bf16 else SOME_GROUPS[-1:]
        for stages in on_or_off:
            for group in FORWARD_GROUPS if hardest and not any(stages) else groups:
                yield "ffa_forward.cu", ffa.forward_variant(dims, group, dtype, *stages)
        for deterministic in (False, True):
            for group in BACKWARD_GROUPS if hardest and not deterministic else groups:
                for variant in ffa.backward_variants(dims, group, dtype, deterministic):
                    yield "ffa_backward.cu", variant
    for dims in [dims for dims in ffa.DIMS if not ffa.has_wide_values(dims)]:
        for variant in ffa.backward_variants(dims, SOME_GROUPS[-1], bf16, True, begins=True):
            yield "ffa_backward.cu", variant
    for dims in ffa.DIMS:
        wide = is_wide(*dims)
        for stages in on_or_off if wide else ((False, False), (True, False)):
            for softcap in (50.0, 1000.0):
                variant = ffa.forward_variant(
                    dims, SOME_GROUPS[-1], bf16, *stages, softcap=softcap, sinks=not stages[1]
                )
                yield "ffa_forward.cu", variant
        for group in (1, 8) if wide else ():
            yield "ffa_forward.cu", ffa.forward_variant(dims, group, bf16)
        for deterministic, softcap in itertools.product((False, True), {1.0, float(not wide)}):
            for variant in ffa.backward_variants(dims, SOME_GROUPS[-1], bf16, deterministic, softcap=softcap):
                yield "ffa_backward.cu", variant
    for fp16, fp32, wide, rounded in itertools.product((False, True), repeat=4):
        if not (fp32 and rounded):
            macros = {"USE_FP16": fp16, "WIRE_FP32": fp32, "WIDE": wide, "ROUNDED": rounded}
            yield "rows.cu", launch.variant_of(macros)
    for silu, fp16 in on_or_off:
        yield "short_conv.cu", launch.variant_of({"SILU": silu, "USE_FP16": fp16})


def fields_of(struct: type[ctypes.Structure], path: str = "") -> Iterator[tuple[str, int]]:
    """Every field, nested ones as a.b, and where it lies."""
    for name, kind in struct._fields_:
        at = getattr(struct, name).offset
        yield path + name, at
        if issubclass(kind, ctypes.Structure):
            yield from ((field, at + inner) for field, inner in fields_of(kind, f"{path}{name}."))


def layout_asserts(struct: type[ctypes.Structure]) -> str:
    """C++ that compiles only if the kernel's struct of the same name is laid out as ours."""
    ours = struct.__name__.removeprefix("_")
    checks = [f"__INTADDR__(&(({ours}*)nullptr)->{field}) == {at}" for field, at in fields_of(struct)]
    checks.append(f"sizeof({ours}) == {ctypes.sizeof(struct)}")
    return "".join(f'static_assert({check}, "{check}");\n' for check in checks)


def shape_asserts(name: str, variant: dict[str, int]) -> str:
    """C++ that compiles only if the kernel has as many threads and rows as the host launches and lists."""
    if not name.startswith("ffa_"):
        return ""
    dims = variant["HEAD_DIM"], variant["VALUE_DIM"]
    if name == "ffa_backward.cu":
        return f"static_assert(kThreads == {ffa.backward_threads(dims)});\n"
    return f"static_assert(kThreads == {ffa.forward_threads(dims)} && kRows == {forward_rows(*dims)});\n"


VARIANTS = list(variants())
COMPILERS = ThreadPoolExecutor(os.cpu_count())


@functools.cache
def compiling(number: int) -> Future[tuple[bytes, str]]:
    name, variant = VARIANTS[number]
    source = jit.expand_source(name) + "".join(map(layout_asserts, STRUCTS[name])) + shape_asserts(name, dict(variant))
    return COMPILERS.submit(jit.compile_source, name, source, dict(variant))


def most_spilled(name: str, variant: dict[str, int]) -> int:
    """Bytes that a variant may spill."""
    from cuda.bindings import nvrtc

    if name == "ffa_forward.cu" and variant["HEAD_DIM"] == 64:
        return OF_FORWARD_64
    is_newer = nvrtc.nvrtcVersion()[1:] >= (13, 2)
    with_softcap = WITH_SOFTCAP if is_newer and name == "ffa_backward.cu" and "SOFTCAP" in variant else 0
    return MOST_SPILLED.get(variant.get("HEAD_DIM", 0), with_softcap)


@pytest.mark.parametrize(
    "number", range(len(VARIANTS)), ids=["-".join([name, *(f"{n}{v}" for n, v in v)]) for name, v in VARIANTS]
)
def test_no_spills_in_loops_no_serialized_wgmma_and_parameters_where_the_host_puts_them(number: int) -> None:
    for later in range(number + 1, min(number + os.cpu_count(), len(VARIANTS))):
        compiling(later)  # those of the next tests, at the same time
    _, log = compiling(number).result()
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    worst = max(int(n) for frame in frames for n in frame)
    name, variant = VARIANTS[number]
    assert worst <= most_spilled(name, dict(variant)), log
    assert "serialized" not in log
    assert set(re.findall(r"C7\d\d\d", log)) <= ALLOWED, log
    assert "setmaxnreg ignored" not in log


def test_every_kernel_waits_for_the_one_before_it() -> None:
    """Launches are programmatic: without the wait a kernel would read what the one before it still writes."""
    for path in jit.kernel_dir().glob("*.cu"):
        kernels = path.read_text().split("__global__")[1:]
        assert kernels
        for kernel in kernels:
            waits = 2 if "ffa_backward" in kernel else 1  # the launch of dk and dq: at its end
            assert kernel.count("wait_for_kernel_before();") == waits, path
            assert kernel.count("let_next_kernel_begin();") == 1, path


def test_head_dims() -> None:
    assert [ffa.padded_dims(d) for d in (8, 40, 64, 72, 128)] == [(64, 64)] * 3 + [(128, 128)] * 2
    given = (96, 64), (144, 128), (192, 16), (192, 144), (208, 64), (256, 256)
    assert [ffa.padded_dims(*d) for d in given] == [*[(192, 128)] * 3, (192, 192), *[(256, 256)] * 2]
    for dims in ((8, 8), (64, 64), (72, 72), (64, 32), *given):  # lists are made for what is padded later
        assert forward_rows(*dims) == forward_rows(*ffa.padded_dims(*dims))
    for dims in ((0,), (12,), (136,), (264,), (192, 200), (64, 128), (72, 64), (192, 24), (64, 0)):
        with pytest.raises(ValueError, match="head_dim"):
            ffa.padded_dims(*dims)


def test_a_schedule_gives_every_tile_to_every_head_once_and_early_ones_first() -> None:
    source = (
        jit.expand_source("ffa_layout.cuh")
        + """
    constexpr bool is_complete(Schedule s) {
      const int num_tiles = s.num_early + s.num_tiles + s.num_tail, in_waves = s.num_early + s.num_tiles;
      bool done[400] = {};
      int last = 0;
      for (int item = 0; item < s.num_items(); item++) {
        const int tile = s.list_index(item), head = s.head(item), section = (tile >= s.num_early) + (tile >= in_waves);
        const int wave = section < 2 ? head / s.heads_per_wave : 0;   // of heads, one after another
        const int place = (section * 100 + wave) * 100 + tile;
        if (tile < 0 || tile >= num_tiles || head < 0 || head >= s.num_heads || place < last) return false;
        if (done[tile * s.num_heads + head]) return false;
        done[tile * s.num_heads + head] = true;
        last = place;
      }
      return s.num_items() == num_tiles * s.num_heads;
    }
    """
    )
    schedules = [
        (early, tiles, tail, heads, per_wave)
        for early, tiles, tail in itertools.product((0, 1, 5), (0, 1, 7), (0, 3))
        for heads, per_wave in ((1, 1), (8, 1), (8, 4), (6, 3), (8, 8))
    ]
    asserts = "".join(f'static_assert(is_complete({{{", ".join(map(str, s))}}}), "{s}");\n' for s in schedules)
    macros = dict(ffa.forward_variant((128, 128), 8, torch.bfloat16))
    jit.compile_source("ffa_layout.cuh", source + asserts, macros)
