"""Small sets of preference pairs and what trains on them: one step takes all of them, however they are packed."""

import functools
import random
import shutil
from pathlib import Path

from support.corpus import WORDS
from support.degrees import degree_arguments
from support.jsonl import write_jsonl
from support.runs import ROOT, corpus, new_folder

from layouts import COMMON  # isort: skip

DPO_TOML = ROOT / "train_configs" / "dpo_debug.toml"
NUM_PAIRS = 8
STEPS = 3


def write_pairs(path, num_pairs, seed):
    """Pairs of 73 to 80 tokens each with the prompt shared, 115 to 126 without."""
    rng = random.Random(seed)

    def text(first, least, most):
        return " ".join([first, *rng.choices(WORDS[1:13], k=rng.randint(least, most))])

    records = [
        {"prompt": text("why", 29, 34), "chosen": text("yes", 12, 15), "rejected": text("no", 12, 15)}
        for _ in range(num_pairs)
    ]
    write_jsonl(path, records)


def scored(prompt, answers):
    """A record of up to 11 answers, no two of which have one score."""
    completions = [{"completion": answer, "score": 7 * number % 11} for number, answer in enumerate(answers)]
    return {"prompt": prompt, "completions": completions}


def flat(record):
    """A record for each pair of one: the best by score against each other answer, or itself."""
    if "chosen" in record:
        return [record]
    best = max(record["completions"], key=lambda answer: answer["score"])
    others = (answer["completion"] for answer in record["completions"] if answer is not best)
    return [{"prompt": record["prompt"], "chosen": best["completion"], "rejected": other} for other in others]


@functools.cache
def data():
    folder = Path(new_folder())
    write_pairs(folder / "pairs.jsonl", NUM_PAIRS, seed=0)
    write_pairs(folder / "validation.jsonl", 5, seed=1)
    return folder


@functools.cache
def answers_data():
    """Folders of the same pairs: prompts with 2 to 8 answers, and a record for each pair, which takes twice as many
    packs of 512 tokens. The answers to one of the prompts need two packs."""
    rng, folders = random.Random(11), []

    def words(first, count):
        return " ".join([first, *rng.choices(WORDS[1:13], k=count)])

    def record(number, least=20):
        answers = [words("yes", rng.randint(least, least + 20)) for _ in range(number)]
        return scored(words("why", rng.randint(90, 120)), answers)

    train = [*(record(number) for number in (2, 4, 8, 4, 2, 4, 2)), record(8, least=50)]
    validation = [record(2), record(4)]
    for parts in (lambda record: [record], flat):
        folders.append(Path(new_folder()))
        for name, whole in (("pairs", train), ("validation", validation)):
            write_jsonl(folders[-1] / f"{name}.jsonl", [part for record in whole for part in parts(record)])
    return folders


def arguments(degrees, *, folder=None, seq_len=512, local_batch_size=2, global_batch_size=2, steps=STEPS):
    """All pairs in two packs of 512 tokens, which data-parallel ranks share; so in eight of 128."""
    folder = folder or data()
    local_batch_size //= degrees.get("dp", 1) * degrees.get("ddp", 1)
    options = (
        f"{COMMON} --model.hf_assets_path {corpus()}/tokenizer --training.steps {steps} "
        f"--training.seq_len {seq_len} --training.local_batch_size {local_batch_size} "
        f"--training.global_batch_size {global_batch_size} --training.dataset_path {folder}/pairs.jsonl "
        f"--validation.enable --validation.dataset_path {folder}/validation.jsonl --validation.steps=-1 "
        f"--validation.freq {STEPS} --validation.seq_len {seq_len} --validation.local_batch_size 1"
    )
    return [*options.split(), *degree_arguments(degrees)]


def copy_of_data(folder=None):
    """Without reference files."""
    return shutil.copytree(
        folder or data(), Path(new_folder()), ignore=shutil.ignore_patterns("*.npz"), dirs_exist_ok=True
    )
