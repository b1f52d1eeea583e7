"""The packed stream: boundaries, labels, determinism, shards, resuming, loaders."""

import json
import logging
import re
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.errors import one_line
from support.numbered_records import SEQ_LEN, dataset, flats, tokenize, write
from support.streams import assert_nothing_is_lost, join, resume, take, with_small_blocks
from torchdata.stateful_dataloader import StatefulDataLoader

from torchtitan_magi.data import (
    IGNORE_INDEX,
    PackedSFTDataset,
    TokenizedAnswers,
    TokenizedDocument,
    TokenizedPairs,
    collate_packs,
)
from torchtitan_magi.sizing.sample_packs import draw_lengths

blocks = with_small_blocks(200)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """120 documents: most short, some longer than a pack, some without a label."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(2.8, 1.1, 120), 1, 300).astype(int)
    documents = [(i + 1, int(n), int(rng.integers(0, n + 2))) for i, n in enumerate(lengths)]
    return write(tmp_path_factory.mktemp("corpus") / "train.jsonl", documents)


def joined(path, ranks, state=None, count=None, **options):
    """The stream of all ranks, which begin at the state and stop after `count` packs of each."""
    shards = []
    for rank in range(ranks):
        packs = dataset(path, dp_rank=rank, dp_world_size=ranks, **options)
        if state:
            assert resume(packs, state).state_dict() == state
        shards.append(flats(take(packs, count)))
    return join(shards)


def pieces_of(stream):
    return sorted((tokens[start], end - start) for tokens, _, documents, _ in stream for start, end in documents)


def spans(path, seq_len, truncate):
    """By definition: (first input token, length) of every piece that has a label."""
    expected = []
    for line in path.read_text().splitlines():
        name, length, first = map(int, json.loads(line)["text"].split())
        for start in range(0, length - 1, seq_len):
            stop = min(start + seq_len, length - 1)
            if stop >= first:  # the last label is token `stop`
                expected.append((name * 1000 + start, stop - start))
            if truncate:
                break
    return sorted(expected)


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_holds_every_labelled_piece_once(corpus, long_documents, shuffle):
    stream = flats(dataset(corpus, long_documents=long_documents, shuffle=shuffle))
    assert pieces_of(stream) == spans(corpus, SEQ_LEN, long_documents == "truncate")


def test_boundaries_positions_and_labels_of_every_pack(corpus):
    for inputs, labels in dataset(corpus):
        tokens, positions, documents = inputs["input"], inputs["positions"], inputs["documents"]
        for row, dtype in ((tokens, torch.int64), (positions, torch.int32), (labels, torch.int64)):
            assert (row.shape, row.dtype) == ((SEQ_LEN,), dtype)
        assert isinstance(documents, np.ndarray)
        assert documents.dtype == np.int32
        assert documents[0, 0] == 0
        assert (documents[1:, 0] == documents[:-1, 1]).all()
        assert (documents[:, 0] < documents[:, 1]).all()
        for start, end in documents.tolist():
            assert positions[start:end].tolist() == list(range(end - start))
            assert tokens[start:end].tolist() == list(range(int(tokens[start]), int(tokens[start]) + end - start))
            labelled = labels[start:end] != IGNORE_INDEX
            assert labelled.any()
            assert (labels[start:end] == tokens[start:end] + 1)[labelled].all()
        padding = slice(int(documents[-1, 1]), None)
        assert (labels[padding] == IGNORE_INDEX).all()
        assert not tokens[padding].any()
        assert not positions[padding].any()


def test_a_pack_by_hand(tmp_path):
    path = write(tmp_path / "train.jsonl", [(1, 4, 2), (2, 6, 0), (3, 3, 3), (4, 1, 0)])
    (inputs, labels), *rest = dataset(path, seq_len=10)
    assert not rest
    assert inputs["documents"].tolist() == [[0, 5], [5, 8]]
    assert inputs["input"].tolist() == [2000, 2001, 2002, 2003, 2004, 1000, 1001, 1002, 0, 0]
    assert labels.tolist() == [2001, 2002, 2003, 2004, 2005, -100, 1002, 1003, -100, -100]
    assert inputs["positions"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 0]


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_nothing_is_lost_without_being_counted(corpus, long_documents):
    lengths = np.array([int(json.loads(line)["text"].split()[1]) - 1 for line in corpus.read_text().splitlines()])
    for epochs in (1, 3):
        packs = dataset(corpus, long_documents=long_documents, epochs=epochs)
        produced = [inputs["documents"] for inputs, _ in packs]
        counts, too_long = packs.counts, epochs * int((lengths > SEQ_LEN).sum())
        assert_nothing_is_lost(counts)
        assert (counts.documents, counts.packs, counts.slots) == (120 * epochs, len(produced), len(produced) * SEQ_LEN)
        assert counts.pieces == sum(map(len, produced))
        assert counts.tokens == sum(int(documents[-1, 1]) for documents in produced)
        assert counts.unlabeled > 0
        if long_documents == "split":
            assert (counts.split, counts.truncated, counts.truncated_tokens) == (too_long, 0, 0)
            assert counts.pieces + counts.unlabeled == epochs * np.maximum(1, -(-lengths // SEQ_LEN)).sum()
        else:
            lost = epochs * np.maximum(0, lengths - SEQ_LEN).sum()
            assert (counts.split, counts.truncated, counts.truncated_tokens) == (0, too_long, lost)


def test_counts_are_logged_once_an_epoch_and_in_a_long_first_one_when_packs_have_doubled(corpus, caplog):
    caplog.set_level(logging.INFO)
    packs = dataset(corpus, epochs=4)
    for _ in range(2):
        list(packs)
    lines = [record.getMessage().removeprefix(f"{corpus}: ") for record in caplog.records]
    ends = [line for line in lines if line.startswith("end of epoch ")]
    assert [line.split(":")[0] for line in ends] == [f"end of epoch {number}" for number in (1, 2, 3, 4)]
    assert ends[-1] == f"end of epoch 4: {packs.counts}"
    assert lines[-3:] == ends[1:]
    packs_logged = [int(re.search(r"documents, (\d+) packs", line)[1]) for line in lines[: -len(ends)]]
    assert len({packs.bit_length() for packs in packs_logged}) == len(packs_logged) > 1
    caplog.clear()
    list(dataset(corpus, epochs=3, window_blocks=100))  # an epoch is one window
    assert [record.getMessage().split(": ")[1] for record in caplog.records] == [f"end of epoch {i}" for i in (1, 2, 3)]


def test_order_depends_on_seed_and_epoch_only_and_iterating_again_starts_over(corpus):
    packs = dataset(corpus)
    first = flats(packs)
    take(packs, 3)
    assert flats(packs) == flats(dataset(corpus)) == first
    assert flats(dataset(corpus, seed=6)) != first
    two_epochs = flats(take(dataset(corpus, epochs=-1), 2 * len(first)))
    assert two_epochs[: len(first)] == first
    assert two_epochs[len(first) :] != first
    in_order = dataset(corpus, shuffle=False, seed=6)
    assert flats(in_order) == flats(dataset(corpus, shuffle=False))


def test_underfull_packs_are_carried_into_the_next_window(tmp_path):
    """Lengths 64, 40, 40 make the first window; a 40 waits for the 24 of the second instead of leaving with room."""
    path = write(tmp_path / "train.jsonl", [(1, 65, 0), (2, 41, 0), (3, 41, 0), (4, 25, 0), (5, 65, 0)])
    with mock.patch("torchtitan_magi.data.records.record_file.BLOCK_BYTES", len('{"text": "1 65 0"}\n')):
        packs = dataset(path, shuffle=False, window_blocks=6)
        assert packs.records.num_blocks == 5
        with mock.patch("torchtitan_magi.data.packs.epoch_order._cut", return_value=np.array([0, 3, 5])):
            produced, carried = [], []
            for inputs, _ in packs:
                produced.append([int(inputs["input"][start]) // 1000 for start in inputs["documents"][:, 0]])
                carried.append(packs.state_dict()["cursor"]["carried"])
    assert produced == [[1], [3], [2, 4], [5]]
    assert carried == [[], [[1, 0]], [[1, 0]], []]
    assert packs.counts.fill == (64 + 40 + 64 + 64) / 256


def test_state_and_memory_of_the_lookahead_are_bounded(tmp_path):
    """Documents of which no two share a pack: every window leaves under-full packs, and few are carried."""
    path = write(tmp_path / "train.jsonl", [(i, 36, 0) for i in range(1, 400)])
    packs = dataset(path, window_blocks=4)
    carried = [len(packs.state_dict()["cursor"]["carried"]) for _ in packs]
    assert 0 < max(carried) <= 8
    assert packs.counts.packs == 399


@pytest.mark.parametrize("epochs", [-1, 1])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 4), (4, 2), (2, 3), (3, 8)])
def test_resume_at_any_round_and_any_degree_continues_the_stream(corpus, before, after, epochs):
    total = 90 if epochs == -1 else len(list(dataset(corpus)))
    stream = flats(take(dataset(corpus, epochs=epochs), total))
    assert total > 30
    ranks = [dataset(corpus, epochs=epochs, dp_rank=r, dp_world_size=before) for r in range(before)]
    iterators = [iter(rank) for rank in ranks]
    for steps in range(-(-total // before) + 1):
        states = [rank.state_dict() for rank in ranks]
        assert all(state == states[0] for state in states)
        if steps % 5 in (0, 1) or steps > total // before - 2:
            state = json.loads(json.dumps(states[0]))  # plain values
            assert state == states[0]
            expected = stream[steps * before :]
            rest = joined(corpus, after, state, -(-len(expected) // after), epochs=epochs)
            assert rest[: len(expected)] == expected
            padding = [[0] * SEQ_LEN, [0] * SEQ_LEN, [], [IGNORE_INDEX] * SEQ_LEN]
            assert all(item == padding for item in rest[len(expected) :]) or epochs == -1
        if steps * before < total:
            for iterator in iterators:
                next(iterator)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=60),
    options=st.fixed_dictionaries({"seq_len": st.integers(1, 20), "window_blocks": st.integers(1, 8)}),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    data=st.data(),
)
def test_any_corpus_is_packed_once_and_resumes_anywhere(tmp_path_factory, lengths, options, before, after, data):
    path = write(tmp_path_factory.mktemp("any") / "train.jsonl", [(i + 1, *row) for i, row in enumerate(lengths)])
    expected = spans(path, options["seq_len"], truncate=False)
    if not expected:
        return
    stream = flats(dataset(path, **options))
    assert pieces_of(stream) == expected
    steps = data.draw(st.integers(0, -(-len(stream) // before)))
    first = dataset(path, dp_world_size=before, **options)
    take(first, steps)
    rest = joined(path, after, first.state_dict() if steps else None, **options)
    assert [item for item in rest if item[2]] == stream[steps * before :]


def test_counts_after_a_resume_are_those_of_one_run(corpus):
    whole = dataset(corpus)
    length = len(list(whole))
    for stop in range(length):
        packs = dataset(corpus)
        take(packs, stop)
        resumed = resume(dataset(corpus), packs.state_dict())
        assert len(list(resumed)) == length - stop
        assert resumed.counts == whole.counts


@pytest.mark.parametrize(
    ("option", "value"), [("seq_len", 32), ("seed", 6), ("long_documents", "truncate"), ("shuffle", False)]
)
def test_state_of_another_stream_is_refused(corpus, option, value):
    state = dataset(corpus).state_dict()
    with pytest.raises(ValueError, match=rf"{option} = .*, this run has {value!r}; resume with the same"):
        dataset(corpus, **{option: value}).load_state_dict(state)


def test_state_of_other_records_or_tokens_is_refused(corpus, tmp_path):
    packs = dataset(corpus)
    state = next(state for _ in packs if (state := packs.state_dict())["cursor"]["carried"])
    other = tmp_path / "other.jsonl"
    other.write_text(corpus.read_text() + '{"text": "121 3 0"}\n')
    with pytest.raises(ValueError, match=r"records = .*120 records.* this run has .*121 records.*; resume with"):
        dataset(other).load_state_dict(state)
    state["cursor"]["carried"][0][1] += 1
    with pytest.raises(ValueError, match=r"train.jsonl:\d+ has no token .* resume with the same tokenizer"):
        next(iter(resume(dataset(corpus), state)))


@pytest.mark.parametrize("epochs", [-1, 1])
def test_corpus_without_a_label_is_an_error_and_no_endless_loop(tmp_path, epochs):
    path = write(tmp_path / "train.jsonl", [(1, 5, 5), (2, 1, 0), (3, 90, 80)])
    with pytest.raises(ValueError, match=r"no record of .* has a token to train on \(.*3 without a label\); add"):
        next(iter(dataset(path, long_documents="truncate", epochs=epochs)))
    assert len(list(dataset(path, long_documents="split"))) == 1


def test_record_that_the_tokenizer_refuses_is_named(corpus, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": "1 5 0"}\n\n{"text": "not numbers"}\n')
    with pytest.raises(ValueError, match=r"train.jsonl:3: invalid literal"):
        list(dataset(path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_len": 0}, "seq_len is 0; give"),
        ({"window_blocks": 0}, "window_blocks is 0; give"),
        ({"dp_rank": 2, "dp_world_size": 2}, "dp_rank is 2 of 2; give"),
        ({"seed": -1}, "seed is -1; give"),
        ({"seq_len": 64.0}, "seq_len is 64.0; give an integer"),
        ({"seed": None}, "seed is None; give an integer"),
        ({"epochs": 1.5}, "epochs is 1.5; give an integer"),
        ({"packs_per_step": True}, "packs_per_step is True; give an integer"),
        ({"shuffle": "no"}, "shuffle is 'no'; use True or False"),
        ({"dp_rank": "0"}, "dp_rank is '0' of 1; give"),
        ({"long_documents": "drop"}, "long_documents is 'drop'; use one of truncate, split"),
    ],
)
def test_arguments_out_of_range_are_refused(corpus, options, words):
    with pytest.raises(ValueError, match=words):
        dataset(corpus, **options)


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [([1, 2, 3], [True, True]), ([0.5, 1.5], [True, True]), ([[1, 2]], [[True, True]]), (3, True)],
)
def test_tokens_that_do_not_fit_their_mask_name_the_record(tmp_path, tokens, mask):
    """A mask of another length would shift the labels of all documents behind it."""
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "a"}\n')
    with one_line(r"records.jsonl:1: tokens are .* and their loss_mask is .*; give integers \[n\], and for each"):
        list(PackedSFTDataset(path, lambda _: TokenizedDocument(np.array(tokens), np.array(mask)), 8, epochs=1))


@pytest.mark.parametrize("made", [None, ([1], [True])])
def test_a_tokenizer_that_returns_no_document_is_named_with_the_record(tmp_path, made):
    path = tmp_path / "records.jsonl"
    path.write_text('{"text": "a"}\n')
    with one_line(
        "records.jsonl:1: tokenize returned '(NoneType|tuple)'; return TokenizedDocument or TokenizedAnswers"
    ):
        list(PackedSFTDataset(path, lambda _: made, 8, epochs=1))


def test_answers_and_pairs_that_do_not_fit_are_refused():
    one, weights = TokenizedDocument(np.arange(3), np.ones(3, bool)), (1.0,)
    for given_ones in ({"weights": (1.0, 1.0)}, {"weights": weights, "logprobs": (np.zeros(2),)}):
        with one_line(r"documents of \[3\] tokens have . weights and logprobs of .*; give each document a weight"):
            TokenizedAnswers((one,), **given_ones)
    for pair in ((0, 2), (-1, 0)):
        with one_line("pairs are .*; number the answers from 0 to 1"):
            TokenizedPairs(np.arange(2), (one, one), (pair,))


def test_collate_stacks_rows_and_shifts_documents(corpus):
    samples = take(dataset(corpus), 3)
    nothing = {"documents": np.zeros((0, 2), dtype=np.int32), "records": np.zeros(0, dtype=np.int64)}
    empty = (samples[0][0] | nothing, samples[0][1])
    inputs, labels = collate_packs([samples[0], empty, samples[2]])
    assert set(inputs) == {"input", "positions", "documents", "records"}
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (3, SEQ_LEN)
    assert torch.equal(inputs["input"][2], samples[2][0]["input"])
    assert inputs["positions"].dtype == torch.int32
    documents = inputs["documents"]
    assert isinstance(documents, np.ndarray)
    assert documents.dtype == np.int32
    first, last = samples[0][0]["documents"], samples[2][0]["documents"]
    np.testing.assert_array_equal(documents, np.concatenate([first, last + 2 * SEQ_LEN]))
    records = [sample[0]["records"] for sample in (samples[0], samples[2])]
    np.testing.assert_array_equal(inputs["records"], np.concatenate(records))
    assert list(map(len, records)) == [len(first), len(last)]


def loader(path, num_workers, batch_size=2, **options):
    packs = dataset(path, **options)
    return StatefulDataLoader(packs, batch_size=batch_size, num_workers=num_workers, collate_fn=collate_packs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_resumes_in_the_middle_of_an_epoch(corpus, num_workers):
    reference = flats(take(loader(corpus, 0, epochs=-1), 30))
    for steps in (0, 1, 5, 17):
        running = loader(corpus, num_workers, epochs=-1)
        assert flats(take(running, steps)) == reference[:steps]
        resumed = resume(loader(corpus, num_workers, epochs=-1), running.state_dict())
        assert flats(take(resumed, 30 - steps)) == reference[steps:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loader_repeats_a_finite_epoch(corpus, num_workers):
    """What a validation set needs."""
    options = {"num_workers": num_workers, "dp_rank": 1, "dp_world_size": 2}
    validation = loader(corpus, **options)
    first = flats(validation)
    assert len(first) > 5
    take(validation, 2)
    assert flats(validation) == first
    stopped = loader(corpus, **options)
    take(stopped, 3)
    resumed = resume(loader(corpus, **options), stopped.state_dict())
    assert flats(resumed) == first[3:]
    assert flats(resumed) == first


def test_more_than_one_worker_of_another_loader_is_refused(corpus, monkeypatch):
    monkeypatch.setattr(
        "torchtitan_magi.data.datasets.packed_dataset.get_worker_info", lambda: SimpleNamespace(num_workers=2)
    )
    with pytest.raises(ValueError, match="num_workers is 2; use 0 or 1, or a PackLoader"):
        next(iter(dataset(corpus)))


@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_packs_are_full_on_the_length_histogram_and_no_record_is_tokenized_twice(tmp_path, long_documents):
    """The benchmark's document lengths, 64k packs: at least 98% full."""
    lengths = draw_lengths(np.random.default_rng(0), 4000) + 1
    path = write(tmp_path / "train.jsonl", [(i, int(n), 0) for i, n in enumerate(lengths)])
    small, counted = mock.patch("torchtitan_magi.data.records.record_file.BLOCK_BYTES", 4096), mock.Mock(wraps=tokenize)
    with small, mock.patch("support.numbered_records.tokenize", counted) as tokenized:
        packs = dataset(path, seq_len=65536, long_documents=long_documents, epochs=1, window_blocks=8)
        list(packs)
    assert packs.counts.fill >= 0.98
    assert tokenized.call_count == packs.counts.documents == 4000
