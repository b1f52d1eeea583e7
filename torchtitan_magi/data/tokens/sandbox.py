"""What chat templates run in: a sandbox with what templates on the hub expect, and what notes where they write what.

Generated text stands between two marks while it is rendered.
"""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from itertools import accumulate
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Spans = list[tuple[int, int]]  # half-open character ranges

ALTERED = "the chat template changes or moves text after {% generation %} has marked it; mark it where it is written"

_START, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters: around generated text


class Message(dict[str, Any]):
    """A message that notes which of its fields a template reads, see `unread`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        super().__init__(fields)
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict; the field counts as read."""
        self._read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        """The fields. Python copies a dict that has its own __iter__ by __getitem__."""
        return super().__iter__()

    def items(self) -> Any:
        """As of a dict; all fields count as read."""
        self._read.update(self)
        return super().items()

    def values(self) -> Any:
        """As of a dict; all fields count as read."""
        self._read.update(self)
        return super().values()


def unread(message: Message) -> set[str]:
    """Fields that no template has read. No method, which would hide a field of its name from templates."""
    return message.keys() - message._read


def has_mark(message: dict[str, Any]) -> bool:
    """Whether its text holds one of the marks."""
    content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
    return _START in content or _END in content or _START in reasoning or _END in reasoning


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: puts marks around the text it renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.FilterBlock(body, _filter("mark", None)).set_lineno(line)


def _filter(name: str, node: nodes.Expr | None) -> nodes.Filter:
    """A call of a function of this module. jinja2 calls filters directly, but checks each call of another function.

    The space keeps the name from templates, which cannot write it.
    """
    return nodes.Filter(node, f"the {name}", [], [], None, None)


class Marks(threading.local):
    """Puts marks around generated text, which it keeps: what a template does with the text is not known before.

    A template may cut text that it has captured, write it twice, or not at all. Each thread has a rendering of its own.
    """

    texts: list[str]
    is_on: bool

    def begin(self, is_on: bool) -> None:
        """Begins a rendering. is_on: whether it gets marks; without them it is as long as without tags."""
        self.texts, self.is_on = [], is_on

    @property
    def filters(self) -> dict[str, Callable[[str], str]]:
        """The filter that puts marks around text, by name."""
        return {"the mark": self._mark}

    def _mark(self, text: str) -> str:
        self.texts.append(text)
        return f"{_START}{text}{_END}" if self.is_on else text

    def strip(self, marked: str) -> tuple[str, Spans]:
        """The text without the marks, and the character spans that they enclosed.

        Raises ValueError unless these hold what was marked, in this order.
        """
        parts = marked.replace(_END, _START).split(_START)  # outside, inside, outside, ...
        if parts[1::2] != self.texts or len(parts) != 2 * len(self.texts) + 1:
            raise ValueError(ALTERED)
        ends = list(accumulate(map(len, parts)))
        return "".join(parts), list(zip(ends[:-1:2], ends[1::2], strict=True))


def can_alter_marked(tree: nodes.Node) -> bool:
    """Whether a template has text with marks in its hands, as in a macro or a block that is captured."""
    return len(list(_written_at_once(tree))) < sum(1 for _ in filter(_is_generation, tree.find_all(nodes.FilterBlock)))


def _written_at_once(node: nodes.Node) -> Iterator[nodes.Node]:
    """The generation blocks that the template does not write into another block, a macro or a variable."""
    for child in node.iter_child_nodes():
        if _is_generation(child):
            yield child
        elif isinstance(child, (nodes.If, nodes.With)) or (isinstance(child, nodes.For) and not child.recursive):
            yield from _written_at_once(child)


def _is_generation(node: nodes.Node) -> bool:
    return isinstance(node, nodes.FilterBlock) and node.filter.name == "the mark"


class Loops(threading.local):
    """Notes at which character of the text a template's loops come to which message.

    The notes are calls that write nothing. As text is taken from the template chunk by chunk, all text before a call
    has been counted when the call is made, except in macros and blocks that are captured: there a message seems to
    have no text. Each thread has a rendering of its own.
    """

    position: int
    events: list[tuple[int, int | None]]

    def begin(self, messages: Sequence[dict[str, Any]]) -> None:
        """Begins the rendering of these messages."""
        self._indices = {id(message): index for index, message in enumerate(messages)}
        self._outer: list[int | None] = []
        self._current: int | None = None
        self.position, self.events = 0, [(0, None)]

    def note_in(self, tree: nodes.Node) -> None:
        """Adds the notes to the loops of a template."""
        for node in list(tree.find_all((nodes.For,))):
            if isinstance(node.target, nodes.Name):
                node.body.insert(0, nodes.ExprStmt(_filter("come to", nodes.Name(node.target.name, "load"))))
        for node in [tree, *tree.find_all((nodes.Stmt,))]:
            for name, value in node.iter_fields():
                if isinstance(value, list):
                    setattr(node, name, [each for item in value for each in self._around(item)])

    @property
    def filters(self) -> dict[str, Callable[[Any], None]]:
        """The filters that note loops and messages, by name."""
        return {"the enter": self._enter, "the come to": self._come_to, "the leave": self._leave}

    def _around(self, item: Any) -> list[Any]:
        enter, leave = (nodes.ExprStmt(_filter(name, nodes.ContextReference())) for name in ("enter", "leave"))
        return [enter, item, leave] if isinstance(item, nodes.For) else [item]

    def _enter(self, _: Any) -> None:
        self._outer.append(self._current)

    def _come_to(self, value: Any) -> None:
        if (index := self._indices.get(id(value))) is not None:
            self._note(index)

    def _leave(self, _: Any) -> None:
        self._note(self._outer.pop())

    def _note(self, index: int | None) -> None:
        if index != self._current:
            self._current = index
            self.events.append((self.position, index))


def environment(day: date) -> ImmutableSandboxedEnvironment:
    """A sandbox with the globals, filters and white-space rules of transformers, which templates on the hub expect."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = datetime(day.year, day.month, day.day).strftime
    return made


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of jinja2's own filter, which do not belong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def length(marked: str) -> int:
    """Number of characters without the marks."""
    return len(marked) if marked.isascii() else len(marked) - marked.count(_START) - marked.count(_END)
