"""A chat template: messages -> text, and which of it the assistant wrote.

A template may mark the assistant's text with `{% generation %} ... {% endgeneration %}`. Without these markers it is
found by two observations:

- templates write messages in a loop. Each loop is compiled with a note of where it comes to which message, so the text
  of every message is known, whatever the template makes of its content;
- the text of an assistant's message begins with what the template writes to prompt a model for it. What follows is
  learned, the end-of-turn token included, and after the last message also what the template writes behind its loop,
  up to a prompt for another turn.

Small conversations (`_probe`) show what the prompt is and that no other message is written among the assistant's.
Templates are other people's programs: they run in a sandbox and under the limits of `guard`.
"""

import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta

from torchtitan_magi.data import guard
from torchtitan_magi.data.records.formats import Messages
from torchtitan_magi.data.tokens.sandbox import (
    ALTERED,
    Loops,
    Marks,
    Message,
    Spans,
    can_alter_marked,
    environment,
    has_mark,
    length,
    tojson,
    unread,
)
from torchtitan_magi.data.tokens.turns import REMEDY, Frame, Trace, alike, beyond, marked_spans, next_header
from torchtitan_magi.wording import one_line, quoted

Kwargs = dict[str, Any]

MAX_CHARACTERS = 2**25  # of a rendered record
_FREE_CHARACTERS = 2**18  # that a template may write whatever the record
_MAX_GROWTH = 8  # characters that it may write beyond these for each of the record's own: a multiple is not meant

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
PROBE_TOOLS: Messages = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks at it.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]
_MAX_FRAMES = 64  # kept per template
_NOT_PLAIN = re.compile(r"\\+(?:u[0-9a-f]{4}|x[0-9a-f]{2}|.?)|[^A-Za-z0-9\\]+", re.DOTALL)
# Of a message; these have notes of their own, or none. "thinking" is another name of "reasoning_content".
_KNOWN_FIELDS = {"role", "content", "reasoning_content", "thinking", "tool_calls", "tool_call_id"}


@dataclass(frozen=True)
class Rendering:
    """A rendered conversation.

    spans: half-open character ranges of the assistant's text; notes: what the template left out, if anything. A note
    is the same for every record that it is true of, so that records can be counted by it.
    """

    text: str
    spans: Spans
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """Renders conversations by a jinja2 template.

    Args:
        source: the template.
        special_tokens: variables of the template, such as `bos_token`.
        day: what the template's `strftime_now` takes for now.
        name: of the template, for messages, such as its path.
        probe_tools: given with the small conversations, for a template of records with tools.

    `check` and `render` raise ValueError for a template that is not jinja2.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], day: date, name: str, probe_tools: Messages | None = None
    ):
        self.source, self.special_tokens, self.day, self.name = source, special_tokens, day, name
        self._probe_tools = probe_tools
        self._has_markers = _GENERATION_TAG.search(source) is not None
        self._frames: dict[tuple[bool, str], Frame] = {}

    def check(self) -> None:
        """Renders small conversations in a process of its own.

        Raises ValueError, with the template's name, if the template is not jinja2, refuses a question and an answer, or
        writes them in a way that does not show what the assistant wrote.
        """
        try:
            guard.run_limited(self._check)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def render(
        self, messages: Messages, tools: Messages | None = None, first: int = 0, kwargs: Kwargs | None = None
    ) -> Rendering:
        """The conversation as text, with the spans of the assistant's turns in messages[first:] that have no weight 0.

        kwargs: further variables of the template. Raises ValueError if the template refuses the messages or the
        assistant's text cannot be told from the rest.
        """
        return guard.limited(self._rendering, messages, tools, first, kwargs or {})

    def _rendering(self, messages: Messages, tools: Messages | None, first: int, kwargs: Kwargs) -> Rendering:
        calls = [message for message in messages if message.get("tool_calls")]
        for word, used in (("tools", tools), ("tool_calls", calls)):
            if used and word not in self.source:
                raise ValueError(f'the chat template has no place for "{word}"; give the assets one that has')
        shown = [Message(self._as_shown(message)) for message in messages]
        trace = self._run(shown, tools, kwargs)
        learned = [
            index >= first and message["role"] == "assistant" and message.get("weight") != 0
            for index, message in enumerate(messages)
        ]
        begun: list[str] = []
        if self._has_markers:
            spans = marked_spans(trace, messages, learned)
        else:
            if calls or any(message["role"] == "tool" for message in messages):
                self._frame(True, kwargs)  # some templates write what a tool answers into the assistant's turn
            turns = [self._turn(trace, messages, index, kwargs) for index in range(len(messages)) if learned[index]]
            spans, begun = [span for span, _ in turns], [note for _, notes in turns for note in notes]
        unused = kwargs.keys() - self._compiled.variables
        notes = begun + [f'the chat template does not use "{name}" of chat_template_kwargs' for name in sorted(unused)]
        notes += [note for index, message in enumerate(messages) for note in self._left_out(trace, index, message)]
        unused = {field for message in shown for field in unread(message)} - _KNOWN_FIELDS
        notes += [f'the chat template does not use "{field[:40]}" of a message' for field in sorted(unused)]
        return Rendering(trace.text, spans, tuple(dict.fromkeys(notes)))

    def _left_out(self, trace: Trace, index: int, message: dict[str, Any]) -> Iterator[str]:
        """Notes on what of a message is not in the text."""
        role = message["role"]
        written = (role == "assistant" and trace.written(index)) or trace.text
        before, _, content = (message.get("content") or "").rpartition("</think>")
        for reasoning in (message.get("reasoning_content"), before.replace("<think>", "", 1)):
            if reasoning and reasoning.strip() not in written:
                yield "the chat template drops reasoning"
        if content.strip() not in written:
            yield f"the chat template drops or changes what a message of role {role!r} says"
        calls = [_function_of(call) for call in message.get("tool_calls", ())]
        names = Counter(filter(None, map(_name_of, calls)))
        given = (text for call in calls for text in _texts(call.get("arguments")))
        if any(written.count(name) < times for name, times in names.items()) or not _are_in(given, written):
            yield "the chat template drops tool calls"
        if any(isinstance(call.get("arguments"), str) for call in calls):
            yield "the arguments of a tool call are no JSON object and reach the chat template as text"
        if message.get("weight") == 1 and role != "assistant":
            yield f"only what the assistant says is learned, though a message of role {role!r} has weight 1"

    def _turn(self, trace: Trace, messages: Messages, index: int, kwargs: Kwargs) -> tuple[tuple[int, int], list[str]]:
        """The characters of an assistant's message that are learned, and notes on how they begin."""
        start, stop = trace.range_of(index)
        bos = self.special_tokens.get("bos_token", "")
        if index == 0 and trace.text.startswith(bos, start):  # some templates write it in their loop
            start += len(bos)
        frame = self._frame(index > 0 and messages[index - 1]["role"] == "tool", kwargs)
        header = frame.header_of(trace.text[start:stop])
        if header is None:
            remedy = REMEDY
            if messages[index].get("reasoning_content") and kwargs:
                remedy = (
                    f"leave out its reasoning or {' and '.join(sorted(kwargs))} of chat_template_kwargs, or {REMEDY}"
                )
            raise ValueError(f"an assistant's turn does not begin as the template's generation prompt does; {remedy}")
        if index == len(messages) - 1:
            if (behind := trace.text[stop:]).strip() and behind != frame.behind:
                raise ValueError(f"what the chat template writes behind its loop depends on the record; {REMEDY}")
            stop = len(trace.text.removesuffix(frame.tail))
        if index and messages[index - 1]["role"] == "system" and self._moves_system:
            raise ValueError(f"the chat template writes a system message into the assistant's turn; {REMEDY}")
        start, left_out = start + header, frame.left_out(trace.text[start:stop])
        return (start, stop), [*self._notes_on_beginning(left_out, trace.text[start:stop])]

    def _notes_on_beginning(self, left_out: str, learned: str) -> Iterator[str]:
        """Notes on a turn that begins otherwise than the model will be asked for it.

        Args:
            left_out: the end of the generation prompt, if the turn is without it.
            learned: the text of the turn.
        """
        if "<think>" in left_out:
            keeps = ', or set "preserve_thinking" in chat_template_kwargs' * ("preserve_thinking" in self.source)
            prompt = f"{quoted(left_out)}, with which the chat template prompts the model"
            yield f"turns are learned without {prompt}; give them weight 0{keeps}"
        if learned.lstrip().startswith("</think>"):
            yield (
                "an answer has no reasoning behind a prompt for it, so the model learns not to think; give it "
                '"reasoning_content", or set "enable_thinking" to false in chat_template_kwargs'
            )

    def _frame(self, after_tool: bool, kwargs: Kwargs) -> Frame:
        """What the template writes around an assistant's turn after a tool's answer, or after another message."""
        key = (after_tool, json.dumps(kwargs, sort_keys=True, default=repr))  # a table may have dates
        frame = self._frames.get(key)
        if frame is None:
            if len(self._frames) >= _MAX_FRAMES:
                self._frames.clear()
            frame = self._frames[key] = self._make_frame(after_tool, kwargs)
        return frame

    def _make_frame(self, after_tool: bool, kwargs: Kwargs) -> Frame:
        messages = [self._as_shown(message) for message in _probe(after_tool, "tool_calls" in self.source)]
        asked = len(messages) - 3
        short, whole = (
            self._run(messages[:number], self._probe_tools, kwargs) for number in (asked + 1, len(messages))
        )
        for trace, number in ((short, asked + 1), (whole, len(messages))):
            for index, message in enumerate(messages[:number]):
                if (message.get("content") or "") not in trace.written(index):
                    whose = f"what a message of role {message['role']!r} says"
                    raise ValueError(f"the chat template does not write {whose} where its loop comes to it; {REMEDY}")
        reasons = messages[asked] | {"reasoning_content": "probe6", "thinking": "probe6"}
        thinking = self._run([*messages[:asked], reasons], self._probe_tools, kwargs)
        head, last_end = short.around(asked, messages[asked])
        inner_head, end = whole.around(asked, messages[asked])
        heads = [head, inner_head, whole.around(asked + 2, messages[asked + 2])[0]]
        is_fixed = {*heads, thinking.around(asked, reasons)[0]} == {head}
        prompt = self._prompt(messages[:asked], whole, head, kwargs)
        return Frame.of(prompt, heads, is_fixed, (end, last_end), short.behind(asked))

    def _prompt(self, messages: Messages, answered: Trace, head: str, kwargs: Kwargs) -> str:
        """What the template writes to prompt the model for an answer to `messages`.

        It is behind the loop, or in the loop behind the last message: then it is what stands there beyond the message
        as it is when an answer follows, or beyond it without a prompt. Taken is what most resembles `head`, with which
        answers begin; an end of the conversation before it is no part of it.
        """
        asking, plain = (self._run(messages, self._probe_tools, kwargs, ask) for ask in (True, False))
        start, stop = asking.range_of(len(messages) - 1)
        others = answered.written(len(messages) - 1), plain.text[start:]
        prompts = [asking.text[stop:], *(beyond(other, asking.text[start:]) for other in others)]
        prompt = max(prompts, key=lambda prompt: len(alike(prompt.lstrip(), head.lstrip())))
        return prompt if alike(prompt.lstrip(), head.lstrip()) else next_header(head, prompt) or prompt

    @functools.cached_property
    def _moves_system(self) -> bool:
        """Whether the template writes a system message into the next one, if the assistant's, as into a question."""
        messages = [{"role": "system", "content": "probe7"}, *_probe()[1:]]
        try:
            return "probe7" in self._run(messages, self._probe_tools, {}).written(1)
        except ValueError:
            return False

    def _as_shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template expects it, an object of its own."""
        shown = dict(message)
        shown.pop("weight", None)
        if "reasoning_content" in shown:
            shown["thinking"] = shown["reasoning_content"]  # as some templates call it
        return self._call_form.apply(shown) if shown.get("tool_calls") else shown

    @functools.cached_property
    def _call_form(self) -> "_CallForm":
        """The first form in which the template writes a call; most take all of them."""
        question, call = _probe(after_tool=True, has_calls=True)[:2]
        for form in _CALL_FORMS:
            try:
                text = self._run([dict(question), form.apply(call)], self._probe_tools, {}).text
            except ValueError:
                continue
            if "look" in text and "None" not in text:
                return form
        return _CALL_FORMS[0]

    def _run(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Messages | None,
        kwargs: Kwargs,
        add_generation_prompt: bool = False,
    ) -> Trace:
        """A rendering of messages that are as `_as_shown` makes them, each an object of its own."""
        if self._has_markers and any(has_mark(message) for message in messages):
            raise ValueError("the text holds the Unicode noncharacter U+FDD0 or U+FDD1; remove it")
        compiled = self._compiled
        variables: Kwargs = {"documents": None} | self.special_tokens | kwargs
        variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        record = [messages, tools, kwargs]
        text, generated = compiled.marks.strip(self._write(variables, record, with_marks=True))
        events = compiled.loops.events
        if compiled.can_alter_marked and self._write(variables, record, with_marks=False) != text:
            raise ValueError(ALTERED)
        return Trace(text, generated, events)

    def _write(self, variables: Kwargs, record: list[Any], with_marks: bool) -> str:
        """What the template writes. record: what of the variables is the record's."""
        compiled = self._compiled
        template, loops = compiled.template, compiled.loops
        loops.begin(variables["messages"])
        compiled.marks.begin(with_marks)
        chunks, limit = [], _FREE_CHARACTERS
        try:
            for chunk in template.generate(**variables):
                chunks.append(chunk)
                loops.position += length(chunk)
                if loops.position > limit:
                    limit = min(MAX_CHARACTERS, _FREE_CHARACTERS + _MAX_GROWTH * _size(record))
                    if loops.position > limit:
                        raise ValueError(f"it writes more than {limit:,} characters, too many for what the record has")
            text = "".join(chunks)
            text.encode()  # a template can cut a character in two
        except MemoryError:
            raise
        except Exception as error:  # a template is a program and can raise anything
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the messages ({reason}); change the record or it") from error
        return text

    @functools.cached_property
    def _compiled(self) -> "_Compiled":
        sandbox, loops, marks = environment(self.day), Loops(), Marks()
        sandbox.filters |= loops.filters | marks.filters
        try:
            tree = sandbox.parse(self.source)
            variables = meta.find_undeclared_variables(tree)
            loops.note_in(tree)
            template = sandbox.from_string(tree)
            template.globals = dict(template.globals)  # jinja2's own mapping is slow to copy, as each rendering does
            return _Compiled(template, loops, marks, variables, can_alter_marked(tree))
        except MemoryError:
            raise
        except Exception as error:  # Python's compiler raises more than jinja2's
            reason = one_line(" ".join(str(error).split()), 1000)  # it may repeat a name of the template
            raise ValueError(f"the chat template is not valid ({reason}); correct it in the model's assets") from error

    def _check(self) -> None:
        for messages in (_probe()[:2], _probe()):
            rendering = self._rendering(messages, None, 0, {})
            learned = [rendering.text[start:stop] for start, stop in rendering.spans]
            for message in messages:
                role, content = message["role"], message["content"]
                inside = [text.partition(content)[2] for text in learned if content in text]
                if (role == "assistant") != bool(inside):
                    kind = "not among what is learned" if role == "assistant" else "learned"
                    raise ValueError(f"what a message of role {role!r} says would be {kind}; {REMEDY}")
                if inside == [""]:
                    raise ValueError(f"the template writes no end after the assistant's text; {REMEDY}")


class _Compiled(NamedTuple):
    """A compiled template. variables: names that it takes from its caller, and of what jinja2 has."""

    template: jinja2.Template
    loops: Loops
    marks: Marks
    variables: set[str]
    can_alter_marked: bool


def _size(value: Any) -> int:
    """Characters of a JSON value; a number counts as 8."""
    if isinstance(value, dict):
        return sum(len(key) + _size(item) for key, item in dict.items(value))
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str) else 8


def _probe(after_tool: bool = False, has_calls: bool = False) -> Messages:
    """Two questions and answers; the first answer perhaps after a tool's, which a call asked for or plain words."""
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    asks = {"role": "assistant"} | ({"content": None, "tool_calls": [call]} if has_calls else {"content": "probe1"})
    tool = {"role": "tool", "content": "probe2", "name": "look", "tool_call_id": "call00000"}
    return [
        {"role": "user", "content": "probe0"},
        *([asks, tool] if after_tool else []),
        {"role": "assistant", "content": "probe3"},
        {"role": "user", "content": "probe4"},
        {"role": "assistant", "content": "probe5"},
    ]


@dataclass(frozen=True)
class _CallForm:
    """How a message with tool calls is given to a template: `arguments` as an object or JSON text, no content as ..."""

    arguments_as_text: bool
    no_content: dict[str, Any]

    def apply(self, message: dict[str, Any]) -> dict[str, Any]:
        if not message.get("content"):
            message = {key: value for key, value in message.items() if key != "content"} | self.no_content
        if self.arguments_as_text:
            message = {**message, "tool_calls": [_with_text_arguments(call) for call in message["tool_calls"]]}
        return message


_NO_CONTENT: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}]
_CALL_FORMS = [_CallForm(as_text, no_content) for as_text in (False, True) for no_content in _NO_CONTENT]


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_text_arguments(call["function"])}
    arguments = call.get("arguments")
    return {**call, "arguments": tojson(arguments)} if isinstance(arguments, dict) else call


def _function_of(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    return function if isinstance(function, dict) else {}


def _name_of(function: dict[str, Any]) -> str:
    name = function.get("name")
    return name if isinstance(name, str) else ""


def _texts(value: Any) -> Iterator[str]:
    """The strings of a JSON value; without recursion, as it may be nested deeply."""
    values = [value]
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, (dict, list)):
            values += value.values() if isinstance(value, dict) else value


def _are_in(texts: Iterable[str], written: str) -> bool:
    """Whether all texts are in what is written, as they are or escaped, such as for JSON."""
    escaped = [text for text in texts if text not in written]
    plain = _plain(written) if escaped else ""
    return all(_plain(text) in plain for text in escaped)


def _plain(text: str) -> str:
    """The ASCII letters and digits of a text, but for those of escapes: the same however often it is escaped."""
    return _NOT_PLAIN.sub("", text)
