"""What looks wrong in a record's tokens, and how to say it of many records."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np

from torchtitan_magi.data.inspection.spelling import Part, Speller
from torchtitan_magi.data.records.formats import ROLES
from torchtitan_magi.data.records.rollout_format import OF_ANSWER
from torchtitan_magi.data.tokens.chat import ChatTokenizer
from torchtitan_magi.wording import amount

Level = Literal["wrong", "look", "note"]
Found = tuple[str, str]  # (kind, detail)

# level -> kind -> what is said of {records}, with the {detail}
_SAID: dict[Level, dict[str, str]] = {
    "wrong": {
        "default": "the folder has no chat template: conversations are written as {detail}, which the model may never"
        " have seen; put its chat_template.jinja there",
        "set-up": "training refuses to start: {detail}",
        "probe": "a plain conversation of two rounds is refused: {detail}",
        "refused": "{records} refused: {detail}",
        "nothing": "nothing is learned in {records}: there is no text of the assistant, or the template marks none;"
        " add answers, or let the template mark them",
        "everything": "everything is learned in {records}: the template marks the user's text, too, or does not write"
        " it; let it mark answers only",
        "no end": "no end-of-turn token is learned in {records}: a model trained so does not learn to stop{detail};"
        " let the template end answers with EOS",
        "no EOS": "no EOS is learned in {records} of plain text: the tokenizer names none",
        "two BOS": "BOS {detail} comes twice at the beginning of {records}; take it out of the text or the template",
        "two EOS": "{detail}, which ends a turn or text, comes twice in a row in {records}; take it out of the text or"
        " the template",
        "not a token": "the template writes {detail}, which is not one token of this tokenizer: the template is of"
        " another model; take that of the model",
        "unknown": "the unknown token {detail} is in {records}: the tokenizer lacks their characters",
    },
    "look": {
        "template": "{detail}: in {records}",
        "role": "the template writes {detail}, which is not one token of this tokenizer: right for models such as"
        " Zephyr and Tulu, else the template is of another model",
        "text end": "turns end with the text {detail} in {records}: generation must stop at this text",
        "no BOS": "BOS {detail} is not at the beginning of {records}: the template does not write it",
        "id": "the token id {detail} of {records} is none of the tokenizer: a run ends there, unless the model has it",
        "misspelt": "a key of {records} is not used: {detail}",
        "special": "text of {records} spells the special token {detail}: it is read as the token",
    },
    "note": {
        "key": 'the key "{detail}" of {records} is not used',
        "end": "turns end with {detail}, which is not the tokenizer's EOS: generation must stop at it, too",
        "text": "{records} plain text: all of it is learned",
    },
}
LEVELS = tuple(_SAID)
KINDS = {kind: (level, said) for level, kinds in _SAID.items() for kind, said in kinds.items()}
# Nobody wants these if the template or every record has them: a run with one of them does not start.
SURE = {"nothing", "everything", "no end", "two BOS", "two EOS", "not a token"}

_FORMS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "completion": ("prompt", "completion"),
    "completions": ("prompt", "completions"),
    "output": ("instruction", "input", "output", "text"),
    "text": ("text",),
}
_FORMS_OF_PAIRS = {"chosen": ("prompt", "chosen", "rejected"), "completions": ("prompt", "completions", "pairs")}
_OF_PROMPT = ("prompt", "prompt_ids")
_FORMS_OF_ROLLOUTS = {
    "completions": (*_OF_PROMPT, "completions"),
    "completion": (*_OF_PROMPT, *OF_ANSWER),
    "completion_ids": (*_OF_PROMPT, *OF_ANSWER),
}
# what parsed pairs, rollouts and documents are known by -> keys of their forms, and of an answer
_KEYS: dict[str, tuple[Mapping[str, Sequence[str]], Sequence[str]]] = {
    "answers": (_FORMS_OF_PAIRS, ("completion", "score")),
    "values": (_FORMS_OF_ROLLOUTS, OF_ANSWER),
    "": (_FORMS, ("completion", "weight")),
}
_NEAR = 0.8  # of difflib's ratio: keys that are likely to be one, misspelt
_ALWAYS = ("system", "tools", "chat_template_kwargs")
# What templates write for tokens: <|im_start|>, <start_of_turn>, </s>
_TOKEN_LIKE = re.compile(r"<\|[^|<>\s]{1,40}\|>|<\w{1,20}_of_\w{1,20}>|</?s>")
_LAST, _TAIL = 20, 256  # characters of a text by which its end is found; tokens that are searched for it
_ROLES = {f"<|{role}|>" for role in ROLES}  # these are plain text to some models


@dataclass(frozen=True)
class Checker:
    """Looks for what is wrong in records of one tokenizer and template."""

    chat: ChatTokenizer
    speller: Speller

    def check(
        self, raw: Any, record: dict[str, Any], parts: tuple[Part, ...], notes: tuple[str, ...]
    ) -> Iterator[Found]:
        """What is wrong in one record.

        Args:
            raw: the JSON value.
            record: what was made of it.
            parts: its tokens.
            notes: what the template left out.
        """
        yield from self._tokens(record, parts)
        yield from (("template", note) for note in notes)
        yield from _unused_keys(raw, record)
        said = [content for part in parts for content in part.contents]
        yield from (("special", name) for name in self.speller.specials.values() for text in said if name in text)

    def check_template(self, part: Part) -> list[Found]:
        """What is wrong in the tokens of a conversation that only shows the template."""
        written = dict.fromkeys(_TOKEN_LIKE.findall(self.speller.text(part.tokens.tolist())))
        strange = [name for name in written if self.chat.tokenizer.token_to_id(name) is None]
        found = [("role" if name in _ROLES else "not a token", name) for name in strange]
        return [*found, *self._tokens({}, (part,))]

    def _tokens(self, record: dict[str, Any], parts: tuple[Part, ...]) -> Iterator[Found]:
        first = parts[0].tokens[:2].tolist()
        bos, eos = (self.speller.name(number) for number in (self.chat.bos_id, self.chat.eos_id))
        if bos and first == [self.chat.bos_id] * 2:
            yield "two BOS", bos
        if bos and first[:1] != [self.chat.bos_id]:
            yield "no BOS", bos
        unknown = getattr(self.chat.tokenizer.model, "unk_token", None)
        if unknown and any((part.tokens == self.chat.tokenizer.token_to_id(unknown)).any() for part in parts):
            yield "unknown", unknown
        is_ids = "prompt_ids" in record  # no template wrote them, and an answer may be cut off, or masked for that
        if is_ids and (largest := max(int(part.tokens.max()) for part in parts)) >= self._num_ids:
            yield "id", str(largest)
        answers = [part for part in parts if part.name != "prompt" and part.counts]
        learned = [part.learned.any() for part in answers]
        if not any(learned) or not (is_ids or all(learned)):
            yield "nothing", ""
            return
        if "text" in record:
            yield "text", ""
        elif not is_ids and _has_other_roles(record) and all(part.learned[1:].all() for part in parts):  # after BOS
            yield "everything", ""
        ends = [self._end(part) for part in answers]
        if None in ends and not is_ids:
            yield self._without_end(answers[ends.index(None)], "text" in record)
        for end in dict.fromkeys([eos, *ends]):
            if end and self._is_twice(end, parts, "text" in record):
                yield "two EOS", end
        for end in dict.fromkeys(ends):
            if end and end != eos:
                yield "end", end

    @functools.cached_property
    def _num_ids(self) -> int:
        return 1 + max(self.chat.tokenizer.get_vocab().values())

    def _is_twice(self, end: str, parts: tuple[Part, ...], is_text: bool) -> bool:
        """Whether the token comes twice in a row; of a text, at its end."""
        number = self.chat.tokenizer.token_to_id(end)
        runs = [part.tokens[number == self.chat.bos_id :][-2 if is_text else 0 :] == number for part in parts]
        return any((run[1:] & run[:-1]).any() for run in runs)

    def _end(self, part: Part) -> str | None:
        """The token that ends the learned text, before white space; None without one."""
        ids = part.tokens[part.learned].tolist()
        if (special := self.speller.last_special(ids)) is not None:
            return self.speller.specials[special]
        text = next(filter(None, (self.speller.text([number]).strip() for number in reversed(ids))), "")
        return text if _TOKEN_LIKE.fullmatch(text) else None

    def _without_end(self, part: Part, is_text: bool) -> Found:
        if is_text:
            return "no EOS", ""
        text = self._text_end(part)
        return ("text end", text) if text else ("no end", self._follower(part))

    def _text_end(self, part: Part) -> str:
        """What is learned after all that the record says, without a token that ends it; "" for white space."""
        said = part.contents[-1].strip()[-_LAST:] if part.contents else ""
        learned = self.speller.text(part.tokens[part.learned][-_TAIL:].tolist())
        return learned.rpartition(said)[2].strip() if said and said in learned else ""

    def _follower(self, part: Part) -> str:
        """Says which special token comes right after the learned text, if one does, or that there is no EOS."""
        after = part.tokens[int(np.flatnonzero(part.learned)[-1]) + 1 :][:1].tolist()
        name = self.speller.specials.get(after[0]) if after else None
        if name:
            return f" ({name} comes after the learned text, but is not learned)"
        return "" if self.chat.eos_id is not None else " (the tokenizer names no EOS)"


def _has_other_roles(record: dict[str, Any]) -> bool:
    """Whether the record has messages that are not the assistant's; the template's own conversation, {}, has."""
    return "messages" not in record or any(message["role"] != "assistant" for message in record["messages"])


def _unused_keys(raw: Any, record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What is found of the keys of a JSON value that nothing reads; nothing of a value that is no object. record: what
    was made of it."""
    if not isinstance(raw, dict):
        return
    kind = next((kind for kind in ("answers", "values") if kind in record), "")
    forms, of_answer = _KEYS[kind]
    form = next((form for form in forms if form in raw), "text")
    yield from _others(raw, (*forms.get(form, ("text",)), *_ALWAYS), "")
    answers = raw["completions"] if form == "completions" else []
    objects = [one for one in answers if isinstance(one, dict) and ("completion" in one or "completion_ids" in one)]
    for one in objects:
        yield from _others(one, of_answer, "completions[].")


def _others(values: dict[str, Any], known: Sequence[str], where: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if value is None or key in known:
            continue
        if near := get_close_matches(key, [one for one in known if one not in values], 1, _NEAR):
            yield "misspelt", f'"{where}{key}", which may be meant for "{near[0]}"'
        else:
            yield "key", where + key


def say(kind: str, detail: str, count: int, total: int) -> str:
    """The line for `count` of `total` records; for what the template does to every conversation if count is 0."""
    records = "every conversation" if not count else f"{'all ' if count == total > 1 else ''}{amount(count, 'record')}"
    if 0 < count < total:
        records += f" of {total:,} ({_percent(count / total)})"
    verb = {"refused": " are" if count > 1 else " is", "text": " are" if count > 1 else " is"}.get(kind, "")
    return KINDS[kind][1].format(records=records + verb, detail=detail)


def _percent(share: float) -> str:
    return "less than 0.1%" if share < 0.001 else f"{100 * share:.1f}%"
