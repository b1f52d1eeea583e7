#!/usr/bin/env python3
"""Draws benchmarks/results/*.json: every picture of a figure in the docs comes from here.

python benchmarks/plot_results.py [FILE.json ...]
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from bench_data import TOKENS_PER_GPU
from bench_train import NAMES
from figures import RESULTS, Row, result
from matplotlib import pyplot

COLORS = {
    "ours": "#1b6ca8", "resident": "#8fbbd9", "ideal": "#222222", "ours deterministic": "#8fbbd9",
    "ours, dp 2": "#4c93c4", "ours, tp 2": "#8fbbd9", "cudnn": "#5a9e3d", "varlen_attn": "#d98e32", "flex": "#a05195",
    "cudnn packed": "#9ac97f",
    "fa3": "#c0392b", "all-gather": "#d98e32", "all-gather balanced": "#c0572b", "ring": "#a05195",
    "ulysses": "#5a9e3d", "no CP": "#222222", "no CP, flex": "#d98e32", "ours by NCCL": "#4c93c4",
    "no attention": "#cccccc",
}  # fmt: skip
LEGEND = NAMES | {
    "ours deterministic": "ours, deterministic", "cudnn": "cuDNN", "fa3": "FlashAttention-3", "ulysses": "Ulysses",
    "cudnn packed": "cuDNN, packed",
    "resident": "ours, resident", "all-gather balanced": "balanced all-gather",
}  # fmt: skip
TRACE_COLORS = {"attention": "#1b6ca8", "communication": "#d98e32", "rows and sums": "#8fbbd9"}
KERNEL_PANELS = {
    "causal": "one causal document", "full": "one document, full attention", "varlen causal": "8 documents, causal",
    "varlen full": "8 documents, full attention", "histogram": "documents of a length histogram, causal",
    "lognormal": "documents of lognormal lengths, causal",
    "window": "sliding window of 1,024", "block causal": "blocks of 1,024, causal",
}  # fmt: skip


def bars(axis: Any, rows: list[Row], length: str, name: str, field: str, scale: float = 1) -> None:
    """Means of a field over rows: groups by length, in each group a bar for every name."""
    values: dict[tuple[int, str], list[float]] = {}
    for row in rows:
        values.setdefault((row[length], row[name]), []).append(row[field] * scale)
    names = list(dict.fromkeys(row[name] for row in rows))
    lengths = sorted({row[length] for row in rows})
    width = 0.82 / max(3, len(names))
    for i, label in enumerate(names):
        at = [x + (i - (len(names) - 1) / 2) * width for x in range(len(lengths))]
        heights = [statistics.mean(values.get((tokens, label), [0])) for tokens in lengths]
        axis.bar(at, heights, 0.92 * width, label=LEGEND.get(label, label), color=COLORS.get(label))
    axis.set_xticks(range(len(lengths)), [f"{tokens / 1024:g}k" for tokens in lengths])
    plain(axis, "{x:,.0f}")


def plain(axis: Any, ticks: str) -> None:
    """Without a frame, with thin lines behind the bars. ticks: how to write a value."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.yaxis.set_major_formatter(ticks)
    axis.grid(axis="y", linewidth=0.4)
    axis.set_axisbelow(True)


def facts(result: dict[str, Any]) -> str:
    return f"{result['device']}, {result['date']}"


def draw_kernel(result: dict[str, Any]) -> Any:
    """TFLOP/s of attention on one GPU, heads 64:8, head_dim 128, by mask and length."""
    rows = [row for row in result["rows"] if row["heads"] == "64:8" and row["head_dim"] == 128]
    rows = [row for row in rows if not row["case"].removeprefix("histogram ").isdigit()]  # of a single pack
    panels = [name for name in KERNEL_PANELS if any(family(row) == name for row in rows)]
    figure, axes = pyplot.subplots(len(panels), 2, figsize=(11, 2.1 * len(panels)), sharey=True, squeeze=False)
    for line, panel in zip(axes, panels, strict=True):
        mine = [row for row in rows if family(row) == panel]
        for axis, field in zip(line, ("fwd_tflops", "bwd_tflops"), strict=True):
            bars(axis, [row for row in mine if row[field]], "tokens", "impl", field)  # FA3 has no backward
        line[0].set_title(KERNEL_PANELS[panel], loc="left", fontsize=10)
        line[0].set_ylabel("TFLOP/s")
    axes[0][1].set_title("backward", loc="right", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("tokens")
    axes[0][0].set_title("forward", loc="right", fontsize=10)
    figure.suptitle(f"Attention, bf16, heads 64:8, head_dim 128: {facts(result)}", fontsize=11)
    return figure, axes[0][0]


def draw_cp(result: dict[str, Any]) -> Any:
    """TFLOP/s per GPU of context-parallel attention, forward and backward together, by pack and strategy."""
    rows = result["rows"]
    for row in rows:  # operations: 1 forward, 2.5 backward
        flops = row["fwd_tflops_per_gpu"] * row["fwd_ms"] + row["bwd_tflops_per_gpu"] * row["bwd_ms"]
        row["tflops"] = flops / (row["fwd_ms"] + row["bwd_ms"])
    kinds = list(dict.fromkeys((row["heads"], row["pack"]) for row in rows))
    figure, axes = pyplot.subplots(len(kinds), 1, figsize=(10, 2.8 * len(kinds)), squeeze=False)
    for (axis,), (heads, pack) in zip(axes, kinds, strict=True):
        mine = [row for row in rows if (row["heads"], row["pack"]) == (heads, pack)]
        bars(axis, mine, "tokens_per_gpu", "strategy", "tflops")
        axis.set_ylabel("TFLOP/s per GPU")
        axis.set_title(f"{pack} packs, heads {heads}", loc="left", fontsize=10)
        axis.set_xlabel("tokens per GPU")
    figure.suptitle(f"Attention over {result['num_gpus']} GPUs, forward and backward: {facts(result)}", fontsize=11)
    return figure, axes[0][0]


def draw_train(result: dict[str, Any]) -> Any:
    """Tokens per second and GPU of training steps, and peak memory, by strategy or activation checkpointing."""
    rows = result["rows"]
    name = "checkpointing" if len({row.get("checkpointing") for row in rows}) > 1 else "strategy"
    panels = {"tokens_per_s": "tokens/s per GPU", "peak_memory_gib": "GiB at the peak"}
    panels = {field: label for field, label in panels.items() if field in rows[0]}
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(9, 3 * len(panels)), sharex=True, squeeze=False)
    for (axis,), (field, label) in zip(axes, panels.items(), strict=True):
        bars(axis, rows, "tokens_per_gpu", name, field, 1 / result["num_gpus"] if field == "tokens_per_s" else 1)
        axis.set_ylabel(label)
    axes[-1, 0].set_xlabel("tokens per GPU")
    model = f"{result.get('model', 'llama3')} {result.get('shapes', '8B')}"
    title = f"Training steps, {model}, {result['layers']} layers, {result['num_gpus']} GPUs"
    if name == "checkpointing":
        title += ", by activation checkpointing"
    figure.suptitle(f"{title}: {facts(result)}", fontsize=11)
    return figure, axes[0, 0]


def draw_headline(result: dict[str, Any]) -> Any:
    """For the README: tokens per second and memory of whole training runs, ours and torchtitan's."""
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 1.7), sharey=True, layout="constrained")
    rows = list(reversed(result["rows"]))
    names = {"ours": "torchtitan_magi", "flex": "torchtitan's\nflex_attention CP"}
    panels = {"tokens_per_s": ("tokens/s per GPU", result["num_gpus"], 0), "peak_memory_gib": ("GiB at the peak", 1, 1)}
    for axis, (field, (label, divisor, digits)) in zip(axes, panels.items(), strict=True):
        values = [row[field] / divisor for row in rows]
        colors = [COLORS[row["strategy"]] for row in rows]
        bars = axis.barh([names[row["strategy"]] for row in rows], values, 0.6, color=colors)
        axis.bar_label(bars, [f"{value:,.{digits}f}" for value in values], padding=4, fontsize=10)
        axis.set_xlim(0, 1.15 * max(values))
        axis.set_xticks([])
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        axis.set_title(label, loc="left", fontsize=10)
    return figure


def draw_curves(result: dict[str, Any]) -> Any:
    """Losses of the layouts, and how far each is from the run without context parallelism that it is compared with."""
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 7), sharex=True, height_ratios=[2, 1])
    curves = {name: [step["loss"] for step in steps] for name, steps in result["runs"].items()}
    colors = pyplot.colormaps["tab20"].colors
    for (name, curve), color in zip(curves.items(), colors[::2] + colors[1::2], strict=False):
        steps, against = range(1, len(curve) + 1), result["against"][name]
        above.plot(steps, curve, label=name, linewidth=1, color=color)
        if against is not None:
            differences = [abs(a - b) for a, b in zip(curve, curves[against], strict=True)]
            below.plot(steps, differences, linewidth=0.8, color=color)
    below.axhline(result["spread"], color="black", linestyle="--", linewidth=1)
    below.text(1, 1.3 * result["spread"], "spread: the same numbers added in another order", va="bottom", fontsize=9)
    below.set_yscale("log")
    below.set_ylim(1e-6, 10 * result["spread"])
    above.set_ylabel("loss")
    below.set_ylabel("difference from no CP")
    below.set_xlabel("step")
    figure.suptitle(f"bf16, our kernel, {result['num_gpus']} GPUs: {facts(result)}", fontsize=11)
    return figure, above


def draw_trace(result: dict[str, Any]) -> Any:
    """What each GPU does in a layer's forward and backward: its streams one above the other."""
    ranks = result["ranks"]
    figure, axes = pyplot.subplots(len(ranks), 1, figsize=(11, 1.3 * len(ranks) + 1.2), sharex=True, squeeze=False)
    for (axis,), (rank, kernels) in zip(axes, enumerate(ranks), strict=True):
        for line, (kind, color) in enumerate(TRACE_COLORS.items()):
            spans = [(kernel["start_us"], max(kernel["us"], 2)) for kernel in kernels if kernel["kind"] == kind]
            axis.broken_barh(spans, (-line - 0.4, 0.8), color=color, label=kind)
        axis.set_yticks(range(0, -len(TRACE_COLORS), -1), list(TRACE_COLORS), fontsize=8)
        axis.set_title(f"GPU {rank}", loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1][0].set_xlabel("microseconds")
    title = f"One layer, {result['tokens_per_gpu']:,} tokens per GPU, heads {result['heads']}: {facts(result)}"
    figure.suptitle(f"{title}\n{result['exposed_comm_share']:.1%} of the time is exposed communication", fontsize=10)
    return figure, axes[0][0]


def draw_plan(result: dict[str, Any]) -> Any:
    """Placement: received rows, balance and time to plan of the histogram cases."""
    rows = [row for row in result["rows"] if row["distribution"] == "histogram" and row["cp"] in (4, 8, 32, 64, 128)]
    cases = list(dict.fromkeys((row["total"], row["cp"]) for row in rows))
    colors = {"ours": "#1b6ca8", "contiguous": "#d98e32", "zigzag": "#5a9e3d", "min_heap": "#a05195"}

    def mean(some: list[Row], field: str) -> float:
        return statistics.mean(row[field] for row in some)

    panels = {
        "mean K/V received / least possible with balanced work": lambda some: (
            mean(some, "recv_mean") / mean(some, "lower_bound_mean")
        ),
        "most K/V sent by a rank, in tokens of a rank": lambda some: max(row["send_max"] for row in some),
        "work of the heaviest rank / mean": lambda some: max(row["imbalance_tile"] for row in some),
        "planning and index data, ms on one core": lambda some: mean(some, "plan_ms"),
    }
    figure, axes = pyplot.subplots(4, 1, figsize=(9, 10), sharex=True)
    for axis, (title, figure_of) in zip(axes, panels.items(), strict=True):
        planners = ["ours"] if "planning" in title else list(colors)
        for i, planner in enumerate(planners):
            values = [
                figure_of([row for row in rows if row["planner"] == planner and (row["total"], row["cp"]) == case])
                for case in cases
            ]
            at = [x + 0.2 * (i - (len(planners) - 1) / 2) for x in range(len(cases))]
            axis.bar(at, values, 0.18, color=colors[planner], label=planner.replace("_", "-"))
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_yscale("log" if "sent" in title or "heaviest" in title else "linear")
        plain(axis, "{x:g}")
    axes[0].axhline(1, color="black", linewidth=0.8)
    axes[2].set_ylim(bottom=1)
    names = [f"{total >> 10}k / {cp}" if total < 1 << 20 else f"{total >> 20}M / {cp}" for total, cp in cases]
    axes[3].set_xticks(range(len(cases)), names)
    axes[3].set_xlabel("tokens of the pack / ranks; documents of the length histogram")
    return figure, axes[0]


def draw_data(result: dict[str, Any]) -> Any:
    """Tokens per second of a rank's packs against the number of ranks."""
    figure, axis = pyplot.subplots(figsize=(6, 3.5))
    ranks = [row["ranks"] for row in result["ranks"]]
    axis.plot(ranks, [row["tokens_per_s"] for row in result["ranks"]], marker="o", label="one rank's packs")
    axis.plot(ranks, [TOKENS_PER_GPU] * len(ranks), linestyle=":", label="8B on one GPU")
    axis.set(xscale="log", yscale="log", xlabel="data-parallel ranks", ylabel="tokens/s of a rank")
    return figure, axis


def family(row: Row) -> str:
    """The panel of a kernel benchmark's case."""
    return next((name for name in sorted(KERNEL_PANELS, key=len, reverse=True) if row["case"].startswith(name)), "")


DRAWINGS = {  # by how the file's name begins
    "kernel_": draw_kernel, "cp_": draw_cp, "train_": draw_train, "loss_curves_": draw_curves,
    "dpo_curves_": draw_curves, "trace_": draw_trace, "plan": draw_plan, "data": draw_data,
}  # fmt: skip


def picture(path: Path) -> Path | None:
    """Draws the figures of a file beside it; None if there is nothing to draw."""
    draw = next((draw for prefix, draw in DRAWINGS.items() if path.name.startswith(prefix)), None)
    if draw is None:
        return None
    figure, axis = draw(json.loads(path.read_text()))
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(6, len(labels)), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.035 * -(-len(labels) // 6), 1, 0.99))
    figure.savefig(path.with_suffix(".png"), dpi=110)
    pyplot.close(figure)
    return path.with_suffix(".png")


def main() -> None:
    headline = draw_headline(result("train_8b_64k_h200x2"))
    headline.savefig(RESULTS.parents[1] / "docs" / "pictures" / "headline.png", dpi=110)
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(RESULTS.glob("*.json")):
        print(picture(path) or f"{path}: nothing to draw")


if __name__ == "__main__":
    main()
