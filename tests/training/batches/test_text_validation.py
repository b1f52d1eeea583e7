"""Validation on torchtitan's own text data: the same batches each time, as many on every rank."""

import random

import pytest
from support.corpus import text
from support.errors import run_ends
from support.runs import on_corpus, train

OPTIONS = "--training.dataset texts --training.local_batch_size 1 --optimizer.lr 0 --validation.enable "
OPTIONS += "--validation.dataset texts --validation.freq 1 --validation.seq_len 128 --validation.local_batch_size 1"


def has_texts(report):
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    rng = random.Random(0)
    rows = [{"text": text(rng, 60)} for _ in range(12)]
    DATASETS["texts"] = DatasetConfig(
        path="", loader=lambda _: Dataset.from_list(rows), sample_processor=lambda row: row["text"]
    )


@pytest.mark.parametrize("steps", [-1, 2])
def test_every_validation_has_the_same_batches(steps):
    run = train(1, [*on_corpus()[:2], *OPTIONS.split(), f"--validation.steps={steps}"], setup=has_texts)
    first, *others = run.validation_losses
    assert first > 0
    assert others == [first] * (len(run.losses) - 1)


def test_data_parallel_ranks_need_a_number_of_batches():
    with run_ends("steps is -1, but 2 data-parallel ranks may have different numbers of batches of dataset 'texts'"):
        train(2, [*on_corpus()[:2], *OPTIONS.split(), "--validation.steps=-1"], setup=has_texts)
