"""The figures of an inspection as words, for terminal and page."""

import numpy as np

from torchtitan_magi.data.inspection.examine import Seen
from torchtitan_magi.data.inspection.summary import Inspection, Tally, joined

_HEAD = ["source", "records", "read", "tokens", "mean", "median", "99%", "longest", "learned"]
_HEAD_OF_PACKS = ["truncated", "tokens lost", "fill"]
NOTES = (
    "tokens: of all records, estimated (~) unless all were read; learned: of the tokens of the records read",
    "truncated, tokens lost: of the records that are longer than --seq-len; fill: of packs of this source alone",
)


def rows(inspection: Inspection) -> list[list[str]]:
    """The head, and a row for each source and for all together if there are several."""
    tallies, seq_len = inspection.tallies, inspection.seq_len
    every = [*tallies, joined(tallies)] if len(tallies) > 1 else tallies
    head = [*_HEAD, *(_HEAD_OF_PACKS if seq_len else []), "left out"]
    body = [[*_lengths(tally), *(_packs(tally, seq_len) if seq_len else []), _left_out(tally)] for tally in every]
    return [head, *body]


def notes(inspection: Inspection) -> list[str]:
    """What the columns say, and why records are left out."""
    lines = [*NOTES[: 2 if inspection.seq_len else 1]]
    if not inspection.seq_len:
        lines.append("--seq-len N adds truncation and how full packs are")
    for tally in inspection.tallies:
        if sum(tally.kept) < tally.alone:
            lines.append(f"{tally.path}: {_together(tally.pairs, sum(tally.kept), tally.alone)}")
        if tally.left_out:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in tally.left_out.most_common())
            lines.append(f"left out of {tally.path}: {reasons}")
    return lines


def shares(seen: Seen) -> str:
    """A record's figures in words: "812 tokens, 40.1% learned"."""
    words = [f"{seen.tokens:,} tokens, {_percent(seen.learned, seen.tokens)} learned"]
    if seen.left_out:
        words.append(f"left out: {seen.left_out}")
    elif seen.kept < seen.length:
        words.append(f"{seen.length - seen.kept:,} truncated")
    if seen.kept < seen.alone:
        words.append(_together(seen.pairs, seen.kept, seen.alone))
    return "; ".join(words)


def _together(pairs: int, kept: int, alone: int) -> str:
    return f"{pairs:,} pairs in {kept:,} positions of packs, in place of {alone:,} if each were a record"


def bin_name(power: int) -> str:
    """The tokens of a bin of `Tally.histogram`: "512-1,023"."""
    return f"{2**power:,}-{2 ** (power + 1) - 1:,}" if power else "1"


def _lengths(tally: Tally) -> list[str]:
    lengths = np.array(tally.tokens, dtype=np.int64)
    words = [tally.path, f"{tally.records:,}", f"{tally.read:,}"]
    if not len(lengths):
        return words + ["-"] * 6
    estimate = int(lengths.sum() * tally.records / tally.read)
    median, late = np.percentile(lengths, [50, 99])
    figures = [f"{value:,.0f}" for value in (lengths.mean(), median, late, lengths.max())]
    about = "~" if tally.read < tally.records else ""
    return [*words, about + _short(estimate), *figures, _percent(tally.learned, int(lengths.sum()))]


def _packs(tally: Tally, seq_len: int) -> list[str]:
    before = sum(tally.kept) + tally.truncated_tokens
    fill = f"{tally.fill(seq_len):.1%}" if tally.kept else "-"
    return [f"{tally.truncated:,}", _percent(tally.truncated_tokens, before), fill]


def _left_out(tally: Tally) -> str:
    return f"{sum(tally.left_out.values()):,}"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _short(count: int) -> str:
    """A number in three digits: "812", "8.1k", "1.25M", "3.2G"."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
