"""The pictures of a report: who owns what, who sends what to whom, when things happen. Needs matplotlib."""

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from torchtitan_magi.planning.needs import parts_of
from torchtitan_magi.planning.plan import AttnPlan
from torchtitan_magi.planning.timeline import Timeline
from torchtitan_magi.sizing.strategies.outcomes import transfer_matrix
from torchtitan_magi.sizing.strategies.size import OURS, SizedPack, Sizing
from torchtitan_magi.sizing.strategies.table import COLUMNS, headline, notes, setting
from torchtitan_magi.wording import amount, shown

Image = npt.NDArray[np.float64]

INK, QUIET, PAPER, LINE = "#22303c", "#6b7885", "#ffffff", "#d5dbe1"
ATTENTION, CAST, REDUCE, REST = "#3d6fa5", "#dd8a3c", "#4c9a72", "#aab4be"
HUES = ["#3d6fa5", "#dd8a3c", "#4c9a72", "#b8504f", "#7d68a6", "#8a6f5a", "#c77fa6", "#4f9aa8", "#a09a45", "#66717d"]
ROWS_MAP = LinearSegmentedColormap.from_list("rows", ["#f4f7fa", "#c3d5e6", "#7fa6cb", "#3d6fa5", "#1c3c63"])
_PAGE = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
PIXELS = 1400  # width and height of the mask
STYLE: Any = {
    "font.size": 10, "font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": QUIET,
    "xtick.color": QUIET, "ytick.color": QUIET, "axes.titlecolor": INK, "axes.titlesize": 12,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": PAPER, "legend.frameon": False, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "legend.handlelength": 1, "legend.handleheight": 1, "legend.columnspacing": 1.4,
    "axes.titlepad": 10,
}  # fmt: skip
IDEAL: Any = {"color": INK, "linewidth": 1.2, "linestyle": (0, (4, 3))}


def png(sizing: Sizing) -> bytes:
    """The pictures of the first pack, and times of all strategies."""
    target = io.BytesIO()
    draw(sizing).savefig(target, format="png", dpi=138)
    return target.getvalue()


def html_page(sizing: Sizing, answer: str = "") -> str:
    """A web page with table and pictures, in one file: no scripts, nothing fetched. answer: HTML to begin with."""
    return _PAGE.substitute(
        title=f"{sizing.first.cp_size} GPUs, {sizing.total:,} tokens per pack",
        answer=answer,
        headline=html.escape(headline(sizing)),
        setting="<br>".join(map(html.escape, setting(sizing))),
        table=_html_table(sizing),
        picture=base64.b64encode(png(sizing)).decode(),
        notes="".join(f"<li>{html.escape(note)}</li>" for note in notes(sizing)),
    )


@matplotlib.rc_context(STYLE)
def draw(sizing: Sizing) -> Figure:
    """Draws all pictures on one sheet: of the first pack, and times of all strategies."""
    figure = Figure(figsize=(13, 13.4))
    plan = sizing.first
    rows = figure.add_gridspec(3, 1, height_ratios=[7.5, 3.6, 4.1])
    top, middle, bottom = (figure.add_subfigure(rows[i]) for i in range(3))
    halves = top.add_gridspec(1, 2)
    top.text(0.043, 0.965, f"{setting(sizing)[0]}. The first pack of {shown(sizing.source)}.", color=QUIET)
    # Each half of the top is square, so that equal fractions of its sides are equally long.
    draw_mask(top.add_subfigure(halves[0]), plan)
    draw_transfers(top.add_subfigure(halves[1]), plan)
    draw_timeline(middle.add_axes((0.085, 0.17, 0.885, 0.63)), sizing.packs[0])
    draw_strategies(bottom.add_axes((0.115, 0.15, 0.415, 0.66)), sizing)
    draw_work(bottom.add_axes((0.6, 0.15, 0.37, 0.66)), plan)
    return figure


# -------------------------------------------------------------------------------------------------------- who owns what


def rank_colors(cp_size: int, gpus_per_node: int) -> Image:
    """RGB of each rank, [cp_size, 3]: a hue for each node, lighter from GPU to GPU; one node: a hue for each GPU."""
    rank = np.arange(cp_size)
    if cp_size <= len(HUES):
        return np.array([to_rgb(HUES[r]) for r in rank])
    if gpus_per_node >= cp_size:  # too many for hues of their own
        return matplotlib.colormaps["viridis"](rank / (cp_size - 1))[:, :3]
    hue = np.array([to_rgb(HUES[node % len(HUES)]) for node in rank // gpus_per_node])
    light = (0.6 * (rank % gpus_per_node) / max(1, gpus_per_node - 1))[:, None]
    return hue * (1 - light) + light


def mask_image(plan: AttnPlan, pixels: int = PIXELS) -> Image:
    """The mask seen from afar, RGB [pixels, pixels, 3]: each pixel a query row's keys, in the colour of its owner.

    A row of pixels shows the query in its middle, and every pixel that its keys touch.
    """
    pixels = min(pixels, plan.padded_tokens)
    query = ((np.arange(pixels) + 0.5) * plan.padded_tokens / pixels).astype(np.int64)
    lo, hi = (bound[:, query].astype(np.int64) for bound in plan.slices.row_bands(plan.padded_tokens))
    first, end = lo * pixels // plan.padded_tokens, -(-hi * pixels // plan.padded_tokens)
    column = np.arange(pixels)
    seen = ((first[..., None] <= column) & (column < end[..., None]) & (hi > lo)[..., None]).any(0)
    image = np.ones((pixels, pixels, 3))
    image[seen] = rank_colors(plan.cp_size, plan.gpus_per_node)[owner_of(plan, query)][np.nonzero(seen)[0]]
    return image


def owner_of(plan: AttnPlan, token: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rank that owns each token."""
    parts, owner = parts_of([share.ranges for share in plan.ranks])
    return owner[np.searchsorted(parts[:, 0], token, side="right") - 1].astype(np.int64)


def draw_mask(figure: Any, plan: AttnPlan) -> None:
    """Draws the mask in the colours of its owners, and beside it the owner of every token."""
    total = plan.padded_tokens
    axes = figure.add_axes((0.12, 0.1, 0.78, 0.78))
    axes.imshow(mask_image(plan), extent=(0, total, total, 0), interpolation="antialiased", aspect="equal")
    places = np.linspace(0, total, 5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(places, map(_tokens, places))
    axes.set(xlabel="key (tokens of the pack)", ylabel="query (tokens of the pack)")
    axes.set_title("Who computes what: the mask, by owner")
    # The owner of every token, also where rows are too short to be seen.
    strip = figure.add_axes((0.915, 0.1, 0.025, 0.78))
    token = ((np.arange(PIXELS) + 0.5) * total / PIXELS).astype(np.int64)
    strip.imshow(rank_colors(plan.cp_size, plan.gpus_per_node)[owner_of(plan, token)][:, None], aspect="auto")
    strip.set_axis_off()
    strip.set_title("owner", fontsize=8, fontweight="normal", color=QUIET, loc="center", pad=4)
    _rank_legend(axes, plan)


def _rank_legend(axes: Axes, plan: AttnPlan) -> None:
    colors = rank_colors(plan.cp_size, plan.gpus_per_node)
    nodes, size = plan.work.num_nodes, plan.gpus_per_node
    ranks: Sequence[int] = range(plan.cp_size)
    if nodes > 1 and plan.cp_size > len(HUES):
        ranks = ranks[::size][: len(HUES)]
        names = [f"node {first // size}: ranks {first}-{min(first + size, plan.cp_size) - 1}" for first in ranks]
    else:
        if plan.cp_size > len(HUES):
            ranks = np.linspace(0, plan.cp_size - 1, 8).astype(int).tolist()
        names = [f"rank {rank}" for rank in ranks]
    entries = [Patch(color=tuple(colors[rank]), label=name) for rank, name in zip(ranks, names, strict=True)]
    if nodes > len(HUES):
        entries.append(Patch(alpha=0, label="then again from the top"))
    axes.legend(handles=entries, loc="upper right", labelspacing=0.35)


def _tokens(count: float) -> str:
    if count >= 1 << 20:
        return f"{count / (1 << 20):.3g}M"
    return f"{count / 1024:.0f}k" if count >= 4096 else f"{count:.0f}"


# ----------------------------------------------------------------------------------------------- who sends what to whom


def draw_transfers(figure: Any, plan: AttnPlan) -> None:
    """Draws the K/V rows that each rank needs of each other, and the sums of what ranks send and receive."""
    rows, cp_size, unit = transfer_matrix(plan), plan.cp_size, plan.tokens_per_rank
    axes = figure.add_axes((0.09, 0.1, 0.63, 0.63))
    image = axes.imshow(rows / unit, cmap=ROWS_MAP, aspect="equal", vmin=0, vmax=max(rows.max() / unit, 1e-9))
    width = min(0.5, 4 * plan.gpus_per_node / cp_size)
    for edge in range(plan.gpus_per_node, cp_size, plan.gpus_per_node):
        axes.axhline(edge - 0.5, color=QUIET, linewidth=width)
        axes.axvline(edge - 0.5, color=QUIET, linewidth=width)
    several = plan.work.num_nodes > 1
    step = -(-cp_size // 16)
    if several:  # whole nodes
        step = plan.gpus_per_node * -(-step // plan.gpus_per_node)
    ticks = range(0, cp_size, step)
    axes.set(xticks=ticks, yticks=ticks, ylabel="receiving rank")
    axes.set_xlabel("sending rank (lines: nodes)" if several else "sending rank")
    colors = rank_colors(cp_size, plan.gpus_per_node)
    limit = 1.05 * max(rows.sum(0).max(), rows.sum(1).max(), 1) / unit
    above = figure.add_axes((0.09, 0.75, 0.63, 0.13), sharex=axes)
    above.bar(range(cp_size), rows.sum(0) / unit, color=colors, width=0.85)
    above.set(ylabel="sent, T", ylim=(0, limit))
    above.tick_params(labelbottom=False)
    beside = figure.add_axes((0.74, 0.1, 0.13, 0.63), sharey=axes)
    beside.barh(range(cp_size), rows.sum(1) / unit, color=colors, height=0.85)
    beside.set(xlabel="received, T", xlim=(0, limit))
    beside.tick_params(labelleft=False)
    above.set_title("Who needs what of whom: K/V rows of one layer's forward")
    bar = figure.add_axes((0.89, 0.1, 0.018, 0.63))
    few_digits = MaxNLocator(5, steps=[1, 2, 5, 10])  # so that there is room for a label
    colorbar = figure.colorbar(image, cax=bar, ticks=few_digits)
    colorbar.outline.set_visible(False)
    mib = unit * plan.heads.row_bytes / 2**20
    colorbar.set_label(f"K/V rows in units of T = {unit:,} rows = {mib:,.0f} MiB")


# ---------------------------------------------------------------------------------------------------- when what happens


def draw_timeline(axes: Axes, pack: SizedPack) -> None:
    """Draws a layer's forward, then its backward, each on the rank whose attention ends last."""
    timelines = pack.plan.predict(pack.case.cost)
    total = 1e3 * sum(timeline.seconds for timeline in timelines)
    start, gap = 0.0, 0.015 * total
    for name, timeline, ideal in zip(("forward", "backward"), timelines, 1e3 * pack.case.ideal_seconds, strict=True):
        rank, took = int(timeline.attends[-1, 1].argmax()), 1e3 * timeline.seconds
        _draw_lanes(axes, timeline, start, rank, total + gap)
        axes.plot([start + ideal] * 2, [-0.5, 2.62], **IDEAL)
        axes.text(start + ideal, -0.56, f"ideal {ideal:.2f} ms", ha="right", va="bottom", fontsize=8.5, color=INK)
        axes.text(start, -0.92, f"{name}, rank {rank}: {took:.2f} ms", ha="left", va="bottom", fontsize=10, color=INK)
        start += took + gap
    axes.axvline(1e3 * timelines[0].seconds + gap / 2, color=LINE, linewidth=1)
    axes.set(xlabel="ms", xlim=(0, 1.005 * (total + gap)), ylim=(2.65, -0.95))
    axes.set_yticks([0, 1, 2], ["attention", "K/V arrive", "dK/dV return"], fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_title("When: one layer on the slowest rank, as predicted", pad=14)
    names = {"attention, by stage": ATTENTION, "K/V arrive": CAST, "dK/dV return": REDUCE, "passes over memory": REST}
    handles = [Patch(color=color, label=name) for name, color in names.items()]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1.0), ncols=4)


def _draw_lanes(axes: Axes, timeline: Timeline, start: float, rank: int, limit: float) -> None:
    """Draws one direction's lanes from `start` on; start and limit in ms."""

    def bar(lane: int, begin: float, end: float, color: Any) -> None:
        axes.barh(lane, end - begin, left=start + begin, height=0.62, color=color, edgecolor=PAPER, linewidth=0.6)

    lanes = (timeline.attends, ATTENTION), (timeline.casts, CAST), (timeline.reduces, REDUCE)
    for lane, (times, color) in enumerate(lanes):
        for stage, (begin, end) in enumerate(1e3 * times[:, :, rank]):
            if end <= begin:
                continue
            light = 0.22 * (stage % 2)
            bar(lane, begin, end, tuple(np.array(to_rgb(color)) * (1 - light) + light))
            if end - begin > 0.022 * limit:
                text = str(stage) if stage else "own" if len(timeline.attends) > 1 else "all"
                axes.text(start + (begin + end) / 2, lane, text, ha="center", va="center", color=PAPER, fontsize=8.5)
    busy = 1e3 * max(float(timeline.attends[-1, 1, rank]), float(timeline.reduces[:, 1, rank].max()))
    finish = 1e3 * float(timeline.end[rank])
    if finish > busy:
        bar(0, busy, finish, REST)


def draw_strategies(axes: Axes, sizing: Sizing) -> None:
    """Draws the time of one layer, forward and backward, under each strategy."""
    rows = sizing.summary()
    directions = {"forward": "#7fa6cb", "backward": ATTENTION}
    ideal = 1e3 * float(np.mean([pack.case.ideal_seconds.sum() for pack in sizing.packs]))
    longest = max(row["forward_ms"] + row["backward_ms"] for row in rows)
    for place, row in enumerate(rows):
        left, exposed = 0.0, row["forward_exposed_ms"] + row["backward_exposed_ms"]
        for name, color in directions.items():
            width = row[f"{name}_ms"] - row[f"{name}_exposed_ms"]
            axes.barh(place, width, left=left, color=color, height=0.62)
            left += width
        axes.barh(place, exposed, left=left, color=CAST, height=0.62)
        bold = "bold" if row["strategy"] == OURS else "normal"
        label = f"{row['efficiency']:.0%} of ideal"
        axes.text(left + exposed + 0.01 * longest, place, label, va="center", fontsize=9.5, fontweight=bold)
    axes.axvline(ideal, **IDEAL)
    axes.set_yticks(range(len(rows)), [row["strategy"] for row in rows], fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    label = f"ms per layer, forward and backward (mean of {amount(len(sizing.packs), 'pack')})"
    axes.set(xlabel=label, xlim=(0, 1.17 * longest), ylim=(len(rows) - 0.5, -0.6))
    axes.set_title("How long: all strategies, by the same cost model", pad=24)
    colors = directions | {"communication not hidden": CAST}
    line = matplotlib.lines.Line2D([], [], color=INK, linestyle=IDEAL["linestyle"], label=f"ideal {ideal:.1f} ms")
    handles = [*(Patch(color=color, label=name) for name, color in colors.items()), line]
    axes.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, handlelength=1.2)


def draw_work(axes: Axes, plan: AttnPlan) -> None:
    """Draws the attention work of each rank, over the mean."""
    work = plan.areas / max(1.0, plan.areas.mean())
    axes.bar(range(plan.cp_size), work, color=rank_colors(plan.cp_size, plan.gpus_per_node), width=0.85)
    axes.axhline(1, **IDEAL)
    axes.set(xlabel="rank", ylabel="(query, key) pairs over the mean")
    axes.set(xlim=(-0.6, plan.cp_size - 0.4), ylim=(0, max(1.15, 1.05 * float(work.max()))))
    axes.set_title(f"How much: pairs per rank, at most {work.max():.3f} x mean", pad=24)


# --------------------------------------------------------------------------------------------------------------- a page


def _html_table(sizing: Sizing) -> str:
    above = "".join(f'<th colspan="{len(columns)}">{html.escape(title)}</th>' for title, columns in COLUMNS.items())
    leaves = [column for columns in COLUMNS.values() for column in columns]
    below = "".join(f"<th>{html.escape(title)}</th>" for title, _, _ in leaves)
    lines = []
    for row in sizing.summary():
        cells = "".join(f"<td>{format(row[key], form)}</td>" for _, key, form in leaves)
        lines.append(f"<tr{' class=ours' if row['strategy'] == OURS else ''}><th>{row['strategy']}</th>{cells}</tr>")
    return f"<table><thead><tr><td></td>{above}</tr><tr><td></td>{below}</tr></thead>{''.join(lines)}</table>"
