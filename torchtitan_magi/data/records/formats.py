"""Record formats, normalised to one form for documents and one for preference pairs.

Documents (`parse_document`), recognised by their key:

    {"messages": [{"role": "user", "content": "..."}, ...]}              the form of chat interfaces
    {"conversations": [{"from": "human", "value": "..."}, ...]}          ShareGPT
    {"prompt": "..." or messages, "completion": "..." or messages}
    {"prompt": "..." or messages, "completions": [...]}                  several answers, see below
    {"instruction": "...", "input": "...", "output": "..."}              Alpaca; "input" may be left out
    {"text": "..."}                                                      plain text, with loss on all of it

Preference pairs (`parse_pair`):

    {"prompt", "chosen", "rejected"}                                     each a string or messages
    {"prompt", "completions": [...], "pairs": [[0, 2], [1, 2]]}          numbers of the chosen and the rejected one
    {"prompt", "completions": [{"completion", "score": 1.5}, ...]}       the best against each that is worse

In the first, without "prompt", or if "chosen" and "rejected" both repeat it, these two are whole conversations; the
messages with which both begin are the prompt. In the last, of equal scores none is better, and the first of the best is
the best.

Each of "completions" is a string, messages, or `{"completion": "..." or messages}`, in a document perhaps with a
"weight", in pairs with a "score". As documents they are learned as so many records with "prompt" and "completion", each
of which counts as often as its weight says (1 if none is given). Of a prompt nothing is learned, the assistant's turns
included.

A string stands for one turn: the user's in "prompt", the assistant's in "completion", "chosen" and "rejected". "tools"
and "chat_template_kwargs" go to the chat template with the messages; "system" (a string) becomes the first message, and
a record that begins with another system message is malformed.
"images", "videos" and "audios" (and their singulars), if not empty, make a conversation malformed.
Other keys of a record are ignored; other keys of a message reach the template unless they are null. Content is a
string, or a list of `{"type": "text", "text": ...}` that is joined. It may be null beside "tool_calls", whose
"arguments" are an object or its JSON text, as in OpenAI's format; empty text is an object without keys. "reasoning" and
"thinking" are other names of "reasoning_content". An assistant's message with `"weight": 0` is not learned; "loss",
"train" and "loss_mask" are other names of "weight", and false of 0.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchtitan_magi.data.records.record_file import FORMS
from torchtitan_magi.wording import quoted

ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"} | {role: role for role in ROLES}

_REASONING = ("reasoning_content", "reasoning", "thinking")
_WEIGHT = ("weight", "loss", "train", "loss_mask")
_JUDGED = {"score": "dpo", "advantage": "rollouts", "reward": "rollouts"}  # keys of answers, and the dataset for them
SEEN = ("images", "image", "videos", "video", "audios", "audio")  # beside messages: what they are about
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")  # of a template
_TOO_LARGE = 1e38  # for float32, in which numbers of answers are kept
BELOW = "below 1e38"

Messages = list[dict[str, Any]]


@contextmanager
def _on_the_stack() -> Iterator[None]:
    """Refuses what Python's stack is too small for."""
    try:
        yield
    except RecursionError:
        raise ValueError("the record is nested too deeply; remove it") from None


@_on_the_stack()
def parse_document(record: Any) -> dict[str, Any]:
    """A JSON value -> `{"text": str}`, `{"messages": Messages}`, or, of several answers, `{"prompt": Messages,
    "completions": list[Messages], "weights": list[float]}`, the last two perhaps with "tools".

    Raises ValueError (`what; remedy`) when it has none of the forms.
    """
    _check_object(record, '"messages" or "text"')
    forms = [key for key in FORMS if key in record]
    if forms == ["output", "text"]:  # Alpaca's own records repeat themselves as "text"
        forms.pop()
    if len(forms) > 1:
        both = " and ".join(f'"{form}"' for form in forms)
        raise ValueError(f"the record has {both}; leave it one of them")
    if not forms:
        if "chosen" in record:
            raise ValueError(
                f'the record is a preference pair, with the keys {quoted_keys(record)}; use it with dataset "dpo"'
            )
        raise ValueError(
            f'the record has only the keys {quoted_keys(record)}; give it "messages" or "text" (or "conversations", '
            '"prompt" and "completion", "instruction" and "output")'
        )
    (form,) = forms
    if form == "text":
        return {"text": _text(record, "text")}
    if form == "completions":
        return _with_tools(record, _weighted_answers(record))
    if form == "messages":
        messages = _messages("messages", record["messages"])
    elif form == "conversations":
        messages = _sharegpt(record["conversations"])
    elif form == "completion":
        messages = _prompted(record)
    else:
        messages = _alpaca(record)
    return _with_tools(record, {"messages": _with_system(record, messages)})


@_on_the_stack()
def parse_pair(record: Any) -> dict[str, Any]:
    """A JSON value -> `{"prompt": Messages, "answers": list[Messages], "pairs": list[tuple[int, int]]}`, perhaps with
    "tools". A pair has the numbers of the chosen and the rejected answer; answers that no pair has are left out.

    Raises ValueError (`what; remedy`) when it has none of the forms.
    """
    _check_object(record, '"prompt", "chosen" and "rejected"')
    if "completions" in record and record.keys().isdisjoint(("chosen", "rejected")):
        return _with_tools(record, _answers_in_pairs(record))
    chosen, rejected = _completion(record, "chosen"), _completion(record, "rejected")
    prompt = _turn(record, "prompt", "user") if "prompt" in record else []
    repeats = [_repeats(prompt, completion) for completion in (chosen, rejected)]
    if not all(repeats) and (any(repeats) or prompt[-1] in (chosen[0], rejected[0])):
        raise ValueError('"chosen" or "rejected" repeats some of "prompt"; let both repeat all of it, or none')
    if all(repeats):
        alike = 0
        while alike < min(len(chosen), len(rejected)) - 1 and chosen[alike] == rejected[alike]:
            alike += 1
        prompt, chosen, rejected = chosen[:alike], chosen[alike:], rejected[alike:]
    if not prompt:
        raise ValueError('chosen and rejected begin with different messages; give the record a "prompt"')
    for name, completion in (("chosen", chosen), ("rejected", rejected)):
        if not any(message["role"] == "assistant" for message in completion):
            raise ValueError(f'"{name}" has no assistant message after the prompt; add one')
    return _with_tools(
        record, {"prompt": _with_system(record, prompt), "answers": [chosen, rejected], "pairs": [(0, 1)]}
    )


def _repeats(prompt: Messages, completion: Messages) -> bool:
    """Whether a completion begins with the prompt; it may have a system message that the prompt lacks."""
    start = int(bool(prompt) and completion[0]["role"] == "system" != prompt[0]["role"])
    return completion[start : start + len(prompt)] == prompt


def _check_object(record: Any, keys: str) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"the line is {_kind(record)}; write an object with {keys}")


def _text(record: dict[str, Any], key: str) -> str:
    if key not in record:
        raise ValueError(f'the record has no "{key}", only the keys {quoted_keys(record)}; add it')
    if not isinstance(record[key], str):
        raise ValueError(f'"{key}" is {_kind(record[key])}; write a string')
    if not record[key]:
        raise ValueError(f'"{key}" is empty; remove the line')
    return record[key]


def _turn(record: dict[str, Any], key: str, role: str) -> Messages:
    """Messages, or a string as one turn of `role`."""
    if isinstance(record.get(key), list):
        return _messages(key, record[key])
    return [{"role": role, "content": _text(record, key)}]


def _completion(record: dict[str, Any], key: str) -> Messages:
    if isinstance(record.get(key), dict):  # one message
        return _messages(key, [record[key]])
    return _turn(record, key, "assistant")


def _prompted(record: dict[str, Any]) -> Messages:
    """The messages of a prompt, of which none is learned, and its completion."""
    prompt, completion = _turn(record, "prompt", "user"), _completion(record, "completion")
    _check_begins_anew('"completion"', prompt, completion)
    return [turn | {"weight": 0} if turn["role"] == "assistant" else turn for turn in prompt] + completion


def _check_begins_anew(name: str, prompt: Messages, completion: Messages) -> None:
    if _repeats(prompt, completion):
        raise ValueError(f'{name} repeats "prompt"; leave it out there')


def _answers(record: dict[str, Any], prompt: Messages) -> tuple[list[Messages], list[dict[str, Any]]]:
    """The messages of each completion, and the object that says more of it, {} where it is none."""
    completions = record["completions"]
    if not isinstance(completions, list) or not completions:
        raise ValueError(f'"completions" is {_kind(completions)}; write a list of answers, each a string or messages')
    answers, given = [], []
    for index, answer in enumerate(completions):
        name, more = f"completions[{index}]", dict[str, Any]()
        if isinstance(answer, dict) and "completion" in answer:
            answer, more = answer["completion"], answer
        answers.append(_completion({name: answer}, name))
        given.append(more)
        if not any(message["role"] == "assistant" for message in answers[-1]):
            raise ValueError(f"{name} has no assistant message; add one")
        _check_begins_anew(name, prompt, answers[-1])
    return answers, given


def _weighted_answers(record: dict[str, Any]) -> dict[str, Any]:
    """Prompt, completions and their weights."""
    prompt = _turn(record, "prompt", "user")
    answers, given = _answers(record, prompt)
    for index, more in enumerate(given):
        key = next((key for key in _JUDGED if more.get(key) is not None), None)
        if key and more.get("weight") is None:
            raise ValueError(
                f'completions[{index}] has "{key}", by which no answer is learned here; use it with dataset '
                f'"{_JUDGED[key]}", or give each answer a "weight"'
            )
    if record.get("pairs") is not None:
        raise ValueError('the record has "pairs" of its completions; use it with dataset "dpo", or remove them')
    weights = [1 if more.get("weight") is None else more["weight"] for more in given]
    for index, weight in enumerate(weights):
        if not is_number(weight) or weight < 0:
            raise ValueError(f"completions[{index}].weight is {quoted(weight)}; use a number of at least 0, {BELOW}")
    weights = [float(weight) for weight in weights]
    return {"prompt": _with_system(record, prompt), "completions": answers, "weights": weights}


def _answers_in_pairs(record: dict[str, Any]) -> dict[str, Any]:
    """Prompt, the completions that are in pairs, and these."""
    prompt = _turn(record, "prompt", "user")
    answers, given = _answers(record, prompt)
    scores = [more.get("score") for more in given]
    has_scores = any(score is not None for score in scores)
    if record.get("pairs") is not None:
        if has_scores:
            raise ValueError('the record has "pairs" and scores; leave it one of them')
        pairs = _given_pairs(record["pairs"], len(answers))
    elif has_scores:
        pairs = _best_against_worse(scores)
    else:
        raise ValueError('the completions have no "score"; give each one, or the record "pairs"')
    used = sorted({number for pair in pairs for number in pair})
    place = {number: index for index, number in enumerate(used)}
    return {
        "prompt": _with_system(record, prompt),
        "answers": [answers[number] for number in used],
        "pairs": [(place[chosen], place[rejected]) for chosen, rejected in pairs],
    }


def _given_pairs(pairs: Any, num_answers: int) -> list[tuple[int, int]]:
    if not isinstance(pairs, list) or not pairs:
        raise ValueError(f'"pairs" is {_kind(pairs)}; write a list of [chosen, rejected], numbers of completions')
    found = dict[tuple[int, int], None]()
    for index, pair in enumerate(pairs):
        name = f"pairs[{index}]"
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair)):
            raise ValueError(f"{name} is {_kind(pair)}; write [chosen, rejected], numbers of completions")
        chosen, rejected = pair
        if not all(0 <= number < num_answers for number in pair):
            raise ValueError(f"{name} is {quoted(pair)}; completions have the numbers 0 to {num_answers - 1}")
        if chosen == rejected:
            raise ValueError(f"{name} is {quoted(pair)}; name two completions")
        if (chosen, rejected) in found:
            raise ValueError(f"{name} is {quoted(pair)} once more; remove it")
        found[chosen, rejected] = None
    return list(found)


def _best_against_worse(scores: list[Any]) -> list[tuple[int, int]]:
    for index, score in enumerate(scores):
        if not is_number(score):
            raise ValueError(
                f"completions[{index}].score is {_kind(score)}; give each completion a finite number, {BELOW}"
            )
    best = scores.index(max(scores))
    pairs = [(best, other) for other, score in enumerate(scores) if score < scores[best]]
    if not pairs:
        raise ValueError(f"no completion has a score below the best, {quoted(scores[best])}; remove the record")
    return pairs


def is_number(value: Any) -> bool:
    """Whether it is a finite number that is not too large."""
    return type(value) in (int, float) and abs(value) < _TOO_LARGE


def _alpaca(record: dict[str, Any]) -> Messages:
    question = _text(record, "instruction")
    if record.get("input"):
        question += "\n\n" + _text(record, "input")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": _text(record, "output")}]


def _sharegpt(turns: Any) -> Messages:
    messages = []
    for index, turn in enumerate(_list("conversations", turns)):
        name = f"conversations[{index}]"
        if isinstance(turn, dict) and turn.get("from") is not None:
            _check_keys(name, turn, ("from", "value"))
            role = _SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
            if role is None:
                raise ValueError(f"{name}.from is {quoted(turn['from'])}; use one of {', '.join(_SHAREGPT_ROLES)}")
            for key, other in (("role", "from"), ("content", "value")):
                if turn.get(key) is not None:
                    raise ValueError(f'{name} has "{other}" and "{key}"; leave it one of them')
            turn = {**turn, "role": role, "content": turn["value"], "from": None, "value": None}
        messages.append(_message(name, turn))
    return messages


def _messages(name: str, messages: Any) -> Messages:
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(_list(name, messages))]


def _list(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f'"{name}" is {_kind(value)}; write a list of objects with "role" and "content"')
    if not value:
        raise ValueError(f'"{name}" is empty; remove the line')
    return value


def _message(name: str, message: Any) -> dict[str, Any]:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    _check_keys(name, message, ("role",) if calls else ("role", "content"))
    if not isinstance(message["role"], str):
        raise ValueError(f"{name}.role is {_kind(message['role'])}; write a string")
    if message["role"] not in ROLES:
        raise ValueError(f"{name}.role is {quoted(message['role'])}; use one of {', '.join(ROLES)}")
    if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ValueError(f"{name}.tool_calls is {_kind(calls)}; write a list of objects")
    content = message.get("content")
    if content is not None or not calls:
        content = _content(name, content)
    if not content and not calls and message["role"] == "assistant":
        raise ValueError(f"{name}.content is empty, and it is the assistant's; write text or remove the message")
    # Exporters write null for keys that a message lacks; templates test whether a key is present.
    given = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    given = _with_weight(name, given)
    calls = [_with_arguments(f"{name}.tool_calls[{index}]", call) for index, call in enumerate(calls or [])]
    return _with_reasoning(name, given) | {"content": content} | ({"tool_calls": calls} if calls else {})


def _with_weight(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message with what it says of its loss, if anything, as "weight" 0 or 1."""
    if message.keys().isdisjoint(_WEIGHT):
        return message
    named = {key: message[key] for key in _WEIGHT if key in message}
    for key, weight in named.items():
        if weight not in (0, 1):
            raise ValueError(f"{name}.{key} is {quoted(weight)}; use 0 for a turn not to be learned, or 1")
    if len({int(weight) for weight in named.values()}) > 1:
        raise ValueError(f"{name} says different things in {' and '.join(named)}; leave it one of them")
    rest = {key: value for key, value in message.items() if key not in named}
    return rest | {"weight": int(next(iter(named.values())))}


def _with_reasoning(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning, if any, as "reasoning_content"."""
    if message.keys().isdisjoint(_REASONING):
        return message
    named = {key: message[key] for key in _REASONING if message.get(key)}
    rest = {key: value for key, value in message.items() if key not in _REASONING}
    for key, reasoning in named.items():
        if not isinstance(reasoning, str):
            raise ValueError(f"{name}.{key} is {_kind(reasoning)}; write a string")
    if len(set(named.values())) > 1:
        raise ValueError(f"{name} has different texts in {' and '.join(named)}; leave it one of them")
    return rest | ({"reasoning_content": next(iter(named.values()))} if named else {})


def _with_arguments(name: str, call: dict[str, Any]) -> dict[str, Any]:
    """The tool call with its arguments as an object instead of JSON text."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(f"{name}.function", call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _json(f"{name}.arguments", arguments) if arguments.strip() else {}
        except json.JSONDecodeError:  # in another language
            return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def _json(name: str, text: str) -> Any:
    """The value of JSON text inside a record. Raises ValueError, JSONDecodeError if it is not JSON."""
    try:
        value = json.loads(text, object_pairs_hook=functools.partial(_object, name))
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{name} is JSON that is nested too deeply; remove the line") from None
    except UnicodeEncodeError as error:
        escape = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"{name} has the escape {escape}, half of a surrogate pair; write the character") from None
    return value


def _object(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{name} has the key {quoted(twice)} twice; leave it one of them")
    return unique


def _content(name: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"{name}.content is {_kind(content)}; write a string")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f'{name}.content[{index}] is {_kind(part)}; only parts {{"type": "text", "text": "..."}} are understood'
            )
        texts.append(part["text"])
    return "".join(texts)


def _check_keys(name: str, message: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(message, dict):
        raise ValueError(f'{name} is {_kind(message)}; write an object with "role" and "content"')
    for key in keys:
        if key not in message:
            raise ValueError(f'{name} has no "{key}", only the keys {quoted_keys(message)}; add it')


def _with_system(record: dict[str, Any], messages: Messages) -> Messages:
    if not record.get("system"):
        return messages
    system = {"role": "system", "content": _text(record, "system")}
    if messages[0]["role"] != "system":
        return [system, *messages]
    if messages[0]["content"] != system["content"]:
        raise ValueError('the record has "system" and a first message of role "system"; leave it one of them')
    return messages


def check_only_text(record: dict[str, Any]) -> None:
    """Raises ValueError for a record with images and the like."""
    if name := next((key for key in SEEN if record.get(key)), None):
        raise ValueError(
            f'the record has "{name}", and only text is trained here; remove it, or the key where its text needs none'
        )


def _with_tools(record: dict[str, Any], parsed: dict[str, Any]) -> dict[str, Any]:
    """The record with what else the chat template is given; some data sets hold it as JSON text."""
    check_only_text(record)
    tools = _given(record, "tools", "a list of objects")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f'"tools" is {_kind(tools)}; write a list of objects')
    kwargs = _given(record, "chat_template_kwargs", "an object")
    if kwargs and not isinstance(kwargs, dict):
        raise ValueError(f'"chat_template_kwargs" is {_kind(kwargs)}; write an object')
    kwargs = {name: value for name, value in (kwargs or {}).items() if value is not None}
    for name in kwargs:
        if name in _RESERVED:
            raise ValueError(f'"chat_template_kwargs" has "{name}", which is not the record\'s to give; remove it')
    return parsed | ({"tools": tools} if tools else {}) | ({"chat_template_kwargs": kwargs} if kwargs else {})


def _given(record: dict[str, Any], key: str, form: str) -> Any:
    value = record.get(key)
    if not (isinstance(value, str) and value):
        return value
    try:
        return _json(f'"{key}"', value)
    except json.JSONDecodeError:
        raise ValueError(f'"{key}" is {_kind(value)}, which is not JSON; write {form}') from None


def _kind(value: Any) -> str:
    return "null" if value is None else f"{quoted(value)} ({type(value).__name__})"


def quoted_keys(record: dict[str, Any]) -> str:
    """Its keys; of a record that a program gives not all need be text."""
    return quoted(sorted(record, key=str))
