"""An inspection as a page that needs nothing else: no script, nothing fetched, light or dark as its reader's system."""

from collections.abc import Sequence
from html import escape

from torchtitan_magi.data.inspection.examine import Seen
from torchtitan_magi.data.inspection.findings import Level
from torchtitan_magi.data.inspection.judgement import Warning
from torchtitan_magi.data.inspection.spelling import Cell, shorten, visible
from torchtitan_magi.data.inspection.summary import Inspection, Tally
from torchtitan_magi.data.inspection.table import bin_name, notes, rows, shares

_RUN, _RECORD = 1_500, 8_000  # tokens shown
_MARKS: dict[Level, str] = {"wrong": "✗", "look": "!", "note": "·"}
_BAR, _ROW = 420, 20  # pixels


def html_page(inspection: Inspection) -> str:
    """The whole page; what looks wrong comes first."""
    template = "<p>refused, see above</p>"
    if inspection.template:
        template = _text(inspection.template)
    return _PAGE.format(
        title=escape(inspection.setting[0]),
        setting="<br>".join(map(escape, inspection.setting[1:])),
        warnings="".join(map(_warning, inspection.warnings)) or "<li class=note>nothing</li>",
        template=template,
        records="".join(_record(where, seen) for where, seen in inspection.shown),
        table=_table(rows(inspection)),
        notes="".join(f"<li>{escape(note)}</li>" for note in notes(inspection)),
        histograms="".join(_histogram(tally, inspection.seq_len) for tally in inspection.tallies),
    )


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


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
 :root {{ color-scheme: light dark; --ink: #22303c; --quiet: #5b6874; --paper: #fff; --line: #d5dbe1; --box: #f6f8fa;
   --learned: #bfe8c8; --learned-ink: #0d3b1c; --special: #8a3d9c; --bar: #3d6fa5; --wrong: #b3261e; --look: #8a5a00 }}
 @media (prefers-color-scheme: dark) {{ :root {{ --ink: #dde4ea; --quiet: #97a4b0; --paper: #14191e; --line: #36414b;
   --box: #1c232a; --learned: #1d5c33; --learned-ink: #e3f7e8; --special: #e0a3ee; --bar: #6f9fd2; --wrong: #ff8a80;
   --look: #f0c060 }} }}
 body {{ font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
   margin: 2em auto; padding: 0 1.5em }}
 h1 {{ font-size: 1.35em; margin-bottom: 0.2em }}
 h2 {{ font-size: 1.15em; margin: 1.6em 0 0.4em }}
 h3 {{ font-size: 0.95em; margin: 1.2em 0 0.3em }}
 h4 {{ font-size: 0.85em; margin: 0.5em 0 0.2em; color: var(--quiet) }}
 small, .setting, .notes, i {{ color: var(--quiet); font-weight: normal }}
 ul {{ padding-left: 0; list-style: none; margin: 0.4em 0 }}
 .warnings li {{ border-left: 4px solid var(--line); padding: 0.25em 0.8em; margin: 0.3em 0; background: var(--box) }}
 .warnings .wrong {{ border-color: var(--wrong) }}
 .warnings .look {{ border-color: var(--look) }}
 .wrong b, p.wrong {{ color: var(--wrong) }}
 .look b {{ color: var(--look) }}
 pre {{ font: 13px/1.55 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; overflow-wrap: anywhere;
   background: var(--box); border: 1px solid var(--line); border-radius: 4px; padding: 0.7em 0.9em; margin: 0.3em 0 }}
 .a {{ color: var(--quiet) }}
 .s {{ color: var(--special); font-weight: 600 }}
 .l {{ background: var(--learned); color: var(--learned-ink) }}
 .l.s {{ text-decoration: underline }}
 u {{ text-decoration: none; opacity: 0.55 }}
 #boundaries:checked ~ section span {{ box-shadow: inset 1px 0 0 0 var(--wrong) }}
 span[title]:hover {{ outline: 1px solid var(--ink) }}
 table {{ border-collapse: collapse; font-size: 0.88em; font-variant-numeric: tabular-nums; width: 100% }}
 th, td {{ padding: 0.3em 0.55em; text-align: right; font-weight: normal; border-bottom: 1px solid var(--line) }}
 th {{ color: var(--quiet) }}
 th:first-child, td:first-child {{ text-align: left }}
 svg {{ max-width: 760px; font: 12px system-ui, sans-serif }}
 text {{ fill: var(--ink) }}
 rect {{ fill: var(--bar) }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="setting">{setting}</p>
<h2>What looks wrong</h2>
<ul class="warnings">{warnings}</ul>
<input type="checkbox" id="boundaries"> <label for="boundaries">token boundaries</label>
&emsp; <span class="l">learned</span> &ensp; <span class="s">special token</span> &ensp;
<span class="a">written by the template</span> &ensp; the record &ensp; <small>⏎ newline; point at a token for its
number</small>
<section>
<h2>The template, on a conversation of two rounds</h2>
{template}
<h2>Records</h2>
{records}
</section>
<h2>Lengths in tokens</h2>
{table}
<ul class="notes">{notes}</ul>
{histograms}
</body>
</html>
"""
