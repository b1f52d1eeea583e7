"""Records -> tokens and the mask of what is learned, through a Hugging Face chat template.

The rendered text (see `template`) is encoded once, so the tokens are those of plain encoding. A token that holds any
character of an assistant's turn is to be predicted.
"""

import functools
import hashlib
import logging
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from torchtitan_magi.data.records.formats import Messages
from torchtitan_magi.data.records.record_file import attempt
from torchtitan_magi.data.tokens.documents import TokenizedAnswers, TokenizedDocument, TokenizedPairs, pairs_of
from torchtitan_magi.data.tokens.sandbox import Spans
from torchtitan_magi.data.tokens.special_tokens import CONFIG, read_object, read_special_tokens
from torchtitan_magi.data.tokens.template import PROBE_TOOLS, ChatTemplate, Kwargs, Rendering
from torchtitan_magi.files import read_text
from torchtitan_magi.machine import lack
from torchtitan_magi.wording import one_line, quoted, quoted_path, shown

T = TypeVar("T")
Documents = TokenizedDocument | TokenizedAnswers

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 2**20  # that are encoded together, or one text; an encoding takes a hundred times their memory
_LEAST_LOGPROB = -80.0  # of a token that was sampled; a ratio of exp(88) is more than float32 has
_RENDERING_VERSION = "4"  # changes when records are rendered or their spans found in another way

DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates, as transformers takes them

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


class ChatTokenizer:
    """Tokenizes a record: `ChatTokenizer(...)(record) -> TokenizedDocument`. Picklable.

    `messages` are rendered by `template`, with loss on the assistant's text. `text` becomes BOS (if there is one),
    text, EOS (if there is one), with loss on everything. `completions` make TokenizedAnswers: each with the prompt, of
    which nothing is learned.

    Args:
        tokenizer: a `tokenizers.Tokenizer`; its truncation and padding, if any, are not applied.
        bos_id: token id or None; the template sees its text as `bos_token`.
        eos_id: token id or None; the template sees its text as `eos_token`.
        template: jinja2 source, run in a sandbox; see `load_chat_template`.
        day: what a template that prints the date takes for today. None: today.
        name: of the template, for messages.
        special_tokens: further variables of the template, such as "pad_token", and their text.
        tool_template: for records with tools; None: `template`.

    Raises ValueError for ids outside the vocabulary; when called, for a template that is not jinja2 and for a record
    that the template refuses or whose assistant turns cannot be found.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        bos_id: int | None,
        eos_id: int | None,
        template: str,
        day: date | None = None,
        name: str = "the chat template",
        special_tokens: dict[str, str] | None = None,
        tool_template: str | None = None,
    ):
        if tokenizer.truncation or tokenizer.padding:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.tokenizer, self.bos_id, self.eos_id, self.template = tokenizer, bos_id, eos_id, template
        self.day, self.name = day or date.today(), name
        self.special_tokens, self.tool_template = special_tokens or {}, tool_template
        variables = self._variables()
        self._template = self._template_for_tools = ChatTemplate(template, variables, self.day, name)
        if tool_template is not None:
            self._template_for_tools = ChatTemplate(tool_template, variables, self.day, name, PROBE_TOOLS)

    def _variables(self) -> dict[str, str]:
        """What the template sees: the texts of BOS and EOS, and of those other special tokens that it writes."""
        variables = {}
        for name, token_id in (("bos", self.bos_id), ("eos", self.eos_id)):
            if token_id is not None:
                token = self.tokenizer.id_to_token(token_id)
                if token is None:
                    raise ValueError(f"{name}_id is {token_id}, not in the vocabulary; correct tokenizer_config.json")
                variables[f"{name}_token"] = token
        others = sorted(self.special_tokens.keys() - {"bos_token", "eos_token"})
        return variables | {name: self.special_tokens[name] for name in others if name in self._sources}

    @property
    def _sources(self) -> str:
        return self.template + (self.tool_template or "")

    @classmethod
    def from_assets(
        cls,
        tokenizer: Tokenizer,
        bos_id: int | None,
        eos_id: int | None,
        assets_path: str | os.PathLike[str],
        day: date | None = None,
        check: bool = True,
    ) -> "ChatTokenizer":
        """Takes the chat template of a Hugging Face assets directory, with its special tokens; without a template, the
        default one (logged). Calls `check` unless that is not wanted."""
        templates = load_chat_templates(assets_path)
        template = templates.get(DEFAULT)
        if template is None:
            template = default_template(tokenizer)
            form = "ChatML" if template == CHATML_TEMPLATE else "plain text"
            logger.info("no chat template in %s: messages are written as %s", shown(assets_path), form)
        name, named = f"the chat template in {shown(assets_path)}", read_special_tokens(assets_path).texts
        chat = cls(tokenizer, bos_id, eos_id, template, day, name, named, templates.get(TOOL_USE))
        if check:
            chat.check()
        return chat

    def check(self) -> None:
        """Raises ValueError, with its name, for a template that is of no use, see `ChatTemplate.check`."""
        self._template.check()

    def __reduce__(self) -> tuple[Any, ...]:
        given = self.tokenizer, self.bos_id, self.eos_id, self.template, self.day, self.name
        return type(self), (*given, self.special_tokens, self.tool_template)

    @property
    def prints_date(self) -> bool:
        """Whether the template asks for the date. Then tokens depend on it."""
        return "strftime_now" in self._sources

    def __call__(self, record: dict[str, Any]) -> Documents:
        (document,) = self.documents([record])
        if isinstance(document, ValueError):
            raise document
        return document

    def pair(self, record: dict[str, Any]) -> TokenizedPairs:
        """Tokenizes the preference pairs of a record, see `pairs`. Raises ValueError as `__call__` does."""
        return _unwrap(self.pairs([record]))

    def documents(self, records: Sequence[dict[str, Any] | ValueError]) -> list[Documents | ValueError]:
        """Tokenizes a batch. A record that is refused, or that is a ValueError already, is its ValueError."""
        return [attempt(_document_of, *of_one) for of_one in self._tokenized(records, self._render_record)]

    def rollouts(self, records: Sequence[dict[str, Any] | ValueError]) -> list[TokenizedAnswers | ValueError]:
        """Tokenizes a batch of rollouts, as `documents` does. Token ids are taken as they are."""
        return [attempt(_rollouts_of, *of_one) for of_one in self._tokenized(records, self._render_rollouts)]

    def pairs(self, records: Sequence[dict[str, Any] | ValueError]) -> list[TokenizedPairs | ValueError]:
        """Tokenizes a batch of records of preference pairs, as `documents` does."""
        return [attempt(_pairs_of, *of_one) for of_one in self._tokenized(records, self._render_answers)]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Digest of all that a record's tokens depend on: 16 hexadecimal digits."""
        day = str(self.day) if self.prints_date else ""
        tokens, variables = self.tokenizer.to_str(), str(self._template.special_tokens)
        parts = [tokens, variables, self.template, day, _RENDERING_VERSION, *filter(None, [self.tool_template])]
        return hashlib.sha256(chr(0).join(parts).encode(errors="surrogatepass")).hexdigest()[:16]

    def render(
        self,
        messages: Messages,
        tools: Messages | None = None,
        first: int = 0,
        chat_template_kwargs: Kwargs | None = None,
    ) -> tuple[str, Spans]:
        """The conversation as text, and the half-open character spans of the assistant's turns in messages[first:]."""
        rendering = self._rendering(messages, tools, first, chat_template_kwargs)
        return rendering.text, rendering.spans

    def _rendering(self, messages: Messages, tools: Messages | None, first: int, kwargs: Kwargs | None) -> Rendering:
        template = self._template_for_tools if tools else self._template
        return template.render(messages, tools, first, kwargs)

    def _render_record(self, record: dict[str, Any]) -> "list[_Text]":
        if "text" in record:
            return [_Text(record["text"], None)]
        if "completions" in record:
            return self._render_answers(record, "completions")
        return [self._render(record, record["messages"])]

    def _render_rollouts(self, record: dict[str, Any]) -> "list[_Text]":
        """None of those that are token ids."""
        return [] if "prompt_ids" in record else self._render_answers(record, "completions")

    def _render_answers(self, record: dict[str, Any], key: str = "answers") -> "list[_Text]":
        prompt = record["prompt"]
        return [self._render(record, prompt + answer, len(prompt)) for answer in record[key]]

    def _render(self, record: dict[str, Any], messages: Messages, first: int = 0) -> "_Text":
        kwargs = record.get("chat_template_kwargs")
        rendering = self._rendering(messages, record.get("tools"), first, kwargs)
        return _Text(rendering.text, rendering.spans, rendering.notes)

    def _tokenized(
        self, records: Sequence[dict[str, Any] | ValueError], render: "Callable[[dict[str, Any]], list[_Text]]"
    ) -> Iterator[tuple[dict[str, Any] | ValueError, list[TokenizedDocument] | ValueError]]:
        """Each record with the tokens of the texts that it is rendered as, or what is wrong with the first bad one."""
        sizes: list[int] = []

        def texts() -> Iterator[_Text | ValueError]:
            for record in records:
                rendered = attempt(render, record)
                of_one = [rendered] if isinstance(rendered, ValueError) else rendered
                sizes.append(len(of_one))
                yield from of_one

        encoded = iter(self._encode(texts()))
        for record, size in zip(records, sizes, strict=True):
            documents = [*islice(encoded, size)]
            good = [document for document in documents if not isinstance(document, ValueError)]
            error = next((document for document in documents if isinstance(document, ValueError)), None)
            yield record, good if error is None else error

    def _encode(self, texts: Iterable["_Text | ValueError"]) -> list[TokenizedDocument | ValueError]:
        """Texts are taken and encoded in batches of so many characters that memory is bounded."""
        return [document for batch in _batches(texts) for document in self._documents_of(batch)]

    def _documents_of(self, texts: list["_Text | ValueError"]) -> Iterator[TokenizedDocument | ValueError]:
        encodings = iter(self._encode_batch([text.text for text in texts if not isinstance(text, ValueError)]))
        for text in texts:
            yield text if isinstance(text, ValueError) else attempt(self._document, next(encodings), text)

    def _encode_batch(self, texts: list[str]) -> Sequence[Encoding | ValueError]:
        encode_batch = self.tokenizer.encode_batch if self._num_bytes is None else self.tokenizer.encode_batch_fast
        try:
            return [*encode_batch(texts, add_special_tokens=False)]
        except MemoryError:  # of the machine, not of the text
            raise
        except Exception as error:  # the library raises nothing narrower, for the whole batch
            if len(texts) == 1:
                return [ValueError(f"the tokenizer refuses the text ({one_line(error)}); correct the record")]
            return [self._encode_batch([text])[0] for text in texts]

    def _document(self, encoding: Encoding, text: "_Text") -> TokenizedDocument:
        tokens = np.array(encoding.ids, np.int32)
        if text.spans is None:
            tokens = np.array([*_given(self.bos_id), *tokens, *_given(self.eos_id)], dtype=np.int32)
            return TokenizedDocument(tokens, np.ones(len(tokens), dtype=bool))
        return TokenizedDocument(tokens, self._learned(tokens, encoding, text.text, text.spans), text.notes)

    def _learned(self, tokens: np.ndarray, encoding: Encoding, text: str, spans: Spans) -> np.ndarray:
        """bool [n]: which tokens hold a character of a span."""
        if self._num_bytes is not None:
            num_bytes, written, normalizer = self._num_bytes[tokens], text.encode(), self.tokenizer.normalizer
            if num_bytes.sum() == len(written) and (not normalizer or normalizer.normalize_str(text) == text):
                return _tokens_at(num_bytes.cumsum(), _in_bytes(spans, text, written))
            encoding = self.tokenizer.encode(text, add_special_tokens=False)  # with offsets
        return _tokens_in_spans(encoding, spans)

    @functools.cached_property
    def _num_bytes(self) -> np.ndarray | None:
        """int64 [ids]: bytes of text of each token, if tokens are the bytes of the text, cut into runs.

        So they are with a byte-level BPE that has all bytes and puts or leaves out none. Its texts are encoded without
        offsets, in seven eighths of the time. None: not so, and the tokenizer is asked for offsets.
        """
        tokenizer = self.tokenizer
        if not isinstance(tokenizer.decoder, ByteLevelDecoder) or not isinstance(tokenizer.model, BPE):
            return None
        vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
        probe = "".join(tokenizer.encode("One  word,\n two.", add_special_tokens=False).tokens)
        if probe != "OneĠĠword,ĊĠtwo." or not vocabulary.keys() >= set(ByteLevel.alphabet()):
            return None
        if any(token.lstrip or token.rstrip for token in added.values()):
            return None
        num_bytes = np.zeros(1 + max([*vocabulary.values(), *added]), np.int64)
        num_bytes[[*vocabulary.values()]] = [*map(len, vocabulary)]  # a character stands for a byte
        num_bytes[[*added]] = [len(token.content.encode()) for token in added.values()]
        return num_bytes


def _document_of(record: dict[str, Any], documents: list[TokenizedDocument]) -> Documents:
    """What a record becomes, by its documents: one, or one for each answer."""
    return TokenizedAnswers(tuple(documents), tuple(record["weights"])) if "completions" in record else documents[0]


def _pairs_of(record: dict[str, Any], documents: list[TokenizedDocument]) -> TokenizedPairs:
    return pairs_of(documents, record["pairs"])


def _rollouts_of(record: dict[str, Any], documents: list[TokenizedDocument]) -> TokenizedAnswers:
    """The tokens of a prompt's answers. documents: of their texts; empty where the record has token ids."""
    if "prompt_ids" in record:
        prompt = record["prompt_ids"]
        for answer, mask in zip(record["completions"], record["masks"], strict=True):
            learned = np.array([0] * len(prompt) + ([1] * len(answer) if mask is None else mask), bool)
            documents.append(TokenizedDocument(np.array(prompt + answer, np.int32), learned))
    logprobs = [
        _at_tokens(f"completions[{number}]", document, given, record)
        for number, (document, given) in enumerate(zip(documents, record["logprobs"], strict=True))
        if given is not None
    ]
    return TokenizedAnswers(tuple(documents), tuple(record["values"]), record["rewarded"], tuple(logprobs))


def _at_tokens(name: str, document: TokenizedDocument, given: list[float], record: dict[str, Any]) -> np.ndarray:
    """float32 [n]: the log-probabilities of the tokens that were sampled, NaN elsewhere."""
    where = np.flatnonzero(document.loss_mask)
    if "prompt_ids" in record:
        where = np.arange(len(record["prompt_ids"]), len(document.tokens))
    if len(given) != len(where):
        raise ValueError(
            f"{name} has {len(given)} logprobs for {len(where)} tokens; give one for each token, best beside "
            '"prompt_ids" and "completion_ids", which are taken as they were sampled'
        )
    found = np.full(len(document.tokens), np.nan, np.float32)
    found[where] = given
    found[~document.loss_mask] = np.nan
    if (least := np.nanmin(found, initial=0)) < _LEAST_LOGPROB:
        raise ValueError(
            f"{name}.logprobs has {least:g}, and no policy samples such a token; correct it, or give the "
            'token 0 in "completion_mask"'
        )
    return found


class _Text(NamedTuple):
    """What is encoded. spans: what is learned of it; None: plain text, which is learned in full."""

    text: str
    spans: Spans | None
    notes: tuple[str, ...] = ()


def _batches(texts: Iterable[_Text | ValueError]) -> Iterator[list[_Text | ValueError]]:
    batch: list[_Text | ValueError] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += 0 if isinstance(text, ValueError) else len(text.text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    yield batch


def load_chat_template(assets_path: str | os.PathLike[str]) -> str | None:
    """The chat template of a Hugging Face assets directory; None when it has none. Raises as `load_chat_templates`."""
    return load_chat_templates(assets_path).get(DEFAULT)


def load_chat_templates(assets_path: str | os.PathLike[str]) -> dict[str, str]:
    """The chat templates of a Hugging Face assets directory by name: DEFAULT, TOOL_USE and others; empty without any.

    They are `chat_template.jinja` (DEFAULT), the files of `additional_chat_templates/`, and what neither names of
    "chat_template" in `tokenizer_config.json`, a string (DEFAULT) or a list of `{"name", "template"}`.

    Raises ValueError if the path is no directory, the files are malformed, or none of several templates is DEFAULT.
    """
    if not os.path.isdir(assets_path):
        raise ValueError(f"{quoted_path(assets_path)} is not a directory; give the one that holds tokenizer.json")
    named = {path.stem: path for path in sorted(Path(assets_path, "additional_chat_templates").glob("*.jinja"))}
    jinja = Path(assets_path, "chat_template.jinja")
    files = named | ({DEFAULT: jinja} if jinja.exists() else {})
    path = Path(assets_path, CONFIG)
    templates = _configured_templates(path) | {name: _read_template(file) for name, file in files.items()}
    if templates and DEFAULT not in templates:
        raise ValueError(
            f'{shown(path)}: the chat templates are named {quoted(sorted(templates))}; name one of them "default"'
        )
    return templates


def _read_template(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            lack(error, shown(path)) or f"{shown(path)} cannot be read ({one_line(error)}); write it again, as UTF-8"
        ) from None


def _configured_templates(path: Path) -> dict[str, str]:
    """The templates of a tokenizer_config.json; none without the file."""
    template = read_object(path).get("chat_template")
    if isinstance(template, list):
        return _named_templates(template, path)
    if template is not None and not isinstance(template, str):
        raise ValueError(f'{shown(path)}: "chat_template" is a {type(template).__name__}; write a string or a list')
    return {} if template is None else {DEFAULT: template}


def _named_templates(templates: list[Any], path: Path) -> dict[str, str]:
    try:
        by_name = {entry["name"]: entry["template"] for entry in templates}
        if not all(isinstance(text, str) for pair in by_name.items() for text in pair):
            raise TypeError
    except (TypeError, KeyError):
        raise ValueError(
            f'{shown(path)}: "chat_template" is a list; give each entry a "name" and a "template", both of them text'
        ) from None
    return by_name


def default_template(tokenizer: Tokenizer) -> str:
    """The template for assets without one: ChatML if the vocabulary has ChatML's two tokens, else plain text."""
    has_chatml = all(tokenizer.token_to_id(token) is not None for token in ("<|im_start|>", "<|im_end|>"))
    return CHATML_TEMPLATE if has_chatml else PLAIN_TEMPLATE


def _tokens_in_spans(encoding: Encoding, spans: Spans) -> np.ndarray:
    """bool [n]: which tokens hold a character of a span.

    A tokenizer may leave the space before a word out of the word's offsets; that space counts as part of the token.
    Offsets ascend, so the ends of a span are searched for: making a list of all offsets takes as long as encoding.
    """

    def offsets(token: int) -> tuple[int, int]:
        return encoding.token_to_chars(token) or (0, 0)

    def end_of(token: int) -> int:
        return offsets(token)[1]

    tokens = range(len(encoding))
    inside = np.zeros(len(tokens), dtype=bool)
    for start, stop in spans:
        if start < stop:
            first = bisect_right(tokens, start, key=end_of)
            last = bisect_left(tokens, stop, first, key=end_of)
            while last + 1 < len(tokens) and offsets(last + 1)[0] < stop:  # more tokens of one character
                last += 1
            inside[first : last + 1] = True
    return inside


def _tokens_at(ends: np.ndarray, spans: Spans) -> np.ndarray:
    """bool [n]: which tokens hold a byte of a span. ends: int64 [n], bytes of the text up to the end of each token."""
    inside = np.zeros(len(ends), dtype=bool)
    for start, stop in spans:
        if start < stop:
            inside[ends.searchsorted(start, side="right") : ends.searchsorted(stop) + 1] = True
    return inside


def _in_bytes(spans: Spans, text: str, written: bytes) -> Spans:
    """Spans of characters as spans of bytes. written: text in UTF-8."""
    if len(written) == len(text):
        return spans
    return [(len(text[:start].encode()), len(text[:stop].encode())) for start, stop in spans]


def _given(token_id: int | None) -> list[int]:
    return [] if token_id is None else [token_id]


def _unwrap(batch: Sequence[T | ValueError]) -> T:
    (result,) = batch
    if isinstance(result, ValueError):
        raise result
    return result
