"""Rollouts: a prompt with the answers that a policy sampled, and how good each was.

    {"prompt": "..." or messages, "completions": [answer, ...]}        text, which the chat template writes
    {"prompt_ids": [1, 2, ...], "completions": [answer, ...]}          token ids, which are taken as they are

An answer is an object with "completion" (text or messages) beside "prompt", or with "completion_ids" beside
"prompt_ids", and

- "advantage", or "reward", from which advantages are made in the group of a prompt; the same for all answers;
- "logprobs": the log-probability of each sampled token under the policy that sampled it;
- "completion_mask", beside "completion_ids": 0 for each token that the policy did not sample, such as a tool's result.

A single answer may stand in the record itself. "system", "tools" and "chat_template_kwargs" are as in `formats`; other
keys are ignored.
"""

from typing import Any

from torchtitan_magi.data.records.formats import BELOW, check_only_text, is_number, parse_document, quoted_keys
from torchtitan_magi.wording import quoted

_OF_TEXT = ("prompt", "system", "tools", "chat_template_kwargs")
OF_ANSWER = ("completion", "completion_ids", "advantage", "reward", "logprobs", "completion_mask")
_ABOVE = 1e-3  # a log-probability may be by rounding


def parse_rollouts(record: Any) -> dict[str, Any]:
    """A JSON value -> `{"prompt": Messages, "completions": list[Messages]}`, perhaps with "tools" and
    "chat_template_kwargs", or `{"prompt_ids": list[int], "completions": list[list[int]], "masks": list}`; and
    "values": a float for each answer, "rewarded": whether these are rewards, "logprobs": for each a list or None.

    Raises ValueError (`what; remedy`) when it has none of the forms.
    """
    if not isinstance(record, dict):
        raise ValueError(f'the line is {quoted(record)}; write an object with "prompt" and "completions"')
    record = _without_null(record)  # of tables, which have all keys in each record
    check_only_text(record)
    answers = record.get("completions")
    if answers is None and not record.keys().isdisjoint(("completion", "completion_ids")):
        answers = [{key: record[key] for key in OF_ANSWER if key in record}]
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, dict) for answer in answers):
        lacks = f'the record has no "completions", only the keys {quoted_keys(record)}'
        raise ValueError(
            (lacks if answers is None else f'"completions" is {quoted(answers)}')
            + '; write a list of objects with "completion" (or "completion_ids") and "advantage" (or "reward")'
        )
    answers = [_without_null(answer) for answer in answers]
    names = [f"completions[{number}]" for number in range(len(answers))]
    kind = _kind_of(answers)
    numbers: dict[str, Any] = {
        "values": [_number(f"{name}.{kind}", answer[kind]) for name, answer in zip(names, answers, strict=True)],
        "rewarded": kind == "reward",
        "logprobs": [_logprobs(name, answer) for name, answer in zip(names, answers, strict=True)],
    }
    if any(given is None for given in numbers["logprobs"]) and any(given is not None for given in numbers["logprobs"]):
        raise ValueError('some of "completions" have "logprobs" and others none; give all of them some, or none')
    return (_of_ids if "prompt_ids" in record else _of_text)(record, answers, names) | numbers


def _without_null(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _kind_of(answers: list[dict[str, Any]]) -> str:
    """ "advantage" or "reward": what all answers have."""
    kinds = {tuple(key for key in ("advantage", "reward") if key in answer) for answer in answers}
    if len(kinds) > 1 or (kind := kinds.pop()) not in (("advantage",), ("reward",)):
        raise ValueError('the answers do not all have one of "advantage" and "reward"; give each the same of the two')
    if kind == ("reward",) and len(answers) == 1:
        raise ValueError(
            'an answer by itself has a "reward", and no other answer to compare it with; give the answers of a prompt '
            'in one record, as "completions", or an "advantage"'
        )
    return kind[0]


def _of_text(record: dict[str, Any], answers: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    for name, answer in zip(names, answers, strict=True):
        if "completion" not in answer:
            raise ValueError(f'{name} has no "completion", only the keys {quoted_keys(answer)}; add it')
        if "completion_mask" in answer:
            raise ValueError(
                f'{name} has "completion_mask" beside "completion"; use it with "prompt_ids" and "completion_ids", or '
                "messages, of which the assistant's are learned"
            )
    texts = [{"completion": answer["completion"]} for answer in answers]
    parsed = parse_document({key: record[key] for key in _OF_TEXT if key in record} | {"completions": texts})
    del parsed["weights"]
    return parsed


def _of_ids(record: dict[str, Any], answers: list[dict[str, Any]], names: list[str]) -> dict[str, Any]:
    if "prompt" in record:
        raise ValueError('the record has "prompt" and "prompt_ids"; leave it one of them')
    for name, answer in zip(names, answers, strict=True):
        if "completion_ids" not in answer:
            raise ValueError(f'{name} has no "completion_ids", only the keys {quoted_keys(answer)}; add them')
    given = [answer["completion_ids"] for answer in answers]
    ids = [_ids(f"{name}.completion_ids", answer) for name, answer in zip(names, given, strict=True)]
    masks = [answer.get("completion_mask") for answer in answers]
    for name, those, mask in zip(names, ids, masks, strict=True):
        if mask is not None and not (isinstance(mask, list) and len(mask) == len(those) and all(map(_is_bit, mask))):
            raise ValueError(f"{name}.completion_mask is {quoted(mask)}; write 0 or 1 for each of {len(those)} tokens")
    return {"prompt_ids": _ids('"prompt_ids"', record["prompt_ids"]), "completions": ids, "masks": masks}


def _is_bit(value: Any) -> bool:
    return type(value) is int and value in (0, 1)


def _ids(name: str, ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
        raise ValueError(f"{name} is {quoted(ids)}; write a list of token ids")
    return ids


def _logprobs(name: str, answer: dict[str, Any]) -> list[float] | None:
    given = answer.get("logprobs")
    if given is None:
        return None
    if not isinstance(given, list) or not given:
        raise ValueError(f"{name}.logprobs is {quoted(given)}; write a list of numbers")
    found = [_number(f"{name}.logprobs", value) for value in given]
    if max(found) > _ABOVE:
        raise ValueError(f"{name}.logprobs has {max(found)}; a log-probability is at most 0")
    return found


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"{name} is {quoted(value)}; use a finite number, {BELOW}")
    return float(value)
