"""Documents that begin alike, packed as trees: the same documents, labels and weights as each by itself."""

import json
from collections import Counter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.jsonl import write_jsonl
from support.kept_tokens import flats
from support.streams import assert_nothing_is_lost, join, resume, take, with_small_blocks

from torchtitan_magi.data import IGNORE_INDEX, PackedPairDataset, PackedSFTDataset, TokenizedDocument, collate_packs
from torchtitan_magi.data.packs import prefix_trees
from torchtitan_magi.data.packs.prefix_trees import Run, grow_trees, paths_of
from torchtitan_magi.data.tokens.documents import TokenizedAnswers

blocks = with_small_blocks(1500)
SEQ_LEN = 64


@pytest.fixture(scope="module", autouse=True)
def short_trees():
    with mock.patch.object(prefix_trees, "SHORTEST", 3):
        yield


def tokenize(record):
    """`text` is "1 2 3+ 4+": tokens, and a plus behind those to be predicted."""
    words = record["text"].split()
    tokens = np.array([int(word.rstrip("+")) for word in words], np.int32)
    return TokenizedDocument(tokens, np.array([word.endswith("+") for word in words]))


def dataset(path, **options):
    defaults = {"seq_len": SEQ_LEN, "seed": 5, "long_documents": "split", "epochs": 1, "window_blocks": 4}
    return PackedSFTDataset(path, tokenize, **(defaults | {"share_prefixes": True} | options))


def words(tokens, learned):
    return {"text": " ".join(f"{token}{'+' * bool(flag)}" for token, flag in zip(tokens, learned, strict=True))}


def grown(rng, count):
    """Documents that branch at random places, with masks of their own; some are as others, or their beginnings."""
    made = [rng.integers(1, 9, rng.integers(2, 90))]
    while len(made) < count:
        kept = made[rng.integers(len(made))]
        kept = kept[: rng.integers(0, len(kept) + 1)]
        made.append(np.concatenate([kept, rng.integers(1, 9, rng.integers(0 if len(kept) > 1 else 2, 40))]))
    return [words(tokens, rng.random(len(tokens)) < rng.choice([0.1, 0.6, 1.0])) for tokens in made]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("corpus") / "train.jsonl", grown(np.random.default_rng(2), 120))


def documents_of(item):
    """(tokens, positions, labels) of each document along its branch; and which tokens of the pack it is made of."""
    inputs, labels = item
    before = np.zeros(0, np.int64)
    for start, end, shared in inputs["documents"].tolist():
        assert shared <= len(before)
        before = np.append(before[:shared], np.arange(start, end))
        found = inputs["input"].flatten()[before].tolist(), inputs["positions"].flatten()[before].tolist()
        yield before, (*found, labels.flatten()[before].tolist())


def masked(path, record, tokens, labels):
    """The document with its own labels only, by what its record says."""
    lines = path.read_text().splitlines()
    tokenized = tokenize(json.loads(lines[record]))
    for start in range(0, len(tokenized.tokens) - 1, SEQ_LEN):
        if tokenized.tokens[start : start + len(tokens)].tolist() == tokens:
            learned = tokenized.loss_mask[start + 1 : start + len(tokens) + 1]
            return tuple(tokens), tuple(np.where(learned, labels, IGNORE_INDEX).tolist())
    raise AssertionError("these are not its tokens")


def assert_same_documents(path, shared, flat):
    """And each label weighs what those of its documents weigh."""
    found = Counter()
    for item in shared:
        weights = np.zeros((2, item[1].numel()))
        for (where, (tokens, positions, labels)), record in zip(documents_of(item), item[0]["records"], strict=True):
            assert positions == list(range(len(tokens)))
            own = masked(path, record, tokens, labels)
            found[own] += 1
            learned = np.array(own[1]) != IGNORE_INDEX
            weights[:, where[learned]] += [[1], [1 / learned.sum()]]
        np.testing.assert_allclose(item[0]["label_weights"].numpy(), weights, rtol=1e-12)
        assert ((weights[0] > 0) == (item[1].numpy() != IGNORE_INDEX)).all()
    wanted = Counter()
    for item in flat:
        wanted.update((tuple(tokens), tuple(labels)) for _, (tokens, _, labels) in documents_of(with_branches(item)))
    assert found == wanted


def with_branches(item):
    inputs, labels = item
    return inputs | {"documents": np.pad(inputs["documents"], ((0, 0), (0, 1)))}, labels


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("long_documents", ["split", "truncate"])
def test_documents_labels_and_weights_are_those_of_flat_packs(corpus, shuffle, long_documents):
    options = {"shuffle": shuffle, "long_documents": long_documents}
    trees, flat = dataset(corpus, **options), dataset(corpus, share_prefixes=False, **options)
    shared = list(trees)
    assert_same_documents(corpus, shared, list(flat))
    counts = trees.counts
    assert counts.tokens == sum(int(item[0]["documents"][-1, 1]) for item in shared)
    assert counts.tokens + counts.shared_tokens == flat.counts.tokens
    assert counts.shared_tokens > flat.counts.tokens / 10
    assert counts.pieces == flat.counts.pieces
    assert_nothing_is_lost(counts)
    assert f" {counts.shared_tokens:,} tokens shared;" in str(counts)
    assert "shared" not in str(flat.counts)


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(20, 70))
@settings(max_examples=25)
def test_any_trees(tmp_path_factory, seed, shortest, seq_len):
    path = write_jsonl(tmp_path_factory.mktemp("any") / "train.jsonl", grown(np.random.default_rng(seed), 30))
    with mock.patch.object(prefix_trees, "SHORTEST", shortest), mock.patch(f"{__name__}.SEQ_LEN", seq_len):
        flat = dataset(path, share_prefixes=False, seq_len=seq_len)
        items = list(dataset(path, seq_len=seq_len))
        assert_same_documents(path, items, list(flat))
        for inputs, _ in items:
            assert_forks_are_apart(inputs["documents"].tolist(), shortest)


def assert_forks_are_apart(rows, shortest):
    forks = []  # above the current branch
    for _, _, shared in rows:
        forks = [fork for fork in forks if fork <= shared]
        assert shared in forks or shared - max(forks, default=0) >= shortest or not shared
        forks.append(shared)


def test_a_tree_by_hand(tmp_path):
    a, b = [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7]
    records = [
        words(a, [0, 0, 1, 1, 1, 1]),
        words(b, [0, 0, 0, 1, 1]),
        words(a[:4], [0, 0, 0, 1]),
        words([8, 9], [0, 1]),
    ]
    ((inputs, labels),) = dataset(write_jsonl(tmp_path / "train.jsonl", records), shuffle=False, seq_len=16)
    assert inputs["documents"].tolist() == [[0, 5, 0], [5, 6, 3], [6, 6, 3], [6, 7, 0]]
    assert inputs["records"].tolist() == [0, 1, 2, 3]
    assert inputs["input"][:7].tolist() == [1, 2, 3, 4, 5, 4, 8]
    assert inputs["positions"][:7].tolist() == [0, 1, 2, 3, 4, 3, 0]
    assert labels[:7].tolist() == [-100, 3, 4, 5, 6, 7, 9]
    per_label, per_document = inputs["label_weights"][:, :7].tolist()
    assert per_label == [0, 1, 3, 1, 1, 1, 1]
    assert per_document == [0, 1 / 4, 1 / 4 + 1 / 2 + 1, 1 / 4, 1 / 4, 1 / 2, 1]


def test_a_tree_that_does_not_fit_begins_anew_in_the_next_pack(tmp_path):
    prompt, answers = list(range(100, 111)), [[i] * 6 for i in range(1, 7)]
    records = [words(prompt + answer, [0] * 11 + [1] * 6) for answer in answers]
    path = write_jsonl(tmp_path / "train.jsonl", records)
    packs = dataset(path, shuffle=False, seq_len=36)
    items = list(packs)
    assert [inputs["documents"][:, 2].tolist() for inputs, _ in items] == [[0, 10, 10, 10], [0, 10]]
    assert [inputs["records"].tolist() for inputs, _ in items] == [[0, 1, 2, 3], [4, 5]]
    assert (packs.counts.tokens, packs.counts.shared_tokens) == (2 * 10 + 6 * 6, 4 * 10)


def order(texts):
    """The order of texts whose letters are tokens, and what each shares with the one before it."""
    tokens = np.array([ord(letter) for text in texts for letter in text], np.int32)
    ends = np.cumsum([*map(len, texts)])
    lengths = np.array([len(text) - 1 for text in texts])
    trees = grow_trees([Run(tokens, ends - lengths - 1, lengths, lengths)], 1000)
    return trees.order.tolist(), trees.shared.tolist()


def test_branches_keep_the_order_of_the_window_but_for_the_largest():
    assert order(["abcdZ", "xyzw", "abcdA", "abcdM"]) == ([0, 2, 3, 1], [0, 3, 3, 0])
    assert order(["abcdZZ", "abcdAAB1", "q", "abcdZY", "abcdAAB2"]) == ([1, 4, 0, 3, 2], [0, 6, 3, 3, 0])
    mixed = [f"abcd{''.join(letters)}" for letters in np.random.default_rng(0).choice([*"xyz"], (40, 2))]
    assert order(mixed) == ([*range(40)], [0, *[3] * 39])  # however their branches would be sorted
    assert order(["abc", "abd", "ab"]) == ([0, 1, 2], [0, 0, 0])  # less than SHORTEST
    assert order([]) == ([], [])


@pytest.mark.parametrize("seed", range(4))
def test_what_is_above_a_branch_lies_in_few_runs(seed):
    """Turns of an agent, each left by a branch: by the order of the window half of them would lie between the turns."""
    rng, turns = np.random.default_rng(seed), 64
    texts = [f"{'abcd' * turn}{'ABCDEFGH'}" for turn in range(1, turns)]
    _, shared = order([texts[i] for i in rng.permutation(len(texts))])
    assert max(map(len, paths_of(shared, range(turns)[1:]))) == 2
    _, shared = order([record["text"].replace(" ", "") for record in grown(rng, 200)])
    assert max(map(len, paths_of(shared, range(200)))) <= 1 + np.log2(200)


def test_data_without_common_beginnings_has_the_same_packs(tmp_path):
    rng = np.random.default_rng(0)
    records = [
        {"text": " ".join(f"{t}+" for t in [1000 + i, *rng.integers(0, 9, rng.integers(2, 60))])} for i in range(90)
    ]
    path = write_jsonl(tmp_path / "train.jsonl", records)
    packs, flat = dataset(path), dataset(path, share_prefixes=False)
    for item, (inputs, labels) in zip(packs, flat, strict=True):
        weights, branches = item[0].pop("label_weights"), item[0].pop("documents")
        assert torch.equal(item[1], labels)
        assert branches[:, :2].tolist() == inputs.pop("documents").tolist()
        assert not branches[:, 2].any()
        assert torch.equal(weights[0], (labels != IGNORE_INDEX).double())
        assert item[0].keys() == inputs.keys()
        assert all(np.array_equal(item[0][name], inputs[name]) for name in inputs)
    assert packs.counts == flat.counts


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3)])
def test_resume_at_any_round_and_degree_continues_the_stream(corpus, before, after):
    options = {"epochs": -1, "window_blocks": 2}
    stream = flats(take(dataset(corpus, **options), 60))
    for rounds in (0, 1, 4, 7, 11):
        packs = dataset(corpus, dp_rank=0, dp_world_size=before, **options)
        take(packs, rounds)
        state = json.loads(json.dumps(packs.state_dict()))
        shards = [dataset(corpus, dp_rank=rank, dp_world_size=after, **options) for rank in range(after)]
        parts = [flats(take(resume(shard, state) if rounds else shard, 10)) for shard in shards]
        assert join(parts) == stream[rounds * before :][: 10 * after]


def test_states_go_on_with_the_same_value_only(corpus):
    packs, flat = dataset(corpus), dataset(corpus, share_prefixes=False)
    for one, other, values in ((packs, flat, ("True", "False")), (flat, packs, ("False", "True"))):
        with pytest.raises(ValueError, match=f"share_prefixes = {values[0]}, this run has {values[1]}; resume with"):
            other.load_state_dict(one.state_dict())
    state = flat.state_dict()
    del state["stream"]["share_prefixes"]  # of an earlier program
    flat.load_state_dict(state)
    with pytest.raises(ValueError, match="share_prefixes = False, this run has True"):
        packs.load_state_dict(state)


def test_batches_put_trees_one_behind_the_other(corpus):
    items = take(dataset(corpus), 3)
    inputs, labels = collate_packs(items[:2], num_rows=3)
    assert inputs["label_weights"].shape == (3, 2, SEQ_LEN)
    first, second = (item[0]["documents"] for item in items[:2])
    np.testing.assert_array_equal(
        inputs["documents"], np.concatenate([first, second + np.int32([SEQ_LEN, SEQ_LEN, 0])])
    )
    assert inputs["documents"].dtype == np.int32
    assert not inputs["label_weights"][2].any()
    assert (labels[2] == IGNORE_INDEX).all()


def test_pairs_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ValueError, match="share_prefixes is True, but it is for documents; leave it out"):
        PackedPairDataset(path, tokenize, 16, share_prefixes=True)


# ------------------------------------------------------------------------------------------------------ several answers


def test_answers_of_a_record_are_documents_that_count_as_their_weights_say(tmp_path):
    def answers(record):
        made = [tokenize({"text": text}) for text in record["text"].split("|")]
        weights = tuple(float(number) for number in made.pop().tokens)
        return TokenizedAnswers(tuple(made), weights)

    prompt = "1 2 3+ 4"
    records = [{"text": f"{prompt} 5+ 6+|{prompt} 7+|{prompt} 8+ 9+|1 3 0"}, {"text": f"{prompt} 5+|20 21 22 23+|2 1"}]
    path = write_jsonl(tmp_path / "train.jsonl", records)
    packs = PackedSFTDataset(path, answers, 20, epochs=1, shuffle=False, share_prefixes=True)
    ((inputs, labels),) = packs
    assert inputs["records"].tolist() == [0, 0, 1, 1]
    assert inputs["documents"].tolist() == [[0, 5, 0], [5, 6, 3], [6, 7, 3], [7, 10, 0]]
    assert labels[:10].tolist() == [-100, 3, -100, 5, 6, 7, 5, -100, -100, 23]
    per_label, per_document = inputs["label_weights"][:, :10].tolist()
    assert per_label == [0, 1 + 2 + 3, 0, 1, 1, 3, 2, 0, 0, 1]
    assert per_document == pytest.approx([0, 1 / 3 + 2 / 2 + 3 / 2, 0, 1 / 3, 1 / 3, 3 / 2, 2 / 2, 0, 0, 1])
    assert packs.counts.unlabeled == 1  # the answer of weight 0
    assert_nothing_is_lost(packs.counts)
    with pytest.raises(ValueError, match=r'has records with "completions", which are packed as trees; set magi.share'):
        list(PackedSFTDataset(path, answers, 20, epochs=1))
