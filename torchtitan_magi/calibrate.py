"""Measures what attention and communication cost on your GPUs, and writes it as a cost model.

Training takes the file as [magi] cost_model, the sizing report as --cost, and
make_plan as cost=CostModel.load(FILE). All GPUs of the run take part, for about
a minute. What a run cannot see (links between nodes when there is one node)
keeps the shipped value.

examples:
  torchrun --standalone --nproc-per-node 8 -m torchtitan_magi.calibrate --output cost.json
  torchtitan-magi calibrate --fit benchmarks/results/kernel_h200.json
"""

# The scripts that time things take their clock, their start and the facts beside their figures from here.

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.attention.bound_plan import bind_slices
from torchtitan_magi.attention.op import PlanHandle, attention_backward_op, attention_op
from torchtitan_magi.backends.choose import choose_block_attn
from torchtitan_magi.backends.interface import StageInputs
from torchtitan_magi.commands.parser import CommandParser, check_output
from torchtitan_magi.exchange import peer_memory
from torchtitan_magi.exchange.in_flight import Arrival, Places, RowShape
from torchtitan_magi.exchange.mesh import process_group_transport
from torchtitan_magi.machine import version_of
from torchtitan_magi.masks.builders import block_causal, sliding_window, varlen_causal, varlen_full
from torchtitan_magi.masks.geometry import Int64Array
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, CostModel, FloatArray, Heads, KernelCost, Link
from torchtitan_magi.planning.plan import make_plan
from torchtitan_magi.planning.relays import ALL, NONE
from torchtitan_magi.planning.stage import Exchange
from torchtitan_magi.wording import one_line, shown

Run = Callable[[], object]

MIB = 1 << 20
EXCHANGES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)  # bytes that a rank sends
HEADS = (Heads(64, 8, 128), Heads(64, 8, 64), Heads(16, 16, 128))
LENGTHS = ((2048, 2048), (8192, 128), (8192, 1024), (8192, 8192), (16384, 512), (16384, 4096))  # tokens, document
WINDOW = 1024  # tokens
MASKS: dict[str, Callable[[Int64Array], AttnSlices]] = {  # of cu_seqlens, by what figures call them
    "full": varlen_full,
    "causal": varlen_causal,
    "window": lambda cu_seqlens: sliding_window(cu_seqlens, WINDOW),
    "block": lambda cu_seqlens: block_causal(cu_seqlens, WINDOW),
}


# ---------------------------------------------------------------------------------------------- shared with the scripts


def facts_of_run(commit: str | None) -> dict[str, str | None]:
    """Date, device, versions, commit, command, to stand beside figures. commit: for a tree that git does not know."""
    root = Path(__file__).resolve().parents[1]
    if commit is None and (root / ".git").exists():  # not so in an installed wheel
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=root, check=False)
        commit = head.stdout.strip()
    program = Path(sys.argv[0]).resolve()
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "torchtitan": version_of("torchtitan") or None,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit,
        "command": shlex.join([
            str(program.relative_to(root) if program.is_relative_to(root) else program.name), *sys.argv[1:]
        ]),
    }  # fmt: skip


def start_rank() -> torch.device:
    """Joins the processes that torchrun started; this one's GPU."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def gpu_ms(run: Run, queued: int, first: Run | None = None) -> float:
    """Time of `run` on the GPU.

    Args:
        queued: cycles of work queued ahead, to hide the time of launches.
        first: what else is queued ahead, after those cycles.
    """
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if queued:
        torch.cuda._sleep(queued)
    if first is not None:
        first()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


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
        per_head = np.array([pairs, pairs * heads.mean_dim, rows, rows * heads.mean_dim])
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
    """x >= 0 of small |table x - values|: leaves out the column with the most negative coefficient until none is."""
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
    """What benchmarks/bench_kernel.py measured of our kernel.

    Raises:
        ValueError: the file is missing, or has no such figures; one line.
    """
    try:
        samples = _samples_in(json.loads(path.read_text())["rows"])
        if not samples:
            raise ValueError("it has no rows of ours")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(
            f"{shown(path)} has no figures of benchmarks/bench_kernel.py ({reason}); give another"
        ) from None
    return samples


def _samples_in(rows: Any) -> list[Sample]:
    samples = []
    for row in rows:
        if row["impl"] == "ours" and row.get("lengths"):
            slices = MASKS[row["mask"]](np.cumsum([0, *map(int, row["lengths"].split())]))
            num_heads_q, num_heads_kv = map(int, row["heads"].split(":"))
            heads = Heads(num_heads_q, num_heads_kv, row["head_dim"])
            samples.append(Sample(slices, row["tokens"], heads, row["fwd_ms"] / 1e3, row["bwd_ms"] / 1e3))
    return samples


def print_fit(name: str, cost: KernelCost, ratio: FloatArray) -> None:
    """Prints the constants of "forward" or "backward", and predicted over measured, [samples]."""
    constants = ", ".join(f"{key}={value:.3g}" for key, value in asdict(cost).items())
    print(f"{name}: {constants}; predicted / measured {ratio.min():.2f} to {ratio.max():.2f}")


# ------------------------------------------------------------------------------------------------------------ measuring


def seconds_of(run: Run, repeats: int = 10) -> float:
    """GPU time of the slowest rank, the median of so many calls after two that do not count."""
    times = []
    for _ in range(repeats + 2):
        dist.barrier()
        times.append(gpu_ms(run, 1_000_000) / 1e3)
    slowest = torch.tensor(times[2:], device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.median())


class Layer:
    """One device's attention over a pack of equal documents: its forward and its backward, to be called."""

    def __init__(self, num_tokens: int, length: int, heads: Heads) -> None:
        device, counts = torch.device("cuda"), (heads.num_heads_q, heads.num_heads_kv, heads.num_heads_kv)
        self.slices = varlen_causal(np.arange(0, num_tokens + 1, length))
        self.block_attn = choose_block_attn("ffa", device)
        bound = bind_slices(self.slices, num_tokens, num_tokens, *counts[:2], self.block_attn, device)
        shapes = [(num_tokens, count, heads.head_dim) for count in counts]
        q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        handle, scale = PlanHandle(bound).tensor, heads.head_dim**-0.5
        self.inputs = StageInputs(q, k, v, bound.forward[0].mask, scale)
        self.forward = partial(attention_op, q, k, v, handle, scale)
        out, lse = self.forward()
        self.backward = partial(attention_backward_op, torch.randn_like(out), q, k, v, out, lse, handle, scale)


def measure_kernel() -> list[Sample]:
    """A layer's forward and backward on each rank, for all HEADS and LENGTHS. A collective, as all that follow."""
    samples = []
    for heads in HEADS:
        for num_tokens, length in LENGTHS:
            layer = Layer(num_tokens, length, heads)
            times = seconds_of(layer.forward), seconds_of(layer.backward)
            samples.append(Sample(layer.slices, num_tokens, heads, *times))
    return samples


def measure_merge() -> float:
    """How much longer a forward takes when it is the first or the last of several, seconds per element of out."""
    layer = Layer(8192, 1024, HEADS[0])
    first = partial(layer.block_attn.forward, layer.inputs, more=True)
    last = partial(layer.block_attn.forward, layer.inputs, first())
    both = seconds_of(first) + seconds_of(last)
    return max(0.0, (both / 2 - seconds_of(layer.forward)) / layer.inputs.q.numel())


def measure_memory() -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * len(source) / seconds_of(lambda: target.copy_(source))


HEAD_SHAPE = 8, 128
ROW_BYTES = 4096  # of K and V in 16 bits


class EvenExchange:
    """An exchange in which each rank sends num_bytes, spread evenly over its partners."""

    def __init__(self, num_bytes: int, partners: Sequence[int]) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        rows = num_bytes // len(partners) // ROW_BYTES  # to each
        splits = tuple(rows if other in partners else 0 for other in range(size))
        pairs = [(a, b, 0, rows, 0, rows) for a in range(size) for b in range(size) if a != b]
        hops = np.array(pairs) if len(partners) == size - 1 else None
        self.exchange = Exchange(rank, np.arange(rows * len(partners)), splits, splits, hops, (NONE, ALL))
        num_heads, head_dim = HEAD_SHAPE
        self.shape = RowShape(num_heads, head_dim, head_dim)
        self.received = torch.empty(rows * len(partners), self.shape.width, dtype=torch.bfloat16, device="cuda")
        self.transport = process_group_transport(dist.group.WORLD)
        self.mover = choose_block_attn("ffa", self.received.device).row_mover()

    def start(self, k: Tensor | None = None, v: Tensor | None = None, rows: Tensor | None = None) -> Arrival:
        """Starts the exchange; packs `rows` of k and v for it, if given."""
        found = self.transport.pieces((self.shape.width,), torch.bfloat16, self.exchange, back=False)
        if found is None:
            sent = torch.empty_like(self.received)
            if k is not None:
                self.mover.gather(k, v, [rows], sent)
            return self.transport.all_to_all(self.received, sent, self.exchange, back=False)
        ((_, places, _, arrival),) = found[1]  # it fits into a slot
        if k is None:  # nothing is packed: only counted, so that the peers fetch
            k, v = self.shape.split(self.received[:1])
            places, rows = Places([], [], 0, places.flags), torch.empty(0, dtype=torch.int32, device="cuda")
        self.mover.gather(k, v, [rows], places)
        arrival.begin()
        return arrival

    def run(self) -> None:
        """The exchange from start to end, for the stream."""
        self.start().wait()


def measure_link(partners: Sequence[int]) -> Link:
    """The link to these ranks, from exchanges of all EXCHANGES."""
    exchanges = [EvenExchange(size, partners) for size in EXCHANGES]
    return fit_link([one.received.nbytes for one in exchanges], [seconds_of(one.run) for one in exchanges])


def measure_slowdown(partners: Sequence[int]) -> float:
    """Fraction of the kernel's speed that an exchange takes while both run."""
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
    """Seconds of a stage with hardly any rows beyond the latency: packing them, starting the exchange."""
    rows = torch.arange(8 * len(partners), device="cuda", dtype=torch.int32)
    k, v = (torch.randn(8192, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exchange = EvenExchange(ROW_BYTES * len(rows), partners)
    stage = seconds_of(lambda: exchange.start(k, v, rows).wait())
    return max(0.0, stage - link.latency)


def measure() -> CostModel:
    """The machine's cost model; what it does not let see is H200's."""
    rank, world, local = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    inside = [other for other in range(world) if other // local == rank // local and other != rank]
    outside = [other for other in range(world) if other // local != rank // local]
    samples = measure_kernel()
    costs = []
    for name in ("forward", "backward"):
        cost, ratio = fit_kernel(samples, np.array([getattr(sample, name) for sample in samples]))
        stock = getattr(H200, name)
        costs.append(replace(cost, wide=stock.wide, wide_queries=stock.wide_queries))  # not measured here
        if rank == 0:
            print_fit(name, cost, ratio)
    model = replace(H200, forward=costs[0], backward=costs[1], merge=measure_merge(), memory=measure_memory())
    if inside:
        link = measure_link(inside)
        model = replace(model, inside=link, slowdown=measure_slowdown(inside), stage=measure_stage(link, inside))
    return replace(model, across=measure_link(outside)) if outside else model


def main() -> None:
    """The command; ends the process with one line if no torchrun started it."""
    usage = "torchrun --nproc-per-node GPUS -m torchtitan_magi.calibrate [options]"
    parser = CommandParser("calibrate", usage, __doc__)
    add = parser.add_argument
    add("--output", type=Path, default=Path("cost.json"), metavar="FILE", help="JSON to write (default: %(default)s)")
    add("--commit", metavar="HASH", help="commit to note in the file (default: that of the checkout, if it is one)")
    add(
        "--fit",
        type=Path,
        metavar="FILE",
        help="no measuring, no GPU: fits the kernel's constants to a file of benchmarks/bench_kernel.py, prints them",
    )
    arguments = parser.parse_args()
    try:
        if arguments.fit is not None:
            samples = recorded_samples(arguments.fit)
            for name in ("forward", "backward"):
                print_fit(name, *fit_kernel(samples, np.array([getattr(sample, name) for sample in samples])))
            return
        _check_start(arguments.output)
    except ValueError as error:
        parser.error(str(error))
    start_rank()
    peer_memory.WRITTEN_BYTES = 0  # copy engines fetch, whatever the size
    model = measure()
    if dist.get_rank() == 0:
        sizes = {"gpus": dist.get_world_size(), "gpus_per_node": int(os.environ["LOCAL_WORLD_SIZE"])}
        model.save(arguments.output, **facts_of_run(arguments.commit), **sizes)
        print(json.dumps(asdict(model), indent=1))
    dist.destroy_process_group()


def _check_start(output: Path) -> None:
    """Raises ValueError, one line, where no torchrun started this, a GPU is missing, or the file cannot be written."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(
            "calibrate measures communication; start it by torchrun --nproc-per-node GPUS -m torchtitan_magi.calibrate"
        )
    if int(os.environ["LOCAL_RANK"]) >= (number := torch.cuda.device_count()):
        remedy = "give --nproc-per-node as many" if number else "measure where there are GPUs"
        raise ValueError(f"torch sees {number} GPUs here; {remedy}")
    if os.environ["RANK"] == "0":  # which writes it
        check_output(output)


if __name__ == "__main__":
    main()
