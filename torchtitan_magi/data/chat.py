"""Records -> tokens and the mask of the assistant's tokens, through a Hugging Face chat template.

The assistant's turns are found in one of three ways:

- the template marks them with `{% generation %} ... {% endgeneration %}`;
- a template without these markers is rendered once per assistant turn: turn i is what `messages[: i + 1]` adds to
  `messages[:i]` with a generation prompt;
- a template that renders a turn differently when more messages follow (Qwen3's drops the reasoning of earlier turns)
  is searched: a turn begins after the generation prompt's text and ends with the text that closes a turn.

In all three the end-of-turn token that the template writes belongs to the turn.

The rendered text is encoded once, so the tokens are those of plain encoding. A token that holds any character of an
assistant turn is to be predicted.
"""

import functools
import json
import logging
import os
import re
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any, TypeVar

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Encoding, Tokenizer

from torchtitan_magi.data.documents import TokenizedDocument, TokenizedPair, pair_of
from torchtitan_magi.data.formats import Messages

T = TypeVar("T")
Spans = list[tuple[int, int]]  # half-open character ranges
Rendered = tuple[str, Spans | None]  # the text and what is learned of it; None: plain text, which is learned in full

logger = logging.getLogger(__name__)

# Used when the assets have no chat template; the first if the vocabulary has the two ChatML tokens.
CHATML_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}
{{ '<|im_start|>assistant\n' }}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}
{% else %}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
PLAIN_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}
{{ 'Assistant:' }}{% generation %}{{ ' ' + message.content }}{{ eos_token }}{{ '\n' }}{% endgeneration %}
{% else %}
{{ message.role | capitalize + ': ' + message.content + '\n' }}
{%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""

_START, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters: around assistant text while it is rendered
_UNCLEAR = (
    "the assistant's text cannot be told from the rest of what the chat template writes; put {% generation %} and"
    " {% endgeneration %} around it in the template"
)
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
# The date that templates print. It is fixed, so that all ranks and a run that resumes on another day render the same
# text; the Llama 3 templates use it when they are given none.
_TEMPLATE_DATE = datetime(2024, 7, 26)


class ChatTokenizer:
    """Tokenizes a record: `ChatTokenizer(...)(record) -> TokenizedDocument`. Picklable.

    `messages` are rendered by `template`, with loss on the assistant's text. `text` becomes BOS (if there is one),
    text, EOS (if there is one), with loss on everything.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; its truncation and padding, if any, are not applied.
        bos_id, eos_id: token ids or None; the template sees their text as `bos_token` and `eos_token`.
        template: jinja2 source, run in a sandbox; see `load_chat_template`.

    Raises ValueError for a template that is not jinja2 and for ids outside the vocabulary; when called, for a record
    that the template refuses or whose assistant turns cannot be found.
    """

    def __init__(self, tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None, template: str):
        if tokenizer.truncation or tokenizer.padding:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.tokenizer, self.bos_id, self.eos_id, self.template = tokenizer, bos_id, eos_id, template
        self._special_tokens = {}
        for name, token_id in (("bos", bos_id), ("eos", eos_id)):
            if token_id is not None:
                token = tokenizer.id_to_token(token_id)
                if token is None:
                    raise ValueError(f"{name}_id is {token_id}, not in the vocabulary; correct tokenizer_config.json")
                self._special_tokens[f"{name}_token"] = token
        self._has_markers = _GENERATION_TAG.search(template) is not None
        try:
            self._compiled = _environment().from_string(template)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template is not valid ({error}); correct it in the model's assets") from error

    @classmethod
    def from_assets(
        cls, tokenizer: Tokenizer, bos_id: int | None, eos_id: int | None, assets_path: str | os.PathLike[str]
    ) -> "ChatTokenizer":
        """Takes the chat template of a Hugging Face assets directory; without one, the default template (logged)."""
        template = load_chat_template(assets_path)
        if template is None:
            template = default_template(tokenizer)
            form = "ChatML" if template == CHATML_TEMPLATE else "plain text"
            logger.info("no chat template in %s: messages are written as %s", os.fspath(assets_path), form)
        return cls(tokenizer, bos_id, eos_id, template)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tokenizer, self.bos_id, self.eos_id, self.template)

    def __call__(self, record: dict[str, Any]) -> TokenizedDocument:
        return _unwrap(self.documents([record]))

    def pair(self, record: dict[str, Any]) -> TokenizedPair:
        """Tokenizes a preference pair, see `pairs`. Raises ValueError as `__call__` does."""
        return _unwrap(self.pairs([record]))

    def documents(self, records: Sequence[dict[str, Any] | ValueError]) -> list[TokenizedDocument | ValueError]:
        """Tokenizes a batch. A record that is refused, or that is a ValueError already, is its ValueError."""
        return self._encode([_attempt(self._render_record, record) for record in records])

    def pairs(self, records: Sequence[dict[str, Any] | ValueError]) -> list[TokenizedPair | ValueError]:
        """Tokenizes a batch of preference pairs, as `documents` does."""
        rendered = [_attempt(self._render_pair, record) for record in records]
        chosen, rejected = (
            self._encode([pair if isinstance(pair, ValueError) else pair[number] for pair in rendered])
            for number in (0, 1)
        )
        return [_attempt(pair_of, *sides) for sides in zip(chosen, rejected, strict=True)]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Checksum of all that a record's tokens depend on: 8 hexadecimal digits."""
        parts = (self.tokenizer.to_str(), str(self._special_tokens), self.template)
        return f"{zlib.crc32(chr(0).join(parts).encode()):08x}"

    def _render_record(self, record: dict[str, Any]) -> Rendered:
        if "text" in record:
            return record["text"], None
        return self.render(record["messages"], record.get("tools"))

    def _render_pair(self, record: dict[str, Any]) -> list[Rendered]:
        prompt, tools = record["prompt"], record.get("tools")
        return [self.render(prompt + record[name], tools, len(prompt)) for name in ("chosen", "rejected")]

    def _encode(self, texts: list[Any]) -> list[TokenizedDocument | ValueError]:
        """texts: Rendered or ValueError."""
        sound = [text for text in texts if not isinstance(text, ValueError)]
        encodings = iter(self._encode_batch([text for text, _ in sound]))
        return [
            text if isinstance(text, ValueError) else _attempt(self._document, next(encodings), text[1])
            for text in texts
        ]

    def _encode_batch(self, texts: list[str]) -> list[Encoding | ValueError]:
        try:
            return [*self.tokenizer.encode_batch(texts, add_special_tokens=False)]
        except Exception as error:  # the library raises nothing narrower, for the whole batch
            if len(texts) == 1:
                return [ValueError(f"the tokenizer refuses the text ({error}); correct the record")]
            return [self._encode_batch([text])[0] for text in texts]

    def _document(self, encoding: Encoding, spans: Spans | None) -> TokenizedDocument:
        tokens = np.array(encoding.ids, dtype=np.int32)
        if spans is None:
            tokens = np.array([*_given(self.bos_id), *tokens, *_given(self.eos_id)], dtype=np.int32)
            return TokenizedDocument(tokens, np.ones(len(tokens), dtype=bool))
        return TokenizedDocument(tokens, _tokens_in_spans(encoding, spans))

    def render(self, messages: Messages, tools: Messages | None = None, first: int = 0) -> tuple[str, Spans]:
        """The conversation as text, and the half-open character spans of the assistant's turns in messages[first:]."""
        for word, used in (("tools", tools), ("tool_calls", any(message.get("tool_calls") for message in messages))):
            if used and word not in self.template:
                raise ValueError(f'the chat template has no place for "{word}"; give the assets one that has')
        if not self._has_markers:
            return self._render_turns(messages, tools, first)
        for message in messages:
            if any(mark in (message["content"] or "") for mark in (_START, _END)):
                raise ValueError("the text holds the Unicode noncharacter U+FDD0 or U+FDD1; remove it")
        text, spans = _strip_marks(self._render(messages, tools))
        if first:
            _, before = _strip_marks(self._render(messages[:first], tools, add_generation_prompt=True))
            spans = spans[len(before) :]
        return text, spans

    def _render_turns(self, messages: Messages, tools: Messages | None, first: int) -> tuple[str, Spans]:
        text = self._render(messages, tools)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant" and index >= first:
                if index == 0:  # templates refuse an empty list
                    return text, self._find_turns(text, messages, tools, first)
                prompt = self._render(messages[:index], tools, add_generation_prompt=True)
                turn = self._render(messages[: index + 1], tools)
                if not (turn.startswith(prompt) and text.startswith(turn)):
                    return text, self._find_turns(text, messages, tools, first)
                spans.append((len(prompt), len(turn)))
        return text, spans

    def _find_turns(self, text: str, messages: Messages, tools: Messages | None, first: int) -> Spans:
        """Spans of the assistant's turns, found by the texts that begin and end one; `_content_ends` limits it."""
        begin, end = self._turn_frame
        if not (begin and end):
            raise ValueError(_UNCLEAR)
        ends, spans, position = self._content_ends(text, messages, tools), [], 0
        for index, (message, content_end) in enumerate(zip(messages, ends, strict=True)):
            stops = position if content_end is None else content_end
            if message["role"] == "assistant":
                later = zip(messages[index + 1 :], ends[index + 1 :], strict=True)
                limit = next((e - len(m["content"].strip()) for m, e in later if e is not None), len(text))
                start = text.find(begin, position, limit if content_end is None else content_end)
                stop = text.find(end, max(start + len(begin), stops), limit)
                if min(start, stop) < 0:
                    raise ValueError(_UNCLEAR)
                stops = stop + len(end)
                if index >= first:
                    spans.append((start + len(begin), stops))
            position = stops
        return spans

    def _content_ends(self, text: str, messages: Messages, tools: Messages | None) -> list[int | None]:
        """Per message: the character where its content ends, before trailing white space; None without content.

        Found by rendering with a mark at the end of each content. Some templates test whether there is content beside
        tool calls, so marks there would change the text; then contents beside tool calls count as None.
        """
        has_content = [bool(message["content"]) for message in messages]
        has_calls = [bool(message.get("tool_calls")) for message in messages]
        beside_calls = [message for message, calls in zip(messages, has_calls, strict=True) if calls]
        without_calls = [has and not calls for has, calls in zip(has_content, has_calls, strict=True)]
        calls_alone = [message["tool_calls"] for message in beside_calls]
        frames = [frame.strip() for frame in self._turn_frame if frame.strip()]
        for is_marked, unmarked in ((has_content, calls_alone), (without_calls, beside_calls)):
            if any(frame in json.dumps(unmarked, ensure_ascii=False) for frame in frames):
                break  # this text would be taken for the end of a turn
            marked = [
                {**message, "content": _with_mark(message["content"])} if mark else message
                for message, mark in zip(messages, is_marked, strict=True)
            ]
            parts = self._render(marked, tools).split(_END)
            if "".join(parts) == text and len(parts) - 1 == sum(is_marked):
                ends = accumulate(map(len, parts))
                return [next(ends) if mark else None for mark in is_marked]
        raise ValueError(_UNCLEAR)

    @functools.cached_property
    def _turn_frame(self) -> tuple[str, str]:
        """What the template writes before and after the text of an assistant's last turn."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": _END}
        before = self._render([question], None)
        prompt = self._render([question], None, add_generation_prompt=True)
        turn = self._render([question, answer], None)
        return prompt.removeprefix(before), turn.partition(_END)[2]

    def _render(self, messages: Messages, tools: Messages | None, add_generation_prompt: bool = False) -> str:
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except Exception as error:  # a template is a program and can raise anything
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses the messages ({reason}); change the record or it") from error


def load_chat_template(assets_path: str | os.PathLike[str]) -> str | None:
    """The chat template of a Hugging Face assets directory; None when it has none.

    `chat_template.jinja` takes precedence over "chat_template" in `tokenizer_config.json`. The latter is a string, or a
    list of `{"name", "template"}` from which "default" is taken. Raises ValueError if the path is no directory or the
    files are malformed.
    """
    if not os.path.isdir(assets_path):
        raise ValueError(f"{os.fspath(assets_path)!r} is not a directory; give the one that holds tokenizer.json")
    try:
        with open(os.path.join(assets_path, "chat_template.jinja"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        pass
    path = os.path.join(assets_path, "tokenizer_config.json")
    try:
        with open(path, encoding="utf-8") as file:
            template = json.load(file).get("chat_template")
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object ({error}); download the tokenizer's files again") from None
    if isinstance(template, list):
        return _named_template(template, path)
    if template is not None and not isinstance(template, str):
        raise ValueError(f'{path}: "chat_template" is a {type(template).__name__}; write a string or a list')
    return template


def _named_template(templates: list[Any], path: str) -> str:
    try:
        by_name = {entry["name"]: entry["template"] for entry in templates}
    except (TypeError, KeyError):
        raise ValueError(f'{path}: "chat_template" is a list; give each entry a "name" and a "template"') from None
    if "default" not in by_name:
        raise ValueError(f'{path}: the chat templates are named {sorted(by_name)}; name one of them "default"')
    return by_name["default"]


def default_template(tokenizer: Tokenizer) -> str:
    """The template for assets without one: ChatML if the vocabulary has ChatML's two tokens, else plain text."""
    has_chatml = all(tokenizer.token_to_id(token) is not None for token in ("<|im_start|>", "<|im_end|>"))
    return CHATML_TEMPLATE if has_chatml else PLAIN_TEMPLATE


def _with_mark(content: str) -> str:
    kept = content.rstrip()
    return kept + _END + content[len(kept) :]


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: puts marks around the text it renders."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_START}{caller()}{_END}"


def _environment() -> ImmutableSandboxedEnvironment:
    """A sandbox with the globals, filters and white-space rules of transformers, which templates on the hub expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TEMPLATE_DATE.strftime
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of jinja2's own filter, which do not belong in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strip_marks(marked: str) -> tuple[str, Spans]:
    """The text without the marks, and the character spans that they enclosed."""
    parts = re.split(f"[{_START}{_END}]", marked)  # outside, inside, outside, ...
    ends = list(accumulate(map(len, parts)))
    return "".join(parts), list(zip(ends[:-1:2], ends[1::2], strict=True))


def _tokens_in_spans(encoding: Encoding, spans: Spans) -> np.ndarray:
    """bool [n]: which tokens hold a character of a span.

    A tokenizer may leave the space before a word out of the word's offsets; that space counts as part of the token.
    Offsets ascend, so the ends of a span are searched for: making a list of all offsets takes as long as encoding.
    """

    def offsets(token: int) -> tuple[int, int]:
        return encoding.token_to_chars(token) or (0, 0)

    def end_of(token: int) -> int:
        return offsets(token)[1]

    def begin_of(token: int) -> int:
        return min(offsets(token)[0], end_of(token - 1) if token else 0)

    tokens = range(len(encoding))
    inside = np.zeros(len(tokens), dtype=bool)
    for start, stop in spans:
        if start < stop:
            inside[bisect_right(tokens, start, key=end_of) : bisect_left(tokens, stop, key=begin_of)] = True
    return inside


def _given(token_id: int | None) -> list[int]:
    return [] if token_id is None else [token_id]


def _attempt(function: Callable[..., T], *arguments: Any) -> T | ValueError:
    """What the function returns or the ValueError that it raises; a ValueError among the arguments is passed on."""
    for argument in arguments:
        if isinstance(argument, ValueError):
            return argument
    try:
        return function(*arguments)
    except ValueError as error:
        return error


def _unwrap(batch: Sequence[T | ValueError]) -> T:
    (result,) = batch
    if isinstance(result, ValueError):
        raise result
    return result
