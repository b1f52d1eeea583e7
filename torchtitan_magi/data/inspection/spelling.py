"""Tokens -> the text that they stand for, cut so that every token, or what several make together, can be shown."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from torchtitan_magi.data.tokens.chat import ChatTokenizer

_MAX_TOGETHER = 8  # tokens that make one character
_BROKEN = "\ufffd"  # what a decoder writes for bytes that are no whole character


@dataclass(frozen=True)
class Part:
    """Tokens of a record that belong together.

    name: "" for a document; "prompt", "chosen", "rejected", or which answer; tokens: int32 [n]; learned: bool [n];
    contents: what the record itself says in it, message by message; counts: whether it is more than shown, as an answer
    of weight 0 is not.
    """

    name: str
    tokens: np.ndarray
    learned: np.ndarray
    contents: tuple[str, ...]
    counts: bool = True


@dataclass(frozen=True)
class Cell:
    """A token, or a few that make a character together.

    place: number of the first in its part; is_added: the template wrote it, not the record.
    """

    text: str
    place: int
    ids: tuple[int, ...]
    is_learned: bool
    is_special: bool
    is_added: bool


class Speller:
    """Spells the tokens of one tokenizer.

    specials: ids of the special tokens -> their text.
    """

    def __init__(self, chat: ChatTokenizer) -> None:
        self.tokenizer = chat.tokenizer
        added = chat.tokenizer.get_added_tokens_decoder()
        self.specials = {number: token.content for number, token in added.items() if token.special}
        for number in (chat.bos_id, chat.eos_id):
            if number is not None:
                self.specials[number] = chat.tokenizer.id_to_token(number) or ""
        self._shown = {number: token.content for number, token in added.items()} | self.specials
        anchor = self.tokenizer.encode("a", add_special_tokens=False).ids
        self._anchors = anchor[:1]  # decoders treat the first token of a text in their own way
        self._anchor_text = self.text(self._anchors)
        self._known: dict[tuple[int, ...], str] = {}

    def name(self, number: int | None) -> str:
        """The text of a special token; "" for another token or None."""
        return "" if number is None else self.specials.get(number, "")

    def text(self, ids: Sequence[int]) -> str:
        """The text of consecutive tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def last_special(self, ids: Sequence[int]) -> int | None:
        """The special token at the end of consecutive tokens, before white space; None without one."""
        for number in reversed(ids):
            if number in self.specials:
                return number
            if self.text([number]).strip():
                return None
        return None

    def cells(self, part: Part) -> list[Cell]:
        """The tokens of a part, in order."""
        groups = list(self._groups(part.tokens.tolist()))
        said = _places(groups, part.contents, self._shown)
        cells, place, position = [], 0, 0
        for ids, text in groups:
            learned = bool(part.learned[place : place + len(ids)].any())
            is_said = bool(said[position : position + len(text)].any())
            cells.append(Cell(text, place, ids, learned, ids[0] in self._shown, not is_said))
            place, position = place + len(ids), position + len(text)
        return cells

    def _groups(self, ids: list[int]) -> Iterator[tuple[tuple[int, ...], str]]:
        """(ids, text) of the fewest tokens that make whole characters."""
        start = 0
        while start < len(ids):
            stop = start + 1
            if ids[start] in self._shown:
                yield (ids[start],), self._shown[ids[start]]
            else:
                while (text := self._spell(tuple(ids[start:stop]))).endswith(_BROKEN):
                    if stop in (len(ids), start + _MAX_TOGETHER) or ids[stop] in self._shown:
                        break
                    stop += 1
                yield tuple(ids[start:stop]), text
            start = stop

    def _spell(self, ids: tuple[int, ...]) -> str:
        if ids not in self._known:
            self._known[ids] = self.text([*self._anchors, *ids]).removeprefix(self._anchor_text)
        return self._known[ids]


def _places(groups: list[tuple[tuple[int, ...], str]], contents: Sequence[str], specials: Container[int]) -> np.ndarray:
    """bool [characters]: which belong to one of the contents, searched for one after the other.

    First outside of special tokens: a short content may be part of their names.
    """
    text = "".join(text for _, text in groups)
    plain = "".join("\0" * len(text) if ids[0] in specials else text for ids, text in groups)
    said, position = np.zeros(len(text), dtype=bool), 0
    for content in map(str.strip, contents):
        start = plain.find(content, position)
        if start < 0:
            start = text.find(content, position)
        if start >= 0:
            position = start + len(content)
            said[start:position] = True
    return said


def shorten(cells: Sequence[Cell], longest_run: int, longest: int) -> list[Cell | str]:
    """The cells, with words in place of the middle of long runs that are learned throughout or not at all.

    longest_run, longest: cells of a run and in all; of what is longer the first two thirds and the last third stay.
    """
    runs = (_cut(list(run), longest_run) for _, run in groupby(cells, key=lambda cell: cell.is_learned))
    return _cut([cell for run in runs for cell in run], longest)


def _cut(cells: list[Cell | str], longest: int) -> list[Cell | str]:
    if len(cells) <= longest:
        return cells
    tail = longest // 3
    head = longest - tail
    middle = [cell for cell in cells[head:-tail] if isinstance(cell, Cell)]
    tokens = sum(len(cell.ids) for cell in middle)
    learned = sum(len(cell.ids) for cell in middle if cell.is_learned)
    return [*cells[:head], f" … {tokens:,} tokens, {learned:,} of them learned … ", *cells[-tail:]]


def visible(text: str) -> str:
    """The text with what cannot be seen, or would steer a terminal, as its escape; newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
