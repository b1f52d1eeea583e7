"""The pictures of a report: who owns what, who sends what to whom, when what happens. Needs matplotlib."""

import base64
import html
import io
from pathlib import Path
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
from torchtitan_magi.report.sizing import OURS, Sizing
from torchtitan_magi.report.text import COLUMNS, column_groups, counted, headline, notes, setting

Image = npt.NDArray[np.float64]

INK, QUIET, PAPER, LINE = "#22303c", "#6b7885", "#ffffff", "#d5dbe1"
ATTENTION, CAST, REDUCE, REST = "#3d6fa5", "#dd8a3c", "#4c9a72", "#aab4be"
HUES = ["#3d6fa5", "#dd8a3c", "#4c9a72", "#b8504f", "#7d68a6", "#8a6f5a", "#c77fa6", "#4f9aa8", "#a09a45", "#66717d"]
ROWS_MAP = LinearSegmentedColormap.from_list("rows", ["#f4f7fa", "#c3d5e6", "#7fa6cb", "#3d6fa5", "#1c3c63"])
PIXELS = 1400  # width and height of the mask
STYLE: Any = {
    "font.size": 10, "font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": QUIET,
    "xtick.color": QUIET, "ytick.color": QUIET, "axes.titlecolor": INK, "axes.titlesize": 12,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "figure.facecolor": PAPER, "legend.frameon": False, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "legend.fontsize": 9, "axes.titlepad": 10,
}  # fmt: skip


def write_png(sizing: Sizing, path: Path) -> None:
    """The pictures of the first pack, and times of all strategies."""
    path.write_bytes(_png(sizing))


def html_page(sizing: Sizing) -> str:
    """One page with everything: no scripts, nothing fetched."""
    picture = base64.b64encode(_png(sizing)).decode()
    title = f"{sizing.first.cp_size} GPUs, {sizing.total:,} tokens per pack"
    return _PAGE.format(
        title=html.escape(title),
        headline=html.escape(headline(sizing)),
        setting="<br>".join(map(html.escape, setting(sizing))),
        table=_html_table(sizing),
        picture=picture,
        notes="".join(f"<li>{html.escape(note)}</li>" for note in notes(sizing)),
    )


def _png(sizing: Sizing) -> bytes:
    buffer = io.BytesIO()
    draw(sizing).savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


@matplotlib.rc_context(STYLE)
def draw(sizing: Sizing) -> Figure:
    """All pictures on one sheet."""
    figure = Figure(figsize=(15, 15.2))
    plan, pack = sizing.first, sizing.packs[0]
    rows = figure.add_gridspec(3, 1, height_ratios=[7.5, 3.6, 4.1])
    top, middle, bottom = (figure.add_subfigure(rows[i]) for i in range(3))
    halves = top.add_gridspec(1, 2)
    top.text(0.043, 0.965, f"{setting(sizing)[0]}. The first pack of {sizing.source}.", color=QUIET)
    # Each half of the top is square, so that equal fractions of its sides are equally long.
    draw_mask(top.add_subfigure(halves[0]), plan)
    draw_transfers(top.add_subfigure(halves[1]), plan)
    draw_timeline(middle.add_axes((0.085, 0.17, 0.885, 0.63)), plan, pack.case.ideal_seconds, sizing)
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
    image = mask_image(plan)
    total = plan.padded_tokens
    axes = figure.add_axes((0.12, 0.1, 0.78, 0.78))
    axes.imshow(image, extent=(0, total, total, 0), interpolation="antialiased", aspect="equal")
    axes.set_title("Who computes what: the mask, by owner of the query")
    _token_ticks(axes.xaxis, total)
    _token_ticks(axes.yaxis, total)
    axes.set_xlabel("key (tokens of the pack)")
    axes.set_ylabel("query (tokens of the pack)")
    # The owner of every token, also where rows are too short to be seen.
    strip = figure.add_axes((0.915, 0.1, 0.025, 0.78))
    token = ((np.arange(PIXELS) + 0.5) * total / PIXELS).astype(np.int64)
    strip.imshow(rank_colors(plan.cp_size, plan.gpus_per_node)[owner_of(plan, token)][:, None], aspect="auto")
    strip.set_axis_off()
    strip.set_title("owner", fontsize=8, fontweight="normal", color=QUIET, loc="center", pad=4)
    _rank_legend(axes, plan)


def _rank_legend(axes: Axes, plan: AttnPlan) -> None:
    colors = rank_colors(plan.cp_size, plan.gpus_per_node)
    nodes = -(-plan.cp_size // plan.gpus_per_node)
    if plan.cp_size <= len(HUES):
        entries = [Patch(color=tuple(colors[r]), label=f"rank {r}") for r in range(plan.cp_size)]
    elif nodes > 1:
        firsts = [node * plan.gpus_per_node for node in range(min(nodes, len(HUES)))]
        lasts = [min(first + plan.gpus_per_node, plan.cp_size) - 1 for first in firsts]
        entries = [
            Patch(color=tuple(colors[first]), label=f"node {node}: ranks {first}-{last}")
            for node, (first, last) in enumerate(zip(firsts, lasts, strict=True))
        ]
        if nodes > len(HUES):
            entries.append(Patch(alpha=0, label="then again from the top"))
    else:
        some = np.linspace(0, plan.cp_size - 1, 8).astype(int).tolist()
        entries = [Patch(color=tuple(colors[r]), label=f"rank {r}") for r in some]
    axes.legend(handles=entries, loc="upper right", handlelength=1, handleheight=1, labelspacing=0.35)


def _token_ticks(axis: Any, total: int) -> None:
    places = np.linspace(0, total, 5)
    axis.set_ticks(places, [_tokens(place) for place in places])


def _tokens(count: float) -> str:
    if count >= 1 << 20:
        return f"{count / (1 << 20):.3g}M"
    return f"{count / 1024:.0f}k" if count >= 4096 else f"{count:.0f}"


# ----------------------------------------------------------------------------------------------- who sends what to whom


def transfer_matrix(plan: AttnPlan) -> npt.NDArray[np.int64]:
    """K/V rows that each rank needs of each other, int64 [receiver, sender]."""
    receiver, sender, start, end = plan.transfers.T
    flat = np.bincount(receiver * plan.cp_size + sender, end - start, plan.cp_size**2)
    return flat.astype(np.int64).reshape(plan.cp_size, plan.cp_size)


def draw_transfers(figure: Any, plan: AttnPlan) -> None:
    rows, cp_size = transfer_matrix(plan), plan.cp_size
    unit = plan.tokens_per_rank
    axes = figure.add_axes((0.09, 0.1, 0.63, 0.63))
    image = axes.imshow(rows / unit, cmap=ROWS_MAP, aspect="equal", vmin=0, vmax=max(rows.max() / unit, 1e-9))
    width = min(0.5, 4 * plan.gpus_per_node / cp_size)
    for edge in range(plan.gpus_per_node, cp_size, plan.gpus_per_node):
        axes.axhline(edge - 0.5, color=QUIET, linewidth=width)
        axes.axvline(edge - 0.5, color=QUIET, linewidth=width)
    step = plan.gpus_per_node * -(-cp_size // (16 * plan.gpus_per_node)) if cp_size > plan.gpus_per_node else 1
    step = max(step, -(-cp_size // 16))
    axes.set_xticks(range(0, cp_size, step))
    axes.set_yticks(range(0, cp_size, step))
    axes.set_xlabel("sending rank" + (" (lines: nodes)" if cp_size > plan.gpus_per_node else ""))
    axes.set_ylabel("receiving rank")
    colors = rank_colors(cp_size, plan.gpus_per_node)
    above = figure.add_axes((0.09, 0.75, 0.63, 0.13), sharex=axes)
    above.bar(range(cp_size), rows.sum(0) / unit, color=colors, width=0.85)
    above.set_ylabel("sent, T")
    beside = figure.add_axes((0.74, 0.1, 0.13, 0.63), sharey=axes)
    beside.barh(range(cp_size), rows.sum(1) / unit, color=colors, height=0.85)
    beside.set_xlabel("received, T")
    for margin in (above, beside):
        margin.tick_params(labelbottom=margin is beside, labelleft=margin is above)
        margin.set_box_aspect(None)
    limit = 1.05 * max(rows.sum(0).max(), rows.sum(1).max(), 1) / unit
    above.set_ylim(0, limit)
    beside.set_xlim(0, limit)
    above.set_title("Who needs what of whom: K/V rows of one layer's forward")
    bar = figure.add_axes((0.89, 0.1, 0.018, 0.63))
    few_digits = MaxNLocator(5, steps=[1, 2, 5, 10])  # so that there is room for a label
    colorbar = figure.colorbar(image, cax=bar, ticks=few_digits)
    colorbar.outline.set_visible(False)
    mib = unit * plan.heads.row_bytes / 2**20
    colorbar.set_label(f"K/V rows in units of T = {unit:,} rows = {mib:,.0f} MiB")


# ---------------------------------------------------------------------------------------------------- when what happens


def draw_timeline(axes: Axes, plan: AttnPlan, ideal: tuple[float, float], sizing: Sizing) -> None:
    """Forward and backward of a layer, one after the other, each on the rank whose attention ends last."""
    forward, backward = plan.predict(sizing.packs[0].case.cost)
    ranks = [int(timeline.attends[-1, 1].argmax()) for timeline in (forward, backward)]
    gap = 0.015 * (forward.seconds + backward.seconds)
    starts = 0.0, forward.seconds + gap
    limit = starts[1] + backward.seconds
    for timeline, start, rank, target, name in zip(
        (forward, backward), starts, ranks, ideal, ("forward", "backward"), strict=True
    ):
        _draw_lanes(axes, timeline, 1e3 * start, rank, 1e3 * limit)
        end = 1e3 * (start + target)
        axes.plot([end, end], [-0.5, 2.62], color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(end, -0.56, f"ideal {1e3 * target:.2f} ms", ha="right", va="bottom", fontsize=8.5, color=INK)
        label = f"{name}, rank {rank}: {1e3 * timeline.seconds:.2f} ms"
        axes.text(1e3 * start, -0.92, label, ha="left", va="bottom", fontsize=10, color=INK)
    axes.axvline(1e3 * (starts[1] - gap / 2), color=LINE, linewidth=1)
    axes.set_ylim(2.65, -0.95)
    axes.set_xlim(0, 1e3 * limit * 1.005)
    axes.set_yticks([0, 1, 2], ["attention", "K/V arrive", "dK/dV return"], fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("ms")
    axes.set_title("When: one layer on the slowest rank, as predicted", pad=14)
    names = {"attention, by stage": ATTENTION, "K/V arrive": CAST, "dK/dV return": REDUCE, "passes over memory": REST}
    axes.legend(
        handles=[Patch(color=color, label=name) for name, color in names.items()],
        loc="lower right", bbox_to_anchor=(1, 1.0), ncols=4, handlelength=1, handleheight=1, columnspacing=1.4,
    )  # fmt: skip


def _draw_lanes(axes: Axes, timeline: Timeline, start: float, rank: int, limit: float) -> None:
    """One direction's lanes from `start` on; start and limit in ms."""
    lanes = ((timeline.attends, 0, ATTENTION), (timeline.casts, 1, CAST), (timeline.reduces, 2, REDUCE))
    for times, lane, color in lanes:
        for stage, (begin, end) in enumerate(1e3 * times[:, :, rank]):
            if end <= begin:
                continue
            shade = np.array(to_rgb(color)) * (1 - 0.22 * (stage % 2)) + 0.22 * (stage % 2)
            axes.barh(
                lane, end - begin, left=start + begin, height=0.62, color=tuple(shade), edgecolor=PAPER, linewidth=0.6
            )
            if end - begin > 0.022 * limit:
                text = str(stage) if stage else "own" if len(timeline.attends) > 1 else "all"
                axes.text(start + (begin + end) / 2, lane, text, ha="center", va="center", color=PAPER, fontsize=8.5)
    last = 1e3 * float(timeline.attends[-1, 1, rank])
    finish = 1e3 * float(timeline.end[rank])
    busy = max(last, 1e3 * float(timeline.reduces[:, 1, rank].max()))
    if finish > busy:
        axes.barh(0, finish - busy, left=start + busy, height=0.62, color=REST, edgecolor=PAPER, linewidth=0.6)


def draw_strategies(axes: Axes, sizing: Sizing) -> None:
    """Time of one layer, forward and backward, under each strategy."""
    rows = sizing.summary()
    directions = (
        ("forward", "forward_ms", "forward_exposed_ms", "#7fa6cb"),
        ("backward", "backward_ms", "backward_exposed_ms", ATTENTION),
    )
    ideal = 1e3 * float(np.mean([sum(pack.case.ideal_seconds) for pack in sizing.packs]))
    longest = max(row["forward_ms"] + row["backward_ms"] for row in rows)
    for place, row in enumerate(rows):
        left, exposed = 0.0, row["forward_exposed_ms"] + row["backward_exposed_ms"]
        for _, time, hidden, color in directions:
            width = row[time] - row[hidden]
            axes.barh(place, width, left=left, color=color, height=0.62)
            left += width
        axes.barh(place, exposed, left=left, color=CAST, height=0.62)
        bold = "bold" if row["strategy"] == OURS else "normal"
        label = f"{row['efficiency']:.0%} of ideal"
        axes.text(left + exposed + 0.01 * longest, place, label, va="center", fontsize=9.5, fontweight=bold)
    axes.axvline(ideal, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [row["strategy"] for row in rows], fontsize=10, color=INK)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(0, 1.17 * longest)
    axes.set_xlabel(f"ms per layer, forward and backward (mean of {counted(len(sizing.packs), 'pack')})")
    axes.set_title("How long: all strategies, by the same cost model", pad=24)
    handles = [Patch(color=color, label=name) for name, _, _, color in directions]
    handles.append(Patch(color=CAST, label="communication not hidden"))
    line = matplotlib.lines.Line2D([], [], color=INK, linestyle=(0, (4, 3)), label=f"ideal {ideal:.1f} ms")
    axes.legend(
        handles=[*handles, line], loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=4, handlelength=1.2,
        handleheight=1, columnspacing=1.4,
    )  # fmt: skip


def draw_work(axes: Axes, plan: AttnPlan) -> None:
    """Attention work of each rank."""
    work = plan.areas / max(1.0, plan.areas.mean())
    axes.bar(range(plan.cp_size), work, color=rank_colors(plan.cp_size, plan.gpus_per_node), width=0.85)
    axes.axhline(1, color=INK, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_ylim(0, max(1.15, 1.05 * float(work.max())))
    axes.set_xlim(-0.6, plan.cp_size - 0.4)
    axes.set_xlabel("rank")
    axes.set_ylabel("(query, key) pairs over the mean")
    axes.set_title(f"How much: pairs of each rank, at most {work.max():.3f} x the mean", pad=24)


# --------------------------------------------------------------------------------------------------------------- a page


def _html_table(sizing: Sizing) -> str:
    above = "".join(f'<th colspan="{len(columns)}">{html.escape(title)}</th>' for title, columns in column_groups())
    below = "".join(f"<th>{html.escape(title)}</th>" for _, title, _, _ in COLUMNS)
    lines = []
    for row in sizing.summary():
        cells = "".join(f"<td>{format(row[key], form).strip()}</td>" for _, _, key, form in COLUMNS)
        lines.append(f"<tr{' class=ours' if row['strategy'] == OURS else ''}><th>{row['strategy']}</th>{cells}</tr>")
    return f"<table><thead><tr><td></td>{above}</tr><tr><td></td>{below}</tr></thead>{''.join(lines)}</table>"


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{title}</title>
<style>
 body {{ font: 15px/1.5 system-ui, sans-serif; color: #22303c; background: #fff; max-width: 1180px; margin: 2em auto;
   padding: 0 1.5em }}
 h1 {{ font-size: 1.5em; margin-bottom: 0.2em }}
 .setting, li {{ color: #6b7885; font-size: 0.92em }}
 .headline {{ border-left: 4px solid #3d6fa5; padding: 0.4em 0 0.4em 1em; font-size: 1.08em }}
 table {{ border-collapse: collapse; font-size: 0.86em; font-variant-numeric: tabular-nums; margin: 1.5em 0;
   width: 100% }}
 th, td {{ padding: 0.28em 0.55em; text-align: right; font-weight: normal; border-bottom: 1px solid #e6eaee }}
 thead th {{ color: #6b7885 }}
 thead tr:first-child th {{ text-align: center; border-bottom: 2px solid #d5dbe1 }}
 tbody th, tr th:first-child {{ text-align: left; white-space: nowrap }}
 tr.ours td, tr.ours th {{ font-weight: 600; background: #eef3f8 }}
 img {{ width: 100%; height: auto }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="setting">{setting}</p>
<p class="headline">{headline}</p>
{table}
<img alt="mask by owner, K/V rows between ranks, timeline of the slowest rank, time of all strategies, work per rank"
 src="data:image/png;base64,{picture}">
<ul>{notes}</ul>
</body>
</html>
"""
