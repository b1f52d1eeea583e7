"""Measures what attention and communication cost on this machine, for the choice of overlap stages.

    torchrun --standalone --nproc-per-node 8 scripts/calibrate.py --output cost.json
    python scripts/calibrate.py --fit benchmarks/results/kernel_h200.json

All GPUs of the run take part; it should need about a minute. `CostModel.load` reads the file, and `make_plan` takes the
model as `cost`. What a run cannot see (links between nodes when there is one node) keeps the value that is shipped.
With --fit, the kernel's constants are fitted to figures of scripts/bench_kernel.py, without a GPU.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from bench_cp import start_rank
from provenance import facts_of_run

from torchtitan_magi.backends.ffa.block_attn import FfaBlockAttn
from torchtitan_magi.backends.ffa.row_kernels import CudaRows
from torchtitan_magi.exchange.group_cast import process_group_transport
from torchtitan_magi.exchange.transport import Arrival, RowSums
from torchtitan_magi.masks.slices import AttnSlices, varlen_causal
from torchtitan_magi.planning.plan import Exchange, make_plan
from torchtitan_magi.planning.stages import ALL, H200, NONE, CostModel, Heads, KernelCost, Link

FloatArray = npt.NDArray[np.float64]
MIB = 1 << 20
EXCHANGES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)  # bytes that a rank sends
HEADS = (Heads(64, 8, 128), Heads(64, 8, 64), Heads(16, 16, 128))
LENGTHS = ((2048, 2048), (8192, 128), (8192, 1024), (8192, 8192), (16384, 512), (16384, 4096))  # tokens, document


# -------------------------------------------------------------------------------------------------------------- fitting


@dataclass(frozen=True)
class Sample:
    """A kernel call: the work of its mask, and how long it took."""

    slices: AttnSlices
    num_tokens: int
    heads: Heads
    forward: float  # s
    backward: float  # s


def fit_kernel(samples: Sequence[Sample], seconds: FloatArray) -> tuple[KernelCost, FloatArray]:
    """The constants of least relative error, none of them negative; and predicted over measured, [samples]."""
    columns = []
    for sample in samples:
        heads = sample.heads
        work = make_plan(sample.slices, sample.num_tokens, 1, heads=heads).work
        pairs, rows = float(work.local_pairs[0]), float(work.local_rows[0])
        per_head = np.array([pairs, pairs * heads.head_dim, rows, rows * heads.head_dim])
        columns.append([1.0, *(per_head * heads.num_heads_q)])
    table = np.array(columns) / seconds[:, None]
    constants = non_negative_least_squares(table, np.ones(len(seconds)))
    return KernelCost(*constants.tolist()), table @ constants


def fit_link(num_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Latency and bandwidth of least relative error."""
    measured = np.array(seconds)
    table = np.stack([np.ones(len(measured)), np.array(num_bytes, float)], 1) / measured[:, None]
    latency, per_byte = non_negative_least_squares(table, np.ones(len(measured)))
    return Link(float(latency), float(1 / per_byte))


def non_negative_least_squares(table: FloatArray, values: FloatArray) -> FloatArray:
    """x >= 0 of small |table x - values|: leaves out the column with the most negative share until none is."""
    scale = np.abs(table).max(0)
    columns = np.arange(table.shape[1])
    while True:
        x = np.linalg.lstsq(table[:, columns] / scale[columns], values, rcond=None)[0]
        if (x >= 0).all():
            break
        columns = np.delete(columns, x.argmin())
    result = np.zeros(table.shape[1])
    result[columns] = x / scale[columns]
    return result


def recorded_samples(path: Path) -> list[Sample]:
    """What scripts/bench_kernel.py measured of our kernel, in the cases that it knows."""
    from bench_kernel import GROUPS, cases

    masks = {}
    for case in (case for group in GROUPS for case in cases(group)):
        masks[case.name, case.tokens, "{}:{}".format(*case.heads), case.head_dim] = case.slices
    samples = []
    for row in json.loads(path.read_text())["rows"]:
        key = row["case"], row["tokens"], row["heads"], row["head_dim"]
        if row["impl"] == "ours" and key in masks:
            heads = Heads(*map(int, row["heads"].split(":")), row["head_dim"])
            samples.append(Sample(masks[key](), row["tokens"], heads, row["fwd_ms"] / 1e3, row["bwd_ms"] / 1e3))
    return samples


def print_fit(name: str, cost: KernelCost, ratio: FloatArray) -> None:
    constants = ", ".join(f"{key}={value:.3g}" for key, value in asdict(cost).items())
    print(f"{name}: {constants}; predicted / measured {ratio.min():.2f} to {ratio.max():.2f}")


# ------------------------------------------------------------------------------------------------------------ measuring


def seconds_of(run: Callable[[], object], repeats: int = 10) -> float:
    """Median time on the device with work queued ahead; of the slowest rank."""
    times = []
    for i in range(repeats + 2):
        dist.barrier()
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end) / 1e3)
    slowest = torch.tensor(times, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


class Layer:
    """One device's attention over a pack of equal documents."""

    def __init__(self, num_tokens: int, length: int, heads: Heads) -> None:
        self.heads, self.num_tokens = heads, num_tokens
        self.slices = varlen_causal(np.arange(0, num_tokens + 1, length))
        self.block_attn = FfaBlockAttn(torch.device("cuda"))
        lists = self.block_attn.prepare(self.slices, num_tokens, num_tokens, heads.num_heads_q, heads.num_heads_kv)
        self.mask = lists.to(torch.from_numpy(lists.words).cuda())
        shapes = [(num_tokens, n, heads.head_dim) for n in (heads.num_heads_q, heads.num_heads_kv, heads.num_heads_kv)]
        self.q, self.k, self.v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        self.dout = torch.randn_like(self.q)
        self.scale = heads.head_dim**-0.5
        self.out, self.lse = self.forward()

    def forward(
        self, earlier: tuple[torch.Tensor, torch.Tensor] | None = None, more: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block_attn.forward(self.q, self.k, self.v, self.mask, self.scale, earlier, more)

    def backward(self) -> None:
        dq, delta = torch.empty_like(self.q, dtype=torch.float32), torch.empty_like(self.lse)
        self.block_attn.rows().sum(RowSums(self.out, self.dout, delta, (dq,)))
        dkv = torch.empty_like(self.k), torch.empty_like(self.v)
        self.block_attn.backward(self.dout, self.q, self.k, self.v, self.lse, delta, self.mask, self.scale, dq, dkv)
        self.block_attn.rows().round(dq, self.scale, torch.empty_like(self.q))


def measure_kernel() -> list[Sample]:
    samples = []
    for heads in HEADS:
        for num_tokens, length in LENGTHS:
            layer = Layer(num_tokens, length, heads)
            times = seconds_of(layer.forward), seconds_of(layer.backward)
            samples.append(Sample(layer.slices, num_tokens, heads, *times))
    return samples


def measure_merge() -> float:
    """How much longer a forward takes that is the first or the last of several, per element of out."""
    layer = Layer(8192, 1024, HEADS[0])
    first = layer.forward(more=True)
    both = seconds_of(lambda: layer.forward(more=True)) + seconds_of(lambda: layer.forward(first))
    return max(0.0, (both / 2 - seconds_of(layer.forward)) / layer.q.numel())


def measure_memory() -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda: target.copy_(source))


ROW_BYTES = 4096


class EvenExchange:
    """An exchange in which each rank sends so many bytes, evenly to its partners."""

    def __init__(self, num_bytes: int, partners: Sequence[int]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        share = num_bytes // len(partners) // ROW_BYTES
        splits = tuple(share if other in partners else 0 for other in range(size))
        pairs = [(a, b, 0, share, 0, share) for a in range(size) for b in range(size) if a != b]
        hops = np.array(pairs) if len(partners) == size - 1 else None
        self.exchange = Exchange(rank, np.arange(share * len(partners)), splits, splits, hops, (NONE, ALL))
        self.shape = (share * len(partners), ROW_BYTES)
        self.received = torch.empty(self.shape, dtype=torch.uint8, device="cuda")
        self.transport = process_group_transport(dist.group.WORLD)

    def start(self, pack: Callable[[torch.Tensor], object] = lambda sent: None) -> Arrival:
        device = self.received.device
        sent = self.transport.send_buffer(self.shape, torch.uint8, device, self.exchange, back=False)
        pack(sent)
        return self.transport.all_to_all(self.received, sent, self.exchange, back=False)

    def run(self) -> None:
        self.start().wait()


def measure_link(partners: Sequence[int]) -> Link:
    exchanges = [EvenExchange(size, partners) for size in EXCHANGES]
    return fit_link([one.received.nbytes for one in exchanges], [seconds_of(one.run) for one in exchanges])


def measure_slowdown(partners: Sequence[int]) -> float:
    """Part of the kernel's speed that an exchange takes while both run."""
    layer = Layer(16384, 4096, HEADS[0])
    alone = seconds_of(layer.backward)
    exchange = EvenExchange(EXCHANGES[-1], partners)

    def both(attend: bool) -> None:
        arrival = exchange.start()
        if attend:
            layer.backward()
        arrival.wait()

    travel = seconds_of(lambda: both(False))
    return float(np.clip((seconds_of(lambda: both(True)) - max(alone, travel)) / min(alone, travel), 0, 1))


def measure_stage(link: Link, partners: Sequence[int]) -> float:
    """What a stage with hardly any rows costs beyond the latency: packing them, starting the exchange."""
    rows = torch.arange(8 * len(partners), device="cuda", dtype=torch.int32)
    k, v = (torch.randn(8192, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exchange = EvenExchange(ROW_BYTES * len(rows), partners)

    def pack(sent: torch.Tensor) -> None:
        CudaRows().gather(k, v, [rows], sent)

    def stage() -> None:
        exchange.start(pack).wait()

    return max(0.0, seconds_of(stage) - link.latency)


def measure() -> CostModel:
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    inside = [other for other in range(world) if other // local == rank // local and other != rank]
    outside = [other for other in range(world) if other // local != rank // local]
    samples = measure_kernel()
    costs = []
    for name in ("forward", "backward"):
        cost, ratio = fit_kernel(samples, np.array([getattr(sample, name) for sample in samples]))
        costs.append(cost)
        if rank == 0:
            print_fit(name, cost, ratio)
    model = replace(H200, forward=costs[0], backward=costs[1], merge=measure_merge(), memory=measure_memory())
    if inside:
        link = measure_link(inside)
        model = replace(model, inside=link, slowdown=measure_slowdown(inside), stage=measure_stage(link, inside))
    return replace(model, across=measure_link(outside)) if outside else model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("cost.json"))
    parser.add_argument("--commit", help="commit of the tree, where git is missing")
    parser.add_argument("--fit", type=Path, help="figures of bench_kernel.py; fits the kernel's constants, no GPU")
    arguments = parser.parse_args()
    if arguments.fit is not None:
        samples = recorded_samples(arguments.fit)
        for name in ("forward", "backward"):
            print_fit(name, *fit_kernel(samples, np.array([getattr(sample, name) for sample in samples])))
        return
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("calibrate measures communication: start it with torchrun --nproc-per-node <GPUs>")
    start_rank()
    model = measure()
    if dist.get_rank() == 0:
        sizes = {"gpus": dist.get_world_size(), "gpus_per_node": int(os.environ["LOCAL_WORLD_SIZE"])}
        model.save(arguments.output, **facts_of_run(arguments.commit), **sizes)
        print(json.dumps(asdict(model), indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
