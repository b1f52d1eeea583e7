#!/usr/bin/env python3
"""Make the demonstration data: conversations and a tokenizer, from text that comes with Python. Nothing is downloaded.

    python scripts/make_demo_data.py [out_dir]       (default assets/demo)

Questions about Python with the answers of `pydoc` topics and the standard library's docstrings, as JSONL `messages`
(`train.jsonl`, `validation.jsonl`). The same as preference pairs (`pairs.jsonl`, `validation_pairs.jsonl`): the chosen
answer is the true text, the rejected one the text of something else or the true one cut short. And a byte-level BPE
tokenizer trained on them (`tokenizer/`): 2,048 tokens, the vocabulary of torchtitan's debug models. The same Python
version makes the same bytes. A complete out_dir is left alone.
"""

import argparse
import importlib
import inspect
import json
import os
import random
import re
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
BOS, EOS, PAD, TURN_START, TURN_END = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{% else %}{{ message.content + '<|im_end|>' }}
{%- endif %}{{ '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
MODULES = """
abc argparse array ast asyncio.events asyncio.queues asyncio.tasks base64 bdb bisect builtins bz2 calendar cmath
codecs collections collections.abc concurrent.futures configparser contextlib copy csv dataclasses datetime decimal
difflib dis email.message enum fractions functools gc getpass gettext glob gzip hashlib heapq html http.client
http.cookies importlib inspect io ipaddress itertools json keyword linecache locale logging logging.handlers lzma
mailbox math mimetypes multiprocessing.pool numbers operator os os.path pathlib pdb pickle pickletools platform plistlib
pprint queue random re sched secrets selectors shelve shlex shutil signal socket socketserver sqlite3 ssl statistics
string struct subprocess sys tarfile tempfile textwrap threading time timeit tokenize trace traceback types typing
unittest unittest.mock urllib.parse urllib.request uuid wave weakref xml.etree.ElementTree zipfile zlib
""".split()  # noqa: SIM905
QUESTIONS = (
    "What does {name} do?",
    "Explain {name}.",
    "How do I use {name}?",
    "Show me the documentation of {name}.",
    "What is {name} for?",
)
FOLLOW_UPS = ("And {name}?", "What about {name}?", "Now explain {name}.")
SYSTEM = "You answer questions about Python from its documentation."
FILES = ("train.jsonl", "validation.jsonl", "pairs.jsonl", "validation_pairs.jsonl")
FILES += ("tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json")
MIN_ANSWER = 40  # characters


def make_demo_data(out_dir: Path) -> str:
    """Write FILES into out_dir unless all are there; a line that says what was done."""
    if all((out_dir / name).is_file() for name in FILES):
        return f"{out_dir}: complete, left alone"
    validation, train = split(make_conversations(random.Random(0)))
    validation_pairs, pairs = split(make_pairs(random.Random(0)))
    out_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir) as temporary:
        made = Path(temporary)
        write_jsonl(made / "train.jsonl", train)
        write_jsonl(made / "validation.jsonl", validation)
        write_jsonl(made / "pairs.jsonl", pairs)
        write_jsonl(made / "validation_pairs.jsonl", validation_pairs)
        write_tokenizer(made / "tokenizer", [m["content"] for c in train for m in c["messages"]])
        (out_dir / "tokenizer").mkdir(exist_ok=True)
        for name in FILES:
            os.replace(made / name, out_dir / name)
    return (
        f"{out_dir}: {len(train):,} training and {len(validation):,} validation conversations, {len(pairs):,} and"
        f" {len(validation_pairs):,} preference pairs, {VOCAB_SIZE:,} tokens"
    )


def split(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Validation (one in twenty) and training records."""
    return records[::20], [record for i, record in enumerate(records) if i % 20]


def make_conversations(rng: random.Random) -> list[dict[str, Any]]:
    """Every documented thing is the answer of one turn; a fifth of the conversations have several turns."""
    conversations = []
    for answers in sources():
        names = sorted(answers)
        rng.shuffle(names)
        while names:
            turns = rng.randint(2, 4) if rng.random() < 0.2 else 1
            chosen, names = names[:turns], names[turns:]
            messages = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.25 else []
            for turn, name in enumerate(chosen):
                question = rng.choice(FOLLOW_UPS if turn else QUESTIONS).format(name=name)
                messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answers[name]}]
            conversations.append({"messages": messages})
    rng.shuffle(conversations)
    return conversations


def make_pairs(rng: random.Random) -> list[dict[str, Any]]:
    """One pair for every documented thing, in each form that a record may have; some with an earlier turn."""
    pairs = []
    for answers in sources():
        names = sorted(answers)
        for index, name in enumerate(names):
            other = answers[names[index - 1]]
            answer = answers[name]
            rejected = answer[: len(answer) // 2] if rng.random() < 1 / 3 or other == answer else other
            question = rng.choice(QUESTIONS).format(name=name)
            messages = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.25 else []
            if rng.random() < 0.2:
                earlier = {"role": "user", "content": rng.choice(QUESTIONS).format(name=names[index - 1])}
                messages += [earlier, {"role": "assistant", "content": other}]
                rejected = answer[: len(answer) // 2]
                question = rng.choice(FOLLOW_UPS).format(name=name)
            pairs.append(pair_record(rng, [*messages, {"role": "user", "content": question}], answer, rejected))
    rng.shuffle(pairs)
    return pairs


def pair_record(rng: random.Random, prompt: list[dict[str, str]], chosen: str, rejected: str) -> dict[str, Any]:
    if len(prompt) == 1 and rng.random() < 0.7:
        return {"prompt": prompt[0]["content"], "chosen": chosen, "rejected": rejected}
    turns = [[{"role": "assistant", "content": answer}] for answer in (chosen, rejected)]
    if rng.random() < 0.5:
        return {"prompt": prompt, "chosen": turns[0], "rejected": turns[1]}
    return {"chosen": prompt + turns[0], "rejected": prompt + turns[1]}


def sources() -> Iterator[dict[str, str]]:
    """Per source, what is documented -> its text: the help topics, then module by module. No text comes twice."""
    seen: set[str] = set()
    yield unseen({f"the topic `{name}`": text for name, text in topics.items()}, seen)
    for name in MODULES:
        try:
            with warnings.catch_warnings(action="ignore"):  # of deprecated members
                texts = docstrings(importlib.import_module(name))
        except ImportError:  # left out of some builds of Python
            continue
        yield unseen(texts, seen)


def docstrings(module: Any) -> dict[str, str]:
    """Docstrings of a module, its public functions and classes, and their public methods."""
    found = {f"the module `{module.__name__}`": module.__doc__}
    for name, value in public_members(module):
        found[f"`{module.__name__}.{name}`"] = own_doc(value)
        if inspect.isclass(value) and value.__module__ == module.__name__:
            for method, function in public_members(value):
                found[f"`{module.__name__}.{name}.{method}`"] = own_doc(function)
    return {name: inspect.cleandoc(text) for name, text in found.items() if isinstance(text, str)}


def public_members(owner: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in sorted(vars(owner).items()) if not name.startswith("_")]


def own_doc(value: Any) -> str | None:
    """The docstring of a function or class; None for data, whose docstring is that of its type."""
    return value.__doc__ if inspect.isroutine(value) or inspect.isclass(value) else None


def unseen(texts: dict[str, str], seen: set[str]) -> dict[str, str]:
    fresh = {}
    for name, text in sorted(texts.items()):
        text = text.strip()
        if len(text) >= MIN_ANSWER and text not in seen and not re.search(r" at 0x[0-9a-f]{6}", text):
            seen.add(text)
            fresh[name] = text
    return fresh


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def write_tokenizer(directory: Path, texts: list[str]) -> None:
    special_tokens = [BOS, EOS, PAD, TURN_START, TURN_END]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"{tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}: too little text")
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", nargs="?", type=Path, default=Path("assets/demo"))
    print(make_demo_data(parser.parse_args().out_dir))
