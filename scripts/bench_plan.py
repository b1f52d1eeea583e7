"""Compares placements: balance, K/V rows that travel, time to plan. Prints a table, writes benchmarks/results/plan.json

    python scripts/bench_plan.py [--cases 512k/8 512k/64] [--seeds 5]

Packs: documents whose lengths are drawn from a distribution, each capped at a quarter of the pack, packed in
sequence, the last one cut to fit, then shuffled. Mask: causal inside each document. Volumes are K/V rows in units of
T, the tokens of a rank. The lower bound holds for every placement with equal tokens and an imbalance of at most 1.02.
"""

import argparse
import functools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_magi.baselines import contiguous, min_heap, zigzag
from torchtitan_magi.outcome import tile_work
from torchtitan_magi.packs import draw_pack
from torchtitan_magi.placement import place
from torchtitan_magi.plan import plan_ownership
from torchtitan_magi.slices import AttnSlices, varlen_causal
from torchtitan_magi.traffic import node_traffic, traffic
from torchtitan_magi.worklists import KEYS

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "plan.json"
Int64Array = npt.NDArray[np.int64]
Owned = tuple[Int64Array, ...]

GPUS_PER_NODE = 8
IMBALANCE = 1.02  # that the lower bound allows
CASES = ["256k/4", "64k/8", "256k/8", "512k/8", "256k/32", "512k/64", "2M/32", "4M/64", "1M/128"]
OTHER_CASES = {"lognormal": "512k/8 512k/64", "few-huge": "512k/8 512k/64", "dense": "64k/8 512k/64"}
ODD_CASES = ["300001/3", "1000003/5", "777777/6", "1M/12", "999983/96"]


# -------------------------------------------------------------------------------------------------------- strategies


def ours(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    return place(slices, num_tokens, cp_size, gpus_per_node=GPUS_PER_NODE)


PLANNERS: dict[str, Callable[[AttnSlices, int, int], Owned]] = {
    "ours": ours,
    "contiguous": contiguous,
    "zigzag": zigzag,
    "min_heap": min_heap,
}


# ----------------------------------------------------------------------------------------------------------- figures


def lower_bound_mean(lengths: Int64Array, cp_size: int, imbalance: float = IMBALANCE) -> float:
    """Least mean K/V rows received, in units of T, of any placement with this imbalance (causal documents).

    The tokens of a document beyond position p need n(p) ranks: k ranks can hold them only if k T tokens are enough and
    if their area, together with that of the lightest other tokens that fill the k ranks, is at most k (1 + e) A. Each
    of these ranks needs the key at p, so the rows needed are at least the integral of n(p), of which S are owned.
    """
    total = int(lengths.sum())
    tokens, area = total / cp_size, (lengths * (lengths + 1) // 2).sum() / cp_size
    # Area of the lightest m tokens, at the token counts where the position of the lightest tokens steps on.
    longest = int(lengths.max())
    alive = len(lengths) - np.searchsorted(np.sort(lengths), np.arange(longest), side="right")
    light_tokens = np.append(0, np.cumsum(alive))
    light_area = np.append(0, np.cumsum(alive * np.arange(1, longest + 1)))
    ranks = np.arange(1, cp_size + 1)
    needed = 0.0
    for length in lengths[lengths > tokens / 64].tolist():
        step = max(1, length // 512)
        edge = np.append(np.arange(step, length, step), length)  # n(p) never increases: its value at the cell's end
        held = length - edge
        held_area = (length * (length + 1) - edge * (edge + 1)) / 2
        filled = np.interp(ranks * tokens - held[:, None], light_tokens, light_area)
        enough = (ranks * tokens >= held[:, None]) & (held_area[:, None] + filled <= ranks * imbalance * area)
        enough[:, -1] = True
        cells = np.diff(np.append(0, edge))
        needed += float((cells * ranks[enough.argmax(1)]).sum()) - length
    return max(0.0, needed) / total


def figures(slices: AttnSlices, owned: Owned, num_tokens: int) -> dict[str, float]:
    """Balance and volumes of one placement."""
    cp_size = len(owned)
    tokens = num_tokens / cp_size
    area, received, sent = traffic(slices, owned)
    nodes = node_traffic(slices, owned, GPUS_PER_NODE) if cp_size > GPUS_PER_NODE else np.zeros(1)
    row = {"imbalance_area": area.max() / area.mean()}
    for name, rows in (("imbalance_tile", 16), ("imbalance_tile_mha", KEYS)):
        work = tile_work(slices, owned, rows)
        row[name] = work.max() / work.mean()
    return row | {
        "recv_max": received.max() / tokens,
        "recv_mean": received.mean() / tokens,
        "send_max": sent.max() / tokens,
        "cross_node_max": nodes.max() / tokens,
        "ranges_max": max(map(len, owned)),
    }


def plan_ms(slices: AttnSlices, num_tokens: int, cp_size: int, repeats: int = 3) -> float:
    """Processor milliseconds of a plan (as in make_plan) and of the stages of the rank with most ranges; median."""
    times = []
    for _ in range(repeats):
        fresh = AttnSlices(slices.table)
        begin = time.process_time()
        owned = ours(fresh.canonical(), -(-num_tokens // cp_size) * cp_size, cp_size)
        plan = plan_ownership(fresh.canonical(), num_tokens, owned, overlap_stages=1)
        share = max(plan.ranks, key=lambda share: len(share.ranges))
        _ = share.forward, share.backward
        times.append(time.process_time() - begin)
    return float(np.median(times)) * 1e3


@functools.cache
def pack(distribution: str, total: int, cp_size: int, seed: int) -> tuple[AttnSlices, float]:
    """The mask of a pack and its lower bound."""
    lengths = draw_pack(distribution, total, seed)
    return varlen_causal(np.append(0, np.cumsum(lengths))).canonical(), lower_bound_mean(lengths, cp_size)


def bench(distribution: str, case: str, planner: str, seed: int) -> dict[str, object]:
    total, cp_size = parse_case(case)
    slices, bound = pack(distribution, total, cp_size, seed)
    padded = -(-total // cp_size) * cp_size
    begin = time.process_time()
    owned = PLANNERS[planner](slices, padded, cp_size)
    elapsed = (time.process_time() - begin) * 1e3
    row = {"distribution": distribution, "total": total, "cp": cp_size, "planner": planner, "seed": seed}
    row |= figures(slices, owned, padded)
    row["lower_bound_mean"] = bound
    row["place_ms"] = elapsed
    row["plan_ms"] = plan_ms(slices, total, cp_size) if planner == "ours" else None
    return row


def parse_case(case: str) -> tuple[int, int]:
    """'512k/8' -> tokens of the pack and ranks."""
    total, cp_size = case.split("/")
    unit = {"k": 1 << 10, "M": 1 << 20}.get(total[-1], 1)
    return int(total.rstrip("kM")) * unit, int(cp_size)


# ------------------------------------------------------------------------------------------------------------- table

COLUMNS = {
    "imbalance_area": max,
    "imbalance_tile": max,
    "imbalance_tile_mha": max,
    "recv_max": max,
    "recv_mean": np.mean,
    "lower_bound_mean": np.mean,
    "send_max": max,
    "cross_node_max": max,
    "ranges_max": max,
    "plan_ms": np.mean,
}


def table_line(rows: list[dict]) -> str:
    first = rows[0]
    cells = [f"{first['distribution']:12} {first['total']:>8} / {first['cp']:<3} {first['planner']:10}"]
    for name, over_packs in COLUMNS.items():
        values = [row[name] for row in rows if row[name] is not None]
        cells.append(f"{over_packs(values):{max(len(name), 7)}.3f}" if values else " " * len(name))
    sends = max(row["send_max"] / row["recv_max"] if row["recv_max"] else 1.0 for row in rows)
    bound = np.mean([row["lower_bound_mean"] for row in rows])
    ratio = np.mean([row["recv_mean"] for row in rows]) / bound if bound else 1.0
    return " | ".join([*cells, f"{ratio:8.2f}", f"{sends:9.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", help="only these, e.g. 512k/64, of the histogram")
    parser.add_argument("--planners", nargs="*", default=list(PLANNERS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()

    cases = [("histogram", case) for case in arguments.cases or CASES]
    if not arguments.cases:
        cases += [(name, case) for name, some in OTHER_CASES.items() for case in some.split()]
        cases += [("histogram", case) for case in ODD_CASES]
    rows: list[dict] = []
    names = " | ".join(f"{name:>7}" for name in [*COLUMNS, "mean / LB", "send/recv"])
    print(f"{'distribution':12} {'total':>8} / {'cp':3} {'planner':10} | {names}")
    for distribution, case in cases:
        for planner in arguments.planners:
            packs = [bench(distribution, case, planner, seed) for seed in range(arguments.seeds)]
            rows += packs
            print(table_line(packs), flush=True)
    if arguments.cases is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
        header = {
            "command": "python " + " ".join(sys.argv),
            "commit": commit,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "processor": f"{platform.machine()}, one core",
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n  ".join(
            json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}) for row in rows
        )
        head = json.dumps(header, indent=1).removesuffix("\n}")
        arguments.output.write_text(f'{head},\n "rows": [\n  {lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
