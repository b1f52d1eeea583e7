"""Compiles every variant that ships, without a GPU, and reads the compiler's log."""

import itertools
import re

import pytest
import torch

pytest.importorskip("cuda.core", reason="cuda-core compiles the kernels")
pytest.importorskip("cuda.bindings", reason="NVRTC is reached through cuda-bindings")

from torchtitan_magi import jit, launch

# Lines with a number of this kind are expected and harmless:
#   C7519  "warpgroup.arrive is injected": ptxas orders register operands of wgmma itself; nothing waits because of it
ALLOWED = {"C7519"}
MAX_STACK_BYTES = 0

FORWARD_PACKS, BACKWARD_PACKS = range(1, 17), range(1, 9)  # that the work lists may ask for
SOME_PACKS = (1, 7, 8)  # no grouping; rows left over; heads 64:8


def variants() -> list[tuple[str, launch.Variant]]:
    found = []
    for head_dim in (64, 128):
        for dtype in (torch.bfloat16, torch.float16):
            hardest = head_dim == 128 and dtype == torch.bfloat16
            for a, b in itertools.product((False, True), repeat=2):
                for pack in FORWARD_PACKS if hardest else SOME_PACKS:
                    found.append(("ffa_forward.cu", launch.forward_variant(head_dim, pack, dtype, a, b)[0]))
            for deterministic in (False, True):
                for pack in BACKWARD_PACKS if hardest else SOME_PACKS:
                    found.append(("ffa_backward.cu", launch.backward_variant(head_dim, pack, dtype, deterministic)[0]))
    return found


@pytest.mark.parametrize(
    ("name", "variant"), variants(), ids=lambda x: x if isinstance(x, str) else "-".join(f"{n}{v}" for n, v in x)
)
def test_no_spills_and_no_serialized_wgmma(name: str, variant: launch.Variant) -> None:
    _, log = jit.compile_source(name, jit.expand_source(name), dict(variant))
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    )
    assert stack <= MAX_STACK_BYTES, log
    assert (stores, loads) == (0, 0), log
    assert "serialized" not in log
    assert set(re.findall(r"C7\d\d\d", log)) <= ALLOWED, log
    assert "setmaxnreg ignored" not in log


def test_kernels_around_attention_do_not_spill() -> None:
    for on in itertools.product((0, 1), repeat=2):
        switches = dict(zip(("USE_FP16", "WIRE_FP32"), on, strict=True))
        _, log = jit.compile_source("rows.cu", jit.expand_source("rows.cu"), switches)
        frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
        assert frames
        assert set(frames) == {("0", "0", "0")}, log


def test_every_kernel_waits_for_the_one_before_it() -> None:
    """Launches are programmatic: without the wait a kernel would read what the one before it still writes."""
    for path in jit.kernel_dir().glob("*.cu"):
        kernels = path.read_text().split("__global__")[1:]
        assert kernels
        for kernel in kernels:
            assert kernel.count("wait_for_kernel_before();") == 1, path


def test_head_dims() -> None:
    assert [launch.padded_head_dim(d) for d in (8, 40, 64, 72, 128)] == [64, 64, 64, 128, 128]
    for head_dim in (0, 12, 136, 256):
        with pytest.raises(ValueError, match="head_dim"):
            launch.padded_head_dim(head_dim)
