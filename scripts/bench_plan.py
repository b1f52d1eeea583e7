"""Compares placements: balance, K/V rows that travel, time to plan. Prints a table, writes benchmarks/results/plan.json

    python scripts/bench_plan.py [--cases 512k/8 512k/64] [--seeds 5]

Packs: documents whose lengths are drawn from a distribution, each capped at a quarter of the pack, packed in
sequence, the last one cut to fit, then shuffled. Mask: causal inside each document. Volumes are K/V rows in units of
T, the tokens of a rank. The lower bound holds for every placement with equal tokens and an imbalance of at most 1.02.
"""

import argparse
import functools
import heapq
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan_magi.placement import place
from torchtitan_magi.plan import plan_ownership
from torchtitan_magi.ranges import expand, intersecting
from torchtitan_magi.slices import AttnSlices, clip_rows, varlen_causal
from torchtitan_magi.traffic import node_traffic, parts_of, traffic
from torchtitan_magi.worklists import KEYS, tile_cost

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "plan.json"
Int64Array = npt.NDArray[np.int64]
Owned = tuple[Int64Array, ...]

GPUS_PER_NODE = 8
IMBALANCE = 1.02  # that the lower bound allows
CASES = ["256k/4", "64k/8", "256k/8", "512k/8", "256k/32", "512k/64", "2M/32", "4M/64", "1M/128"]
OTHER_CASES = {"lognormal": "512k/8 512k/64", "few_huge": "512k/8 512k/64", "one_document": "64k/8 512k/64"}
ODD_CASES = ["300001/3", "1000003/5", "777777/6", "1M/12", "999983/96"]

# Document lengths of MagiAttention's benchmark: cumulative percentage of documents at the upper edge of each bin.
HISTOGRAM = {
    10: 0.22, 50: 3.13, 100: 8.33, 200: 18.56, 500: 46.75, 1024: 71.38, 2048: 87.03, 4096: 94.37,
    8192: 97.42, 16384: 98.71, 32768: 99.56, 65536: 99.70, 131072: 99.86, 196608: 100.0,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- packs


def document_lengths(distribution: str, total: int, seed: int) -> Int64Array:
    """Lengths of the documents of one pack, in tokens; they sum to total."""
    rng = np.random.default_rng(seed)
    if distribution == "one_document":
        return np.array([total])
    lengths: list[int] = []
    while sum(lengths) < total:
        lengths += np.minimum(_draw(distribution, rng, total), max(1, total // 4)).tolist()
    ends = np.cumsum(lengths)
    count = int(np.searchsorted(ends, total)) + 1
    packed = np.array(lengths[:count])
    packed[-1] -= ends[count - 1] - total
    return rng.permutation(packed)


def _draw(distribution: str, rng: np.random.Generator, total: int) -> Int64Array:
    """A batch of document lengths."""
    if distribution == "lognormal":
        return np.clip(rng.lognormal(np.log(4096) - 1.1**2 / 2, 1.1, 256), 1024, 8192).astype(np.int64)
    if distribution == "few_huge":  # half of the tokens in documents of an eighth of the pack, half in tiny ones
        tiny = rng.integers(16, 512, max(1, total // 8 // 264))
        return np.append(tiny, total // 8)
    edges = np.array([0, *HISTOGRAM])
    bins = np.searchsorted(np.array(list(HISTOGRAM.values())), rng.random(1024) * 100)
    return rng.integers(edges[bins] + 1, edges[bins + 1] + 1)


# -------------------------------------------------------------------------------------------------------- strategies


def contiguous(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    """Rank r owns the r-th stretch of the pack."""
    tokens = num_tokens // cp_size
    return tuple(np.array([[r * tokens, (r + 1) * tokens]]) for r in range(cp_size))


def zigzag(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    """Rank r owns the r-th stretch from the front and the r-th from the back, of 2 cp_size stretches of the pack."""
    edges = np.arange(2 * cp_size + 1) * num_tokens // (2 * cp_size)
    return tuple(np.array([edges[r : r + 2], edges[2 * cp_size - r - 1 :][:2]]) for r in range(cp_size))


def min_heap(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    """Equal chunks, heaviest first, each to the rank with the least area so far: MagiAttention's default idea.

    Chunks of 1024 tokens, at least 8 and at most 32 per rank.
    """
    per_rank = min(32, max(8, num_tokens // cp_size // 1024))
    edges = np.arange(per_rank * cp_size + 1) * num_tokens // (per_rank * cp_size)
    work = np.add.reduceat(slices.row_cost(num_tokens), edges[:-1])
    owned: list[list[int]] = [[] for _ in range(cp_size)]
    heap = [(0, rank) for rank in range(cp_size)]
    for chunk in np.argsort(-work, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        owned[rank].append(chunk)
        if len(owned[rank]) < per_rank:
            heapq.heappush(heap, (load + int(work[chunk]), rank))
    return tuple(np.stack([edges[sorted(c)], edges[1:][sorted(c)]], 1) for c in owned)


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


def tile_work(slices: AttnSlices, owned: Owned, tile_rows: int) -> npt.NDArray[np.float64]:
    """Run time of the forward kernel's tiles on each rank in units of one block: `tile_rows` local tokens by 128 keys.

    All of a rank's keys count as one buffer in token order (no overlap stages).
    """
    table = slices.canonical().table.astype(np.int64)
    parts, owner = parts_of(owned)
    rank_start = np.arange(len(owned)) * -(-(parts[:, 1] - parts[:, 0]).sum() // len(owned) // tile_rows) * tile_rows
    by_rank = np.lexsort((parts[:, 0], owner))
    lengths = (parts[:, 1] - parts[:, 0])[by_rank]
    local = np.empty(len(parts), np.int64)  # local row of each part's first token
    first = np.searchsorted(owner[by_rank], np.arange(len(owned)))
    before = lengths.cumsum() - lengths
    local[by_rank] = before - before[first][owner[by_rank]]
    local += rank_start[owner]

    # Step 1: the slices' rows in local numbers, cut at tiles.
    which, part = intersecting(table[:, 0], table[:, 1], parts[:, 0], parts[:, 1])
    pieces = clip_rows(table[which], parts[part, 0], parts[part, 1])
    shift = local[part] - parts[part, 0]
    first_tile, end_tile = (pieces[:, 0] + shift) // tile_rows, -(-(pieces[:, 1] + shift) // tile_rows)
    piece = np.repeat(np.arange(len(pieces)), end_tile - first_tile)
    tile = expand(first_tile, end_tile)
    cut = clip_rows(pieces[piece], tile * tile_rows - shift[piece], (tile + 1) * tile_rows - shift[piece])

    # Step 2: blocks per tile, cost per tile, cost per rank.
    tiles_per_rank = rank_start[1] // tile_rows if len(owned) > 1 else tile.max(initial=0) + 1
    blocks = np.bincount(tile, -(-(cut[:, 3] - cut[:, 2]) // KEYS), tiles_per_rank * len(owned))
    return tile_cost(blocks.astype(np.int64)).reshape(len(owned), -1).sum(1)


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
        _ = share.stages
        times.append(time.process_time() - begin)
    return float(np.median(times)) * 1e3


@functools.cache
def pack(distribution: str, total: int, cp_size: int, seed: int) -> tuple[AttnSlices, float]:
    """The mask of a pack and its lower bound."""
    lengths = document_lengths(distribution, total, seed)
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
