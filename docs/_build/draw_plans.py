#!/usr/bin/env python3
"""Draws the pictures of the concepts from masks and plans of the library.

python docs/_build/draw_plans.py [--folder DIR]

idea.png: a pack of documents over four GPUs, and the K/V that each receives. masks.png: five masks and their slices.
ownership.png: which GPU computes which part of a mask, and which of it needs K/V of other GPUs. parts.png: the parts of
the same documents in a layer of linear attention, the maps that travel, and what each GPU does in which order.
tree.png: a tree of records, and who owns what of its mask.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from torchtitan_magi import (
    AttnPlan,
    AttnSlices,
    block_causal,
    make_plan,
    shared_prompt,
    sliding_window,
    tree_causal,
    varlen_causal,
)
from torchtitan_magi.masks.geometry import BI_CAUSAL, CAUSAL, INV_CAUSAL
from torchtitan_magi.planning.document_parts import DocumentParts
from torchtitan_magi.sizing.sample_packs import draw_pack
from torchtitan_magi.sizing.strategies.picture import HUES, INK, LINE, QUIET, STYLE, owner_of, rank_colors

ROOT = Path(__file__).resolve().parents[2]
TOKENS, GPUS, SEED = 131072, 4, 2
BAR, LANE = 0.62, 1.0
SMALL = 32 * np.array([0, 96, 128, 448, 512, 544, 960, 1024])  # tokens; documents of the small pack
PIXELS = 1024  # along a side of its mask
GAP, WIDEST = 1280, 6080  # tokens, between steps, and as wide as the title of one
DOCUMENTS = [0, 16, 22, 44, 64]
NODES = {  # of a tree: words, parent, tokens
    "system message": (-1, 320), "question": (0, 160), "answer": (1, 96), "answer ": (1, 64), "answer  ": (1, 96),
    "question ": (0, 128), "answer   ": (5, 96), "answer    ": (5, 64),
}  # fmt: skip
MASKS = {
    "varlen_causal(cu_seqlens)": varlen_causal(DOCUMENTS),
    "sliding_window(cu_seqlens, 8)": sliding_window(DOCUMENTS, 8),
    "block_causal(cu_seqlens, 8)": block_causal(DOCUMENTS, 8),
    "shared_prompt(lengths)": shared_prompt([[10, 12, 8], [16, 8, 10]]),
    "AttnSlices([...]): one of each type": AttnSlices(
        [[0, 20, 0, 20, 1], [20, 36, 4, 36, 3], [36, 64, 0, 24, 0], [44, 64, 36, 64, 2]]
    ),
}


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


def pairs_of(slice_: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """The pairs of query and key among these tokens that one slice covers, bool [tokens, tokens]."""
    q_start, q_end, k_start, k_end, kind = slice_.tolist()
    q, k = tokens[:, None], tokens[None]
    inside = (q >= q_start) & (q < q_end) & (k >= k_start) & (k < k_end)
    if kind in (CAUSAL, BI_CAUSAL):
        inside &= k - k_end <= q - q_end
    if kind in (INV_CAUSAL, BI_CAUSAL):
        inside &= k - k_start >= q - q_start
    return inside


def square(axes: Axes, tokens: int, title: str) -> None:
    axes.set(xlim=(0, tokens), ylim=(tokens, 0), xticks=[], yticks=[], aspect="equal")
    axes.set_title(title, fontsize=9.5, weight="normal", pad=6)
    for spine in axes.spines.values():
        spine.set(visible=True, color=LINE)


@matplotlib.rc_context(STYLE)
def draw_masks(masks: dict[str, AttnSlices], tokens: int) -> Figure:
    """A square for each mask: queries downwards, keys to the right, a colour for each slice."""
    figure = Figure(figsize=(12, 2.75))
    for number, (title, slices) in enumerate(masks.items()):
        axes = figure.add_axes((0.008 + 0.199 * number, 0.03, 0.186, 0.83))
        image = np.ones((tokens, tokens, 3))
        for index, slice_ in enumerate(slices.table):
            image[pairs_of(slice_, np.arange(tokens))] = to_rgb(HUES[index % len(HUES)])
        axes.imshow(image, extent=(0, tokens, tokens, 0), interpolation="nearest")
        square(axes, tokens, title)
    return figure


@matplotlib.rc_context(STYLE)
def draw_ownership(plan: AttnPlan) -> Figure:
    """The mask in the colours of the GPUs that own its queries, strong where the key belongs to another GPU."""
    tokens = plan.total_tokens
    shown = np.arange(0, tokens, max(1, tokens // PIXELS))
    owner = owner_of(plan, shown)
    colors = rank_colors(plan.cp_size, plan.gpus_per_node)
    figure = Figure(figsize=(10, 4.9))
    axes = figure.add_axes((0.035, 0.02, 0.44, 0.9))
    image = np.ones((len(shown), len(shown), 3))
    attended = np.zeros(image.shape[:2], dtype=bool)
    for slice_ in plan.slices.table:
        attended |= pairs_of(slice_, shown)
    remote = owner[:, None] != owner[None, :]
    row_colors = np.broadcast_to(colors[owner][:, None, :], image.shape)
    image[attended] = 1 - 0.35 * (1 - row_colors[attended])
    image[attended & remote] = row_colors[attended & remote]
    axes.imshow(image, extent=(0, tokens, tokens, 0), interpolation="nearest")
    square(axes, tokens, f"{tokens:,} tokens, {len(plan.slices)} documents: queries downwards, keys to the right")
    strip = figure.add_axes((0.01, 0.02, 0.02, 0.9))
    strip.imshow(colors[owner][:, None, :], extent=(0, 1, tokens, 0), aspect="auto", interpolation="nearest")
    strip.set_axis_off()
    side = figure.add_axes((0.48, 0.02, 0.51, 0.9))
    side.set_axis_off()
    rows = []
    for rank in range(plan.cp_size):
        share = 100 * plan.areas[rank] / plan.areas.sum()
        work = f"{plan.tokens_per_rank:,} tokens, {share:.1f}% of the pairs"
        text = f"GPU {rank}: {work}, receives {plan.received_rows[rank]:,} rows"
        rows.append(Patch(color=colors[rank], label=text))
    rows.append(Patch(color="#c5ccd3", label="faint: the key lies on the same GPU; nothing travels"))
    rows.append(Patch(color=INK, label="strong: the key lies on another GPU; its K and V travel once"))
    side.legend(handles=rows, loc="center left", fontsize=9.5, labelspacing=1.1)
    return figure


@matplotlib.rc_context(STYLE)
def draw_tree(plan: AttnPlan, words: list[str], lengths: np.ndarray, parents: np.ndarray) -> Figure:
    """Left each node at its positions, in the colours of the GPUs that own its tokens; right the mask in these."""
    tokens, starts = plan.total_tokens, lengths.cumsum() - lengths
    owner, colors = owner_of(plan, np.arange(tokens)), rank_colors(plan.cp_size, plan.gpus_per_node)
    figure = Figure(figsize=(10, 4.2))
    axes = figure.add_axes((0.015, 0.08, 0.545, 0.82))
    begins = np.zeros(len(lengths), int)
    for node, (parent, start, length) in enumerate(zip(parents, starts, lengths, strict=True)):
        if parent >= 0:
            begins[node] = begins[parent] + lengths[parent]
            axes.plot([begins[node]] * 2, [-parent - BAR / 2, -node + BAR / 2], color=QUIET, linewidth=1)
        for rank in range(plan.cp_size):
            runs = spans(owner[start : start + length] == rank)
            bars = [(begins[node] + first, last - first) for first, last in runs]
            axes.broken_barh(bars, (-node - BAR / 2, BAR), facecolors=[colors[rank]])
        text = f"{words[node].strip()}, {length} tokens"
        axes.text(begins[node] + length + 8, -node, text, va="center", color=INK, fontsize=9)
    longest = int((begins + lengths).max())
    axes.set(xlim=(0, 1.35 * longest), ylim=(-len(lengths) + 0.4, 0.6), xticks=[0, longest], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title("position in each of the five records", fontsize=9.5, weight="normal", loc="left")
    side = figure.add_axes((0.59, 0.02, 0.4, 0.88))
    image, attended = np.ones((tokens, tokens, 3)), np.zeros((tokens, tokens), dtype=bool)
    for slice_ in plan.slices.table:
        attended |= pairs_of(slice_, np.arange(tokens))
    image[attended] = np.broadcast_to(colors[owner][:, None, :], image.shape)[attended]
    side.imshow(image, extent=(0, tokens, tokens, 0), interpolation="nearest")
    flat = int((begins + lengths)[~np.isin(np.arange(len(lengths)), parents)].sum())
    square(side, tokens, f"{tokens:,} tokens in place of {flat:,}: queries downwards")
    return figure


@matplotlib.rc_context(STYLE)
def draw_idea(plan: AttnPlan, cu_seqlens: np.ndarray) -> Figure:
    """The pack, and a line for each GPU: what it owns, and whose K/V it receives."""
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


def names_of(parts: DocumentParts) -> list[str]:
    """Of each part the letter of its document; of a document that is cut also its number there."""
    letter, names = -1, []
    for part, parent in enumerate(parts.parent.tolist()):
        letter += parent < 0
        is_cut = parent >= 0 or part in parts.parent
        number = part - max(i for i in range(part + 1) if parts.parent[i] < 0) + 1
        names.append(chr(ord("A") + letter) + (str(number) if is_cut else ""))
    return names


def order_of(parts: DocumentParts, rank: int) -> list[list[tuple[int, bool]]]:
    """What a GPU does in the forward before maps travel, and then: parts, and whether only their map is made."""
    own = parts.ranks[rank].numbers.tolist()
    return [[(part, True) for part in own if part in parts.parent], [(part, False) for part in own]]


@matplotlib.rc_context(STYLE)
def draw_parts(plan: AttnPlan) -> Figure:
    """Above the parts of documents on GPUs, and an arrow for each map; below what each GPU does, from left to right."""
    parts, figure = plan.document_parts, Figure(figsize=(10, 5.7))
    colors, names = rank_colors(plan.cp_size, plan.gpus_per_node), names_of(parts)
    first, end = parts.ranges.T
    height = plan.cp_size - 1 - parts.rank
    steps = [order_of(parts, rank) for rank in range(plan.cp_size)]
    widths = [max(sum((end - first)[part] for part, _ in step[i]) for step in steps) for i in range(len(steps[0]))]
    starts = np.cumsum([0, *(max(width, WIDEST) + GAP for width in widths)])

    def bar(axes: Axes, part: int, start: float, is_map: bool = False) -> None:
        y, color, length = height[part], colors[parts.rank[part]], end[part] - first[part]
        style = {"facecolor": (*color, 0.25), "hatch": "////"} if is_map else {"facecolor": color}
        axes.broken_barh([(start, length)], (y - BAR / 2, BAR), edgecolor="white", linewidth=0.8, **style)
        is_narrow = length < GAP / 2
        text = {"color": INK if is_map or is_narrow else "white", "ha": "center", "va": "center", "fontsize": 8.5}
        axes.text(start + length / 2, y + 0.45 * is_narrow, names[part], **text)

    def lanes(bottom: float, limit: float) -> Axes:
        axes = figure.add_axes((0.075, bottom, 0.915, 0.37))
        axes.set(xlim=(0, limit), ylim=(-0.5, plan.cp_size - 0.4), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        for rank, color in enumerate(colors):
            y = plan.cp_size - 1 - rank
            axes.axhline(y, color=LINE, linewidth=0.8, zorder=0)
            axes.text(-0.012 * limit, y, f"GPU {rank}", ha="right", va="center", color=color, weight="bold")
        return axes

    above, below = lanes(0.56, plan.total_tokens), lanes(0.01, starts[-1] - GAP)
    for part in range(len(parts)):
        bar(above, part, first[part])
    for receiver, _, part in parts.carries(False).tolist():
        later = next(i for i in range(part + 1, len(parts)) if parts.rank[i] == receiver)
        side = np.sign(height[later] - height[part]) * BAR / 2
        ends = (first[later], height[later] - side), (end[part], height[part] + side)
        arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 0.9, "connectionstyle": "arc3,rad=0.08"}
        above.annotate("", *ends, arrowprops=arrow, zorder=0.5)
    for step in steps:
        for start, todo in zip(starts, step, strict=False):
            for part, is_map in todo:
                bar(below, part, start, is_map)
                start += end[part] - first[part]
    titles = "maps of parts\nthat others continue", "maps have travelled: all parts run,\neach from its state"
    for start, title in zip(starts, titles, strict=False):
        below.text(start, plan.cp_size - 0.45, title, color=QUIET, va="bottom", linespacing=1.3)
    figure.text(0.075, 0.95, "The pack: parts of documents A to G on their GPUs, an arrow for each map", color=INK)
    figure.text(0.075, 0.495, "Each GPU from left to right:", color=INK)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs" / "pictures", help="for the files")
    folder = parser.parse_args().folder
    cu_seqlens = np.append(0, draw_pack("histogram", TOKENS, SEED, batch=1).cumsum())
    plan = make_plan(varlen_causal(cu_seqlens), TOKENS, GPUS)
    draw_idea(plan, cu_seqlens).savefig(folder / "idea.png", dpi=160)
    draw_masks(MASKS, 64).savefig(folder / "masks.png", dpi=160)
    small = make_plan(varlen_causal(SMALL), int(SMALL[-1]), GPUS)
    draw_ownership(small).savefig(folder / "ownership.png", dpi=160)
    draw_parts(small).savefig(folder / "parts.png", dpi=160)
    parents, lengths = np.array([*NODES.values()]).T
    plan = make_plan(tree_causal(lengths, parents), int(lengths.sum()), GPUS)
    draw_tree(plan, [*NODES], lengths, parents).savefig(folder / "tree.png", dpi=160)


if __name__ == "__main__":
    main()
