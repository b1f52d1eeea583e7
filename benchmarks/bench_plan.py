"""Compares placements: balance, K/V rows that travel, time to plan. Writes benchmarks/results/plan.json.

    python benchmarks/bench_plan.py [--cases 512k/8 512k/64] [--seeds 5]
    python benchmarks/bench_plan.py --unseen      # only packs on which placement was not tuned; writes nothing
    python benchmarks/bench_plan.py --trees       # only trees, into benchmarks/results/plan_trees.json

Packs are those of the sizing report, causal inside each document. Volumes are K/V rows in units of T, the tokens of a
rank. The lower bound holds for every placement with equal tokens and an imbalance of at most 1.02. Heads 64:8, 8 GPUs
per node; cross_node_max counts a row once per node and spreads it over the node's ranks.

Placement was tuned on the packs of the first seeds. The unseen packs have other seeds, sizes and distributions. Of each
of their settings the file has the rows received and the least possible, plan time, and the layer's predicted time and
ideal, all for heads 64:8 and 32:32.

Trees
  answers   prompts of 8k tokens, each with 8 answers of 1k
  long      prompts of 32k tokens, each with 16 answers of 4k
  system    conversations of 1k behind one system message of 3k, which all of a pack share
  random    nodes of 128 to 16k tokens, up to 12 deep
"""

import functools
import json
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
from figures import RESULTS, Row, grouped, parser, part, result, save, table

from torchtitan_magi.backends.ffa.row_kernels import CudaRowMover
from torchtitan_magi.backends.ffa.worklists import build_worklists
from torchtitan_magi.backends.interface import StageMask
from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.commands.parser import count_of_tokens
from torchtitan_magi.masks.builders import sliding_window, varlen_causal
from torchtitan_magi.masks.slices import AttnSlices
from torchtitan_magi.planning.cost_model import H200, LLAMA_HEADS, Heads
from torchtitan_magi.planning.needs import node_traffic, traffic
from torchtitan_magi.planning.plan import PlanSpec, forget_plans, make_plans, plan_afresh
from torchtitan_magi.planning.topology import Nodes
from torchtitan_magi.sizing.sample_packs import DISTRIBUTIONS, draw_pack, fill_pack
from torchtitan_magi.sizing.strategies.outcomes import Case, Owned, contiguous, min_heap, plan_outcome, tile_work
from torchtitan_magi.sizing.strategies.pack_masks import tokens_and_parents
from torchtitan_magi.tiles import KEYS

Int64Array = npt.NDArray[np.int64]

GPUS_PER_NODE = 8
IMBALANCE = 1.02  # allowed by the lower bound
CASES = ["256k/4", "64k/8", "256k/8", "512k/8", "256k/32", "512k/64", "2M/32", "4M/64", "1M/128"]
OTHER_CASES = {"lognormal": "512k/8 512k/64", "few-huge": "512k/8 512k/64", "dense": "64k/8 512k/64"}
ODD_CASES = ["300001/3", "1000003/5", "777777/6", "1M/12", "999983/96"]

WIDE_CASES = "4M/64 8M/128 16M/256 16M/512 16M/1024"
WIDE_PACKS = "histogram", "lognormal", "few-huge"
WINDOW = 128  # of every second layer of gpt-oss

UNSEEN = {
    "histogram": "128k/4 192k/6 64k/8 512k/8 256k/16 1M/32 512k/64",
    "lognormal": "64k/8 128k/16 256k/32",
    "few-huge": "256k/8 256k/16",
    "pareto": "128k/8 512k/32",
    "uniform": "128k/8 256k/16",
}
SHAPES = {"answers": (8192, 8, 1024), "long": (32768, 16, 4096), "system": (3072, 4096, 1024)}
TREES = *SHAPES, "random"
FLAT = "histogram", "lognormal"  # beside them
TREE_CASES = {16384: (2, 4, 8, 16, 32, 64), 4096: (8, 64)}  # tokens of a rank: ranks
TREE_SEEDS = range(4)
UNSEEN_SEEDS = range(2000, 2006)
UNSEEN_HEADS = LLAMA_HEADS, Heads(num_heads_q=32, num_heads_kv=32, head_dim=128)


# -------------------------------------------------------------------------------------------------------- strategies


def ours(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    spec = PlanSpec(num_tokens, cp_size, -1, LLAMA_HEADS, Nodes.of(GPUS_PER_NODE, cp_size), H200)
    return plan_afresh(slices, spec).routes.owned


def zigzag(slices: AttnSlices, num_tokens: int, cp_size: int) -> Owned:
    """Rank r owns the r-th stretch from the front and the r-th from the back, of 2 cp_size stretches of the pack."""
    edges = np.arange(2 * cp_size + 1) * num_tokens // (2 * cp_size)
    return tuple(np.array([edges[r : r + 2], edges[2 * cp_size - r - 1 :][:2]]) for r in range(cp_size))


PLANNERS: dict[str, Callable[[AttnSlices, int, int], Owned]] = {
    "ours": ours,
    "contiguous": contiguous,
    "zigzag": zigzag,
    "min_heap": min_heap,
}


# ----------------------------------------------------------------------------------------------------------- figures


def lower_bound_mean(pack: Int64Array, cp_size: int, imbalance: float = IMBALANCE) -> float:
    """Least mean K/V rows received, in units of T, of any placement with this imbalance.

    A key is needed by the tokens of its node from its own on and by those of all nodes below, who are Q tokens. They
    need n ranks: k ranks can hold them only if k T tokens are enough and if their area, together with that of the
    lightest other tokens that fill the k ranks, is at most k (1 + e) A. So the rows needed are at least the sum of n
    over all keys, of which S are owned.

    Args:
        pack: of documents or trees, see ``sizing.strategies.pack_masks``.
    """
    sizes, parents = tokens_and_parents(pack)
    total = int(sizes.sum())
    begin, below = np.zeros_like(sizes), np.zeros((2, len(sizes)), np.int64)  # tokens and area of the nodes below
    for node in np.flatnonzero(parents >= 0).tolist():
        begin[node] = begin[parents[node]] + sizes[parents[node]]
    areas = sizes * begin + sizes * (sizes + 1) // 2
    for node in np.flatnonzero(parents >= 0)[::-1].tolist():
        below[:, parents[node]] += below[:, node] + (sizes[node], areas[node])
    tokens, area = total / cp_size, areas.sum() / cp_size
    # Area of the lightest m tokens, at the token counts where the position of the lightest tokens steps on.
    longest = int((begin + sizes).max())
    begins, ends = np.bincount(begin, minlength=longest), np.bincount(begin + sizes)[:longest]
    alive = np.cumsum(begins - ends)
    light_tokens = np.append(0, np.cumsum(alive))
    light_area = np.append(0, np.cumsum(alive * np.arange(1, longest + 1)))
    ranks = np.arange(1, cp_size + 1)
    needed = 0.0
    for node in np.flatnonzero(sizes + below[0] > tokens / 64).tolist():
        size, first, (others, others_area) = int(sizes[node]), int(begin[node]), below[:, node].tolist()
        step = max(1, size // 512)
        edge = np.append(np.arange(step, size, step), size)  # n never increases: take it at the cell's end
        held = size - edge + others
        held_area = (size - edge) * first + (size * (size + 1) - edge * (edge + 1)) / 2 + others_area
        filled = np.interp(ranks * tokens - held[:, None], light_tokens, light_area)
        enough = (ranks * tokens >= held[:, None]) & (held_area[:, None] + filled <= ranks * imbalance * area)
        enough[:, -1] = True
        cells = np.diff(np.append(0, edge))
        needed += float((cells * ranks[enough.argmax(1)]).sum()) - size
    return max(0.0, needed) / total


def figures(slices: AttnSlices, owned: Owned, num_tokens: int) -> dict[str, float]:
    """Balance and volumes of one placement."""
    cp_size = len(owned)
    tokens = num_tokens / cp_size
    area, received, sent = traffic(slices, owned)
    nodes = node_traffic(slices, owned, Nodes.of(GPUS_PER_NODE, cp_size))[0] if cp_size > GPUS_PER_NODE else np.zeros(1)
    row = {"imbalance_area": area.max() / area.mean()}
    for name, rows in (("imbalance_tile", LLAMA_HEADS.tile_rows), ("imbalance_tile_mha", KEYS)):
        work = tile_work(slices, owned, rows)
        row[name] = work.max() / work.mean()
    return row | {
        "recv_max": received.max() / tokens,
        "recv_mean": received.mean() / tokens,
        "send_max": sent.max() / tokens,
        "cross_node_max": nodes.max() / tokens,
        "ranges_max": max(map(len, owned)),
    }


def plan_ms(slices: AttnSlices, num_tokens: int, cp_size: int, repeats: int = 5) -> dict[str, object]:
    """Stages chosen, and CPU ms of a plan and of all index data of the rank with most ranges: the least of the repeats,
    as other work on the machine only adds."""
    times = []
    for _ in range(repeats):
        fresh = AttnSlices(slices.table)
        begin = time.process_time()
        plan = plan_afresh(
            fresh, PlanSpec(num_tokens, cp_size, -1, LLAMA_HEADS, Nodes.of(GPUS_PER_NODE, cp_size), H200)
        )
        planned = time.process_time()
        share = max(plan.ranks, key=lambda share: len(share.ranges))
        for stage in dict.fromkeys((*share.forward, *share.backward)):
            heads = LLAMA_HEADS.num_heads_q, LLAMA_HEADS.num_heads_kv
            build_worklists(StageMask(stage.slices, plan.tokens_per_rank, stage.num_rows, *heads))
            for exchange in stage.exchanges:
                CudaRowMover().index(exchange)
        end = time.process_time()
        times.append((end - begin, planned - begin, end - planned))
    whole, plan_only, index_data = (1e3 * least for least in np.min(times, 0))
    return {
        "plan_ms": whole,
        "plan_without_index_ms": plan_only,
        "index_ms": index_data,
        "stages_forward": len(plan.forward) - 1,
        "stages_backward": len(plan.backward) - 1,
    }


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
    row |= plan_ms(slices, total, cp_size) if planner == "ours" else {"plan_ms": None}
    return row


def draw_unseen(distribution: str, total: int, seed: int) -> Int64Array:
    """Document lengths of a pack: of the sizing report's distributions or one of two others."""
    if distribution in DISTRIBUTIONS:
        return draw_pack(distribution, total, seed)
    rng = np.random.default_rng(seed)
    draws = {
        "pareto": lambda: 256 * (1 + rng.pareto(1.0, 256)),  # few very long ones
        "uniform": lambda: rng.integers(1, 16384, 64),  # hardly any short ones
    }
    return rng.permutation(fill_pack(lambda: np.minimum(draws[distribution](), total // 4).astype(np.int64), total))


def bench_unseen(distribution: str, case: str, heads: Heads, seed: int) -> dict[str, object]:
    """One pack: rows received by all ranks and the least possible, balance, plan time, predicted time and ideal."""
    total, cp_size = parse_case(case)
    found = planned(draw_unseen(distribution, total, seed), total, cp_size, heads, seed)
    return {"distribution": distribution} | found


def planned(pack: Int64Array, total: int, cp_size: int, heads: Heads, seed: int) -> Row:
    """The figures of a pack as it is planned for nodes of GPUS_PER_NODE."""
    on_machine = Case(pack, total, cp_size, min(GPUS_PER_NODE, cp_size), heads, H200)
    times = []
    for _ in range(3):
        fresh = AttnSlices(on_machine.slices.table)
        begin = time.process_time()
        plan = plan_afresh(fresh, PlanSpec(total, cp_size, -1, heads, Nodes.of(GPUS_PER_NODE, cp_size), H200))
        times.append(time.process_time() - begin)
    outcome = plan_outcome(on_machine, plan)
    return {
        "total": total,
        "cp": cp_size,
        "heads": f"{heads.num_heads_q}:{heads.num_heads_kv}",
        "seed": seed,
        "imbalance_area": outcome.balance_area,
        "rows_received": int(plan.received_rows.sum()),
        "rows_least": lower_bound_mean(pack, cp_size) * total,
        "rows_received_max": int(plan.received_rows.max()),
        "rows_across_max": int(plan.rows_across_nodes.max()),
        "plan_without_index_ms": 1e3 * min(times),
        "layer_ms": 1e3 * float(outcome.seconds.sum()),
        "ideal_ms": 1e3 * float(on_machine.ideal_seconds.sum()),
    }


def run_unseen() -> list[Row]:
    """All settings of unseen packs; prints a line for each."""
    found: list[Row] = []
    for distribution, cases in UNSEEN.items():
        for case in cases.split():
            for heads in UNSEEN_HEADS:
                rows = [bench_unseen(distribution, case, heads, seed) for seed in UNSEEN_SEEDS]
                print(*next(iter(unseen_lines(rows))), sep=" | ", flush=True)
                found += rows
    print(unseen_table({"unseen": found}))
    return found


# --------------------------------------------------------------------------------------------------------------- trees


def draw_trees(kind: str, total: int, seed: int) -> Int64Array:
    """The nodes of a pack of trees, [m, 2], see ``sizing.strategies.pack_masks``; the last ones are cut to fit."""
    rng, rows, left = np.random.default_rng(seed), list[tuple[int, int]](), total

    def add(tokens: float, parent: int = -1) -> int:
        nonlocal left
        if left:
            rows.append((min(left, int(tokens)), parent))
            left -= rows[-1][0]
        return len(rows) - 1

    def grow(parent: int, depth: int) -> None:
        node = add(np.clip(rng.lognormal(6.2), 128, 16384), parent)
        if left and depth < 12 and rng.random() < 0.75:
            for _ in range(rng.integers(2, 4)):
                grow(node, depth + 1)

    while left:
        if kind == "random":
            grow(-1, 1)
            continue
        prompt, answers, answer = SHAPES[kind]
        root = add(prompt * rng.uniform(0.8, 1.2))
        for _ in range(answers):
            if left:
                add(answer * rng.uniform(0.5, 1.5), root)
    return np.array(rows)


def bench_trees(kind: str, total: int, cp_size: int, seed: int) -> Row:
    """A pack of trees, or of documents beside them: rows received and the least possible, balance, time."""
    pack = draw_trees(kind, total, seed) if kind in TREES else draw_pack(kind, total, seed)
    return {"distribution": kind, "nodes": len(pack)} | planned(pack, total, cp_size, LLAMA_HEADS, seed)


def run_trees() -> list[Row]:
    """Prints a line for each kind and number of ranks."""
    found: list[Row] = []
    for tokens, cp_sizes in TREE_CASES.items():
        for kind in (*TREES, *FLAT):
            for cp_size in cp_sizes:
                rows = [bench_trees(kind, tokens * cp_size, cp_size, seed) for seed in TREE_SEEDS]
                print(*next(iter(tree_lines(rows))), sep=" | ", flush=True)
                found += rows
    return found


# ---------------------------------------------------------------------------------------------------------- many ranks


def bench_wide(distribution: str, case: str, windows: bool, repeats: int = 3) -> dict[str, object]:
    """Planning for many ranks: CPU seconds, the least of the repeats, and what the plan promises.

    Args:
        windows: whether every second layer has a window, so that there are two masks.
    """
    total, cp_size = parse_case(case)
    cu_seqlens = np.append(0, np.cumsum(draw_pack(distribution, total, 0)))
    masks = [varlen_causal(cu_seqlens), *([sliding_window(cu_seqlens, WINDOW)] if windows else [])]
    times = []
    for _ in range(repeats):
        forget_plans()
        begin = time.process_time()
        plan, *_ = make_plans(masks, total, cp_size, gpus_per_node=GPUS_PER_NODE)
        times.append(time.process_time() - begin)
    begin = time.process_time()
    _ = plan.fingerprint
    work, tokens = plan.work.local_pairs + plan.work.remote_pairs, plan.tokens_per_rank
    return {
        "distribution": distribution,
        "total": total,
        "cp": cp_size,
        "masks": len(masks),
        "plan_s": min(times),
        "fingerprint_ms": 1e3 * (time.process_time() - begin),
        "imbalance_tile": work.max() / work.mean(),
        "recv_mean": plan.received_rows.mean() / tokens,
        "recv_max": plan.received_rows.max() / tokens,
        "cross_node_max": plan.rows_across_nodes.max() / tokens,
        "layer_ms": 1e3 * sum(part.seconds for part in plan.predict()),
    }


def run_wide() -> list[Row]:
    """Prints a line for each case."""
    found: list[Row] = []
    for case in WIDE_CASES.split():
        for distribution, windows in [*((name, False) for name in WIDE_PACKS), ("histogram", True)]:
            row = bench_wide(distribution, case, windows)
            found.append(row)
            print(" | ".join(f"{name} {x:.3f}" if isinstance(x, float) else f"{x}" for name, x in row.items()))
    return found


def parse_case(case: str) -> tuple[int, int]:
    """'512k/8' -> tokens of the pack and ranks."""
    total, cp_size = case.split("/")
    return count_of_tokens(total, "--cases"), int(cp_size)


# ------------------------------------------------------------------------------------------------------------- table


def placement_lines(rows: Iterable[Row]) -> Iterable[list[object]]:
    """One for each case."""
    for (distribution, tokens, cp), found in grouped(rows, "distribution", "total", "cp").items():
        by = {planner: of for (planner,), of in grouped(found, "planner").items()}
        received = [mean(row["recv_mean"] for row in by[planner]) for planner in RECEIVED]
        yield [
            distribution, f"{tokens:,}", cp, f"{max(row['imbalance_area'] for row in by['ours']):.3f}",
            f"{max(row['imbalance_area'] for row in by['min_heap']):.3f}",
            f"{mean(row['lower_bound_mean'] for row in by['ours']):.2f}", *(f"{share:.2f}" for share in received),
            f"{mean(row['plan_ms'] for row in by['ours']):.0f}",
        ]  # fmt: skip


RECEIVED = ("ours", "min_heap", "zigzag", "contiguous")


def placement_table(found: dict[str, Any]) -> str:
    columns = ["documents", "tokens", "GPUs", "imbalance: ours", "min-heap", "rows received: bound", "ours", "min-heap"]
    return table([*columns, "zigzag", "contiguous", "plan, ms"], placement_lines(found["rows"]))


def unseen_lines(rows: Iterable[Row]) -> Iterable[list[object]]:
    """One for each setting, of sums over its packs."""
    for (distribution, tokens, cp), of_case in grouped(rows, "distribution", "total", "cp").items():
        for (heads,), found in grouped(of_case, "heads").items():
            least, received, layer, ideal = (
                sum(row[name] for row in found) for name in ("rows_least", "rows_received", "layer_ms", "ideal_ms")
            )
            yield [
                distribution, f"{tokens:,}", cp, heads, f"{received / least:.2f}",
                f"{max(row['imbalance_area'] for row in found):.3f}", f"{ideal / layer:.1%}",
                f"{mean(row['plan_without_index_ms'] for row in found):.0f}",
            ]  # fmt: skip


def unseen_table(found: dict[str, Any]) -> str:
    """Packs on which placement was not tuned."""
    columns = ["documents", "tokens", "GPUs", "heads", "rows / bound", "imbalance", "share of the ideal"]
    return table([*columns, "plan without index data, ms"], unseen_lines(found["unseen"]))


def tree_lines(rows: Iterable[Row]) -> Iterable[list[object]]:
    """One for each kind and number of ranks."""
    for (kind, tokens, cp), found in grouped(rows, "distribution", "total", "cp").items():
        least, received, layer, ideal = (
            sum(row[name] for row in found) for name in ("rows_least", "rows_received", "layer_ms", "ideal_ms")
        )
        yield [
            kind, f"{tokens // cp // 1024}k", cp, f"{mean(row['nodes'] for row in found):.0f}",
            f"{least / tokens / len(found):.2f}", f"{received / tokens / len(found):.2f}",
            f"{mean(row['rows_received_max'] for row in found) / tokens * cp:.2f}",
            f"{max(row['imbalance_area'] for row in found):.3f}", f"{ideal / layer:.1%}",
            f"{mean(row['plan_without_index_ms'] for row in found):.0f}",
        ]  # fmt: skip


def tree_table(found: dict[str, Any]) -> str:
    """Packs of trees, and packs of documents of as many tokens."""
    columns = ["pack", "tokens of a GPU", "GPUs", "nodes", "rows received: bound", "mean", "most", "imbalance"]
    return table([*columns, "share of the ideal", "plan without index data, ms"], tree_lines(found["rows"]))


PARTS: dict[str, Callable[[], str]] = {  # of the docs
    "placement": part(placement_table, "plan"),
    "placement-trees": part(tree_table, "plan_trees"),
    "placement-unseen": lambda: unseen_table(result("plan")),
}


def as_lines(rows: list[Row]) -> str:
    """JSON, a line for each row."""
    lines = [json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}) for row in rows]
    return "[\n  " + ",\n  ".join(lines) + "\n ]"


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--cases", nargs="*", help="only these, e.g. 512k/64, of the histogram; nothing is written")
    command.add_argument("--seeds", type=int, default=5, help="packs per case")
    command.add_argument("--output", type=Path, default=RESULTS / "plan.json", help="JSON file to write")
    command.add_argument("--unseen", action="store_true", help="only packs on which placement was not tuned")
    command.add_argument("--wide", action="store_true", help="only planning for 64 to 1,024 ranks")
    command.add_argument("--trees", action="store_true", help="only trees, into plan_trees.json")
    arguments = command.parse_args()
    if arguments.trees:
        save(facts_of_run(None) | {"rows": run_trees()}, RESULTS / "plan_trees.json")
        return
    if arguments.unseen or arguments.wide:
        run_unseen() if arguments.unseen else run_wide()
        return
    cases = [("histogram", case) for case in arguments.cases or CASES]
    if not arguments.cases:
        cases += [(name, case) for name, some in OTHER_CASES.items() for case in some.split()]
        cases += [("histogram", case) for case in ODD_CASES]
    rows: list[Row] = []
    for distribution, case in cases:
        found = [bench(distribution, case, planner, seed) for planner in PLANNERS for seed in range(arguments.seeds)]
        print(*next(iter(placement_lines(found))), sep=" | ", flush=True)
        rows += found
    print(placement_table({"rows": rows}))
    if arguments.cases is None:
        unseen, wide = run_unseen(), run_wide()
        header = facts_of_run(None) | {
            "numpy": np.__version__,
            "processor": f"{platform.machine()}, one core; times are the least of 5 repeats",
        }
        head = json.dumps(header, indent=1).removesuffix("\n}")
        arguments.output.write_text(
            f'{head},\n "rows": {as_lines(rows)},\n "unseen": {as_lines(unseen)},\n "wide": {as_lines(wide)}\n}}\n'
        )


if __name__ == "__main__":
    main()
