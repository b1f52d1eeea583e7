"""A step whose loss or gradient is not a number ends the run by its name, before it changes or saves anything."""

import functools
import re
from pathlib import Path

import pytest
from corpus import chat_tokenizer
from poisoned import GRADIENTS, LOSSES, WORD, poison, write_records
from training import TrainingError, corpus, new_folder, train


@functools.cache
def token():
    return chat_tokenizer(corpus()).tokenizer.token_to_id(WORD)


def poisoned_run(folder, what, *options, lines=(5,), processes=2, **kwargs):
    write_records(Path(folder, "train.jsonl"), set(lines))
    arguments = ["--training.dataset_path", f"{folder}/train.jsonl", "--training.local_batch_size", "1"]
    arguments += ["--magi.no-shuffle", "--job.dump_folder", folder, "--training.steps", "6", *options]
    setup = functools.partial(set_up, what, token())
    with pytest.raises(TrainingError) as caught:
        train(processes, arguments, entry="torchtitan_magi.train", setup=setup, **kwargs)
    return caught.value


def set_up(what, token, report):
    poison(what, token)


def test_x():
    folder = new_folder()
    e = poisoned_run(folder, LOSSES, "--checkpoint.enable", "--checkpoint.interval", "1", "--checkpoint.keep_latest_k", "2")
    print(e.type, e, e.__notes__)
    print(sorted(Path(folder, "checkpoint").iterdir()))
