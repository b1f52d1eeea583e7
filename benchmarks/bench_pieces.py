#!/usr/bin/env python3
"""Times a dense document whose exchanges travel in pieces of at most peer_memory.MAX_SLOT_BYTES beside whole ones.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_pieces.py [--output benchmarks/results/pieces_h200x2.json]

By turns, forward and backward, each setting with a process group and thus peer memory of its own. outside_bytes: what
the first forward and backward take of the GPU's memory outside PyTorch's allocator.
"""

import argparse
import gc
import statistics
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from bench_cp import HEAD_DIM, describe_run, forward_and_backward, once_ms, write

from torchtitan_magi import make_plan, varlen_causal
from torchtitan_magi.attention.bound_plan import bind_plan
from torchtitan_magi.attention.op import PlanHandle, attend
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.calibrate import start_rank
from torchtitan_magi.exchange import peer_memory
from torchtitan_magi.exchange.mesh import process_group_transport
from torchtitan_magi.exchange.peer_memory import PeerTransport
from torchtitan_magi.exchange.pieces import Flow
from torchtitan_magi.planning.cost_model import Heads

LIMITS = {"whole": 1 << 60, "pieces": peer_memory.MAX_SLOT_BYTES}


def outside_bytes() -> int:
    """The GPU's memory in use beyond what PyTorch's allocator holds."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def slowest(ms: float) -> float:
    """Of all ranks."""
    figure = torch.tensor(ms, device="cuda")
    dist.all_reduce(figure, op=dist.ReduceOp.MAX)
    return figure.item()


def bench(tokens: int, heads: tuple[int, int], repeats: int, device: torch.device) -> list[dict]:
    cp_size = dist.get_world_size()
    plan = make_plan(varlen_causal(np.array([0, tokens])), tokens, cp_size, heads=Heads(*heads, HEAD_DIM))
    exchange = plan.ranks[dist.get_rank()].forward[0].exchanges[0]
    row_bytes = 2 * heads[1] * HEAD_DIM * 2
    q, k, v = (
        torch.randn(tokens // cp_size, n, HEAD_DIM, device=device, dtype=torch.bfloat16)
        for n in (heads[0], heads[1], heads[1])
    )
    runs, rows = {}, {}
    for name, limit in LIMITS.items():
        group = dist.new_group(list(range(cp_size)))
        transport = process_group_transport(group)
        assert isinstance(transport, PeerTransport), "the GPUs do not reach each other's memory"
        bound = bind_plan(plan, group, choose_block_attn("ffa", device), *heads, device)
        handle = PlanHandle(bound)
        dist.barrier(group)
        peer_memory.MAX_SLOT_BYTES, before = limit, outside_bytes()
        runs[name] = forward_and_backward(
            q, k, v, lambda q, k, v, handle=handle: attend(q, k, v, handle, HEAD_DIM**-0.5)[0]
        )
        runs[name][1]()
        torch.cuda.synchronize()
        rows[name] = {
            "setting": name, "tokens_per_gpu": tokens // cp_size, "heads": f"{heads[0]}:{heads[1]}", "cp": cp_size,
            "sent_bytes_max": Flow.of(exchange, False).most_sent * row_bytes,
            "pieces": Flow.of(exchange, False).num_pieces(limit // row_bytes),
            "symmetric_bytes": transport.num_bytes, "outside_bytes": outside_bytes() - before,
            "fwd_ms": [], "bwd_ms": [],
        }  # fmt: skip
    whole, pieces = (forward() for forward, _ in runs.values())
    assert torch.equal(whole, pieces), "pieces bring other rows"
    del whole, pieces
    for repeat in range(repeats):
        for name in list(runs)[:: 1 if repeat % 2 else -1]:
            peer_memory.MAX_SLOT_BYTES = LIMITS[name]
            for figure, run in zip(("fwd_ms", "bwd_ms"), runs[name], strict=True):
                rows[name][figure].append(slowest(once_ms(run)))
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokens", type=int, default=1 << 20, help="tokens of the document, over all GPUs (default: %(default)s)"
    )
    parser.add_argument("--heads", default="32:8", help="query heads : K/V heads (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of each setting (default: %(default)s)")
    parser.add_argument("--commit", help="commit of the tree, where git is missing")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    gc.disable()  # as in torchtitan's training
    device = start_rank()
    heads = tuple(map(int, arguments.heads.split(":")))
    rows = bench(arguments.tokens, heads, arguments.repeats, device)
    if dist.get_rank() == 0:
        for row in rows:
            gib = f"{row['symmetric_bytes'] / 2**30:.2f} GiB symmetric, {row['outside_bytes'] / 2**30:.2f} outside"
            times = " ".join(f"{figure} {statistics.median(row[figure]):.1f}" for figure in ("fwd_ms", "bwd_ms"))
            print(f"{row['setting']:7s} {row['pieces']:2d} pieces of {row['sent_bytes_max'] >> 20} MiB  {times}  {gib}")
        whole, pieces = (sum(statistics.median(row[figure]) for figure in ("fwd_ms", "bwd_ms")) for row in rows)
        print(f"pieces take {pieces / whole:.4f} x the time")
        if arguments.output:
            write(describe_run(arguments.commit) | {"rows": rows}, arguments.output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
