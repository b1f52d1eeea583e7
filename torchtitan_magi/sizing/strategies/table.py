"""A report in words, as tables and as JSON."""

import textwrap
from typing import Any

import numpy as np

from torchtitan_magi.planning.cost_model import FloatArray
from torchtitan_magi.sizing.sample_packs import DISTRIBUTIONS
from torchtitan_magi.sizing.strategies.outcomes import DESCRIPTIONS, why_not
from torchtitan_magi.sizing.strategies.size import OURS, SizedPack, Sizing
from torchtitan_magi.wording import amount, shown

HIDDEN = 0.02  # communication counts as hidden if no more than this fraction of the time is exposed


def report_lines(sizings: list[Sizing]) -> list[str]:
    """The report for a terminal: of one layout in full, of several a line each."""
    first = sizings[0]
    if len(sizings) > 1:
        return [*map(_wrapped, setting(first)[1:]), "", scan_table(sizings), "", SCAN_NOTE]
    words = map(_wrapped, (headline(first), rank_line(first)))
    return [*map(_wrapped, setting(first)), "", text_table(first), "", *words, "", *notes(first)]


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 120)


# ------------------------------------------------------------------------------------------------------------- in words


def headline(sizing: Sizing) -> str:
    """Says what the table says, in two or three sentences."""
    plan, rows = sizing.first, sizing.summary()
    ours, others = rows[0], rows[1:]
    nodes = plan.work.num_nodes
    place = amount(plan.cp_size, "GPU") + (f" in {nodes} nodes" if nodes > 1 else "")
    exposed, rest = ours["exposed_share"], 1 - ours["efficiency"] - ours["exposed_share"]
    clauses = [f"{place}: {ours['efficiency']:.0%} of ideal (worst pack {ours['efficiency_worst']:.0%})"]
    if exposed <= HIDDEN:
        clauses.append("communication hidden" if plan.cp_size > 1 else "nothing travels")
    else:
        clauses.append(f"{exposed:.0%} of the time is communication that nothing hides")
    clauses.append(f"{rest:.0%} goes to imbalance, shorter stretches and stages")
    if others:
        best = max(others, key=lambda row: row["efficiency"])
        ratio = ours["efficiency"] / best["efficiency"]
        clauses.append(f"{ratio:.2f} x the speed of the best other strategy, {best['strategy']}")
    lines = ["; ".join(clauses) + "."]
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
    """Two lines that say what was sized: layout and heads, packs and documents."""
    plan, heads = sizing.first, sizing.first.heads
    layout = f"{amount(plan.cp_size, 'GPU')}, {plan.gpus_per_node} per node"
    counts = [len(pack.case.documents) for pack in sizing.packs]
    fill = sum(int(pack.case.documents.sum()) for pack in sizing.packs) / (sizing.total * len(counts))
    longest = max(int(pack.case.documents.max(initial=0)) for pack in sizing.packs)
    what = f" ({DISTRIBUTIONS[sizing.source]})" if sizing.source in DISTRIBUTIONS else ""
    documents = amount(round(np.mean(counts)), sizing.packs[0].case.kind)
    dims = "/".join(map(str, dict.fromkeys(heads.dims)))
    return [
        f"{layout}; packs of {sizing.total:,} tokens, T = {plan.tokens_per_rank:,} on each GPU; "
        f"heads {heads.num_heads_q}:{heads.num_heads_kv}, head_dim {dims}, 16 bits",
        f"{amount(len(counts), 'pack')} of {shown(sizing.source)}{what}: {documents} in one, "
        f"the longest {longest:,} tokens, {fill:.1%} full",
    ]


# ------------------------------------------------------------------------------------------------------------ the table

# title above: title, key, format of each column
COLUMNS = {
    "balance": [("area", "balance_area", ".3f"), ("tile", "balance_tile", ".3f")],
    "K/V in, T": [("mean", "received_mean", ".2f"), ("max", "received_max", ".2f")],
    "out, T": [("max", "sent_max", ".2f")],
    "MiB in": [("all", "received_max_mib", ",.0f"), ("nodes", "across_max_mib", ",.0f")],
    "stages": [("fwd", "stages_forward", "d"), ("bwd", "stages_backward", "d")],
    "fwd ms": [("time", "forward_ms", ".2f"), ("expo", "forward_exposed_ms", ".2f")],
    "bwd ms": [("time", "backward_ms", ".2f"), ("expo", "backward_exposed_ms", ".2f")],
    "TFLOP/s": [("/ GPU", "tflops_per_gpu", ".0f")],
    "of ideal": [("mean", "efficiency", ".0%"), ("worst", "efficiency_worst", ".0%")],
}
SCAN_NOTE = "ours, one layer; exposed: communication that nothing hides; a single --cp gives all strategies and details"
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
    names = ["", "", *(row["strategy"] for row in rows)]
    lines = [name.ljust(max(map(len, names))) for name in names]
    for above, columns in COLUMNS.items():
        cells = [[title, *(format(row[key], form) for row in rows)] for title, key, form in columns]
        widths = [max(map(len, column)) for column in cells]
        widths[0] += max(0, len(above) - sum(widths) - len(widths) + 1)
        block = [" ".join(map(str.rjust, line, widths)) for line in zip(*cells, strict=True)]
        block.insert(0, above.rjust(len(block[0])))
        lines = [f"{line}  {cell}" for line, cell in zip(lines, block, strict=True)]
    return "\n".join(lines)


def scan_table(sizings: list[Sizing]) -> str:
    """Ours under several layouts, a line each."""
    lines = [
        "GPUs  T, tokens  fwd ms  bwd ms  exposed  TFLOP/s / GPU  of ideal  worst  MiB from nodes  plan ms  best other"
    ]
    for sizing in sizings:
        plan, (ours, *others) = sizing.first, sizing.summary()
        best = max(others, key=lambda row: row["efficiency"], default=None)
        lines.append(
            f"{plan.cp_size:4}  {plan.tokens_per_rank:9,}  {ours['forward_ms']:6.2f}  {ours['backward_ms']:6.2f}"
            f"  {ours['exposed_share']:7.1%}  {ours['tflops_per_gpu']:13.0f}  {ours['efficiency']:8.0%}"
            f"  {ours['efficiency_worst']:5.0%}  {ours['across_max_mib']:9,.0f}"
            f"  {np.mean([pack.plan_ms for pack in sizing.packs]):7.0f}"
            + (f"  {best['efficiency']:.0%} {best['strategy']}" if best else "")
        )
    return "\n".join(lines)


def notes(sizing: Sizing) -> list[str]:
    """A line for each group of columns and each strategy: what it is, or why it cannot run."""
    pack = sizing.packs[0]
    baselines = {name: outcome for name, outcome in pack.outcomes.items() if name != OURS}
    said = [f"{name}: {DESCRIPTIONS[name] if runs else why_not(name, pack.case)}" for name, runs in baselines.items()]
    return [*LEGEND, *said]


def rank_times(pack: SizedPack) -> list[dict[str, float]]:
    """Predicted ms of each rank in a layer: attending, and everything else until it is done (waiting, above all)."""
    times: dict[str, FloatArray] = {}
    for name, timeline in zip(("forward", "backward"), pack.plan.predict(pack.case.cost), strict=True):
        attention = 1e3 * (timeline.attends[:, 1] - timeline.attends[:, 0]).sum(0)
        times |= {f"{name}_attention_ms": attention, f"{name}_other_ms": 1e3 * timeline.end - attention}
    return [{name: float(values[rank]) for name, values in times.items()} for rank in range(pack.plan.cp_size)]


def rank_line(sizing: Sizing) -> str:
    """One line: from what to what the predicted times of the first pack's ranks go, in ms."""
    said, ranks = [], rank_times(sizing.packs[0])
    for way in ("forward", "backward"):
        own, rest = ([rank[f"{way}_{kind}_ms"] for rank in ranks] for kind in ("attention", "other"))
        waiting = f"{min(rest):.2f} to {max(rest):.2f} of waiting and the rest"
        said.append(f"{way} {min(own):.2f} to {max(own):.2f} ms of attention, {waiting}")
    return f"Ranks of the first pack: {'; '.join(said)}."


def as_json(sizing: Sizing) -> dict[str, Any]:
    """The report as JSON has it: settings, a summary, and each pack; times in ms, volumes in units of T or MiB."""
    plan, heads = sizing.first, sizing.first.heads
    packs = [
        {
            "documents": len(pack.case.documents),
            "tokens": int(pack.case.documents.sum()),
            "longest": int(pack.case.documents.max(initial=0)),
            "plan_ms": pack.plan_ms,
            "ideal_forward_ms": 1e3 * pack.case.ideal_seconds[0],
            "ideal_backward_ms": 1e3 * pack.case.ideal_seconds[1],
            "ranks": rank_times(pack),
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
        "value_dim": heads.value_dim,
        "headline": headline(sizing),
        "summary": sizing.summary(),
        "packs": packs,
    }
