#!/usr/bin/env python3
"""Records what the GPUs do in one layer of context-parallel attention, kernel by kernel, with torch.profiler.

    torchrun --standalone --nproc-per-node 4 benchmarks/trace_layer.py [--output benchmarks/results/trace_h200x4.json]

A histogram pack as in bench_cp.py, its forward and then its backward. plot_results.py draws the file: attention
on one line, communication beside it on another. Exposed communication = (t - r) / t: t is the time of the layer, r that
of the same plan with remote K/V already resident, both timed as in bench_cp.py.
"""

from functools import partial

import torch
import torch.distributed as dist
from bench_cp import (
    HEAD_DIM,
    NoCommunication,
    bind,
    describe_run,
    forward_and_backward,
    histogram_pack,
    random_qkv,
    times_of,
)
from figures import recording_parser, save
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from torchtitan_magi import make_plan, varlen_causal
from torchtitan_magi.attention.op import PlanHandle, attention_op
from torchtitan_magi.calibrate import start_rank
from torchtitan_magi.planning.cost_model import Heads

KINDS = {"ffa_forward": "attention", "ffa_backward": "attention", "PtoP": "communication", "nccl": "communication"}
OURS = ("gather_rows", "ffa_", "finish_grads", "add_rows")


def kind_of(kernel: str) -> str:
    """The kind of a GPU activity, by its name."""
    return next((kind for name, kind in KINDS.items() if name in kernel), "rows and sums")


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="per GPU")
    parser.add_argument("--heads", default="64:8", help="query heads : K/V heads")
    parser.add_argument("--seed", type=int, default=0, help="of the pack")
    arguments = parser.parse_args()
    start_rank()
    group = dist.group.WORLD
    heads = tuple(map(int, arguments.heads.split(":")))
    cu = histogram_pack(arguments.tokens * dist.get_world_size(), arguments.seed)
    plan = make_plan(varlen_causal(cu), int(cu[-1]), dist.get_world_size(), heads=Heads(*heads, HEAD_DIM))
    ours, resident = (PlanHandle(bind(plan, mesh, heads)).tensor for mesh in (group, NoCommunication(group)))
    q, k, v = random_qkv(arguments.tokens, heads)

    def attend(handle: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_op(q, k, v, handle, HEAD_DIM**-0.5)[0]

    handles = {"ours": ours, "resident": resident}
    runs = {name: forward_and_backward(q, k, v, partial(attend, handle)) for name, handle in handles.items()}
    forwards, backwards = times_of(runs, 20)
    times = {name: forwards[name] + backwards[name] for name in runs}
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    dout = torch.randn_like(q)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # the profiler slows the host down
        torch.autograd.grad(attend(ours, q, k, v), (q, k, v), dout)
        torch.cuda.synchronize()
    kernels = [
        {"name": kernel.name()[:60], "kind": kind_of(kernel.name()), "stream": kernel.device_resource_id(),
         "start_us": kernel.start_ns() / 1e3, "us": kernel.duration_ns() / 1e3}
        for kernel in profiler.profiler.kineto_results.events()
        if kernel.device_type() == DeviceType.CUDA
    ]  # fmt: skip
    first = min(kernel["start_us"] for kernel in kernels if kernel["name"].startswith(OURS))  # not the barrier's
    kernels = [kernel | {"start_us": kernel["start_us"] - first} for kernel in kernels if kernel["start_us"] >= first]
    by_rank: list = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, sorted(kernels, key=lambda kernel: kernel["start_us"]))
    exposed = 1 - times["resident"] / times["ours"]
    if dist.get_rank() == 0:
        print(f"forward and backward {times['ours']:.3f} ms, {times['resident']:.3f} without communication")
        print(f"exposed communication {exposed:.1%}; stages {len(plan.forward)}, {len(plan.backward)}")
        facts = {"tokens_per_gpu": arguments.tokens, "heads": arguments.heads, "exposed_comm_share": exposed}
        save(describe_run(arguments.commit) | facts | {"ranks": by_rank}, arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
