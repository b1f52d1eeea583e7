"""Where the assistant's turns are in a rendered conversation, and what of them is learned."""

import functools
import itertools
import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from torchtitan_magi.data.records.formats import Messages
from torchtitan_magi.data.tokens.sandbox import Spans

REMEDY = "put {% generation %} and {% endgeneration %} around the assistant's text and its end in the template"
_OPEN_TAG = re.compile(r"(<[^<>\s]*|\[[^\[\]\s]*)\Z")


@dataclass(frozen=True)
class Trace:
    """A rendering and what was written where.

    generated: spans of generation markers; events: (position, message or None), in order.
    """

    text: str
    generated: Spans
    events: list[tuple[int, int | None]]

    @functools.cached_property
    def ranges(self) -> dict[int | None, Spans]:
        """Message or None -> the spans of its text."""
        ends = [position for position, _ in self.events[1:]] + [len(self.text)]
        ranges: dict[int | None, Spans] = {}
        for (start, index), stop in zip(self.events, ends, strict=True):
            if start < stop:
                ranges.setdefault(index, []).append((start, stop))
        return ranges

    def range_of(self, index: int) -> tuple[int, int]:
        """The characters of a message. Raises ValueError if it has none, or if they are not in one span."""
        found = self.ranges.get(index, [])
        if len(found) != 1:
            many = "in several places" if found else "not in a loop over the messages"
            raise ValueError(f"the chat template writes a message {many}; {REMEDY}")
        return found[0]

    def written(self, index: int) -> str:
        """The text of a message."""
        return "".join([self.text[start:stop] for start, stop in self.ranges.get(index, [])])

    def around(self, index: int, message: dict[str, Any]) -> tuple[str, str]:
        """What is written before and after the content of a message."""
        before, _, after = self.written(index).partition(message["content"])
        return before, after

    def behind(self, index: int) -> str:
        """The text behind a message."""
        return self.text[self.ranges[index][-1][1] :]

    def owner_of(self, position: int, count: int) -> int | None:
        """The message that a character belongs to; what follows the loop over `count` messages is of the last."""
        owner = None
        for start, index in self.events:
            if start > position:
                break
            owner = index
        follows = owner is None and any(
            spans[0][0] < position for index, spans in self.ranges.items() if index is not None
        )
        return count - 1 if follows else owner


def marked_spans(trace: Trace, messages: Messages, learned: list[bool]) -> Spans:
    """The marked spans that belong to messages to be learned.

    Raises ValueError if one holds what another than the assistant says, or if it is not clear whose one is.
    """
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            for span in trace.ranges.get(index, ()):
                if (number := bisect_left(trace.generated, span[1:])) and trace.generated[number - 1][1] > span[0]:
                    _check_not_marked(trace, span, message)  # few are touched by a mark
    assistants = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if all(learned[index] for index in assistants):
        return _joined(trace.generated)
    owners = [trace.owner_of(start, len(messages)) for start, _ in trace.generated]
    if not set(owners) <= set(assistants):
        owners = list(assistants)
        if len(owners) != len(trace.generated) or not all(
            _says(messages[index], trace.text[start:stop])
            for index, (start, stop) in zip(assistants, trace.generated, strict=True)
        ):
            raise ValueError("it is not clear which {% generation %} of the chat template belongs to which message")
    pairs = zip(trace.generated, owners, strict=True)
    return _joined([span for span, owner in pairs if owner is not None and learned[owner]])


def _check_not_marked(trace: Trace, span: tuple[int, int], message: dict[str, Any]) -> None:
    """Raises ValueError if a marked span holds what a message says in a span of the text."""
    for start, stop in trace.generated:
        if _says(message, trace.text[max(span[0], start) : min(span[1], stop)]):
            whose = f"what a message of role {message['role']!r} says"
            raise ValueError(f"the chat template marks {whose}; let {{% generation %}} hold the assistant's text alone")


def _says(message: dict[str, Any], text: str) -> bool:
    """Whether the text has what a message says, of which templates may leave out reasoning."""
    said = (message["content"] or "").rpartition("</think>")[2].strip()
    return bool(said) and said in text


def _joined(spans: Spans) -> Spans:
    """Spans that touch as one; none that is empty."""
    joined: Spans = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        elif start < stop:
            joined.append((start, stop))
    return joined


@dataclass(frozen=True)
class Frame:
    """What a template writes around the assistant's turns.

    prompt: what it writes to prompt the model for a turn; heads: what turns may begin with instead; behind: what it
    writes behind its loop; tail: a prompt that ends every conversation, or "". None is learned, but `behind` up to it.
    """

    prompt: str
    heads: tuple[str, ...]
    behind: str
    tail: str

    @classmethod
    def of(cls, prompt: str, heads: list[str], is_fixed: bool, ends: tuple[str, str], behind: str) -> "Frame":
        """The frame that a template's renderings show.

        Args:
            prompt: what it writes to prompt the model.
            heads: what it writes before the content of some turns.
            is_fixed: whether that is written before all turns, whatever they are.
            ends: what the loop writes after the content of a turn inside a conversation, and of its last turn.
            behind: what it writes behind its loop.

        Raises ValueError if turns begin with something that is no prompt.
        """
        head = heads[0]
        lead = head[: len(head) - len(head.lstrip())]  # white space that the loop writes
        prompt = lead + prompt.lstrip() if prompt.strip() else prompt
        if head.strip() and not _whole(alike(prompt, head), [prompt, head]).strip():
            raise ValueError(f"the chat template writes no generation prompt; add one, or {REMEDY}")
        common = _whole(alike(prompt, *heads), [prompt, *heads])
        differs = not prompt.startswith(head) and not head.startswith(prompt)  # so the model is not asked for its rest
        tail = next_header(common, beyond(ends[0], ends[1] + behind))
        return cls(prompt, (head, common) if is_fixed and differs else (common,), behind, tail)

    def header_of(self, text: str) -> int | None:
        """Number of characters at the beginning of an assistant's message that are not learned; None: not a message."""
        for header in (self.prompt, *self.heads):
            if text.startswith(header):
                return len(header)
        return None

    def left_out(self, text: str) -> str:
        """The end of the prompt that an assistant's message does not begin with, such as "<think>"; "" if none."""
        header = text[: self.header_of(text)]
        return self.prompt.removeprefix(header).strip() if self.prompt.startswith(header) else ""


def alike(*texts: str) -> str:
    """What all texts begin with."""
    columns = itertools.takewhile(lambda characters: len(set(characters)) == 1, zip(*texts, strict=False))
    return texts[0][: len(list(columns))]


def beyond(text: str, other: str) -> str:
    """The end of other with which it differs from text, from the beginning of a tag on."""
    shared = alike(text, other)
    return other[len(shared if shared == text else _OPEN_TAG.sub("", shared)) :]


def _whole(beginning: str, texts: list[str]) -> str:
    """The beginning of texts if it is one of them; else its lines, or its words and tags if it has no line."""
    lines = beginning[: beginning.rfind("\n") + 1]
    if beginning in texts or lines.strip():
        return beginning if beginning in texts else lines
    if any(text[len(beginning)].isalnum() for text in texts):
        beginning = re.sub(r"\w+\Z", "", beginning)
    return _OPEN_TAG.sub("", beginning)


def next_header(header: str, text: str) -> str:
    """The end of a text, from the place on where it has a turn's header, or ends with the first part of one."""
    name = header.strip()
    lead = header[: header.find(name)]
    for start, character in enumerate(text):
        rest = text[start:].strip()
        if name and not character.isspace() and (rest.startswith(name) or name.startswith(rest)):
            return (lead if text.endswith(lead, 0, start) else "") + text[start:]
    return ""
