"""A plan in numbers that a person can judge, and what a run would look like before it has any GPUs.

python -m torchtitan_magi.report SOURCE --total TOKENS --cp GPUS [--gpus-per-node 8] [--html FILE]
"""

import argparse
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan_magi.baselines import DESCRIPTIONS
from torchtitan_magi.packs import DISTRIBUTIONS
from torchtitan_magi.plan import AttnPlan
from torchtitan_magi.sizing import OURS, Sizing, size_run
from torchtitan_magi.stages import H200, CostModel, Heads

HIDDEN = 0.02  # part of the time that may be exposed of communication that counts as hidden


def describe_plan(plan: AttnPlan) -> str:
    """One line: tokens per rank, balance of the work, and K/V received against an all-gather."""
    balance = plan.areas.max() / plan.areas.mean() if plan.areas.any() else 1.0
    line = (
        f"Plan: {plan.tokens_per_rank:,} tokens on each of {plan.cp_size} ranks, heaviest rank {balance:.3f} x the mean"
    )
    all_gather = plan.padded_tokens - plan.tokens_per_rank
    if all_gather == 0:
        return line
    received = plan.received_rows
    return (
        f"{line}, K/V received {received.mean():,.0f} rows per rank (at most {received.max():,}; "
        f"{received.mean() / all_gather:.0%} of an all-gather)"
    )


# ------------------------------------------------------------------------------------------------------------- in words


def headline(sizing: Sizing) -> str:
    """What the table says, in a sentence or two."""
    plan, rows = sizing.first, sizing.summary()
    ours, others = rows[0], rows[1:]
    nodes = -(-plan.cp_size // plan.gpus_per_node)
    place = f"{plan.cp_size} GPUs" + (f" in {nodes} nodes" if nodes > 1 else "")
    exposed, rest = ours["exposed_share"], 1 - ours["efficiency"] - ours["exposed_share"]
    parts = [f"{place}: {ours['efficiency']:.0%} of ideal (worst pack {ours['efficiency_worst']:.0%})"]
    if exposed <= HIDDEN:
        parts.append("communication hidden" if plan.cp_size > 1 else "nothing travels")
    else:
        parts.append(f"{exposed:.0%} of the time is communication that nothing hides")
    parts.append(f"{rest:.0%} goes to imbalance, shorter stretches and stages")
    if others:
        best = max(others, key=lambda row: row["efficiency"])
        ratio = ours["efficiency"] / best["efficiency"]
        parts.append(f"{ratio:.2f} x the speed of the next best, {best['strategy']}")
    lines = ["; ".join(parts) + "."]
    if nodes > 1:
        crossing = np.mean([pack.plan.work.across.mean() for pack in sizing.packs]) / plan.tokens_per_rank
        least = min((row["across_max_mib"] for row in others), default=0.0)
        lines.append(
            f"From other nodes a GPU gets {crossing:.2f} T K/V rows per layer, at most "
            f"{ours['across_max_mib']:,.0f} MiB (the others' least: {least:,.0f} MiB)."
        )
    plan_ms = np.array([pack.plan_ms for pack in sizing.packs])
    lines.append(f"A plan takes {plan_ms.mean():.0f} ms of one core (at most {plan_ms.max():.0f}), ahead of its step.")
    return " ".join(lines)


def setting(sizing: Sizing) -> list[str]:
    """What was sized: two lines."""
    plan, heads = sizing.first, sizing.first.heads
    layout = f"{plan.cp_size} GPUs, {plan.gpus_per_node} per node"
    counts = [len(pack.case.lengths) for pack in sizing.packs]
    fill = sum(int(pack.case.lengths.sum()) for pack in sizing.packs) / (sizing.total * len(counts))
    longest = max(int(pack.case.lengths.max(initial=0)) for pack in sizing.packs)
    what = f" ({DISTRIBUTIONS[sizing.source]})" if sizing.source in DISTRIBUTIONS else ""
    packs = f"{len(counts)} pack{'s' if len(counts) > 1 else ''}"
    return [
        f"{layout}; packs of {sizing.total:,} tokens, T = {plan.tokens_per_rank:,} on each GPU; "
        f"heads {heads.num_heads_q}:{heads.num_heads_kv}, head_dim {heads.head_dim}, 16 bits",
        f"{packs} of {sizing.source}{what}: {np.mean(counts):,.0f} causal documents in one, "
        f"the longest {longest:,} tokens, {fill:.1%} full",
    ]


# ------------------------------------------------------------------------------------------------------------ the table

# title above, title, key, format
COLUMNS = (
    ("balance", "area", "balance_area", "6.3f"),
    ("", "tile", "balance_tile", "6.3f"),
    ("K/V in, T", "mean", "received_mean", "6.2f"),
    ("", "max", "received_max", "6.2f"),
    ("out, T", "max", "sent_max", "6.2f"),
    ("MiB in", "all", "received_max_mib", "7,.0f"),
    ("", "nodes", "across_max_mib", "6,.0f"),
    ("stages", "fwd", "stages_forward", "3d"),
    ("", "bwd", "stages_backward", "3d"),
    ("fwd ms", "time", "forward_ms", "7.2f"),
    ("", "expo", "forward_exposed_ms", "6.2f"),
    ("bwd ms", "time", "backward_ms", "7.2f"),
    ("", "expo", "backward_exposed_ms", "6.2f"),
    ("TFLOP/s", "/ GPU", "tflops_per_gpu", "7.0f"),
    ("of ideal", "mean", "efficiency", "5.0%"),
    ("", "worst", "efficiency_worst", "5.0%"),
)
LEGEND = (
    "balance: heaviest rank over the mean, in (query, key) pairs and in run time of the kernel's tiles, worst pack",
    "K/V in, out: rows received and sent in a layer's forward, in units of T; backward: twice that (Ulysses: the same)",
    "MiB in: the most that a GPU receives in a forward, of it what crosses nodes (either way)",
    "expo: time that the same work would not take if links were infinitely fast",
    "ideal: our kernel on the whole pack on one GPU, time / GPUs; times are means over packs",
)


def text_table(sizing: Sizing) -> str:
    """The table for a terminal."""
    rows = sizing.summary()
    width = max(len(row["strategy"]) for row in rows)
    cells = [[title for _, title, _, _ in COLUMNS]]
    cells += [[format(row[key], form).strip() for _, _, key, form in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    lines = [" " * width, *(name.ljust(width) for name in ("", *(row["strategy"] for row in rows)))]
    for title, columns in column_groups():
        widths[columns[0]] += max(0, len(title) - sum(widths[i] + 1 for i in columns) + 1)
        lines[0] += "  " + title.rjust(sum(widths[i] + 1 for i in columns) - 1)
        for number, line in enumerate(cells, start=1):
            lines[number] += "  " + " ".join(line[i].rjust(widths[i]) for i in columns)
    return "\n".join(lines)


def column_groups() -> list[tuple[str, list[int]]]:
    """Titles above the columns, and the columns under each."""
    groups: list[tuple[str, list[int]]] = []
    for i, (above, _, _, _) in enumerate(COLUMNS):
        if above:
            groups.append((above, []))
        groups[-1][1].append(i)
    return groups


def notes(sizing: Sizing) -> list[str]:
    """What the columns and the strategies are, a line each, and which ones cannot run."""
    heads, plan = sizing.first.heads, sizing.first
    reason = f"cannot spread {heads.num_heads_q}:{heads.num_heads_kv} heads over {plan.cp_size} GPUs"
    outcomes = sizing.packs[0].outcomes
    strategies = [
        f"{name}: {DESCRIPTIONS[name] if outcome else reason}" for name, outcome in outcomes.items() if name != OURS
    ]
    return [*LEGEND, *strategies]


def as_json(sizing: Sizing) -> dict[str, Any]:
    """Everything in the report: settings, a summary, and each pack; times in ms, volumes in units of T or MiB."""
    plan, heads = sizing.first, sizing.first.heads
    packs = [
        {
            "documents": len(pack.case.lengths),
            "tokens": int(pack.case.lengths.sum()),
            "longest": int(pack.case.lengths.max(initial=0)),
            "plan_ms": pack.plan_ms,
            "ideal_forward_ms": 1e3 * pack.case.ideal_seconds[0],
            "ideal_backward_ms": 1e3 * pack.case.ideal_seconds[1],
            "strategies": Sizing(sizing.source, sizing.total, [pack]).summary(),
        }
        for pack in sizing.packs
    ]
    return {
        "source": sizing.source,
        "total": sizing.total,
        "tokens_per_gpu": plan.tokens_per_rank,
        "cp": plan.cp_size,
        "gpus_per_node": plan.gpus_per_node,
        "heads": f"{heads.num_heads_q}:{heads.num_heads_kv}",
        "head_dim": heads.head_dim,
        "headline": headline(sizing),
        "summary": sizing.summary(),
        "packs": packs,
    }


# --------------------------------------------------------------------------------------------------------- command line


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120)


def count_of_tokens(text: str) -> int:
    """'512k' -> 524288; k is 1024 and M 1024 k. Raises ValueError for anything else."""
    unit = {"k": 1 << 10, "K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
    digits = text[:-1] if unit > 1 else text
    if not (digits.isdecimal() and len(digits) < 12):
        raise ValueError(f"--total is {text!r}; write tokens as 300000, 512k or 1M")
    return int(digits) * unit


def heads_of(text: str, head_dim: int) -> Heads:
    """'64:8' -> 64 query heads and 8 K/V heads; '32' -> as many of both. Raises ValueError for anything else."""
    query, _, keys = text.partition(":")
    if not (query.isdecimal() and (keys or query).isdecimal()):
        raise ValueError(f"--heads is {text!r}; write query heads : K/V heads, as 64:8")
    return Heads(int(query), int(keys or query), head_dim)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan_magi.report",
        description="What context parallelism would do with your documents on your GPUs, beside other strategies.",
    )
    names = ", ".join(DISTRIBUTIONS)
    add = parser.add_argument
    add("source", help=f"{names}; or a file: lengths in tokens (text or .npy), or a .jsonl data set with --tokenizer")
    add("--total", required=True, metavar="TOKENS", help="tokens of a pack: 300000, 512k, 1M")
    add("--cp", required=True, type=int, metavar="GPUS", help="context-parallel GPUs")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    where.add_argument("--nodes", type=int, metavar="N", help="instead: nodes that the GPUs are spread over evenly")
    add("--heads", default="64:8", metavar="Q:KV", help="query and K/V heads of a layer on one GPU; default: 64:8")
    add("--head-dim", type=int, default=128, metavar="D", help="default: 128")
    add("--packs", type=int, default=5, metavar="N", help="packs to draw; default: 5")
    add("--seed", type=int, default=0, help="of the draw; default: 0")
    add("--tokenizer", metavar="DIR", help="for a data set: Hugging Face tokenizer.json and chat template")
    add("--cost", type=Path, metavar="FILE", help="cost model of your machine; default: H200")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--html", type=Path, metavar="FILE", help="write a page with table and pictures (needs matplotlib)")
    add("--png", type=Path, metavar="FILE", help="write the pictures (needs matplotlib)")
    return parser


def _sizing_of(options: argparse.Namespace) -> Sizing:
    gpus_per_node = options.gpus_per_node
    if options.nodes is not None:
        if options.nodes < 1 or options.cp % options.nodes:
            raise ValueError(f"--nodes is {options.nodes} for --cp {options.cp}; give a number that divides it")
        gpus_per_node = options.cp // options.nodes
    heads = heads_of(options.heads, options.head_dim)
    cost = H200
    if options.cost is not None:
        try:
            cost = CostModel.load(options.cost)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{options.cost} is no cost model ({error!r}); write one with calibrate.py") from None
    return size_run(
        options.source, count_of_tokens(options.total), options.cp, gpus_per_node, heads, options.packs, options.seed,
        options.tokenizer, cost,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        sizing = _sizing_of(options)
    except ValueError as error:
        parser.error(str(error))
    print(
        "\n".join(
            [
                *map(_wrapped, setting(sizing)),
                "",
                text_table(sizing),
                "",
                _wrapped(headline(sizing)),
                "",
                *notes(sizing),
            ]
        )
    )
    if options.json:
        options.json.write_text(json.dumps(as_json(sizing), indent=1) + "\n")
    if options.html or options.png:
        try:
            from torchtitan_magi import report_picture
        except ImportError as error:
            parser.error(f"{error}; --html and --png need matplotlib: install the extra torchtitan_magi[report]")
        if options.html:
            options.html.write_text(report_picture.html_page(sizing))
        if options.png:
            report_picture.write_png(sizing, options.png)


if __name__ == "__main__":
    main()
