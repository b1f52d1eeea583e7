"""An inspection as a page that needs nothing else: no script, nothing fetched, light or dark as its reader's system."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from torchtitan_magi.data.inspection.examine import Seen
from torchtitan_magi.data.inspection.findings import Level
from torchtitan_magi.data.inspection.judgement import Warning
from torchtitan_magi.data.inspection.spelling import Cell, shorten, visible
from torchtitan_magi.data.inspection.summary import Inspection, Tally
from torchtitan_magi.data.inspection.table import bin_name, notes, rows, shares
from torchtitan_magi.data.inspection.trees import Sharing

_PAGE = Template(Path(__file__).with_name("page.html").read_text("utf-8"))
_RUN, _RECORD = 1_500, 8_000  # tokens shown
_MARKS: dict[Level, str] = {"wrong": "✗", "look": "!", "note": "·"}
_BAR, _ROW = 420, 20  # pixels


def html_page(inspection: Inspection) -> str:
    """The whole page; what looks wrong comes first."""
    return _PAGE.substitute(
        title=escape(inspection.setting[0]),
        setting="<br>".join(map(escape, inspection.setting[1:])),
        warnings="".join(map(_warning, inspection.warnings)) or "<li class=note>nothing</li>",
        template=_text(inspection.template) if inspection.template else "<p>refused, see above</p>",
        records="".join(_record(where, seen) for where, seen in inspection.shown),
        table=_table(rows(inspection)),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes(inspection)),
        sharing=_sharing(inspection.sharing),
        histograms="".join(_histogram(tally, inspection.seq_len) for tally in inspection.tallies),
    )


def _sharing(sharing: Sharing | None) -> str:
    if sharing is None:
        return ""
    said, *nodes = map(escape, sharing.lines())
    return f"<h2>Common beginnings</h2><p>{said}</p><pre>{chr(10).join(nodes)}</pre>"


def _warning(warning: Warning) -> str:
    where = f" <small>e.g. {escape(warning.where)}</small>" if warning.where else ""
    return f"<li class={warning.level}><b>{_MARKS[warning.level]}</b> {escape(visible(warning.shown))}{where}</li>"


def _record(where: str, seen: Seen) -> str:
    if seen.error:
        return f"<h3>{escape(where)}</h3><p class=wrong>refused: {escape(visible(seen.error))}</p>"
    parts = [(f"<h4>{name}</h4>" if name else "") + _text(shorten(cells, _RUN, _RECORD)) for name, cells in seen.cells]
    return f"<h3>{escape(where)} <small>{shares(seen)}</small></h3>{''.join(parts)}"


def _text(cells: Sequence[Cell | str]) -> str:
    return f"<pre>{''.join(map(_cell, cells))}</pre>"


def _cell(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return f"<i>{cell}</i>"
    names = [name for name, has in (("l", cell.is_learned), ("s", cell.is_special), ("a", cell.is_added)) if has]
    last = cell.place + len(cell.ids) - 1
    places = f"token {cell.place:,}" if len(cell.ids) == 1 else f"tokens {cell.place:,}-{last:,}"
    title = f"{places}, id {' '.join(map(str, cell.ids))}{', learned' if cell.is_learned else ''}"
    text = escape(visible(cell.text)).replace("\n", "<u>⏎</u>\n")
    return f'<span class="{" ".join(names)}" title="{title}">{text}</span>'


def _table(lines: list[list[str]]) -> str:
    head, *body = (
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line)
        for tag, line in zip(["th", *["td"] * len(lines)], lines, strict=False)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{line}</tr>' for line in body)}</tbody></table>"


def _histogram(tally: Tally, seq_len: int | None) -> str:
    bins = tally.histogram()
    most = max((count for _, count in bins), default=1)
    height, lines = _ROW * len(bins), []
    for row, (power, count) in enumerate(bins):
        width, middle = _BAR * count / most, _ROW * row + 14
        lines.append(f'<text x="150" y="{middle}" text-anchor="end">{bin_name(power)}</text>')
        lines.append(f'<rect x="160" y="{_ROW * row + 3}" width="{width:.1f}" height="{_ROW - 6}"/>')
        here = " ← --seq-len" if seq_len and 2**power <= seq_len < 2 ** (power + 1) else ""
        lines.append(f'<text x="{168 + width:.1f}" y="{middle}">{count:,}{here}</text>')
    name = f"Records of {escape(tally.path)} by tokens"
    return f'<h3>{name}</h3><svg viewBox="0 0 760 {height}" role="img" aria-label="{name}">{"".join(lines)}</svg>'
