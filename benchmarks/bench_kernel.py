"""Times the FFA kernel beside cuDNN (torch SDPA), torch's varlen_attn, flex_attention and FA3's forward in one run.

    python benchmarks/bench_kernel.py --json benchmarks/results/kernel_h200.json
    python benchmarks/bench_kernel.py --sustained --groups masks --json benchmarks/results/kernel_sustained_h200.json

TFLOP/s of a forward: 2 * (visible pairs) * num_heads_q * (head_dim + value_dim) over the median time by CUDA events;
of a backward with 3 products over head_dim and 2 over value_dim. Implementations take turns. Before a timed call, work
is queued ahead, so that the time is the GPU's; the L2 cache is flushed; and a call of the same kind has set the clock,
since most of them are limited by power. With --sustained each runs without a pause instead, as in training, and clock
and power stand beside; short forwards (SHORT_MS) are replayed as CUDA graphs then. Backward times are of a whole
autograd backward (for ours: delta, zeroing and rounding dq, and the kernel). Work lists are built and uploaded before
timing; the time to build them is a figure of its own. FA3 is the wheel fa3-fwd, if it is installed. First every
implementation's results are compared with ours.
"""

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from figures import part, recording_parser, result, save, side_by_side, table, thousands
from rivals import ATTENTIONS, Case
from timing import Sustained, sustained, take_turns

from torchtitan_magi import flex_flash_attn
from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.backends.interface import StageMask
from torchtitan_magi.calibrate import MASKS, WINDOW, facts_of_run
from torchtitan_magi.masks.builders import varlen_causal
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.sizing.sample_packs import draw_lengths, fill_pack

LISTS = (65536, 150), (1 << 20, 150), (1 << 20, 2000)  # tokens and documents of the packs whose lists are timed
PACKS = (0, 1, 2)  # seeds of histogram packs
PACK_NAMES = [f"histogram {seed}" for seed in PACKS]
DOCUMENTS = (0.31, 0.19, 0.14, 0.11, 0.09, 0.07, 0.05, 0.04)  # eight documents, as fractions of the length
CLOSE = 2e-2  # relative difference of results: roundings to bf16
K = 1024
KINDS = ("full", "causal")


@dataclass
class Row:
    case: str
    tokens: int
    heads: str
    head_dim: int
    value_dim: int
    impl: str
    fwd_ms: float
    fwd_tflops: float
    bwd_ms: float = 0.0  # 0: forward only
    bwd_tflops: float = 0.0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    # With --sustained: MHz and W
    fwd_clock: float = 0.0
    fwd_power: float = 0.0
    bwd_clock: float = 0.0
    bwd_power: float = 0.0
    mask: str = ""  # ours: name in MASKS, and tokens of each document, for calibrate --fit
    lengths: str = ""
    build_ms: float = 0.0
    # ours on the causal documents of `beside` in the same turns, as clocks differ from case to case
    causal_fwd_tflops: float = 0.0
    causal_bwd_tflops: float = 0.0


def one(tokens: int) -> tuple[int, int]:
    return (0, tokens)


def eight_documents(tokens: int) -> tuple[int, ...]:
    lengths = [int(tokens * fraction) | 1 for fraction in DOCUMENTS]
    lengths[0] += tokens - sum(lengths)
    return (0, *np.cumsum(lengths).tolist())


def histogram_pack(tokens: int, seed: int) -> tuple[int, ...]:
    """cu_seqlens of documents of the histogram in the order in which they are drawn, the last one cut to fit."""
    rng = np.random.default_rng(seed)
    return (0, *fill_pack(lambda: draw_lengths(rng, 1), tokens).cumsum().tolist())


def histogram_packs(tokens: int) -> list[Case]:
    return [Case(name, histogram_pack(tokens, seed)) for seed, name in zip(PACKS, PACK_NAMES, strict=True)]


def local(tokens: int) -> tuple[Case, Case]:
    return Case("window 1024", one(tokens), "window"), Case("block causal 1024", one(tokens), "block")


def trees(name: str, tokens: int, root: int, children: int, length: int) -> Case:
    """As many trees as fit, each of a root and its children."""
    lengths = [root, *[length] * children]
    count = tokens // sum(lengths)
    parents = [parent for i in range(count) for parent in (-1, *[i * len(lengths)] * children)]
    return Case(name, (0, *np.cumsum(lengths * count).tolist()), "tree", tuple(parents))


def beside(case: Case) -> tuple[int, ...] | None:
    """cu_seqlens of causal documents that are timed in the same turns: one of 16k beside a histogram pack, beside trees
    those of one length that see about as many pairs."""
    if case.mask == "tree":
        count = round(case.tokens**2 / (2 * case.slices().area))
        return tuple(np.linspace(0, case.tokens, count + 1).astype(int).tolist())
    return one(16 * K) if case.name in PACK_NAMES else None


def lognormal_pack(tokens: int) -> tuple[int, ...]:
    """cu_seqlens of documents of lognormal lengths, a median of 1.5k, in the order in which they are drawn."""
    rng = np.random.default_rng(0)
    draw = lambda: np.maximum(rng.lognormal(np.log(1500), 1.2, 1).astype(np.int64), 16)  # noqa: E731
    return (0, *fill_pack(draw, tokens).cumsum().tolist())


def variants() -> Iterator[Case]:
    """Wide heads, softcap, sinks, narrow windows."""
    wide = [Case("causal", one(n), heads=(32, 8), dims=(256, 256)) for n in (8 * K, 16 * K)]
    latent = [Case("causal", one(n), dims=(192, 128)) for n in (8 * K, 16 * K)]
    plain = [Case("causal", one(n)) for n in (8 * K, 16 * K)]
    narrow = [Case("window 128", one(32 * K), "window", dims=(dim, dim), width=128) for dim in (128, 64)]
    small = Case("causal", one(16 * K), dims=(64, 64))
    yield from [*wide, *latent, replace(latent[1], heads=(128, 128)), replace(wide[1], dims=(192, 192))]
    yield from [*plain, *narrow, small]
    yield from [replace(case, softcap=50.0) for case in (plain[1], wide[1], latent[1])]
    yield from [replace(case, sinks=True) for case in (*plain, *narrow, small)]


WITHOUT_SINKS = "ours without sinks"  # in the same turns, as clocks differ from case to case
GROUPS: dict[str, tuple[Case, ...]] = {
    "masks": (
        *(Case("causal", one(n)) for n in (8 * K, 16 * K, 32 * K)),
        *(Case("full", one(n), "full") for n in (8 * K, 16 * K)),
        *(Case("varlen causal", eight_documents(n)) for n in (2 * K, 8 * K, 32 * K)),
        *(Case("histogram 0", histogram_pack(n, 0)) for n in (8 * K, 64 * K)),
        Case("lognormal", lognormal_pack(64 * K)),
        Case("window 1024", one(32 * K), "window"),
        Case("varlen causal", eight_documents(8 * K), heads=(8, 1)),
        Case("causal", one(16 * K), dims=(64, 64)),
    ),
    "dense": tuple(Case(kind, one(n), kind) for kind in KINDS for n in (2 * K, 8 * K, 16 * K, 32 * K)),
    "varlen": tuple(
        Case(f"varlen {kind}", eight_documents(n), kind)
        for kind in KINDS
        for n in (2 * K, 4 * K, 8 * K, 16 * K, 32 * K)
    ),
    "packs": tuple(case for n in (8 * K, 32 * K, 64 * K) for case in histogram_packs(n)),
    "window": tuple(case for n in (8 * K, 32 * K) for case in local(n)),
    "heads": (
        *(
            Case(name, cu_seqlens, heads=heads, dims=(dim, dim))
            for heads in ((8, 1), (40, 8), (32, 32))
            for dim in (64, 128)
            for name, cu_seqlens in (("varlen causal", eight_documents(8 * K)), ("causal", one(16 * K)))
        ),
        *(Case("causal", one(n), dims=(64, 64)) for n in (8 * K, 16 * K)),
    ),
    "long": (
        Case("causal", one(128 * K)),
        Case("varlen causal", eight_documents(128 * K)),
        *local(128 * K),
        *histogram_packs(256 * K),
    ),
    "variants": tuple(variants()),
    "trees": (
        trees("8k with 8 of 1k", 32 * K, 8 * K, 8, K),
        trees("4k with 8 of 512", 32 * K, 4 * K, 8, 512),
        trees("3k with 28 of 1k", 32 * K, 3 * K, 28, K),
    ),
}
BY_DEFAULT = ("dense", "varlen", "packs", "window", "heads", "long")


Times = dict[str, float] | dict[str, Sustained]


@functools.cache
def yardstick(cu_seqlens: tuple[int, ...]) -> tuple[float, dict[str, Callable[[], object]]]:
    """Ours on causal documents: TFLOP of a forward, and the runs."""
    case = Case("causal", cu_seqlens)
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    q, k, v = (make(case.tokens, heads, case.dims[0]) for heads in (case.heads[0], case.heads[1], case.heads[1]))
    slices = case.slices()
    out = flex_flash_attn(q, k, v, slices)[0]
    dout = torch.randn_like(out)
    return 4e-12 * slices.area * case.dims[0] * case.heads[0], {
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


def measure(case: Case, impls: list[str], ms: float, is_sustained: bool) -> Iterator[Row]:
    (heads_q, heads_kv), (dim, value_dim) = case.heads, case.dims
    make = lambda *shape: torch.randn(case.tokens, *shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    shapes = (heads_q, dim), (heads_kv, dim), (heads_kv, value_dim)
    qkv, dout = tuple(make(*shape).requires_grad_() for shape in shapes), make(heads_q, value_dim)
    slices = case.slices()
    pairs = 2e-9 * slices.area * heads_q
    forwards, backwards = {}, {}
    reference: list[torch.Tensor] = []
    names = dict.fromkeys(["ours", *impls, *[WITHOUT_SINKS] * case.sinks])  # ours makes and uploads the lists
    for name in names:
        run = ATTENTIONS["ours"](replace(case, sinks=False)) if name == WITHOUT_SINKS else ATTENTIONS[name](case)
        if run is None:
            continue
        try:
            out = run(*qkv)
            results = [out]
            if out.requires_grad and name != "fa3":
                results += torch.autograd.grad(out, qkv, dout, retain_graph=True)
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"  {name}: {str(error).splitlines()[0][:100]}", flush=True)
            continue
        reference = reference or [x.detach().float() for x in results]
        compared = [] if name == WITHOUT_SINKS else zip(reference, results, strict=False)  # FA3 has no gradients
        for a, b in compared:
            error = float((a - b.detach().float()).norm() / a.norm())
            assert error < CLOSE, f"{name} and ours differ by {error:.1e} on {case}"
        if name in (*impls, WITHOUT_SINKS):
            forwards[name] = torch.no_grad()(partial(run, *qkv))
            if len(results) > 1:
                backwards[name] = partial(torch.autograd.grad, out, qkv, dout, retain_graph=True)
    del reference, results, out
    timed_names, causal, documents = list(forwards), {}, None if is_sustained else beside(case)
    if documents:
        tflop, runs_of_causal = yardstick(documents)
        forwards["causal"], backwards["causal"] = runs_of_causal["forward"], runs_of_causal["backward"]
    forward: Times = sustained(forwards, ms, can_replay=True) if is_sustained else take_turns(forwards, ms)
    backward: Times = sustained(backwards, ms) if is_sustained else take_turns(backwards, ms)
    if documents:
        causal = {
            "causal_fwd_tflops": round(1e3 * tflop / forward["causal"], 1),
            "causal_bwd_tflops": round(2.5e3 * tflop / backward["causal"], 1),
        }
    fits = case.mask in MASKS and case.is_plain and dim == value_dim and case.width == WINDOW
    for name in timed_names:
        fwd, bwd = figures(forward[name]), figures(backward[name]) if name in backward else None
        row = Row(
            case.name, case.tokens, f"{heads_q}:{heads_kv}", dim, value_dim, name, fwd["ms"],
            round(pairs * (dim + value_dim) / fwd["ms"], 1), window=case.width if case.mask == "window" else 0,
            softcap=case.softcap, sinks=case.sinks, **causal,
            **{f"fwd_{key}": value for key, value in fwd.items() if key != "ms"},
        )  # fmt: skip
        if bwd:
            tflops = round(pairs * (3 * dim + 2 * value_dim) / bwd["ms"], 1)
            row = replace(row, bwd_tflops=tflops, **{f"bwd_{key}": value for key, value in bwd.items()})
        if name == "ours" and fits:
            lengths = " ".join(map(str, np.diff(case.cu_seqlens).tolist()))
            row = replace(row, mask=case.mask, lengths=lengths, build_ms=build_ms(slices, case.tokens, case.heads))
        yield row


def figures(time: float | Sustained) -> dict[str, float]:
    """ms, and where it was sustained clock and power."""
    if isinstance(time, float):
        return {"ms": round(time, 4)}
    return {"ms": round(time.ms, 4), "clock": round(time.clock), "power": round(time.power)}


def together(rows: list[Row]) -> list[Row]:
    """The histogram packs of each length as one case: all their work in the sum of their times."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        if row.case in PACK_NAMES:
            groups.setdefault((row.tokens, row.impl), []).append(row)
    sums = []
    for packs in groups.values():
        if len(packs) == len(PACKS):
            sum_of = replace(packs[0], case="histogram, all", lengths="", build_ms=0.0)
            for way in ("fwd", "bwd"):
                ms, tflops, causal = ([getattr(row, name) for row in packs] for name in names_of(way))
                if not sum(ms):
                    continue  # forward only
                work = [time * speed for time, speed in zip(ms, tflops, strict=True)]
                of_sum = sum(ms), sum(work) / sum(ms)
                if all(causal):  # over the time of causal 16k for all the work, at its speed in the turns of each
                    of_sum += (sum(work) / sum(part / speed for part, speed in zip(work, causal, strict=True)),)
                values = zip(names_of(way), of_sum, strict=False)
                sum_of = replace(
                    sum_of, **{name: round(value, 4 if name.endswith("ms") else 1) for name, value in values}
                )
            sums.append(sum_of)
    return sums


def names_of(way: str) -> tuple[str, str, str]:
    """Fields of a direction: ms, TFLOP/s, those of causal 16k."""
    return f"{way}_ms", f"{way}_tflops", f"causal_{way}_tflops"


# -------------------------------------------------------------------------------------------------------------- tables


def mask_name(case: str) -> str:
    return case.replace("histogram, all", "histogram, three packs").replace("varlen", "8 documents,")


def speeds(by: dict[str, dict[str, Any]], way: str, names: Iterable[str]) -> list[str | None]:
    """TFLOP/s of each implementation that did the case."""
    return [f"{by[name][f'{way}_tflops']:.0f}" if name in by else None for name in names]


def kernel_table(found: dict[str, Any]) -> str:
    """All masks; histogram packs of one length together."""
    rows = [row for row in found["rows"] if not row["case"].removeprefix("histogram ").isdigit()]
    lines, flex = [], ["flex"] * any(row["impl"] == "flex" for row in rows)
    for case, by in side_by_side(rows, "impl", "case", "tokens", "heads", "head_dim").items():
        name, tokens, *heads = case
        forward = speeds(by, "fwd", ("ours", "fa3", "cudnn", "varlen_attn", *flex))
        backward = speeds(by, "bwd", ("ours", "ours deterministic", "cudnn", "varlen_attn", *flex))
        lines.append([mask_name(name), thousands(tokens), *heads, *forward, *backward])
    columns = ["mask", "tokens", "heads", "head_dim", "forward: ours", "FA3", "cuDNN", "varlen_attn", *flex]
    return table([*columns, "backward: ours", "deterministic", "cuDNN", "varlen_attn", *flex], lines)


def sustained_table(found: dict[str, Any]) -> str:
    """Without pauses, beside FlashAttention-3's forward."""
    lines = []
    for case, by in side_by_side(found["rows"], "impl", "case", "tokens", "heads", "head_dim").items():
        name, tokens, *heads = case
        clocks = [f"{by[impl]['fwd_clock']:.0f}" if impl in by else None for impl in ("ours", "fa3")]
        lines.append([
            mask_name(name).replace("histogram 0", "histogram"), thousands(tokens), *heads,
            *speeds(by, "fwd", ("ours", "fa3")), ratio(by, "fwd", "fa3"), *clocks,
            *speeds(by, "bwd", ("ours", "cudnn")), ratio(by, "bwd", "cudnn"),
        ])  # fmt: skip
    columns = ["mask", "tokens", "heads", "head_dim", "forward: ours", "FA3", "ratio", "MHz: ours", "FA3"]
    return table([*columns, "backward: ours", "cuDNN", "ratio"], lines)


def ratio(by: dict[str, dict[str, Any]], way: str, other: str) -> str | None:
    name = f"{way}_tflops"
    return f"{by['ours'][name] / by[other][name]:.2f}" if {"ours", other} <= by.keys() else None


def variants_table(found: dict[str, Any]) -> str:
    """Wide heads, softcap, sinks and a narrow window."""
    lines = []
    fields = ("head_dim", "value_dim", "heads", "tokens", "window", "softcap", "sinks")
    for case, by in side_by_side(found["rows"], "impl", *fields).items():
        dim, value_dim, heads, tokens, window, softcap, sinks = case
        extras = [f"window {window}"] * bool(window) + [f"softcap {softcap:g}"] * bool(softcap) + ["sinks"] * sinks
        forward = speeds(by, "fwd", ("ours", WITHOUT_SINKS, "cudnn", "fa3", "varlen_attn"))
        backward = speeds(by, "bwd", ("ours", WITHOUT_SINKS, "cudnn", "varlen_attn"))
        lines.append([f"{dim}/{value_dim}", heads, thousands(tokens), ", ".join(extras), *forward, *backward])
    columns = ["head_dim of q, k / v", "heads", "tokens", ""]
    columns += ["forward: ours", "without sinks", "cuDNN", "FA3", "varlen_attn"]
    return table([*columns, "backward: ours", "without sinks", "cuDNN", "varlen_attn"], lines)


def lists_table(found: dict[str, Any]) -> str:
    lines = [[f"{row['tokens']:,}", f"{row['documents']:,}", f"{row['build_ms']:.2f}"] for row in found["lists"]]
    return table(["tokens", "documents", "ms"], lines)


def causal_table(found: dict[str, Any]) -> str:
    """Our kernel in TFLOP/s on the rows timed by turns with causal documents, and its share of theirs."""
    lines = []
    for row in found["rows"]:
        if row["impl"] == "ours" and row["causal_fwd_tflops"]:
            line = [row["case"], thousands(row["tokens"])]
            for way in ("fwd", "bwd"):
                mine, causal = row[f"{way}_tflops"], row[f"causal_{way}_tflops"]
                line += [f"{mine:.0f}", f"{causal:.0f}", f"{mine / causal:.2f}"]
            lines.append(line)
    columns = ["mask", "tokens", "forward", "causal documents", "share", "backward", "causal documents", "share"]
    return table(columns, lines)


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "kernel": part(kernel_table, "kernel_h200"),
    "kernel-sustained": part(sustained_table, "kernel_sustained_h200"),
    "kernel-variants": part(variants_table, "variants_h200"),
    "kernel-trees": part(causal_table, "kernel_trees_h200"),
    "kernel-lists": lambda: lists_table(result("kernel_h200")),
}


def describe_run(commit: str | None) -> dict[str, Any]:
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return facts_of_run(commit) | {"cudnn": torch.backends.cudnn.version(), "sms": sms}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--groups", nargs="+", metavar="GROUP", default=BY_DEFAULT, choices=GROUPS,
                        help=f"of cases: {', '.join(GROUPS)}")  # fmt: skip
    parser.add_argument("--impls", nargs="+", default=[name for name in ATTENTIONS if name != "flex"],
                        choices=ATTENTIONS, help="compared in turns; what is not installed is left out")  # fmt: skip
    parser.add_argument("--ms", type=float, default=100, help="GPU time of each measurement")
    parser.add_argument("--sustained", action="store_true", help="each without a pause, with clock and power")
    arguments = parser.parse_args()
    rows: list[Row] = []
    facts = describe_run(arguments.commit) | {"lists": lists()}
    print(lists_table(facts))
    for group in arguments.groups:
        for case in GROUPS[group]:
            torch.manual_seed(0)
            try:
                rows += measure(case, arguments.impls, arguments.ms, arguments.sustained)
            except torch.OutOfMemoryError:
                print(f"  out of memory: {case}")
            torch.cuda.empty_cache()
            found = facts | {"rows": [asdict(row) for row in rows + together(rows)]}
            save(found, arguments.output)  # after each: a run that is cut short leaves what it has
    as_table = variants_table if "variants" in arguments.groups else kernel_table
    print((sustained_table if arguments.sustained else as_table)(found))
    print(causal_table(found))


if __name__ == "__main__":
    main()
