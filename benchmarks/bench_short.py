#!/usr/bin/env python3
"""Times eight whole layers on short packs, where the host could keep the GPU waiting.

    torchrun --standalone --nproc-per-node 1 benchmarks/bench_short.py [--output benchmarks/results/short_h100.json]

Each layer is a rank's share of Llama 3.1 70B under tensor parallelism of 8, without its collectives: hidden size 8192,
heads 8:1, 3,584 columns of the feed-forward. A pack has eight documents. A run is a forward and a backward of all
layers, issued at once: "queued" is its GPU time behind other work, so that every launch has happened; "from idle" is
its time where the GPU waits for the first launch, and for each one that the host brings late. As wide as these two are
apart, as much of the host shows. Attention is ours, varlen_attn of torch, or q + k + v in its place; layers are
as torch runs them or compiled one by one, as torchtitan compiles them. All take turns in one process.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench_cp import HEAD_DIM, LAYERS, attend_by, bind, describe_run, host_us, once_ms, take_turns
from bench_kernel import eight_documents
from figures import parts, recording_parser, save, table, thousands
from rivals import ATTENTIONS, Case
from torch import Tensor, nn

from torchtitan_magi import make_plan, varlen_causal
from torchtitan_magi.calibrate import start_rank
from torchtitan_magi.planning.cost_model import Heads

HIDDEN, FEED_FORWARD, HEADS = 8192, 28672 // 8, (8, 1)
TOKENS = 1024, 2048
QUEUED = 60_000_000  # cycles, in which all launches of a run happen
REPEATS = 20

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """A rank's share of a transformer layer; x [tokens, HIDDEN]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        heads_q, heads_kv = HEADS
        linear = lambda columns, rows: nn.Linear(columns, rows, bias=False)  # noqa: E731
        self.attend = attend
        self.norm, self.feed_forward_norm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.q, self.k, self.v = (linear(HIDDEN, heads * HEAD_DIM) for heads in (heads_q, heads_kv, heads_kv))
        self.out = linear(heads_q * HEAD_DIM, HIDDEN)
        self.gate, self.up, self.down = (linear(*s) for s in [(HIDDEN, FEED_FORWARD)] * 2 + [(FEED_FORWARD, HIDDEN)])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (project(y).unflatten(1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.out(self.attend(rotated(q, cos, sin), rotated(k, cos, sin), v).flatten(1))
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding; cos, sin [tokens, 1, HEAD_DIM]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def attentions(cu_seqlens: tuple[int, ...]) -> dict[str, Attend]:
    """By name; without those that are not there."""
    slices, total = varlen_causal(np.array(cu_seqlens)), cu_seqlens[-1]
    plan = make_plan(slices, total, 1, heads=Heads(*HEADS, HEAD_DIM))
    found = {"ours": attend_by(bind(plan, dist.group.WORLD, HEADS)), "no attention": lambda q, k, v: q + k + v}
    other = ATTENTIONS["varlen_attn"](Case("varlen causal", cu_seqlens, heads=HEADS))
    return found | ({} if other is None else {"varlen_attn": other})


def step_of(attend: Attend, tokens: int, compiled: bool) -> Callable[[], object]:
    """A forward and a backward of all layers."""
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.bfloat16}
    layers = [Layer(attend).to(**make) for _ in range(LAYERS)]
    x, dout = torch.randn(tokens, HIDDEN, requires_grad=True, **make), torch.randn(tokens, HIDDEN, **make)
    cos, sin = (torch.randn(tokens, 1, HEAD_DIM, **make) for _ in range(2))
    weights = [weight for layer in layers for weight in layer.parameters()]
    calls = [torch.compile(layer, fullgraph=True) if compiled else layer for layer in layers]

    def step() -> None:
        y = x
        for call in calls:
            y = call(y, cos, sin)
        torch.autograd.grad(y, [x, *weights], dout)

    return step


def measure(tokens: int, compiled: bool) -> list[dict[str, Any]]:
    """A row for each attention."""
    steps = {name: step_of(attend, tokens, compiled) for name, attend in attentions(eight_documents(tokens)).items()}
    queued, from_idle = (take_turns(steps, REPEATS, partial(once_ms, queued=queued)) for queued in (QUEUED, 0))
    host = take_turns(steps, REPEATS, host_us)
    row = {"tokens": tokens, "layers": "compiled" if compiled else "as torch runs them"}
    return [
        row | {"impl": name, "queued_ms": queued[name], "from_idle_ms": from_idle[name],
               "host_ms": LAYERS * host[name] / 1e3}
        for name in steps
    ]  # fmt: skip


def short_table(found: dict[str, Any]) -> str:
    """The GPU's and the host's times of each step."""
    lines = [
        [
            thousands(row["tokens"]), row["layers"], row["impl"], f"{row['queued_ms']:.2f}",
            f"{row['from_idle_ms']:.2f}", f"{row['from_idle_ms'] / row['queued_ms']:.2f}", f"{row['host_ms']:.2f}",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    return table(["tokens", "layers", "attention", "queued, ms", "from idle, ms", "ratio", "host, ms"], lines)


PARTS = {"short": parts(short_table, "short_*")}  # of the docs


def main() -> None:
    arguments = recording_parser(__doc__).parse_args()
    start_rank()
    found: dict[str, Any] = describe_run(arguments.commit) | {"rows": []}
    for tokens in TOKENS:
        for compiled in (False, True):
            found["rows"] += measure(tokens, compiled)
            save(found, arguments.output)
    print(short_table(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
