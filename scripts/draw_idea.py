#!/usr/bin/env python3
"""Draws the idea: a pack of documents over four GPUs, and the K/V that each receives, from a real plan.

python scripts/draw_idea.py [--output docs/pictures/idea.png]
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from bench_cp import histogram_pack
from matplotlib.figure import Figure

from torchtitan_magi import AttnPlan, make_plan, varlen_causal
from torchtitan_magi.report.picture import INK, LINE, QUIET, STYLE, owner_of, rank_colors

ROOT = Path(__file__).resolve().parent.parent
TOKENS, GPUS, SEED = 131072, 4, 2
BAR, LANE = 0.62, 1.0


def spans(flags: np.ndarray) -> np.ndarray:
    """Half-open ranges [n, 2] in which flags, bool [tokens], is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return edges.reshape(-1, 2)


def sees(plan: AttnPlan, own: np.ndarray) -> np.ndarray:
    """The keys that the queries of `own`, bool [tokens], see: bool [tokens]."""
    lo, hi = plan.slices.row_bands(plan.padded_tokens)
    steps = np.zeros(plan.padded_tokens + 1, dtype=np.int64)
    is_band = (hi > lo) & own
    np.add.at(steps, lo[is_band], 1)
    np.add.at(steps, hi[is_band], -1)
    return steps.cumsum()[:-1] > 0


@matplotlib.rc_context(STYLE)
def draw(plan: AttnPlan, cu_seqlens: np.ndarray) -> Figure:
    figure = Figure(figsize=(10, 3.5))
    axes = figure.add_axes((0.075, 0.03, 0.665, 0.86))
    colors = rank_colors(plan.cp_size, plan.gpus_per_node)
    owner = owner_of(plan, np.arange(plan.padded_tokens))

    def bar(y: float, ranges: np.ndarray, **style: object) -> None:
        axes.broken_barh([(a, b - a) for a, b in ranges], (y - BAR / 2, BAR), **style)

    top = plan.cp_size * LANE + 0.35
    documents = np.stack([cu_seqlens[:-1], cu_seqlens[1:]], 1)
    bar(top, documents, facecolors=["#e3e8ed", "#c9d1d9"], edgecolors="white", linewidth=0.4)
    axes.text(-0.012 * TOKENS, top, "pack", ha="right", va="center", weight="bold")
    counts = f"{TOKENS / 1024:.0f}k tokens,\n{len(documents)} documents"
    axes.text(1.015 * TOKENS, top, counts, va="center", color=QUIET, fontsize=9)
    cost = plan.slices.row_cost(plan.padded_tokens)
    pairs = np.array([cost[owner == rank].sum() for rank in range(plan.cp_size)])
    for rank in range(plan.cp_size):
        y = (plan.cp_size - 1 - rank) * LANE
        own = owner == rank
        received = sees(plan, own) & ~own
        axes.axhline(y, color=LINE, linewidth=0.8, zorder=0)
        bar(y, spans(received), facecolors=[(*colors[rank], 0.3)])
        bar(y, spans(own), facecolors=[colors[rank]])
        axes.text(-0.012 * TOKENS, y, f"GPU {rank}", ha="right", va="center", color=colors[rank], weight="bold")
        work = f"{own.sum() / 1024:.0f}k tokens, {100 * pairs[rank] / pairs.sum():.1f}% of the work\n"
        share = received.sum() / (plan.padded_tokens - own.sum())
        axes.text(
            1.015 * TOKENS, y, f"{work}receives K/V of {received.sum() / 1024:.1f}k others ({100 * share:.0f}%)",
            va="center", color=INK, fontsize=9,
        )  # fmt: skip
    axes.set(xlim=(0, TOKENS), ylim=(-0.6, top + 0.5), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    others = plan.padded_tokens * (plan.cp_size - 1) / plan.cp_size / 1024
    legend = f"dark: tokens that a GPU owns; light: tokens whose K/V it receives; all-gather would send {others:.0f}k"
    figure.text(0.075, 0.93, legend, color=QUIET)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "pictures" / "idea.png")
    arguments = parser.parse_args()
    cu_seqlens = np.asarray(histogram_pack(TOKENS, SEED))
    plan = make_plan(varlen_causal(cu_seqlens), TOKENS, GPUS)
    draw(plan, cu_seqlens).savefig(arguments.output, dpi=160)


if __name__ == "__main__":
    main()
