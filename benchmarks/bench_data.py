"""Measures the way of the data: tokenizing, the cache, packing, a rank's packs. Writes benchmarks/results/data.json.

    python benchmarks/bench_data.py [--quick] [--folder DIR]

The sets, of words of an invented language by Zipf's law, with a BPE of 32k words trained on the spot:

- chat: 200,000 conversations of one to three rounds, median answer 90 words; `--quick`: 2,000;
- lognormal: 60,000 documents of 1,024 to 8,192 tokens, mean 3,250, lengths only;
- records: 1,000,000 short conversations.

Speeds are tokens per second of wall-clock time on all cores that the process may use; `cpu` is what one core does. What
is compared runs in turns.
"""

import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from figures import RESULTS, parser, part, save, table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_magi.calibrate import facts_of_run
from torchtitan_magi.data import ChatTokenizer, Corpus, PackedSFTDataset, PackingCounts, TokenizedDocument
from torchtitan_magi.data.records.formats import parse_document
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE
from torchtitan_magi.data.tokens.token_cache import TokenCache

SEQ_LEN = 131_072
TOKENIZED_BLOCKS = 24  # of 4 MiB each, to measure tokenizing
TOKENS_PER_GPU = 9_000  # per second, 8B on one H200
RANKS = [1, 8, 64, 512]
SIZES = {"chat": 200_000, "records": 1_000_000, "lognormal": 60_000}
QUICK_SIZES = {"chat": 2_000, "records": 3_000, "lognormal": 2_000}
SYLLABLES = [a + b for a in "bcdfghjklmnprstvwxyz" for b in "aeiou"]


class Language:
    """Words of one to four syllables; the k-th is drawn k times more seldom than the first."""

    def __init__(self, seed: int, num_words: int = 40_000) -> None:
        rng = random.Random(seed)
        words: dict[str, None] = {}
        while len(words) < num_words:
            words["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4)))] = None
        self.words, self.rng = list(words), rng
        self.weights = list(itertools.accumulate(1 / (rank + 1) for rank in range(num_words)))

    def text(self, num_words: int) -> str:
        return " ".join(self.rng.choices(self.words, cum_weights=self.weights, k=num_words))

    def conversation(self, median_words: int) -> dict[str, Any]:
        messages = []
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            answer = min(4_000, 3 + int(median_words * self.rng.lognormvariate(0, 1)))
            messages += [{"role": "user", "content": self.text(self.rng.randint(5, 40))}]
            messages += [{"role": "assistant", "content": self.text(answer)}]
        return {"messages": messages}


def make_sets(folder: Path, sizes: dict[str, int]) -> None:
    """chat.jsonl, records.jsonl and lognormal.jsonl, unless they are there."""
    for name, median_words in (("chat", 90), ("records", 15)):
        path = folder / f"{name}-{sizes[name]}.jsonl"
        if not path.exists():
            language = Language(1)
            with open(f"{path}.part", "w") as file:
                file.writelines(json.dumps(language.conversation(median_words)) + "\n" for _ in range(sizes[name]))
            os.rename(f"{path}.part", path)
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(2_900), 0.5, sizes["lognormal"]), 1_024, 8_192).astype(int)
    lines = (json.dumps({"text": "x" * (4 * n), "tokens": int(n)}) + "\n" for n in lengths)
    with open(folder / f"lognormal-{sizes['lognormal']}.jsonl", "w") as file:
        file.writelines(lines)


def make_tokenizer(num_words: int) -> ChatTokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=num_words, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    language = Language(1)
    tokenizer.train_from_iterator((language.text(num_words) for _ in range(25)), trainer)
    return ChatTokenizer(tokenizer, 0, 1, CHATML_TEMPLATE)


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.perf_counter()
    return function(), time.perf_counter() - begin


def memory() -> int:
    """Bytes of this process that are not mapped files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * resource.getpagesize()


# ----------------------------------------------------------------------------------------------------------- figures


def cpu_seconds() -> float:
    """CPU time of this process, its threads and the processes that it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def tokenizing(path: Path, tokenizer: ChatTokenizer, folder: Path, rounds: int) -> dict[str, Any]:
    """encode_batch of a text against writing the tokens of its records, in turns, each on all cores.

    of_encode_batch: medians of the ratios of the rounds, of wall-clock time and of CPU time. Start and end of the
    processes that write count. busy: CPU time over what all cores have; less than 1 for encode_batch: the machine had
    other work, and the ratio of CPU time is the one to go by.
    """
    corpus = Corpus(path, parse_document)
    blocks = range(min(corpus.num_blocks, TOKENIZED_BLOCKS))
    texts = [tokenizer.render(record["messages"])[0] for block in blocks for record in sound(corpus.read(block))]

    def encode() -> int:
        batches = (texts[first : first + 10_000] for first in range(0, len(texts), 10_000))
        encode_batch = tokenizer.tokenizer.encode_batch
        return sum(sum(map(len, encode_batch(batch, add_special_tokens=False))) for batch in batches)

    def write() -> int:
        shutil.rmtree(folder, ignore_errors=True)
        cache = TokenCache(folder, corpus, tokenizer, "documents", "bench")
        cache.order(list(blocks))
        for writer in cache._writers.values():
            writer.process.wait()
        return sum(len(cache.open(block, NEVER).tokens) for block in blocks)

    rows = []
    for _ in range(rounds):
        for function in (encode, write):
            cpu = cpu_seconds()
            tokens, seconds = timed(function)
            rows.append((tokens, seconds, cpu_seconds() - cpu))
    shutil.rmtree(folder)
    if len({tokens for tokens, _, _ in rows}) != 1:
        raise AssertionError(f"not the same tokens: {rows}")
    (encoding, encoding_cpu), (writing, writing_cpu) = (np.array(rows[n::2])[:, 1:].T for n in (0, 1))
    cores = len(os.sched_getaffinity(0))
    return {
        "tokens": tokens,
        "rounds": rounds,
        "encode_batch_tokens_per_s": tokens / np.median(encoding),
        "encode_batch_tokens_per_cpu_s": tokens / np.median(encoding_cpu),
        "encode_batch_busy": np.median(encoding_cpu / encoding) / cores,
        "tokens_per_s": tokens / np.median(writing),
        "tokens_per_cpu_s": tokens / np.median(writing_cpu),
        "busy": np.median(writing_cpu / writing) / cores,
        "of_encode_batch": np.median(encoding / writing),
        "of_encode_batch_cpu": np.median(encoding_cpu / writing_cpu),
    }


def sound(records: list[dict[str, Any] | ValueError]) -> Iterator[dict[str, Any]]:
    return (record for record in records if not isinstance(record, ValueError))


def cold(path: Path, tokenizer: ChatTokenizer, cache: Path) -> dict[str, Any]:
    """The first pack, nothing kept. Then all tokens are written."""
    packs = PackedSFTDataset(path, tokenizer, SEQ_LEN, token_cache=cache, check=False, epochs=1)
    _, first_pack = timed(lambda: next(iter(packs)))
    made = sum(len(packs.tokens.open(block, NEVER).tokens) for block in range(packs.records.num_blocks))
    order = packs._stream.order_of(0)
    window = sum(len(packs.tokens.open(block, NEVER).tokens) for block, _ in order.records(0))
    return {"tokens": made, "first_pack_s": first_pack, "first_window_tokens": window}


class _Never:
    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


NEVER: Any = _Never()


def a_ranks_packs(path: Path, tokenizer: ChatTokenizer, cache: Path, num_ranks: int, seconds: float) -> dict[str, Any]:
    """Tokens per second of the last rank's packs, of windows that are packed already.

    As many epochs as have two packs for the rank, again and again.
    """
    options: dict[str, Any] = {"token_cache": cache, "check": False}
    per_epoch = pack_windows(PackedSFTDataset(path, tokenizer, SEQ_LEN, epochs=1, **options)).packs
    options["epochs"] = 1 + 2 * num_ranks // per_epoch
    pack_windows(PackedSFTDataset(path, tokenizer, SEQ_LEN, **options))
    packs = PackedSFTDataset(path, tokenizer, SEQ_LEN, num_ranks - 1, num_ranks, **options)
    cpu, begin, tokens = time.process_time(), time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        for inputs, _ in packs:
            tokens += int(np.diff(inputs["documents"]).sum())
            if time.perf_counter() - begin > seconds:
                break
    spent, spent_cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {
        "ranks": num_ranks,
        "epochs": options["epochs"],
        "tokens_per_s": tokens / spent,
        "tokens_per_cpu_s": tokens / spent_cpu,
        "gpus_fed": int(tokens * num_ranks / spent / TOKENS_PER_GPU),
    }


def pack_windows(packs: PackedSFTDataset) -> PackingCounts:
    """Packs all windows and reads no pack."""
    for _ in packs.shard(lambda _: False):
        pass
    return packs.counts


def packing(path: Path, tokenizer: ChatTokenizer, cache: Path) -> dict[str, float]:
    """Tokens per second of packing an epoch that nobody has packed yet, and of going through its plans."""
    options: dict[str, Any] = {"token_cache": cache, "check": False, "epochs": 1, "seed": 1}
    counts, first = timed(lambda: pack_windows(PackedSFTDataset(path, tokenizer, SEQ_LEN, **options)))
    _, again = timed(lambda: pack_windows(PackedSFTDataset(path, tokenizer, SEQ_LEN, **options)))
    return {"tokens_per_s": counts.tokens / first, "again_tokens_per_s": counts.tokens / again}


OPENING = """
import sys, time
sys.path[:0] = sys.argv[1:2]
from pathlib import Path
import bench_data
path, cache, assets = sys.argv[2:]
tokenizer = bench_data.load_tokenizer(assets)
before = bench_data.memory()
begin = time.perf_counter()
packs = bench_data.PackedSFTDataset(path, tokenizer, bench_data.SEQ_LEN, token_cache=cache, epochs=1)
opened = time.perf_counter()
items = iter(packs)
next(items)
first = time.perf_counter()
most = bench_data.memory()
for _ in items:
    most = max(most, bench_data.memory())
print(opened - begin, first - opened, (most - before) / 1e6)
"""


def load_tokenizer(path: str) -> ChatTokenizer:
    return ChatTokenizer(Tokenizer.from_file(path), 0, 1, CHATML_TEMPLATE)


def opening(path: Path, tokenizer: ChatTokenizer, cache: Path, folder: Path) -> dict[str, float]:
    """A process that opens the data and takes all packs; the cache is warm."""
    pack_windows(PackedSFTDataset(path, tokenizer, SEQ_LEN, token_cache=cache, check=False, epochs=1))
    tokenizer.tokenizer.save(str(folder / "tokenizer.json"))
    command = [sys.executable, "-c", OPENING, Path(__file__).parent, path, cache, folder / "tokenizer.json"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    open_s, first_pack_s, megabytes = map(float, printed.split())
    return {"records": len(Corpus(path, cache=cache)), "open_s": open_s, "first_pack_s": first_pack_s, "mb": megabytes}


def by_length(record: dict[str, Any]) -> TokenizedDocument:
    num = len(record["text"]) // 4 + 1
    return TokenizedDocument(np.zeros(num, np.int32), np.ones(num, bool))


def fills(folder: Path, sizes: dict[str, int], tokenizer: ChatTokenizer, cache: Path) -> Iterator[dict[str, Any]]:
    """Tokens of one epoch over the slots of its packs, and over those of the best that any packer could do."""
    sets = {"chat": (tokenizer, cache, (32_768, SEQ_LEN)), "lognormal": (by_length, None, (8_192, 32_768, SEQ_LEN))}
    for name, (tokenize, kept, lengths) in sets.items():
        for seq_len in lengths:
            path = folder / f"{name}-{sizes[name]}.jsonl"
            packs = PackedSFTDataset(path, tokenize, seq_len, token_cache=kept, check=False, epochs=1)
            counts = pack_windows(packs)
            best = counts.tokens / (-(-counts.tokens // seq_len) * seq_len)
            yield {"set": name, "seq_len": seq_len, "fill": counts.fill, "of_best": counts.fill / best}


def measure(folder: Path, quick: bool) -> dict[str, Any]:
    sizes = QUICK_SIZES if quick else SIZES
    folder.mkdir(parents=True, exist_ok=True)
    make_sets(folder, sizes)
    tokenizer = make_tokenizer(1_000 if quick else 32_000)
    chat, cache = folder / f"chat-{sizes['chat']}.jsonl", folder / "cache"
    records = folder / f"records-{sizes['records']}.jsonl"
    shutil.rmtree(cache, ignore_errors=True)
    parts: dict[str, Callable[[], Any]] = {
        "tokenizing": lambda: tokenizing(chat, tokenizer, folder / "written", 2 if quick else 5),
        "cold": lambda: cold(chat, tokenizer, cache),
        "packing": lambda: packing(chat, tokenizer, cache),
        "ranks": lambda: [a_ranks_packs(chat, tokenizer, cache, ranks, 0.2 if quick else 10.0) for ranks in RANKS],
        "fill": lambda: list(fills(folder, sizes, tokenizer, cache)),
        "opening": lambda: opening(records, tokenizer, cache, folder),
    }
    found: dict[str, Any] = {**facts_of_run(None), "cores": len(os.sched_getaffinity(0)), "seq_len": SEQ_LEN}
    for name, measured in parts.items():
        found[name] = measured()
        print(part_table(name, found[name]), flush=True)
    return found


# -------------------------------------------------------------------------------------------------------------- tables


def part_table(name: str, found: dict[str, Any] | list[dict[str, Any]]) -> str:
    """The figures of one part, one below the other, or a line for each of its rows."""
    if isinstance(found, dict):
        lines = table(["figure", "value"], [[label(key), figure(value)] for key, value in found.items()])
    else:
        lines = table([label(key) for key in found[0]], [list(map(figure, row.values())) for row in found])
    return f"{name.capitalize()}:\n\n{lines}"


def label(key: str) -> str:
    """A figure's name with its unit."""
    words = (
        f"{key} ".replace("_", " ").replace(" per cpu s ", " per second of CPU time").replace(" per s ", " per second")
    )
    words = words.replace("of encode batch", "share of encode_batch").replace(" busy", ", share of the CPU's time")
    units = {" cpu ": " by CPU time", " s ": ", seconds", "mb ": "memory, MB", "gpus fed": "GPUs fed"}
    for unit, name in units.items():
        words = words.replace(unit, name)
    return words.strip().replace("encode batch", "encode_batch")


def figure(value: object) -> str:
    """A number in four digits."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def data_tables(found: dict[str, Any]) -> str:
    """For the docs: the way of a record, then ranks, then how full packs are."""
    ranks = [(row["ranks"], millions(row["tokens_per_s"]), f"{row['gpus_fed']:,}") for row in found["ranks"]]
    fill = [(row["set"], f"{row['seq_len']:,}", f"{row['fill']:.1%}", f"{row['of_best']:.1%}") for row in found["fill"]]
    tables = (
        table(["step", "speed or time"], way_of_a_record(found)),
        table(["ranks", "million tokens per second and rank", "GPUs fed"], ranks),
        table(["documents", "tokens per pack", "fill", "of the best possible"], fill),
    )
    return "\n\n".join(tables)


def way_of_a_record(found: dict[str, Any]) -> list[tuple[str, str]]:
    """Steps from a file to the first pack, each with its speed or time."""
    tokenizing, opening, length = found["tokenizing"], found["opening"], f"{found['seq_len']:,} tokens"
    speed = (
        f"{millions(tokenizing['tokens_per_s'])} million tokens/s, {tokenizing['of_encode_batch']:.0%} of encode_batch"
    )
    return [
        (f"tokenize into the cache, {found['cores']} cores", speed),
        (f"first pack of {length}, nothing cached", f"{found['cold']['first_pack_s']:.1f} s"),
        ("plan packs from lengths", f"{millions(found['packing']['tokens_per_s'])} million tokens/s"),
        ("plan them again, from the cache", f"{millions(found['packing']['again_tokens_per_s'])} million tokens/s"),
        (f"open {opening['records']:,} records, indexed before", f"{1000 * opening['open_s']:.0f} ms"),
        ("their first pack", f"{1000 * opening['first_pack_s']:.0f} ms"),
    ]


def millions(tokens: float) -> str:
    return f"{tokens / 1e6:,.3g}" if tokens < 1e9 else f"{tokens / 1e6:,.0f}"


PARTS: dict[str, Callable[[], str]] = {"data": part(data_tables, "data")}  # of the docs


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--folder", type=Path, default=Path("outputs/bench_data"), help="for data and cache")
    command.add_argument("--quick", action="store_true", help="small sets; nothing is stored")
    arguments = command.parse_args()
    found = measure(arguments.folder, arguments.quick)
    if not arguments.quick:
        save(found, RESULTS / "data.json")


if __name__ == "__main__":
    main()
