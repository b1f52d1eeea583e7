"""A small corpus in a language of its own and its tokenizer: the same with any Python, in a second.

Documents have from three tokens to several packs. As in a natural language a few words make most of the text.
"""

import random
import shutil
from pathlib import Path

from support.chat import byte_level_tokenizer
from support.jsonl import write_jsonl

from torchtitan_magi.data import ChatTokenizer
from torchtitan_magi.data.tokens.assets import load_chat_tokenizer

DEMO = Path(__file__).resolve().parents[2] / "assets" / "demo"
SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
SYLLABLES = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]


def make_words(rng: random.Random, num_words: int = 1500) -> list[str]:
    """Words of one to four syllables, no two alike."""
    words: dict[str, None] = {}
    while len(words) < num_words:
        words["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))] = None
    return list(words)


WORDS = make_words(random.Random(0))


def text(rng: random.Random, num_words: int) -> str:
    """Zipf's law: the k-th word is drawn k times more seldom than the first."""
    return " ".join(rng.choices(WORDS, [1 / (k + 1) for k in range(len(WORDS))], k=num_words))


def record(rng: random.Random) -> dict:
    """Plain text of few words or a conversation of one or two rounds, with a system message or without."""
    if rng.random() < 0.15:
        return {"text": text(rng, rng.randint(1, 4))}
    messages = [{"role": "system", "content": text(rng, 5)}] if rng.random() < 0.25 else []
    for _ in range(rng.choices((1, 2), (4, 1))[0]):
        answer = min(800, 4 + int(rng.lognormvariate(3.3, 1.2)))
        messages += [{"role": "user", "content": text(rng, rng.randint(3, 12))}]
        messages += [{"role": "assistant", "content": text(rng, answer)}]
    return {"messages": messages}


def make_corpus(folder: Path) -> Path:
    """Writes train.jsonl, validation.jsonl and tokenizer/."""
    rng = random.Random(2)
    for name, num_records in (("train", 600), ("validation", 60)):
        write_jsonl(folder / f"{name}.jsonl", [record(rng) for _ in range(num_records)])
    write_tokenizer(folder / "tokenizer", [text(rng, 50_000), "user assistant system " * 1000])
    return folder


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """Byte-level BPE of 2,048 tokens, as torchtitan's debug models have; the demonstration data's chat template."""
    folder.mkdir()
    byte_level_tokenizer(SPECIAL, vocab_size=2048, texts=texts).save(str(folder / "tokenizer.json"))
    shutil.copy(DEMO / "tokenizer" / "tokenizer_config.json", folder)


def chat_tokenizer(folder: Path | str) -> ChatTokenizer:
    """The tokenizer of a corpus or of the demonstration data."""
    return load_chat_tokenizer(Path(folder) / "tokenizer")
