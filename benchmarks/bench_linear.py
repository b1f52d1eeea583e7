#!/usr/bin/env python3
"""Times the gated delta rule of Qwen3.5's layers: on one GPU beside other libraries, on several beside the ideal.

    python benchmarks/bench_linear.py --output benchmarks/results/linear_h200.json
    torchrun --nproc-per-node 2 benchmarks/bench_linear.py --output benchmarks/results/linear_cp_h200x2.json

On one GPU implementations take turns: ours with a plan of one rank, the public call of FlashQLA, and that of
flash-linear-attention with its own kernels, if it is installed. Before a timed call work is queued ahead, so that the
time is the GPU's, and the L2 cache is flushed. Host times are of issuing a call. Results are compared first.

Under torchrun all ranks share a pack. Timed in turns are the rule, and by itself the convolution before it, as medians
of the slowest rank. Before that each rank compares its results and gradients with those of the whole pack.
  ours      cp_gated_delta_rule or cp_causal_conv1d
  resident  the same without any communication (results are wrong): shows what communication costs
  ideal     the whole pack on one GPU, time / ranks; every rank runs it by itself, at the same time
"""

import importlib.util
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import bench_cp
import numpy as np
import torch
import torch.distributed as dist
from bench_cp import NoCommunication
from figures import Row, part, parts, recording_parser, save, table, thousands
from timing import take_turns
from torch import Tensor

import torchtitan_magi as magi
from torchtitan_magi.calibrate import facts_of_run, start_rank
from torchtitan_magi.machine import version_of
from torchtitan_magi.planning.plan import AttnPlan
from torchtitan_magi.sizing.sample_packs import draw_pack

HEADS = {"35B-A3B": (16, 32), "27B": (16, 48)}  # of q and k, of v
HEAD_DIM, SCALE = 128, 128**-0.5
PACKS = {"pack": "histogram", "one document": "dense"}
CLOSE = 2e-2  # relative difference of results: roundings to bf16
QUEUED = 10_000_000  # cycles ahead of a timed call, which takes some ms to issue
REPEATS = 12  # of the calls of several ranks
WIDTH = 4  # of the convolution

Layer = Callable[..., Tensor]


def versions() -> dict[str, str]:
    """The libraries that are timed, as far as they are installed."""
    found = {name: version_of(name) for name in ("flash-qla", "tilelang", "fla-core")}
    return {name: version for name, version in found.items() if version}


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


class Operation(NamedTuple):
    """One of a layer over a pack."""

    rows: list[Tensor]  # inputs [T, ...], of which each rank has its tokens
    weights: list[Tensor]
    dout: Tensor
    call: Callable[..., Tensor]  # out of rows, weights, a plan and a mesh


def operations(tokens: int, heads: tuple[int, int]) -> dict[str, Operation]:
    """The rule, and the convolution of its queries, keys and values."""
    rule, dout = inputs_of(tokens, heads)
    generator = torch.Generator("cuda").manual_seed(tokens)
    channels = (2 * heads[0] + heads[1]) * HEAD_DIM
    x, dx, weight = (
        torch.randn(rows, width, device="cuda", generator=generator, dtype=torch.bfloat16)
        for rows, width in ((tokens, channels), (tokens, channels), (channels, WIDTH))
    )
    convolution = partial(magi.cp_causal_conv1d, activation="silu")
    return {
        "rule": Operation(rule, [], dout, magi.cp_gated_delta_rule),
        "convolution": Operation([x.requires_grad_()], [weight.requires_grad_()], dx, convolution),
    }


def largest_error(ours: tuple[Tensor, ...], whole: tuple[Tensor, ...], num_weights: int, plan: AttnPlan) -> float:
    """The largest relative difference of any result on any rank.

    Args:
        ours: out, and the gradients of a rank's rows and of weights.
        whole: the same of the whole pack.
        num_weights: how many of the last ones are of weights, to which each rank adds.
    """
    errors, num_rows = [], len(ours) - num_weights
    for i, (x, y) in enumerate(zip(ours, whole, strict=True)):
        found, wanted = x.detach().float().contiguous(), y.detach().float()
        if i < num_rows:
            wanted = magi.dispatch(wanted, plan, dist.group.WORLD)
        else:
            dist.all_reduce(found)
        errors.append(float((found - wanted).norm() / wanted.norm()))
    return float(bench_cp.of_slowest_rank([errors]).max())


def cp_rows(model: str, tokens: int, kind: str, silent: NoCommunication) -> Iterator[Row]:
    """Times of each operation of a layer over all ranks, of so many tokens each, once its results are right."""
    mesh, size = dist.group.WORLD, dist.get_world_size()
    lengths, total = draw_pack(PACKS[kind], size * tokens, seed=0), size * tokens
    mask = magi.varlen_causal(np.append(0, lengths.cumsum()))
    plan, alone = (magi.make_plan(mask, total, ranks) for ranks in (size, 1))
    for name, (rows, weights, dout, call) in operations(total, HEADS[model]).items():
        pack = [*rows, *weights], dout
        *share, dshare = (magi.dispatch(x.detach(), plan, mesh) for x in (*rows, dout))
        local = [*(x.requires_grad_() for x in share), *weights], dshare
        layers: dict[str, tuple[Layer, tuple[list[Tensor], Tensor]]] = {
            "ours": (lambda *x, call=call: call(*x, plan, mesh), local),
            "resident": (lambda *x, call=call: call(*x, plan, silent), local),
            "ideal": (lambda *x, call=call: call(*x, alone), pack),
        }
        error = largest_error(*(both(layers[way][0], *layers[way][1]) for way in ("ours", "ideal")), len(weights), plan)
        row: Row = {"operation": name, "model": model, "tokens": tokens, "documents": kind, "cp": size}
        row |= {"num_documents": len(lengths), "error": error}
        if not error < CLOSE:
            if dist.get_rank() == 0:
                print(f"FAILED, results differ from those of the whole pack: {row}", flush=True)
            continue
        runs: dict[str, Callable[[], object]] = {}
        for way, (layer, (inputs, grad)) in layers.items():
            runs[f"{way}_fwd_ms"] = partial(forward, layer, inputs)
            runs[f"{way}_both_ms"] = partial(both, layer, inputs, grad)
        times = bench_cp.take_turns(runs, REPEATS, partial(bench_cp.once_ms, queued=2 * QUEUED))
        yield row | {field: ms / size if field.startswith("ideal") else ms for field, ms in times.items()}


def bench_ranks(arguments: Any) -> None:
    """One rank's part in the times of a job of several."""
    start_rank()
    silent = NoCommunication(dist.group.WORLD)
    figures = bench_cp.describe_run(arguments.commit) | {"libraries": versions(), "cp": []}
    for model in arguments.models:
        for tokens in arguments.tokens:
            for kind in PACKS:
                figures["cp"] += cp_rows(model, tokens, kind, silent)
                if dist.get_rank() == 0:  # after every pack: a run cut short leaves what it has
                    save(figures, arguments.output)
    if dist.get_rank() == 0:
        print(cp_table(figures))
    dist.destroy_process_group()


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


def cp_table(found: dict[str, Any]) -> str:
    """Milliseconds of the slowest rank, the share of the ideal, and that of communication which nothing hides."""
    lines = []
    for row in found["cp"]:
        ours, resident, ideal = (
            [row[f"{way}_{what}_ms"] for what in ("fwd", "both")] for way in ("ours", "resident", "ideal")
        )
        shares = [f"{100 * best / ms:.0f}%" for best, ms in zip(ideal, ours, strict=True)]
        exposed = [f"{100 * (1 - without / ms):.0f}%" for without, ms in zip(resident, ours, strict=True)]
        case = row["operation"], row["model"], thousands(row["tokens"]), row["documents"]
        lines.append([*case, *(f"{ms:.2f}" for ms in ours), *shares, *exposed])
    columns = ["operation", "model", "tokens per GPU", "documents", "forward", "both", "of the ideal: forward", "both"]
    return table([*columns, "exposed: forward", "both"], lines)


PARTS = {
    "linear-layers": part(layers_table, "linear_h200"),
    "linear-cp": parts(cp_table, "linear_cp_*"),
}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=HEADS, default=list(HEADS), help="whose layers")
    parser.add_argument("--tokens", nargs="*", type=int, default=[8192, 16384, 65536], help="per layer and GPU")
    parser.add_argument("--wanted", type=float, default=25, help="ms for which each implementation is timed")
    arguments = parser.parse_args()
    if dist.is_torchelastic_launched():
        bench_ranks(arguments)
        return
    figures: dict[str, Any] = facts_of_run(arguments.commit) | {"libraries": versions(), "layers": []}
    for model in arguments.models:
        for tokens in arguments.tokens:
            for kind in PACKS:
                figures["layers"] += layer_rows(model, tokens, kind, arguments.wanted)
            save(figures, arguments.output)
    print(layers_table(figures))


if __name__ == "__main__":
    main()
