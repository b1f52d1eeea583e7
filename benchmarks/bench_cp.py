"""Times context-parallel attention beside the strategies it replaces, each with our own kernel, on one machine.

    torchrun --standalone --nproc-per-node 4 benchmarks/bench_cp.py [--output benchmarks/results/cp_h200x4.json]

Strategies
  ours        make_plan: balanced placement, only the K/V rows that are needed, overlapped with attention
  ours by NCCL   the same without peer memory
  resident    the same plan and kernels without any communication (results are wrong): shows what communication costs
  all-gather  contiguous shares; every rank receives all K/V, then attends
  all-gather balanced   the same, each rank owning the tokens that it owns in ours
  ring        contiguous shares; cp - 1 stages, each with the K/V of one other rank
  ulysses     all-to-all from tokens to heads and back; needs K/V heads divisible by the ranks
  ideal       our kernel on the whole pack on one GPU, time / cp

Ours also has host figures: host time of a layer's op while the GPU is busy, beside that of torch's add_; the speed
when nothing is queued ahead, so that the GPU waits for the host; the time to take a rank's share of a batch (tokens,
labels, positions).

--stack times LAYERS layers instead, with full and window attention in turn, as one GPU's work from the first to the
last: ours, and the ideal.

--pieces times one dense document whose exchanges travel in pieces of at most peer_memory.MAX_SLOT_BYTES beside whole
ones, by turns, each with a process group and thus peer memory of its own (take --tokens 524288 --heads 32:8
--repeats 2). outside_bytes: what the first forward and backward take of the GPU's memory outside PyTorch's allocator.

TFLOP/s per GPU count the pairs of the mask: 4 * area * head_dim * num_heads_q forward, 2.5 times that backward.
"""

import gc
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from figures import Row, part, recording_parser, save, side_by_side, sources, table, thousands, total_ms
from torch import Tensor

from torchtitan_magi import flex_flash_attn, make_plan, make_plans, sliding_window, varlen_causal
from torchtitan_magi.attention.bound_plan import BoundPlan, bind_plan
from torchtitan_magi.attention.op import PlanHandle, attend, attention_backward_op, attention_op
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.calibrate import Run, facts_of_run, gpu_ms, start_rank
from torchtitan_magi.exchange import peer_memory
from torchtitan_magi.exchange.in_flight import Arrival
from torchtitan_magi.exchange.mesh import process_group_transport
from torchtitan_magi.exchange.peer_memory import PeerTransport
from torchtitan_magi.exchange.pieces import Flow
from torchtitan_magi.exchange.transport import ProcessGroupTransport
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.choose_stages import equal_stages
from torchtitan_magi.planning.cost_model import Heads
from torchtitan_magi.planning.plan import AttnPlan, plan_ownership
from torchtitan_magi.planning.relays import Routes, Spans
from torchtitan_magi.planning.stage import RankShare
from torchtitan_magi.sizing.sample_packs import draw_pack
from torchtitan_magi.sizing.strategies import outcomes as baselines

HEAD_DIM = 128
LAYERS = 8  # called one after another for a host time, or of a stack
WINDOW = 128  # tokens, of every other layer of a stack


def histogram_pack(total: int, seed: int) -> np.ndarray:
    """cu_seqlens of a pack of the histogram; the figures in benchmarks/results are of these packs."""
    return np.append(0, draw_pack("histogram", total, seed, batch=1).cumsum())


class NoCommunication(ProcessGroupTransport):
    """Every row is already there."""

    def all_to_all(self, *arguments: object, **options: object) -> Arrival:
        return Arrival(lambda: None)


def everything(plan: AttnPlan, spans: Spans, stage: Callable[[int, int], int]) -> AttnPlan:
    """The same work with all rows sent to all ranks.

    stage: from destination and source to the number of the stage in which the rows travel; stages are of equal size.
    """
    owned = tuple(share.ranges for share in plan.ranks)
    tokens, num_stages = plan.tokens_per_rank, max(1, len(spans) - 1)
    hops = []
    for destination in range(plan.cp_size):
        for source in range(plan.cp_size):
            if source != destination:
                before = stage(destination, source) * tokens  # row in the sequence of all stages' rows
                for start, end in owned[source].tolist():
                    hops.append((destination, source, start, end, before, num_stages * tokens))
                    before += end - start
    table = np.array(hops, dtype=np.int64)
    routes = Routes(owned, plan.nodes, table[:, :4], table)
    ranks = tuple(RankShare(rank, plan.slices, routes, (spans, spans)) for rank in range(plan.cp_size))
    return replace(plan, routes=routes, ranks=ranks, forward=spans, backward=spans)


def contiguous(slices: AttnSlices, total: int, cp_size: int) -> AttnPlan:
    return plan_ownership(slices.canonical(), total, baselines.contiguous(slices, total, cp_size), 0)


def all_gather(plan: AttnPlan) -> AttnPlan:
    return everything(plan, equal_stages(0), lambda destination, source: 0)


def ring(plan: AttnPlan) -> AttnPlan:
    cp_size = plan.cp_size
    return everything(plan, equal_stages(cp_size - 1), lambda destination, source: (destination - source) % cp_size - 1)


class _HeadsToTokens(torch.autograd.Function):
    """[T, H, D] of all heads <-> [T * cp, H / cp, D] of some heads, by all-to-all."""

    @staticmethod
    def forward(ctx: object, x: Tensor, to_heads: bool) -> Tensor:
        ctx.to_heads = to_heads  # type: ignore[attr-defined]
        return exchange_heads(x) if to_heads else exchange_tokens(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return (exchange_tokens(grad) if ctx.to_heads else exchange_heads(grad)), None  # type: ignore[attr-defined]


def exchange_heads(x: Tensor) -> Tensor:
    cp_size = dist.get_world_size()
    by_rank = x.unflatten(1, (cp_size, -1)).transpose(0, 1).contiguous()
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank)
    return received.flatten(0, 1)


def exchange_tokens(x: Tensor) -> Tensor:
    cp_size = dist.get_world_size()
    by_rank = x.contiguous().unflatten(0, (cp_size, -1))
    received = torch.empty_like(by_rank)
    dist.all_to_all_single(received, by_rank)
    return received.transpose(0, 1).flatten(1, 2)


def once_ms(run: Run, queued: int = 6_000_000) -> float:
    """This rank's GPU time. queued: cycles of work queued ahead, to hide the time of launches; 0: none.

    With queued work an all-reduce comes before the run, so that ranks begin together: the cycles take one GPU longer
    than another, and the rank that is ahead would wait for rows.
    """
    dist.barrier()
    return gpu_ms(run, queued, (lambda: dist.all_reduce(torch.zeros(1, device="cuda"))) if queued else None)


def host_us(run: Run) -> float:
    """Host time of a layer while the device is busy; `run` calls LAYERS of them."""
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(6_000_000)
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start) / LAYERS


def layer_calls(q: Tensor, k: Tensor, v: Tensor, handle: Tensor) -> tuple[Run, Run]:
    """Forward and backward of LAYERS layers, one after another, as ops, below autograd."""
    scale = HEAD_DIM**-0.5
    out, lse = attention_op(q, k, v, handle, scale)
    dout = torch.randn_like(out)

    @torch.inference_mode()
    def forward() -> None:
        for _ in range(LAYERS):
            attention_op(q, k, v, handle, scale)

    @torch.inference_mode()
    def backward() -> None:
        for _ in range(LAYERS):
            attention_backward_op(dout, q, k, v, out, lse, handle, scale)

    return forward, backward


def small_calls(device: torch.device) -> Run:
    """LAYERS calls of one of torch's smallest operations: a yardstick for the CPU."""
    x = torch.zeros(1, device=device)

    def add() -> None:
        for _ in range(LAYERS):
            x.add_(1)

    return add


def take_turns(runs: dict[str, Run], repeats: int, measure: Callable[[Run], float] = once_ms) -> dict[str, float]:
    """Each run's figure: of the slowest rank, the median over repeats."""
    figures = in_turns(runs, repeats, measure)
    return dict(zip(runs, figures.median(0).values.tolist(), strict=True))


def in_turns(runs: dict[str, Run], repeats: int, measure: Callable[[Run], float]) -> Tensor:
    """The slowest rank's figures, [repeats, runs].

    Runs follow one another in an order that is new each time and the same on all ranks: the clock that a run finds
    depends on the run before.
    """
    figures = []
    for repeat in range(repeats + 3):
        order = random.Random(repeat).sample(list(runs), len(runs))
        found = {name: measure(runs[name]) for name in order}
        figures.append([found[name] for name in runs])
    return of_slowest_rank(figures[3:])


def of_slowest_rank(figures: float | list[list[float]]) -> Tensor:
    slowest = torch.tensor(figures, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest


def forward_and_backward(q: Tensor, k: Tensor, v: Tensor, attend: Callable[..., Tensor]) -> tuple[Run, Run]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    dout = torch.randn_like(out)
    return lambda: attend(q, k, v), lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def this_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def random_qkv(tokens: int, heads: tuple[int, int]) -> list[Tensor]:
    """bf16 [tokens, heads, HEAD_DIM] of queries, keys and values."""
    numbers = heads[0], heads[1], heads[1]
    return [torch.randn(tokens, number, HEAD_DIM, device=this_gpu(), dtype=torch.bfloat16) for number in numbers]


def bind(plan: AttnPlan, mesh: Any, heads: tuple[int, int]) -> BoundPlan:
    return bind_plan(plan, mesh, choose_block_attn("ffa", this_gpu()), *heads, this_gpu())


def attend_by(bound: BoundPlan) -> Callable[..., Tensor]:
    """out of q, k, v."""
    handle = PlanHandle(bound)
    return lambda q, k, v: attend(q, k, v, handle, HEAD_DIM**-0.5)[0]


def bench_pack(name: str, cu: np.ndarray, heads: tuple[int, int], seed: int, repeats: int) -> list[Row]:
    cp_size, group = dist.get_world_size(), dist.group.WORLD
    slices, total = varlen_causal(cu), int(cu[-1])
    plan = make_plan(slices, total, cp_size, heads=Heads(*heads, HEAD_DIM))
    local = total // cp_size

    def by_plan(plan: AttnPlan, mesh: object) -> tuple[Callable[..., Tensor], int]:
        received = int(plan.received_rows.max()) * 2 * heads[1] * HEAD_DIM * 2
        return attend_by(bind(plan, mesh, heads)), received

    strategies = {
        "ours": by_plan(plan, group),
        "ours by NCCL": by_plan(plan, ProcessGroupTransport(group)),
        "resident": by_plan(plan, NoCommunication(group)),
        "all-gather": by_plan(all_gather(contiguous(slices, total, cp_size)), group),
        "all-gather balanced": by_plan(all_gather(plan), group),
        "ring": by_plan(ring(contiguous(slices, total, cp_size)), group),
    }
    if heads[1] % cp_size == 0:

        def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (_HeadsToTokens.apply(x, True) for x in (q, k, v))
            return _HeadsToTokens.apply(flex_flash_attn(q, k, v, slices)[0], False)

        moved = (heads[0] * 2 + heads[1] * 2) * local * (cp_size - 1) // cp_size * HEAD_DIM * 2
        strategies["ulysses"] = ulysses, moved

    torch.manual_seed(seed)
    qkv = random_qkv(local, heads)
    runs = {name: forward_and_backward(*qkv, attend) for name, (attend, _) in strategies.items()}
    # The ideal: every rank runs the whole pack by itself, at the same time, so that the clocks are the same.
    whole = random_qkv(total, heads)
    runs["ideal"] = forward_and_backward(*whole, lambda q, k, v: flex_flash_attn(q, k, v, slices)[0])
    forwards, backwards = times_of(runs, repeats)
    # Without autograd's thread: waking it takes longer than a layer, and in training happens once a step.
    with torch.autograd.set_multithreading_enabled(False):
        unqueued = sum(take_turns({"ours": run}, repeats, partial(once_ms, queued=0))["ours"] for run in runs["ours"])
    bound = bind(plan, group, heads)
    batch = torch.zeros(3, total, dtype=torch.int64, device=this_gpu())  # tokens, labels, positions
    dispatch = take_turns({"dispatch": lambda: [x.index_select(0, bound.tokens) for x in batch]}, repeats)["dispatch"]
    forward, backward = layer_calls(*qkv, PlanHandle(bound).tensor)
    calls = {"fwd_host_us": forward, "bwd_host_us": backward, "add_host_us": small_calls(this_gpu())}
    of_calls = {name: in_turns({name: run}, repeats, host_us) for name, run in calls.items()}
    host = {name: float(figures.median()) for name, figures in of_calls.items()}
    # Other work on the machine, whose CPUs are shared, only ever adds to host times.
    least = {name.replace("host", "least_host"): float(figures.min()) for name, figures in of_calls.items()}
    forwards["ideal"], backwards["ideal"] = forwards["ideal"] / cp_size, backwards["ideal"] / cp_size

    flops = 4 * slices.area * HEAD_DIM * heads[0]
    rows = []
    for strategy, forward in forwards.items():
        backward, received = backwards[strategy], strategies[strategy][1] if strategy in strategies else 0
        rows.append({
            "strategy": strategy, "pack": name, "tokens_per_gpu": local, "heads": f"{heads[0]}:{heads[1]}",
            "seed": seed, "cp": cp_size, "recv_bytes_max": received, "fwd_ms": forward, "bwd_ms": backward,
            "fwd_tflops_per_gpu": flops / cp_size / forward / 1e9,
            "bwd_tflops_per_gpu": 2.5 * flops / cp_size / backward / 1e9,
        })  # fmt: skip
        if strategy.startswith("ours"):
            rows[-1]["exposed_comm_share"] = 1 - (forwards["resident"] + backwards["resident"]) / (forward + backward)
    spent = forwards["ours"] + backwards["ours"]
    rows[0] |= {"speed_unqueued": spent / unqueued, "dispatch_us": 1e3 * dispatch, **host, **least}
    return rows


def times_of(runs: dict[str, tuple[Run, Run]], repeats: int) -> list[dict[str, float]]:
    """All forwards, then all backwards, as in training."""
    return [take_turns({name: both[i] for name, both in runs.items()}, repeats) for i in range(2)]


def bench_stack(name: str, cu: np.ndarray, heads: tuple[int, int], seed: int, repeats: int) -> list[Row]:
    """LAYERS layers with full and window attention in turn, their tokens placed once, beside their ideal."""
    cp_size = dist.get_world_size()
    masks, total = (varlen_causal(cu), sliding_window(cu, WINDOW)), int(cu[-1])
    plans = make_plans(masks, total, cp_size, layers=[LAYERS // 2] * 2, heads=Heads(*heads, HEAD_DIM))

    def stack(qkv: list[Tensor], attend_by: list[Callable[..., Tensor]]) -> tuple[Run, Run]:
        both = [forward_and_backward(*qkv, attend) for attend in attend_by] * (LAYERS // 2)
        return lambda: [forward() for forward, _ in both], lambda: [backward() for _, backward in reversed(both)]

    torch.manual_seed(seed)
    ours = [attend_by(bind(plan, dist.group.WORLD, heads)) for plan in plans]
    whole = [lambda q, k, v, mask=mask: flex_flash_attn(q, k, v, mask)[0] for mask in masks]
    runs = {"ours": stack(random_qkv(total // cp_size, heads), ours), "ideal": stack(random_qkv(total, heads), whole)}
    forwards, backwards = times_of(runs, repeats)
    return [{
        "strategy": "ours", "pack": name, "window": WINDOW, "tokens_per_gpu": total // cp_size, "seed": seed,
        "heads": f"{heads[0]}:{heads[1]}", "cp": cp_size, "layers": LAYERS,
        "fwd_ms": forwards["ours"], "bwd_ms": backwards["ours"],
        "ideal_fwd_ms": forwards["ideal"] / cp_size, "ideal_bwd_ms": backwards["ideal"] / cp_size,
    }]  # fmt: skip


def outside_bytes() -> int:
    """The GPU's memory in use beyond what PyTorch's allocator holds."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def bench_pieces(name: str, cu: np.ndarray, heads: tuple[int, int], seed: int, repeats: int) -> list[Row]:
    """Exchanges whole and in pieces, which must bring the same rows."""
    cp_size, total = dist.get_world_size(), int(cu[-1])
    plan = make_plan(varlen_causal(cu), total, cp_size, heads=Heads(*heads, HEAD_DIM))
    exchange = plan.ranks[dist.get_rank()].forward[0].exchanges[0]
    row_bytes, qkv = 2 * heads[1] * HEAD_DIM * 2, random_qkv(total // cp_size, heads)
    limits = {"whole": 1 << 60, "pieces": peer_memory.MAX_SLOT_BYTES}
    runs, rows = {}, {}
    for setting, limit in limits.items():
        group = dist.new_group(list(range(cp_size)))
        transport = process_group_transport(group)
        assert isinstance(transport, PeerTransport), "the GPUs do not reach each other's memory"
        attend = attend_by(bind(plan, group, heads))
        dist.barrier(group)
        peer_memory.MAX_SLOT_BYTES, before = limit, outside_bytes()
        runs[setting] = forward_and_backward(*qkv, attend)
        runs[setting][1]()
        torch.cuda.synchronize()
        rows[setting] = {
            "setting": setting, "tokens_per_gpu": total // cp_size, "heads": f"{heads[0]}:{heads[1]}", "cp": cp_size,
            "sent_bytes_max": Flow.of(exchange, False).most_sent * row_bytes,
            "pieces": Flow.of(exchange, False).num_pieces(limit // row_bytes),
            "symmetric_bytes": transport.num_bytes, "outside_bytes": outside_bytes() - before,
            "fwd_ms": [], "bwd_ms": [],
        }  # fmt: skip
    whole, pieces = (forward() for forward, _ in runs.values())
    assert torch.equal(whole, pieces), "pieces bring other rows"
    del whole, pieces
    for repeat in range(repeats):
        for setting in list(runs)[:: 1 if repeat % 2 else -1]:
            peer_memory.MAX_SLOT_BYTES = limits[setting]
            for figure, run in zip(("fwd_ms", "bwd_ms"), runs[setting], strict=True):
                rows[setting][figure].append(float(of_slowest_rank(once_ms(run))))
    return list(rows.values())


def describe_run(commit: str | None) -> dict:
    """`facts_of_run`, the number of GPUs, and NCCL's version."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return facts_of_run(commit) | {"num_gpus": dist.get_world_size(), "nccl": nccl}


# -------------------------------------------------------------------------------------------------------------- tables

FILES = {
    2: ("cp_h200x2", "cp_h200x2_64k", "cp_h200x2_32_8", "cp_h200x2_32_32"),
    4: ("cp_h200x4", "cp_h200x4_64k", "cp_h100x4_32_32"),
}
OTHERS = ("all-gather", "all-gather balanced", "ring", "ulysses")


def packs_of(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """(tokens per GPU, heads, kind of pack, seed) -> strategy -> its row."""
    return side_by_side(rows, "strategy", "tokens_per_gpu", "heads", "pack", "seed")


def pack_table(found: dict[str, Any]) -> str:
    """The strategies, on one pack."""
    ideal, lines = total_ms(found["rows"][-1]), []
    for row in found["rows"]:
        speeds = [f"{row[f'{way}_tflops_per_gpu']:.0f}" for way in ("fwd", "bwd")]
        setting = [row[name] for name in ("pack", "tokens_per_gpu", "heads", "seed", "strategy")]
        lines.append([*setting, *speeds, f"{ideal / total_ms(row):.0%}", f"{row['recv_bytes_max'] / 2**20:.1f}"])
    columns = ["pack", "tokens per GPU", "heads", "seed", "strategy", "TFLOP/s forward", "backward", "of the ideal"]
    return table([*columns, "MiB received"], lines)


def settings_table(*files: dict[str, Any]) -> str:
    """Ours in each setting of each file, over its packs."""
    lines = []
    for found in files:
        settings: dict[tuple[Any, ...], list[dict[str, Row]]] = {}
        for (*setting, _), by in packs_of(found["rows"]).items():
            settings.setdefault(tuple(setting), []).append(by)
        for (tokens, heads, pack), packs in settings.items():
            ours = [total_ms(by["ours"]) for by in packs]
            shares = [100 * total_ms(by["ideal"]) / time for by, time in zip(packs, ours, strict=True)]
            others = [
                min(total_ms(by[other]) for other in OTHERS if other in by) / time
                for by, time in zip(packs, ours, strict=True)
            ]
            exposed, unqueued = (
                mean(by["ours"][field] for by in packs) for field in ("exposed_comm_share", "speed_unqueued")
            )
            lines.append([
                thousands(tokens), heads, pack, len(packs), f"{mean(shares):.0f}%", f"{min(shares):.0f}%",
                f"{mean(others):.2f}", f"{100 * exposed:.1f}%", f"{unqueued:.2f}",
            ])  # fmt: skip
    columns = ["tokens per GPU", "heads", "pack", "packs", "of the ideal", "lowest", "against the best other"]
    return table([*columns, "exposed", "nothing queued"], lines)


def stack_table(found: dict[str, Any]) -> str:
    """Layers with full and window attention in turn."""
    lines = []
    for row in found["rows"]:
        ideal, spent = row["ideal_fwd_ms"] + row["ideal_bwd_ms"], total_ms(row)
        times = [f"{row[way]:.2f}" for way in ("fwd_ms", "bwd_ms")]
        pack = thousands(row["tokens_per_gpu"]), row["heads"], row["pack"], row["seed"]
        lines.append([*pack, *times, f"{100 * ideal / spent:.0f}%"])
    columns = ["tokens per GPU", "heads", "pack", "seed", "forward, ms", "backward, ms", "of the ideal"]
    return table(columns, lines)


def pieces_table(found: dict[str, Any]) -> str:
    lines = []
    for row in found["rows"]:
        times = (f"{min(row[way]):,.0f}" for way in ("fwd_ms", "bwd_ms"))
        lines.append([row["setting"], row["pieces"], f"{row['outside_bytes'] / 2**30:.1f}", *times])
    return table(["exchange", "pieces", "GiB outside PyTorch", "forward, ms", "backward, ms"], lines)


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "cp-two": part(settings_table, *FILES[2]),
    "cp-four": part(settings_table, *FILES[4]),
    "cp-stack": part(stack_table, "cp_stack_h200x2"),
    "cp-pieces": part(pieces_table, "pieces_h200x2"),
    "cp-trace": partial(sources, "trace_h200x4"),
}


def main() -> None:
    parser = recording_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 65536], help="per GPU")
    parser.add_argument("--heads", nargs="+", default=["64:8", "32:32"],
                        help="query heads : K/V heads; all but the first at the first size only")  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="histogram packs per size")
    parser.add_argument("--repeats", type=int, default=10, help="up to 16k tokens per GPU; fewer for more")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--stack", action="store_true", help="a stack of full and window layers instead")
    kind.add_argument("--pieces", action="store_true", help="whole exchanges and pieces of a dense document instead")
    arguments = parser.parse_args()
    bench, as_table = bench_pack, pack_table
    if arguments.stack or arguments.pieces:
        bench, as_table = (bench_stack, stack_table) if arguments.stack else (bench_pieces, pieces_table)
    gc.disable()  # as in torchtitan's training
    start_rank()
    rows: list[Row] = []
    for heads in arguments.heads:
        num_heads = tuple(map(int, heads.split(":")))
        for tokens in arguments.tokens[: None if heads == arguments.heads[0] else 1]:
            total = tokens * dist.get_world_size()
            seeds = range(0 if arguments.pieces else arguments.seeds)
            packs = [("histogram", histogram_pack(total, seed), seed) for seed in seeds]
            for name, cu, seed in [*packs, ("dense", np.array([0, total]), 0)]:
                least = arguments.repeats if arguments.pieces else 3
                repeats = max(least, arguments.repeats * 16384 // max(tokens, 16384))
                found = bench(name, cu, num_heads, seed, repeats)
                rows += found
                if dist.get_rank() == 0:  # after every pack: a run cut short leaves what it has
                    print(as_table({"rows": found}), flush=True)
                    save(describe_run(arguments.commit) | {"rows": rows}, arguments.output)
    if dist.get_rank() == 0 and bench is bench_pack:
        print(settings_table({"rows": rows}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
