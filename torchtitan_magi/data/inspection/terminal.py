"""An inspection as text for a terminal, in colour or with marks."""

from collections.abc import Sequence
from itertools import groupby

from torchtitan_magi.data.inspection.examine import Seen
from torchtitan_magi.data.inspection.findings import Level
from torchtitan_magi.data.inspection.spelling import Cell, shorten, visible
from torchtitan_magi.data.inspection.summary import Inspection, Tally
from torchtitan_magi.data.inspection.table import bin_name, notes, rows, shares

LEARNED, SPECIAL, LEARNED_SPECIAL, ADDED = "30;42", "1;35", "1;4;30;42", "2"
_TITLE, _QUIET, _BARS = "1", "2", "34"
_LEVELS: dict[Level, tuple[str, str]] = {"wrong": ("✗", "1;31"), "look": ("!", "1;33"), "note": ("·", "2")}
_OPEN, _CLOSE = "⟦", "⟧"  # around what is learned, without colour
_RUN, _RECORD = 120, 1_200  # tokens shown
_BAR = 40  # characters


class Painter:
    """Writes cells and words, in colour or without.

    boundaries: whether the beginning of each token is marked.
    """

    def __init__(self, has_color: bool, boundaries: bool = False) -> None:
        self.has_color, self.boundaries = has_color, boundaries

    def paint(self, text: str, style: str) -> str:
        """The text in a style (SGR codes, as "1;31"), newlines outside of it; as it is without colour."""
        if not (self.has_color and style):
            return text
        return "\n".join(f"\x1b[{style}m{line}\x1b[0m" if line else "" for line in text.split("\n"))

    def cells(self, cells: Sequence[Cell | str]) -> str:
        """Tokens as text, newlines visible."""
        if self.has_color:
            runs = groupby(cells, key=_style)
            return "".join(self.paint("".join(map(self._spelled, run)), style) for style, run in runs)
        text = ""
        for learned, run in groupby(cells, key=lambda cell: isinstance(cell, Cell) and cell.is_learned):
            words = "".join(map(self._spelled, run))
            ended = words.removesuffix("\n")
            text += f"{_OPEN}{ended}{_CLOSE}{words[len(ended) :]}" if learned else words
        return text

    def _spelled(self, cell: Cell | str) -> str:
        if isinstance(cell, str):
            return cell
        return "│" * self.boundaries + visible(cell.text).replace("\n", "⏎\n")

    def legend(self) -> str:
        """What the colours or marks say."""
        if not self.has_color:
            return f"{_OPEN}learned{_CLOSE}, everything else is not; ⏎ newline"
        named = (("learned", LEARNED), ("special token", SPECIAL), ("written by the template", ADDED), ("record", ""))
        return "  ".join([*(self.paint(f" {text} ", style) for text, style in named), "⏎ newline"])


def _style(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return _QUIET
    if cell.is_learned:
        return LEARNED_SPECIAL if cell.is_special else LEARNED
    return SPECIAL if cell.is_special else ADDED if cell.is_added else ""


def report(inspection: Inspection, painter: Painter) -> str:
    """The whole report; what looks wrong comes last, where a terminal shows it."""
    sections = [*inspection.setting, painter.legend()]
    if inspection.template:
        sections += ["", painter.paint("The template, on a conversation of two rounds", _TITLE)]
        sections.append(painter.cells(inspection.template).removesuffix("\n"))
    for where, seen in inspection.shown:
        sections += ["", *_record(where, seen, painter)]
    sections += ["", painter.paint("Lengths in tokens", _TITLE), *_table(inspection)]
    sections += [painter.paint(line, _QUIET) for line in notes(inspection)]
    for tally in inspection.tallies:
        sections += ["", f"Records of {tally.path} by tokens", *_histogram(tally, inspection.seq_len, painter)]
    if inspection.sharing:
        sections += ["", painter.paint("Common beginnings", _TITLE), *inspection.sharing.lines()]
    sections += ["", painter.paint("What looks wrong", _TITLE), *_warnings(inspection, painter)]
    return "\n".join(sections) + "\n"


def _record(where: str, seen: Seen, painter: Painter) -> list[str]:
    if seen.error:
        return [painter.paint(where, _TITLE), painter.paint(visible(f"refused: {seen.error}"), _LEVELS["wrong"][1])]
    lines = [f"{painter.paint(where, _TITLE)}  {shares(seen)}"]
    for name, cells in seen.cells:
        lines += [painter.paint(f"{name}:", _QUIET)] if name else []
        lines.append(painter.cells(shorten(cells, _RUN, _RECORD)).removesuffix("\n"))
    return lines


def _table(inspection: Inspection) -> list[str]:
    lines = rows(inspection)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [map(str.rjust, line[1:], widths[1:]) for line in lines]
    return ["  ".join([line[0].ljust(widths[0]), *cells]) for line, cells in zip(lines, aligned, strict=True)]


def _histogram(tally: Tally, seq_len: int | None, painter: Painter) -> list[str]:
    bins = tally.histogram()
    most = max((count for _, count in bins), default=1)
    lines = []
    for power, count in bins:
        bar = "█" * round(_BAR * count / most) or "▏" * (count > 0)
        mark = "  <- --seq-len" if seq_len and 2**power <= seq_len < 2 ** (power + 1) else ""
        lines.append(f"{bin_name(power):>19} {painter.paint(bar, _BARS)} {count:,}{mark}")
    return lines


def _warnings(inspection: Inspection, painter: Painter) -> list[str]:
    lines = []
    for warning in inspection.warnings:
        mark, style = _LEVELS[warning.level]
        where = painter.paint(f"  (e.g. {warning.where})", _QUIET) if warning.where else ""
        lines.append(f"{painter.paint(mark, style)} {visible(warning.shown)}{where}")
    return lines or ["nothing"]
