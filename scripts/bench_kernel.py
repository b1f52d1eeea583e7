"""Times the FFA kernel beside cuDNN (torch SDPA), torch's varlen_attn, compiled flex_attention and FA3 in one run.

    python scripts/bench_kernel.py --json benchmarks/results/kernel_h200.json

TFLOP/s = 4 * (visible pairs) * head_dim * num_heads_q, backward 2.5 times that, over the median time by CUDA events.
Implementations take turns. Before a timed call, work is queued ahead, so that the time is the GPU's; the L2 cache is
flushed; and a call of the same kind has set the clock, since most of them are limited by power. Backward times are of a
whole autograd backward (for ours: delta, zeroing and rounding dq, and the kernel). Work lists are built and uploaded
before timing; the time to build them is a figure of its own. First every implementation's results are compared with
ours.
"""

import argparse
import functools
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_magi import flex_flash_attn
from torchtitan_magi.backends import StageMask
from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.calibrate import MASKS, WINDOW, facts_of_run, gpu_ms
from torchtitan_magi.masks.builders import varlen_causal
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.report.sample_packs import draw_lengths, fill_pack

LISTS = (65536, 150), (1 << 20, 150), (1 << 20, 2000)  # tokens and documents of the packs whose lists are timed
PACKS = (0, 1, 2)  # seeds of histogram packs
PACK_NAMES = [f"histogram {seed}" for seed in PACKS]
DOCUMENTS = (0.31, 0.19, 0.14, 0.11, 0.09, 0.07, 0.05, 0.04)  # eight documents, as fractions of the length


@dataclass
class Case:
    name: str
    tokens: int
    cu_seqlens: list[int]
    mask: str  # name in MASKS
    heads: tuple[int, int] = (64, 8)
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    def slices(self) -> AttnSlices:
        return MASKS[self.mask](self.cu_seqlens)

    @property
    def longest(self) -> int:
        return int(np.diff(self.cu_seqlens).max())


@dataclass
class Row:
    case: str
    tokens: int
    heads: str
    head_dim: int
    dtype: str
    impl: str
    fwd_ms: float
    bwd_ms: float
    fwd_tflops: float
    bwd_tflops: float
    mask: str = ""  # ours: name in MASKS, and tokens of each document, for calibrate --fit
    lengths: str = ""
    build_ms: float = 0.0
    # beside a histogram pack: ours on one causal document of 16k in the same turns, as clocks differ from case to case
    causal_fwd_tflops: float = 0.0
    causal_bwd_tflops: float = 0.0


def eight_documents(tokens: int) -> list[int]:
    lengths = [int(tokens * fraction) | 1 for fraction in DOCUMENTS]
    lengths[0] += tokens - sum(lengths)
    return [0, *np.cumsum(lengths).tolist()]


def histogram_pack(tokens: int, seed: int) -> list[int]:
    """cu_seqlens of documents of the histogram in the order in which they are drawn, the last one cut to fit.

    kernel_h200.json is of packs whose documents differ from these by at most one token; it holds their lengths.
    """
    rng = np.random.default_rng(seed)
    return [0, *fill_pack(lambda: draw_lengths(rng, 1), tokens).cumsum().tolist()]


def cases(which: str) -> Iterator[Case]:
    """Cases of one group: quick, dense, varlen, packs, window, heads, long."""
    k = 1024
    if which == "quick":
        for n in (8 * k, 16 * k, 32 * k):
            yield Case("causal", n, [0, n], "causal")
        yield Case("full", 8 * k, [0, 8 * k], "full")
        for n in (2 * k, 8 * k, 32 * k):
            yield Case("varlen causal", n, eight_documents(n), "causal")
        for n in (8 * k, 64 * k):
            yield Case("histogram 0", n, histogram_pack(n, 0), "causal")
        yield Case("window 1024", 32 * k, [0, 32 * k], "window")
        yield Case("varlen causal", 8 * k, eight_documents(8 * k), "causal", (8, 1))
        yield Case("causal", 16 * k, [0, 16 * k], "causal", (64, 8), 64)
    if which == "dense":
        for kind in ("full", "causal"):
            for n in (2 * k, 8 * k, 16 * k, 32 * k):
                yield Case(kind, n, [0, n], kind)
    if which == "varlen":
        for kind in ("full", "causal"):
            for n in (2 * k, 4 * k, 8 * k, 16 * k, 32 * k):
                yield Case(f"varlen {kind}", n, eight_documents(n), kind)
    if which == "packs":
        for n in (8 * k, 32 * k, 64 * k):
            for seed, name in zip(PACKS, PACK_NAMES, strict=True):
                yield Case(name, n, histogram_pack(n, seed), "causal")
    if which == "window":
        for n in (8 * k, 32 * k):
            yield Case("window 1024", n, [0, n], "window")
            yield Case("block causal 1024", n, [0, n], "block")
    if which == "heads":
        for heads in ((8, 1), (40, 8), (32, 32)):
            for head_dim in (64, 128):
                yield Case("varlen causal", 8 * k, eight_documents(8 * k), "causal", heads, head_dim)
                yield Case("causal", 16 * k, [0, 16 * k], "causal", heads, head_dim)
        for n in (8 * k, 16 * k):
            yield Case("causal", n, [0, n], "causal", (64, 8), 64)
    if which == "long":
        yield Case("causal", 128 * k, [0, 128 * k], "causal")
        yield Case("varlen causal", 128 * k, eight_documents(128 * k), "causal")
        yield Case("window 1024", 128 * k, [0, 128 * k], "window")
        yield Case("block causal 1024", 128 * k, [0, 128 * k], "block")
        for seed, name in zip(PACKS, PACK_NAMES, strict=True):
            yield Case(name, 256 * k, histogram_pack(256 * k, seed), "causal")


GROUPS = ("quick", "dense", "varlen", "packs", "window", "heads", "long")


# ------------------------------------------------------------------------------------------------------ implementations
# Each returns the attention of (q, k, v) [T, H, D], or None where it cannot do the case.
def cudnn(case: Case) -> Callable[..., Tensor] | None:
    if len(case.cu_seqlens) > 2 or case.mask not in ("full", "causal"):
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*heads_first, is_causal=case.mask == "causal", enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


def torch_varlen(case: Case) -> Callable[..., Tensor] | None:
    if case.mask == "block":
        return None
    from torch.nn.attention.varlen import varlen_attn

    cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device="cuda")
    longest = case.longest
    window = {"full": (-1, -1), "causal": (-1, 0), "window": (WINDOW - 1, 0)}[case.mask]
    return lambda q, k, v: varlen_attn(q, k, v, cu, cu, longest, longest, window_size=window)


def flex(case: Case) -> Callable[..., Tensor] | None:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document = torch.repeat_interleave(
        torch.arange(len(case.cu_seqlens) - 1), torch.tensor(np.diff(case.cu_seqlens))
    ).cuda()

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        same = document[q] == document[k]
        if case.mask == "full":
            return same
        if case.mask == "window":
            return same & (k <= q) & (k > q - WINDOW)
        return same & (k <= q) if case.mask == "causal" else same & (k // WINDOW <= q // WINDOW)

    mask = create_block_mask(visible, None, None, case.tokens, case.tokens, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)

    return run


def flash_attention_3(case: Case) -> Callable[..., Tensor] | None:
    try:
        from flash_attn_interface import flash_attn_varlen_func
    except ImportError:
        return None
    if case.mask == "block":
        return None
    cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device="cuda")
    longest = case.longest
    window = (WINDOW - 1, 0) if case.mask == "window" else (-1, -1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_varlen_func(
            q, k, v, cu, cu, longest, longest, causal=case.mask == "causal", window_size=window
        )
        return out[0] if isinstance(out, tuple) else out

    return run


OTHERS = {"cudnn": cudnn, "varlen_attn": torch_varlen, "flex": flex, "fa3": flash_attention_3}


def take_turns(runs: dict[str, Callable[[], object]], wanted: float) -> dict[str, float]:
    """Median GPU times, ms. Each run is timed for about `wanted` ms; an untimed call of it precedes each timed one."""
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def once(run: Callable[[], object]) -> float:
        return gpu_ms(run, 2_000_000, lambda: (run(), cache.zero_()))

    first = [once(run) for _ in range(2) for run in runs.values()]
    rounds = max(5, round(wanted * len(first) / sum(first)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(once(runs[name]))
    return {name: statistics.median(x) for name, x in times.items()}


@functools.cache
def yardstick() -> tuple[float, dict[str, Callable[[], object]]]:
    """Ours on one causal document of 16k tokens: TFLOP of a forward, and the runs."""
    case = Case("causal", 16384, [0, 16384], "causal")
    make = partial(torch.randn, device="cuda", dtype=case.dtype, requires_grad=True)
    q, k, v = (make(case.tokens, heads, case.head_dim) for heads in (case.heads[0], case.heads[1], case.heads[1]))
    slices = case.slices()
    out = flex_flash_attn(q, k, v, slices)[0]
    dout = torch.randn_like(out)
    return 4e-12 * slices.area * case.head_dim * case.heads[0], {
        "forward": torch.no_grad()(partial(flex_flash_attn, q, k, v, slices)),
        "backward": partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True),
    }


def build_ms(slices: AttnSlices, tokens: int, heads: tuple[int, int]) -> float:
    """Host ms to build work lists, forward and backward: the least of 30, as other work on the machine only adds."""
    attn, times = FfaBlockAttn("cuda"), []
    for _ in range(30):
        fresh = AttnSlices(slices.table)
        start = time.perf_counter()
        attn.prepare(StageMask(fresh, tokens, tokens, *heads))
        times.append(time.perf_counter() - start)
    return round(1e3 * min(times), 2)


def lists() -> list[dict[str, float]]:
    """Host time of the lists of packs of many documents."""
    found = []
    for tokens, documents in LISTS:
        cuts = np.sort(np.random.default_rng(0).choice(np.arange(1, tokens), documents - 1, replace=False))
        slices = varlen_causal(np.concatenate([[0], cuts, [tokens]]))
        found.append({"tokens": tokens, "documents": documents, "build_ms": build_ms(slices, tokens, (64, 8))})
    return found


def measure(case: Case, impls: list[str], ms: int) -> Iterator[Row]:
    heads_q, heads_kv = case.heads
    make = lambda h: torch.randn(case.tokens, h, case.head_dim, device="cuda", dtype=case.dtype)  # noqa: E731
    q, k, v = (make(h).requires_grad_() for h in (heads_q, heads_kv, heads_kv))
    dout = make(heads_q)
    slices = case.slices()
    flops = 4 * slices.area * case.head_dim * heads_q
    lengths = " ".join(map(str, np.diff(case.cu_seqlens).tolist()))

    ours = flex_flash_attn(q, k, v, slices)[0]  # the first call makes and uploads the lists
    grads = torch.autograd.grad(ours, (q, k, v), dout)
    runs: dict[str, Callable[..., Tensor] | None] = {
        "ours": lambda q, k, v: flex_flash_attn(q, k, v, slices)[0],
        "ours deterministic": lambda q, k, v: flex_flash_attn(q, k, v, slices, deterministic=True)[0],
        **{name: OTHERS[name](case) for name in OTHERS if name in impls},
    }
    forwards, backwards = {}, {}
    for name, run in runs.items():
        if run is None or name not in impls:
            continue
        try:
            out = run(q, k, v)
            theirs = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"  {name}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        for a, b in zip((ours, *grads), (out, *theirs), strict=True):
            a, b = a.detach().float(), b.detach().float()
            error = float((a - b).norm() / b.norm())
            assert error < 2e-2, f"{name} and ours differ by {error:.1e} on {case}"

        forwards[name] = torch.no_grad()(partial(run, q, k, v))
        backwards[name] = partial(torch.autograd.grad, out, (q, k, v), dout, retain_graph=True)
    del out, theirs, grads
    names, causal = list(forwards), (0.0, 0.0)
    if case.name in PACK_NAMES:
        tflop, runs_of_causal = yardstick()
        forwards["causal"], backwards["causal"] = runs_of_causal["forward"], runs_of_causal["backward"]
    times = take_turns(forwards, ms), take_turns(backwards, ms)
    if case.name in PACK_NAMES:
        causal = round(1e3 * tflop / times[0]["causal"], 1), round(2.5e3 * tflop / times[1]["causal"], 1)
    for name in names:
        fwd, bwd = times[0][name], times[1][name]
        yield Row(
            case.name, case.tokens, f"{heads_q}:{heads_kv}", case.head_dim, str(case.dtype).removeprefix("torch."),
            name,
            round(fwd, 4), round(bwd, 4), round(flops / fwd / 1e9, 1), round(2.5 * flops / bwd / 1e9, 1),
            *((case.mask, lengths, build_ms(slices, case.tokens, case.heads)) if name == "ours" else ("", "", 0.0)),
            *causal,
        )  # fmt: skip


def together(rows: list[Row]) -> list[Row]:
    """The histogram packs of each length as one case: all their work in the sum of their times."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if row.case in PACK_NAMES:
            groups.setdefault((row.tokens, row.impl), []).append(row)
    sums = []
    for packs in groups.values():
        if len(packs) == len(PACKS):
            fwd, bwd = sum(row.fwd_ms for row in packs), sum(row.bwd_ms for row in packs)
            work = sum(row.fwd_ms * row.fwd_tflops for row in packs), sum(row.bwd_ms * row.bwd_tflops for row in packs)
            tflops = round(work[0] / fwd, 1), round(work[1] / bwd, 1)
            # Time that causal 16k would take for all their work, at its speed in the turns of each.
            as_causal = (
                sum(row.fwd_ms * row.fwd_tflops / row.causal_fwd_tflops for row in packs),
                sum(row.bwd_ms * row.bwd_tflops / row.causal_bwd_tflops for row in packs),
            )
            sums.append(replace(
                packs[0], case="histogram, all", lengths="", fwd_ms=round(fwd, 4), bwd_ms=round(bwd, 4),
                fwd_tflops=tflops[0], bwd_tflops=tflops[1], build_ms=0.0,
                causal_fwd_tflops=round(work[0] / as_causal[0], 1), causal_bwd_tflops=round(work[1] / as_causal[1], 1),
            ))  # fmt: skip
    return sums


def print_table(rows: list[Row]) -> None:
    names = list(dict.fromkeys(row.impl for row in rows))
    print(f"{'TFLOP/s forward / backward':38s}" + "".join(f"{name:>20s}" for name in names))
    for key in dict.fromkeys((r.case, r.tokens, r.heads, r.head_dim) for r in rows):
        cells = {
            r.impl: f"{r.fwd_tflops:.0f} / {r.bwd_tflops:.0f}"
            for r in rows
            if (r.case, r.tokens, r.heads, r.head_dim) == key
        }
        print(
            f"{key[0]:18s}{key[1]:>8d} {key[2]:>6s} {key[3]:>4d}"
            + "".join(f"{cells.get(name, '-'):>20s}" for name in names)
        )
    for row in rows:
        if row.impl == "ours" and row.causal_fwd_tflops:
            forward, backward = row.fwd_tflops / row.causal_fwd_tflops, row.bwd_tflops / row.causal_bwd_tflops
            print(f"{row.case:18s}{row.tokens:>8d}  {forward:.2f} / {backward:.2f} of causal 16k in the same turns")


def describe_run(commit: str | None) -> dict[str, Any]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return facts_of_run(commit) | {"cudnn": torch.backends.cudnn.version(), "sms": sms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--groups",
        nargs="+",
        default=[g for g in GROUPS if g != "quick"],
        choices=GROUPS,
        help="groups of cases (default: %(default)s)",
    )
    parser.add_argument(
        "--impls",
        nargs="+",
        default=["ours", "ours deterministic", "cudnn", "varlen_attn", "fa3"],
        help="implementations, compared in turns; what is not installed is left out (default: %(default)s)",
    )
    parser.add_argument("--ms", type=int, default=100, help="GPU time of each measurement (default: %(default)s)")
    parser.add_argument("--commit", help="commit of the tree, where git is missing")
    parser.add_argument("--json", help="JSON file to write")
    args = parser.parse_args()
    rows: list[Row] = []
    facts = describe_run(args.commit) | {"lists": lists()}
    print(*facts["lists"], sep="\n")
    for group in args.groups:
        for case in cases(group):
            torch.manual_seed(0)
            try:
                rows += list(measure(case, args.impls, args.ms))
            except torch.OutOfMemoryError:
                print(f"  out of memory: {case}")
            torch.cuda.empty_cache()
            if args.json:  # after every case: a run that is cut short leaves what it has
                with open(args.json, "w") as file:
                    json.dump(facts | {"rows": [asdict(row) for row in rows + together(rows)]}, file, indent=1)
    print_table(rows + together(rows))
    assert all(math.isfinite(row.fwd_tflops) for row in rows)


if __name__ == "__main__":
    main()
