#!/usr/bin/env python3
"""Makes the demonstration data: conversations and a tokenizer, from text that comes with Python. Nothing is downloaded.

    python scripts/make_demo_data.py [out_dir]       (default assets/demo)

Questions about Python with the answers of `pydoc` topics and the standard library's docstrings, as JSONL `messages`
(`train.jsonl`, `validation.jsonl`). The same as preference pairs (`pairs.jsonl`, `validation_pairs.jsonl`): the chosen
answer is the true text, the rejected one the text of something else or the true one cut short. And a byte-level BPE
tokenizer trained on them (`tokenizer/`): 2,048 tokens, the vocabulary of torchtitan's debug models. All text is read
from the standard library's files, nothing from what a process has imported: one Python makes the same bytes, whoever
makes them. A complete out_dir is left alone.
"""

import argparse
import ast
import json
import os
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
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
PACKAGES = ("asyncio", "collections", "concurrent", "email", "html", "importlib", "json", "logging")
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
MAX_CUT, MAX_EARLIER = 2_000, 20_000  # characters: pairs stay pairs in packs of 16,384 tokens


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
            cut = answer[: min(len(answer) // 2, MAX_CUT)]
            rejected = cut if rng.random() < 1 / 3 or other == answer else other
            question = rng.choice(QUESTIONS).format(name=name)
            messages = [{"role": "system", "content": SYSTEM}] if rng.random() < 0.25 else []
            if rng.random() < 0.2 and len(other) < MAX_EARLIER:
                earlier = {"role": "user", "content": rng.choice(QUESTIONS).format(name=names[index - 1])}
                messages += [earlier, {"role": "assistant", "content": other}]
                rejected = cut
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
    """Per source, what is documented -> its text: the help topics, then file by file. No text comes twice."""
    library = Path(sysconfig.get_path("stdlib"))
    files = [*library.glob("*.py"), *(file for package in PACKAGES for file in (library / package).rglob("*.py"))]
    names = {file.relative_to(library).as_posix().removesuffix(".py").removesuffix("/__init__"): file for file in files}
    seen: set[str] = set()
    yield unseen({f"the topic `{name}`": text for name, text in topics(library).items()}, seen)
    for name in sorted(names):
        if "/_" not in f"/{name}":
            yield unseen(docstrings(name.replace("/", "."), parse(names[name])), seen)


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def topics(library: Path) -> dict[str, str]:
    """The texts of Python's `help()`, by topic."""
    (assignment,) = (node for node in parse(library / "pydoc_data/topics.py").body if isinstance(node, ast.Assign))
    return ast.literal_eval(assignment.value)


def docstrings(name: str, module: ast.Module) -> dict[str, str]:
    """Docstrings of a module, its public functions and classes, and their public methods."""
    found = {f"the module `{name}`": ast.get_docstring(module)}
    for member in public_members(module):
        found[f"`{name}.{member.name}`"] = ast.get_docstring(member)
        if isinstance(member, ast.ClassDef):
            for method in public_members(member):
                found[f"`{name}.{member.name}.{method.name}`"] = ast.get_docstring(method)
    return {name: text for name, text in found.items() if text}


def public_members(owner: ast.Module | ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node for node in owner.body if isinstance(node, documented) and not node.name.startswith("_")]


def unseen(texts: dict[str, str], seen: set[str]) -> dict[str, str]:
    fresh = {}
    for name, text in sorted(texts.items()):
        text = text.strip()
        if len(text) >= MIN_ANSWER and text not in seen:
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
    parser.add_argument(
        "out_dir", nargs="?", type=Path, default=Path("assets/demo"), help="folder to write (default: %(default)s)"
    )
    print(make_demo_data(parser.parse_args().out_dir))
