"""A small set of preference pairs and what trains on it: one step takes all of them, however they are packed."""

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


@functools.cache
def data():
    folder = Path(new_folder())
    write_pairs(folder / "pairs.jsonl", NUM_PAIRS, seed=0)
    write_pairs(folder / "validation.jsonl", 5, seed=1)
    return folder


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


def copy_of_data():
    """Without reference files."""
    return shutil.copytree(data(), Path(new_folder()), ignore=shutil.ignore_patterns("*.npz"), dirs_exist_ok=True)
