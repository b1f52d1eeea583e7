"""Times wide heads, softcaps, sinks and narrow windows beside cuDNN, torch's varlen_attn and FlashAttention-3.

    python scripts/bench_variants.py --json benchmarks/results/variants_h200.json

Implementations take turns; each runs for a while without a pause, so that clocks are those of long work, and the table
has the median of the rounds. TFLOP/s = 2 * (visible pairs) * num_heads_q * (head_dim + value_dim); backward: with 3
products over head_dim and 2 over value_dim. FlashAttention-3's forward is taken from the wheel fa3-fwd, if installed.
First all outputs are compared with ours.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchtitan_magi import flex_flash_attn
from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.masks.builders import sliding_window, varlen_causal
from torchtitan_magi.masks.slices import AttnSlices

ROUNDS = 3
CLOSE = 2e-2  # relative difference of outputs: roundings to bf16


@dataclass(frozen=True)
class Case:
    tokens: int
    heads: tuple[int, int]
    dims: tuple[int, int] = (128, 128)
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    def slices(self) -> AttnSlices:
        cu = [0, self.tokens]
        return sliding_window(cu, self.window) if self.window else varlen_causal(cu)


@dataclass
class Row:
    tokens: int
    heads: str
    dims: str
    window: int
    softcap: float
    sinks: bool
    impl: str
    fwd_ms: float
    fwd_tflops: float
    bwd_ms: float = 0.0
    bwd_tflops: float = 0.0


def cases() -> list[Case]:
    k = 1024
    wide = [Case(n, (32, 8), (256, 256)) for n in (8 * k, 16 * k)]
    latent = [Case(n, (64, 8), (192, 128)) for n in (8 * k, 16 * k)] + [Case(16 * k, (128, 128), (192, 128))]
    plain = [Case(8 * k, (64, 8)), Case(16 * k, (64, 8))]
    narrow = [Case(32 * k, (64, 8), window=128), Case(32 * k, (64, 8), (64, 64), window=128)]
    dense = [Case(16 * k, (64, 8), (64, 64))]
    return [
        *wide, *latent, Case(16 * k, (32, 8), (192, 192)), *plain, *narrow, *dense,
        *(replace(case, softcap=50.0) for case in (plain[1], wide[1], latent[1])),
        *(replace(case, sinks=True) for case in (*plain, *narrow, *dense)),
    ]  # fmt: skip


def ours(case: Case) -> Callable[..., Tensor]:
    slices = case.slices()
    sinks = torch.randn(case.heads[0], device="cuda") if case.sinks else None
    return lambda q, k, v: flex_flash_attn(q, k, v, slices, softcap=case.softcap, sinks=sinks)[0]


def cudnn(case: Case) -> Callable[..., Tensor] | None:
    if case.window or case.softcap or case.sinks:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    return run


def torch_varlen(case: Case) -> Callable[..., Tensor] | None:
    if not case.window or case.softcap or case.sinks:
        return None
    from torch.nn.attention.varlen import varlen_attn

    cu = torch.tensor([0, case.tokens], dtype=torch.int32, device="cuda")
    size = case.tokens, case.tokens
    return lambda q, k, v: varlen_attn(q, k, v, cu, cu, *size, window_size=(case.window - 1, 0))


def flash_attention_3(case: Case) -> Callable[..., Tensor] | None:
    """The forward only."""
    try:
        import fa3_fwd._C  # noqa: F401
    except ImportError:
        return None
    if case.sinks:
        return None
    cu = torch.tensor([0, case.tokens], dtype=torch.int32, device="cuda")
    left, scale = (case.window - 1 if case.window else -1), case.dims[0] ** -0.5
    window = (left, 0) if case.window else (-1, -1)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.fa3_fwd.fwd(
            q, k, v, None, None, None, None, cu, cu, None, None, None, case.tokens, case.tokens, *[None] * 9, scale,
            not case.window, *window, 0, case.softcap, True, None, 1, None, 0,
        )[0]  # fmt: skip

    return run


OTHERS = {"cudnn": cudnn, "varlen_attn": torch_varlen, "fa3": flash_attention_3}


def sustained_ms(run: Callable[[], object], wanted: float) -> float:
    """Time of a call in a row of calls that takes about `wanted` ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(count: int) -> float:
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    run()
    return time(max(3, int(wanted / time(3))))


def measure(case: Case, wanted: float) -> list[Row]:
    torch.manual_seed(0)
    (heads_q, heads_kv), (dim, value_dim) = case.heads, case.dims
    shapes = (heads_q, dim), (heads_kv, dim), (heads_kv, value_dim)
    qkv = [torch.randn(case.tokens, *s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    dout = torch.randn(case.tokens, heads_q, value_dim, device="cuda", dtype=torch.bfloat16)
    found = {"ours": ours(case)} | {name: make(case) for name, make in OTHERS.items()}
    runs = {name: run for name, run in found.items() if run is not None}
    outs, graphs = {}, {}
    for name, run in list(runs.items()):
        try:
            out = run(*qkv)
        except RuntimeError as error:  # what an implementation does not take
            print(f"{name}: {str(error).splitlines()[0][:100]}")
            del runs[name]
            continue
        outs[name] = out.detach().float()
        if out.requires_grad and name != "fa3":
            graphs[name] = out
    for name, out in outs.items():
        difference = float((out - outs["ours"]).norm() / outs["ours"].norm())
        assert difference < CLOSE, f"{name} differs from ours by {difference:.1e} on {case}"
    detached = [x.detach() for x in qkv]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name][0].append(sustained_ms(lambda run=run: run(*detached), wanted))
        for name, out in graphs.items():
            grads = lambda out=out: torch.autograd.grad(out, qkv, dout, retain_graph=True)  # noqa: E731
            times[name][1].append(sustained_ms(grads, wanted))
    pairs, rows = case.slices().area * heads_q, []
    for name, (forward, backward) in times.items():
        fwd, bwd = statistics.median(forward), statistics.median(backward or [0.0])
        row = Row(
            case.tokens, f"{heads_q}:{heads_kv}", f"{dim}/{value_dim}", case.window, case.softcap, case.sinks, name,
            fwd, 2e-9 * pairs * (dim + value_dim) / fwd,
        )  # fmt: skip
        if bwd:
            row = replace(row, bwd_ms=bwd, bwd_tflops=2e-9 * pairs * (3 * dim + 2 * value_dim) / bwd)
        rows.append(row)
        print(
            f"{row.tokens:>6d} {row.heads:>8s} {row.dims:>8s} window {row.window:<4d} softcap {row.softcap:<5g} "
            f"sinks {row.sinks:<2d} {name:12s} forward {row.fwd_tflops:6.1f} ({fwd:7.3f} ms) "
            f"backward {row.bwd_tflops:6.1f} ({bwd:7.3f} ms)",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ms", type=float, default=100, help="GPU time of each measurement")
    parser.add_argument("--commit", help="commit of the tree, where git is missing")
    parser.add_argument("--json", help="where to write the rows")
    args = parser.parse_args()
    rows = [row for case in cases() for row in measure(case, args.ms)]
    if args.json:
        with open(args.json, "w") as file:
            json.dump(facts_of_run(args.commit) | {"rows": [asdict(row) for row in rows]}, file, indent=1)


if __name__ == "__main__":
    main()
