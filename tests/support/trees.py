"""Conversations that begin alike: system messages, questions with several answers, first rounds that go on."""

import functools
import random
from pathlib import Path

from support.corpus import text
from support.jsonl import write_jsonl
from support.runs import new_folder


def conversation(*contents, **last):
    """A system message, and questions and answers in turn; ``last``: more of the last answer."""
    roles = ["system", *["user", "assistant"] * (len(contents) // 2)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    messages[-1] |= last
    return {"messages": messages}


@functools.cache
def trees_file(has_weights: bool = True) -> Path:
    """Records whose trees have forks in forks, labels that some of their records learn and others do not, a record
    twice, and records that have nothing in common. has_weights: whether some answer has the weight 0."""
    rng = random.Random(5)
    records = []
    for _ in range(3):
        system, question = text(rng, 150), text(rng, 140)
        answers = [text(rng, rng.randint(10, 60)) for _ in range(3)]
        records += [conversation(system, question, answer) for answer in answers]
        first = conversation(system, question, answers[0], **({"weight": 0} if has_weights else {}))
        records.append({"messages": first["messages"] + conversation(system, "and", answers[1])["messages"][1:]})
        follow_ups = [text(rng, 12) for _ in range(2)]
        records += [conversation(system, question, answers[0], ask, text(rng, 30)) for ask in follow_ups]
        records += [conversation(system, text(rng, 8), text(rng, rng.randint(5, 90))) for _ in range(4)]
    records.append(records[0])
    records += [{"text": text(rng, rng.randint(30, 200))} for _ in range(6)]
    rng.shuffle(records)
    write_jsonl(path := Path(new_folder(), "trees.jsonl"), records)
    return path


@functools.cache
def answers_files() -> tuple[Path, Path]:
    """Prompts with several answers, and the same as a record for each answer: none for one of weight 0, two for one of
    weight 2."""
    rng = random.Random(7)
    whole, alone = [], []
    for _ in range(6):
        prompt = [{"role": role, "content": text(rng, words)} for role, words in (("system", 80), ("user", 90))]
        answers = [text(rng, rng.randint(10, 90)) for _ in range(4)]
        weights = [1, 2, 0, None]
        weighted = [{"completion": a, "weight": w} for a, w in zip(answers, weights, strict=True)]
        whole.append({"prompt": prompt, "completions": [answers[0], *weighted[1:]]})
        chosen = [answers[0], *[answers[1]] * 2, answers[3]]
        alone += [{"prompt": prompt, "completion": answer} for answer in chosen]
    paths = Path(new_folder(), "answers.jsonl"), Path(new_folder(), "alone.jsonl")
    for path, records in zip(paths, (whole, alone), strict=True):
        write_jsonl(path, records)
    return paths
