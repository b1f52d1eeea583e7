"""Times the FFA kernel beside FlashAttention-3's forward, cuDNN and torch's varlen_attn, by turns in bursts.

    python benchmarks/bench_kernel.py --json benchmarks/results/kernel_h200.json
    python benchmarks/bench_kernel.py --groups masks --impls ours fa3

Each implementation runs without a pause for 25 ms, ours before and after each other one: most of them are limited by
power, so the clock is that of a warm GPU, as in training. What counts are ratios: the other's time over that of our
neighbouring bursts, the median and half of the distance between the quartiles. TFLOP/s of a forward: 2 * (visible
pairs) * num_heads_q * (head_dim + value_dim) over the median time of a call; of a backward with 3 products over
head_dim and 2 over value_dim. Short forwards (SHORT_MS) are replayed as CUDA graphs. Backward times are of a whole
autograd backward (for ours: delta, zeroing and rounding dq, and the kernel). Work lists are built and uploaded before
timing; the time to build them is a figure of its own. FA3 is the wheel fa3-fwd, "cudnn packed" takes the wheel
nvidia-cudnn-frontend; what is not installed is left out. First every implementation's results are compared with ours:
one that differs, or fails, is named and left out.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from figures import RESULTS, part, recording_parser, result, save, side_by_side, sources, table, thousands
from rivals import ATTENTIONS, Attention, Case
from timing import Time, in_bursts

from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.backends.interface import StageMask
from torchtitan_magi.calibrate import MASKS, WINDOW, facts_of_run
from torchtitan_magi.masks.builders import varlen_causal
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.sizing.sample_packs import draw_lengths, fill_pack

LISTS = (65536, 150), (1 << 20, 150), (1 << 20, 2000)  # tokens and documents of the packs whose lists are timed
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
    # of others: their time over that of ours, and how far apart its quartiles are, halved
    fwd_ratio: float = 0.0
    fwd_spread: float = 0.0
    bwd_ratio: float = 0.0
    bwd_spread: float = 0.0
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    mask: str = ""  # ours: name in MASKS, and tokens of each document, for calibrate --fit
    lengths: str = ""
    build_ms: float = 0.0
    # ours on the causal documents of `beside`, in the same turns
    causal_fwd_tflops: float = 0.0
    causal_bwd_tflops: float = 0.0


def one(tokens: int) -> tuple[int, int]:
    return (0, tokens)


def eight_documents(tokens: int) -> tuple[int, ...]:
    lengths = [int(tokens * fraction) | 1 for fraction in DOCUMENTS]
    lengths[0] += tokens - sum(lengths)
    return (0, *np.cumsum(lengths).tolist())


def histogram_pack(tokens: int) -> tuple[int, ...]:
    """cu_seqlens of documents of the histogram in the order in which they are drawn, the last one cut to fit."""
    rng = np.random.default_rng(0)
    return (0, *fill_pack(lambda: draw_lengths(rng, 1), tokens).cumsum().tolist())


def local(tokens: int) -> tuple[Case, Case]:
    return Case("window 1024", one(tokens), "window"), Case("block causal 1024", one(tokens), "block")


def trees(name: str, tokens: int, root: int, children: int, length: int) -> Case:
    """As many trees as fit, each of a root and its children."""
    lengths = [root, *[length] * children]
    count = tokens // sum(lengths)
    parents = [parent for i in range(count) for parent in (-1, *[i * len(lengths)] * children)]
    return Case(name, (0, *np.cumsum(lengths * count).tolist()), "tree", tuple(parents))


def beside(case: Case) -> Case | None:
    """Causal documents that are timed in the same turns as trees, of one length, that see about as many pairs."""
    if case.mask != "tree":
        return None
    count = round(case.tokens**2 / (2 * case.slices().area))
    return Case("causal", tuple(np.linspace(0, case.tokens, count + 1).astype(int).tolist()))


def lognormal_pack(tokens: int) -> tuple[int, ...]:
    """cu_seqlens of documents of lognormal lengths, a median of 1.5k, in the order in which they are drawn."""
    rng = np.random.default_rng(0)
    draw = lambda: np.maximum(rng.lognormal(np.log(1500), 1.2, 1).astype(np.int64), 16)  # noqa: E731
    return (0, *fill_pack(draw, tokens).cumsum().tolist())


def packs(tokens: int, **options: Any) -> tuple[Case, Case]:
    return (
        Case("histogram", histogram_pack(tokens), **options), Case("lognormal", lognormal_pack(tokens), **options)
    )  # fmt: skip


def causal(*lengths: int, **options: Any) -> tuple[Case, ...]:
    return tuple(Case("causal", one(n), **options) for n in lengths)


def eight(*lengths: int, **options: Any) -> tuple[Case, ...]:
    return tuple(Case("varlen causal", eight_documents(n), **options) for n in lengths)


def variants() -> Iterator[Case]:
    """Wide heads, softcap, sinks, narrow windows."""
    wide: dict[str, Any] = {"heads": (32, 8), "dims": (256, 256)}
    latent: dict[str, Any] = {"dims": (192, 128)}
    yield from [*causal(8 * K, 16 * K, **wide), *eight(32 * K, **wide)]
    for heads in ((16, 4), (24, 4), (16, 2)):
        yield from causal(16 * K, heads=heads, dims=(256, 256))
    yield from [*causal(8 * K, 16 * K, **latent), *causal(16 * K, heads=(128, 128), **latent), *eight(32 * K, **latent)]
    yield from causal(16 * K, heads=(32, 8), dims=(192, 192))
    for options in ({}, wide, latent):
        yield from causal(16 * K, softcap=50.0, **options)
    narrow = [Case("window 128", one(32 * K), "window", dims=(dim, dim), width=128) for dim in (128, 64)]
    plain = [*causal(8 * K, 16 * K), *causal(16 * K, dims=(64, 64))]
    yield from [*narrow, *(replace(case, sinks=True) for case in (*plain, *narrow))]


WITHOUT_SINKS, BESIDE = "ours without sinks", "causal documents"  # in the same turns
NARROW = {"dims": (64, 64)}
GROUPS: dict[str, tuple[Case, ...]] = {
    "masks": (
        *causal(8 * K, 16 * K, 32 * K),
        *(Case("full", one(n), "full") for n in (8 * K, 16 * K)),
        *eight(2 * K, 8 * K, 32 * K),
        *packs(64 * K),
        Case("window 1024", one(32 * K), "window"),
        *eight(8 * K, heads=(8, 1)),
        *causal(16 * K, **NARROW),
        packs(32 * K, **NARROW)[1],
    ),
    "dense": tuple(Case(kind, one(n), kind) for kind in KINDS for n in (2 * K, 8 * K, 16 * K, 32 * K)),
    "varlen": (*eight(2 * K, 4 * K, 8 * K, 16 * K, 32 * K), Case("varlen full", eight_documents(8 * K), "full")),
    "packs": (*(case for n in (8 * K, 32 * K, 64 * K) for case in packs(n)), packs(64 * K, heads=(32, 8))[1]),
    "window": tuple(case for n in (8 * K, 32 * K) for case in local(n)),
    "heads": tuple(
        case
        for heads in ((8, 1), (32, 8), (32, 32))
        for case in (*causal(8 * K, 16 * K, 32 * K, heads=heads), *eight(8 * K, heads=heads))
    ),
    "narrow": (
        *causal(8 * K, 16 * K, **NARROW),
        *eight(8 * K, **NARROW),
        packs(32 * K, **NARROW)[1],
        *(case for heads in ((8, 1), (32, 32)) for case in causal(16 * K, heads=heads, **NARROW)),
    ),
    "long": (*causal(128 * K), *eight(128 * K)),
    "variants": tuple(variants()),
    "trees": (
        trees("8k with 8 of 1k", 32 * K, 8 * K, 8, K),
        trees("4k with 8 of 512", 32 * K, 4 * K, 8, 512),
        trees("3k with 28 of 1k", 32 * K, 3 * K, 28, K),
    ),
}
BY_DEFAULT = ("dense", "varlen", "packs", "window", "heads", "narrow", "long")


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


Run = Callable[[], object]


class Inputs:
    """Random q, k, v and dout of a case, and what implementations make of them."""

    def __init__(self, case: Case) -> None:
        (heads_q, heads_kv), (dim, value_dim) = case.heads, case.dims
        make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        shapes = (heads_q, dim), (heads_kv, dim), (heads_kv, value_dim)
        self.qkv = tuple(make(case.tokens, *shape, requires_grad=True) for shape in shapes)
        self.dout = make(case.tokens, heads_q, value_dim)
        pairs = 2e-9 * case.slices().area * heads_q
        self.gflop = {"fwd": pairs * (dim + value_dim), "bwd": pairs * (3 * dim + 2 * value_dim)}

    def runs(self, attention: Attention) -> tuple[list[torch.Tensor], dict[str, Run]]:
        """out and, if there is a backward, gradients; and a call of each direction to be timed."""
        out = attention(*self.qkv)
        runs: dict[str, Run] = {"fwd": torch.no_grad()(partial(attention, *self.qkv))}
        if out.grad_fn is None:
            return [out], runs
        runs["bwd"] = partial(torch.autograd.grad, out, self.qkv, self.dout, retain_graph=True)
        return [out.detach(), *torch.autograd.grad(out, self.qkv, self.dout, retain_graph=True)], runs


def implementations(case: Case, impls: list[str]) -> dict[str, tuple[str, Case]]:
    """What is timed: each name's entry in ATTENTIONS, and the case that it computes. Ours first."""
    found = {name: (name, case) for name in dict.fromkeys(["ours", *impls])}
    if case.sinks:
        found[WITHOUT_SINKS] = "ours", replace(case, sinks=False)
    documents = beside(case)
    return found if documents is None else found | {BESIDE: ("ours", documents)}


def all_runs(case: Case, impls: list[str]) -> tuple[dict[str, dict[str, Run]], dict[str, Inputs]]:
    """For each direction the calls of all implementations, ours first; and their inputs. Who fails, or has other
    results than ours, is left out."""
    ways: dict[str, dict[str, Run]] = {"fwd": {}, "bwd": {}}
    inputs: dict[str, Inputs] = {}
    reference: list[torch.Tensor] = []
    for name, (impl, computed) in implementations(case, impls).items():
        inputs[name] = inputs["ours"] if computed is case and inputs else Inputs(computed)
        try:
            attention = ATTENTIONS[impl](computed)
            if attention is None:
                continue
            results, runs = inputs[name].runs(attention)
        except Exception as error:  # others raise what they like
            if name == "ours":
                raise
            print(f"  {name} fails on {described(case)}: {str(error).splitlines()[0][:160]}", flush=True)
            continue
        reference = reference or results
        compared = [] if name in (WITHOUT_SINKS, BESIDE) else zip(reference, results, strict=False)
        errors = [float((x.float() - y.float()).norm() / x.float().norm()) for x, y in compared]
        if not all(error < CLOSE for error in errors):
            print(f"  {name} and ours differ on {described(case)}: {' '.join(f'{x:.1e}' for x in errors)}", flush=True)
            continue
        for way, run in runs.items():
            ways[way][name] = run
    return ways, inputs


def described(case: Case) -> str:
    return f"{case.name}, {case.tokens} tokens, heads {case.heads}, {case.dims}"


def measure(case: Case, impls: list[str], ms: float) -> list[Row]:
    """Rows of a case, ours first."""
    (heads_q, heads_kv), (dim, value_dim) = case.heads, case.dims
    ways, inputs = all_runs(case, impls)
    row = Row(
        case.name, case.tokens, f"{heads_q}:{heads_kv}", dim, value_dim, "", 0.0, 0.0, softcap=case.softcap,
        sinks=case.sinks, window=case.width if case.mask == "window" else 0,
    )  # fmt: skip
    rows = {name: replace(row, impl=name) for name in ways["fwd"]}
    for way, runs in ways.items():
        for name, found in in_bursts(runs, ms, can_replay=way == "fwd").items():
            rows[name] = replace(rows[name], **fields(way, found, inputs[name].gflop[way], name == "ours"))
    if BESIDE in rows:
        other = rows.pop(BESIDE)
        speeds = {"causal_fwd_tflops": other.fwd_tflops, "causal_bwd_tflops": other.bwd_tflops}
        rows["ours"] = replace(rows["ours"], **speeds)
    if case.mask in MASKS and case.is_plain and dim == value_dim and case.width == WINDOW:
        lengths = " ".join(map(str, np.diff(case.cu_seqlens).tolist()))
        build = build_ms(case.slices(), case.tokens, case.heads)
        rows["ours"] = replace(rows["ours"], mask=case.mask, lengths=lengths, build_ms=build)
    return list(rows.values())


def fields(way: str, found: Time, gflop: float, is_ours: bool) -> dict[str, float]:
    """What a row holds of this direction."""
    values = {"ms": round(found.ms, 4), "tflops": round(gflop / found.ms, 1)}
    if not is_ours:
        values |= {"ratio": round(found.ratio, 4), "spread": round(found.spread, 4)}
    return {f"{way}_{key}": value for key, value in values.items()}


# -------------------------------------------------------------------------------------------------------------- tables


RIVALS = {  # in a table: ours over the speed of these
    "fa3": "FA3", "cudnn packed": "cuDNN packed", "cudnn": "cuDNN", "varlen_attn": "varlen_attn", "flex": "flex",
}  # fmt: skip
OWN = {"ours deterministic": "deterministic", WITHOUT_SINKS: "without sinks"}  # their speed over ours
WAYS = {"fwd": "forward", "bwd": "backward"}


def ratios_table(found: dict[str, Any]) -> str:
    """TFLOP/s of ours, and how many times as fast it is as each other implementation that did a case."""
    rows = found["rows"]
    names = {way: [name for name in RIVALS if has(rows, name, way)] for way in WAYS}
    own = {way: [name for name in OWN if has(rows, name, way)] for way in WAYS}
    own["fwd"] = [name for name in own["fwd"] if name == WITHOUT_SINKS]  # there is one forward
    lines = []
    fields = ("case", "tokens", "heads", "head_dim", "value_dim", "window", "softcap", "sinks")
    for case, by in side_by_side(rows, "impl", *fields).items():
        line = case_cells(*case)
        for way in WAYS:
            line.append(f"{by['ours'][f'{way}_tflops']:.0f}")
            ratios = {name: row[f"{way}_ratio"] for name, row in by.items()}
            line += [f"{ratios[name]:.2f}" if ratios.get(name) else None for name in names[way]]
            line += [f"{1 / ratios[name]:.2f}" if ratios.get(name) else None for name in own[way]]
        lines.append(line)
    columns = ["mask", "tokens", "heads", "head_dim"]
    for way, label in WAYS.items():
        columns += [f"{label}: TFLOP/s", *(f"over {RIVALS[name]}" for name in names[way])]
        columns += [OWN[name] for name in own[way]]
    return table(columns, lines)


def has(rows: list[dict[str, Any]], impl: str, way: str) -> bool:
    return any(row["impl"] == impl and row[f"{way}_ratio"] for row in rows)


def case_cells(
    name: str, tokens: int, heads: str, dim: int, value_dim: int, window: int, softcap: float, sinks: bool
) -> list[str | None]:
    """mask, tokens, heads, head_dim."""
    extras = [f"softcap {softcap:g}"] * bool(softcap) + ["sinks"] * sinks
    mask = ", ".join([name.replace("varlen", "8 documents,"), *extras])
    return [mask, thousands(tokens), heads, str(dim) if dim == value_dim else f"{dim}/{value_dim}"]


def spread_text(found: dict[str, Any]) -> str:
    """How exact the ratios are."""
    spreads = [row[f"{way}_spread"] for row in found["rows"] for way in WAYS if row[f"{way}_ratio"]]
    same = [row["fwd_ratio"] for row in found["rows"] if row["impl"] == "ours deterministic"]
    text = f"Half of the distance between a ratio's quartiles: {100 * statistics.median(spreads):.1f}% in the median"
    text += f", at most {100 * max(spreads):.1f}%."
    if same:
        text += f" The deterministic mode has the same forward: its ratios are {min(same):.3f} to {max(same):.3f}."
    return text


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


def by_card(kind: str) -> dict[str, dict[str, Any]]:
    """The files KIND_CARD.json."""
    return {path.stem: result(path.stem) for path in sorted(RESULTS.glob(f"{kind}_h?00.json"))}


def of_cards(kind: str) -> str:
    """The table of each card."""
    texts = []
    for name, found in by_card(kind).items():
        texts += [f"One {found['device']}:", ratios_table(found), spread_text(found)]
        if (RESULTS / f"{name}.png").exists():
            texts.append(f"![TFLOP/s of each kernel by mask and length](../../benchmarks/results/{name}.png)")
        texts.append(sources(name))
    return "\n\n".join(texts)


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "kernel": lambda: of_cards("kernel"),
    "kernel-variants": lambda: of_cards("variants"),
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
    parser.add_argument("--ms", type=float, default=200, help="GPU time of each implementation")
    arguments = parser.parse_args()
    rows: list[Row] = []
    facts = describe_run(arguments.commit) | {"lists": lists()}
    print(lists_table(facts))
    for group in arguments.groups:
        for case in GROUPS[group]:
            torch.manual_seed(0)
            try:
                rows += measure(case, arguments.impls, arguments.ms)
            except torch.OutOfMemoryError:
                print(f"  out of memory: {described(case)}", flush=True)
            torch.cuda.empty_cache()
            found = facts | {"rows": [asdict(row) for row in rows]}
            save(found, arguments.output)  # after each: a run that is cut short leaves what it has
    print(ratios_table(found))
    print(spread_text(found))
    print(causal_table(found))


if __name__ == "__main__":
    main()
