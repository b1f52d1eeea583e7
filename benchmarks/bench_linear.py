#!/usr/bin/env python3
"""Times the gated delta rule of Qwen3.5's layers on one GPU beside the libraries' own calls on the same documents.

    python benchmarks/bench_linear.py --output benchmarks/results/linear_h200.json
    python benchmarks/bench_linear.py --ranks --output benchmarks/results/linear_ranks_h200.json

Implementations take turns: ours with a plan of one rank, the public call of FlashQLA, and that of
flash-linear-attention with its own kernels, if it is installed. Before a timed call work is queued ahead, so that the
time is the GPU's, and the L2 cache is flushed. Host times are of issuing a call. Results are compared first.

The ranks of a plan of several are timed one after the other on this GPU, without communication: maps that arrive are
zeros. Their share is that of the whole pack's time / ranks, by the slowest one.
"""

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import numpy as np
import torch
from figures import Row, part, recording_parser, save, table, thousands
from timing import take_turns
from torch import Tensor

import torchtitan_magi as magi
from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.exchange.in_flight import Arrival
from torchtitan_magi.linear.delta_rule import delta_rule
from torchtitan_magi.linear.kernels import Kernels
from torchtitan_magi.planning.document_parts import RankParts
from torchtitan_magi.sizing.sample_packs import draw_pack

HEADS = {"35B-A3B": (16, 32), "27B": (16, 48)}  # of q and k, of v
HEAD_DIM, SCALE = 128, 128**-0.5
PACKS = {"pack": "histogram", "one document": "dense"}
CLOSE = 2e-2  # relative difference of results: roundings to bf16
RANKS = 2
QUEUED = 10_000_000  # cycles ahead of a timed call, which takes some ms to issue

Layer = Callable[..., Tensor]


def versions() -> dict[str, str]:
    """Of what is timed, as far as it is installed."""
    found = {}
    for name in ("flash-qla", "tilelang", "fla-core"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def inputs_of(tokens: int, heads: tuple[int, int]) -> tuple[list[Tensor], Tensor]:
    """q, k, v, g, beta, and dout; gates of which most forget little."""
    generator = torch.Generator("cuda").manual_seed(tokens)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, device="cuda", generator=generator)

    q, k = (torch.nn.functional.normalize(drawn(heads[0], HEAD_DIM), dim=-1).bfloat16() for _ in range(2))
    v, dout = (drawn(heads[1], HEAD_DIM).bfloat16() for _ in range(2))
    g, beta = torch.nn.functional.logsigmoid(2 * drawn(heads[1]) + 3), drawn(heads[1]).sigmoid()
    return [x.requires_grad_() for x in (q, k, v, g, beta)], dout


def implementations(lengths: np.ndarray) -> dict[str, Layer]:
    """Name -> out [T, H, V] of q, k, v, g, beta."""
    cu_seqlens, total = np.append(0, lengths.cumsum()), int(lengths.sum())
    plan = magi.make_plan(magi.varlen_causal(cu_seqlens), total, cp_size=1)
    on_gpu = torch.from_numpy(cu_seqlens).int().cuda()
    found: dict[str, Layer] = {"ours": lambda *x: magi.cp_gated_delta_rule(*x, plan)}

    def library(call: Callable[..., tuple[Tensor, object]], *x: Tensor) -> Tensor:
        return call(*(y[None] for y in x), scale=SCALE, cu_seqlens=on_gpu)[0][0]

    import flash_qla

    found["flash-qla"] = partial(library, flash_qla.chunk_gated_delta_rule)
    if importlib.util.find_spec("fla") is not None:
        os.environ["FLA_FLASH_QLA"] = "0"  # its own kernels
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        found["fla"] = partial(library, chunk_gated_delta_rule)
    return found


def forward(layer: Layer, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return layer(*inputs)


def both(layer: Layer, inputs: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    out = layer(*inputs)
    return out, *torch.autograd.grad(out, inputs, dout)


def host_ms(run: Callable[[], object]) -> float:
    """Time to issue a call while the GPU is busy."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return median(times)


def check_close(results: dict[str, tuple[Tensor, ...]]) -> None:
    """All implementations compute the same."""
    for name, found in results.items():
        for x, y in zip(found, results["ours"], strict=True):
            error = float((x.detach().float() - y.detach().float()).norm() / y.detach().float().norm())
            assert error < CLOSE, f"{name} differs from ours by {error:.1e}"


def layer_rows(model: str, tokens: int, kind: str, wanted: float) -> list[Row]:
    """Times of a layer, one row for each implementation."""
    lengths = draw_pack(PACKS[kind], tokens, seed=0)
    inputs, dout = inputs_of(tokens, HEADS[model])
    layers = implementations(lengths)
    check_close({name: both(layer, inputs, dout) for name, layer in layers.items()})
    fwd = {name: partial(forward, layer, inputs) for name, layer in layers.items()}
    all_of = {name: partial(both, layer, inputs, dout) for name, layer in layers.items()}
    fwd_ms, both_ms = take_turns(fwd, wanted, QUEUED), take_turns(all_of, wanted, QUEUED)
    return [
        {
            "model": model, "tokens": tokens, "documents": kind, "num_documents": len(lengths), "impl": name,
            "fwd_ms": fwd_ms[name], "both_ms": both_ms[name], "fwd_host_ms": host_ms(fwd[name]),
            "both_host_ms": host_ms(all_of[name]),
        }
        for name in layers
    ]  # fmt: skip


class Silent:
    """The transport of a rank to which zeros arrive at once."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_to_all(self, output: Tensor, *_: object, **__: object) -> Arrival:
        output.zero_()
        return Arrival(lambda: None)


def rank_row(model: str, tokens: int, kind: str, wanted: float) -> Row:
    """Times of the ranks of a plan of RANKS, of so many tokens each, and of the whole pack."""
    lengths, total = draw_pack(PACKS[kind], RANKS * tokens, seed=0), RANKS * tokens
    mask = magi.varlen_causal(np.append(0, lengths.cumsum()))
    plans = {size: magi.make_plan(mask, total, size) for size in (1, RANKS)}
    runs: dict[str, Callable[[], object]] = {}
    for size, plan in plans.items():
        inputs, dout = inputs_of(plan.tokens_per_rank, HEADS[model])
        for rank, parts in enumerate(plan.document_parts.ranks):

            def layer(*x: Tensor, parts: RankParts = parts, transport: Silent = Silent(rank, size)) -> Tensor:  # noqa: B008
                found: Tensor = delta_rule(*x, parts, transport, SCALE, Kernels())
                return found

            runs[f"fwd {size} {rank}"] = partial(forward, layer, inputs)
            runs[f"both {size} {rank}"] = partial(both, layer, inputs, dout)
    times = take_turns(runs, wanted, QUEUED)
    row: Row = {"model": model, "tokens": tokens, "documents": kind, "num_documents": len(lengths)}
    for name in ("fwd", "both"):
        row[f"{name}_ms"] = [times[f"{name} {RANKS} {rank}"] for rank in range(RANKS)]
        row[f"whole_{name}_ms"] = times[f"{name} 1 0"]
    return row


def share(rows: list[Row], field: str) -> str:
    """Ours as a share of FlashQLA's speed."""
    times = {row["impl"]: row[field] for row in rows}
    return f"{100 * times['flash-qla'] / times['ours']:.0f}%"


def layers_table(*results: dict[str, Any]) -> str:
    """Milliseconds of the layers, forward and both directions."""
    rows = [row for found in results for row in found["layers"]]
    cases: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["model"], row["tokens"], row["documents"]), []).append(row)
    names = list(dict.fromkeys(row["impl"] for row in rows))
    columns = [f"{what}, {name}" for what in ("forward", "both") for name in names]
    lines = []
    for (model, tokens, kind), of_case in cases.items():
        by_name = {row["impl"]: row for row in of_case}
        cells = [f"{by_name[name][field]:.2f}" for field in ("fwd_ms", "both_ms") for name in names]
        lines.append([model, thousands(tokens), kind, *cells, share(of_case, "fwd_ms"), share(of_case, "both_ms")])
    return table(["model", "tokens", "documents", *columns, "share of forward", "share of both"], lines)


def ranks_table(*results: dict[str, Any]) -> str:
    """Milliseconds of the slowest rank, and its share of the ideal."""
    rows = [row for found in results for row in found["ranks"]]
    lines = []
    for row in rows:
        slowest = [max(row[f"{name}_ms"]) for name in ("fwd", "both")]
        shares = [
            f"{100 * row[f'whole_{name}_ms'] / RANKS / ms:.0f}%"
            for name, ms in zip(("fwd", "both"), slowest, strict=True)
        ]
        lines.append(
            [row["model"], thousands(row["tokens"]), row["documents"], *(f"{ms:.2f}" for ms in slowest), *shares]
        )
    return table(["model", "tokens", "documents", "forward", "both", "share of forward", "share of both"], lines)


PARTS = {
    "linear-layers": part(layers_table, "linear_h200"),
    "linear-ranks": part(ranks_table, "linear_ranks_h200"),
}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=HEADS, default=list(HEADS), help="whose layers")
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 16384, 65536], help="per layer")
    parser.add_argument("--ranks", action="store_true", help=f"time the {RANKS} ranks of a plan instead")
    parser.add_argument("--wanted", type=float, default=25, help="ms for which each implementation is timed")
    arguments = parser.parse_args()
    figures: dict[str, Any] = facts_of_run(arguments.commit) | {"libraries": versions()}
    figures |= {"ranks" if arguments.ranks else "layers": []}
    for model in arguments.models:
        for tokens in arguments.tokens:
            for kind in PACKS:
                if arguments.ranks:
                    figures["ranks"].append(rank_row(model, tokens, kind, arguments.wanted))
                else:
                    figures["layers"] += layer_rows(model, tokens, kind, arguments.wanted)
            save(figures, arguments.output)
    print((ranks_table if arguments.ranks else layers_table)(figures))


if __name__ == "__main__":
    main()
