"""Preference pairs: forms of records, tokens, both layouts, what is left out, and the packed stream of them."""

import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat import CHATML_UNMARKED, LLAMA3_TEMPLATE, TOKENIZER, chat, learned
from support.conversations import assistant, user
from support.jsonl import write_jsonl
from support.streams import assert_nothing_is_lost, join, resume, take, with_small_blocks
from tokenizers import Tokenizer, models

from torchtitan_magi.data import IGNORE_INDEX, PackedPairDataset, TokenizedDocument, TokenizedPair, collate_packs
from torchtitan_magi.data.datasets.pairs import fit_pair, lay_out_pair
from torchtitan_magi.data.records.formats import parse_pair
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE, PLAIN_TEMPLATE
from torchtitan_magi.data.tokens.documents import pair_of

SEQ_LEN = 64
USER, YES, NO = user("q"), assistant("yes"), assistant("no")
SYSTEM = {"role": "system", "content": "s"}
PAIR = {"prompt": [USER], "chosen": [YES], "rejected": [NO]}


def document(tokens, first):
    tokens = np.array(tokens, dtype=np.int32)
    return TokenizedDocument(tokens, np.arange(len(tokens)) >= first)


def numbered(prompt, chosen, rejected, name=0):
    """P is name * 1000 + 0, 1, ..; C counts on from + 300, R from + 600."""
    base = name * 1000
    return TokenizedPair(
        np.arange(base, base + prompt, dtype=np.int32),
        document(np.arange(base + 300, base + 300 + chosen), 0),
        document(np.arange(base + 600, base + 600 + rejected), 0),
    )


def tokenize(record):
    """The prompt's content is "name prompt chosen rejected"."""
    name, *lengths = map(int, record["prompt"][0]["content"].split())
    return numbered(*lengths, name=name)


def write(path, pairs):
    """Pairs of (name, prompt, chosen, rejected)."""
    return write_jsonl(path, ({"prompt": " ".join(map(str, p)), "chosen": "c", "rejected": "r"} for p in pairs))


def dataset(path, **options):
    return PackedPairDataset(path, tokenize, **({"seq_len": SEQ_LEN, "epochs": 1, "window_blocks": 2} | options))


blocks = with_small_blocks(300)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """100 pairs: most short, some longer than a pack, some with too long a prompt."""
    rng = np.random.default_rng(1)
    lengths = np.clip(rng.lognormal(1.8, 1.0, (100, 3)), 1, 200).astype(int)
    pairs = [(i + 1, *row) for i, row in enumerate(lengths.tolist())]
    return write(tmp_path_factory.mktemp("corpus") / "pairs.jsonl", pairs)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "q", "chosen": "yes", "rejected": "no"},
        {"prompt": [USER], "chosen": "yes", "rejected": "no"},
        {"prompt": "q", "chosen": [YES], "rejected": NO},
        {"prompt": "q", "chosen": [USER, YES], "rejected": [USER, NO]},
        {"chosen": [USER, YES], "rejected": [USER, NO], "score_chosen": 1.0},
        {"prompt": "q", "chosen": [assistant([{"type": "text", "text": "yes"}])], "rejected": "no"},
    ],
)
def test_every_form_of_a_pair_is_the_same_pair(record):
    assert parse_pair(record) == PAIR


def test_conversations_may_repeat_the_prompt_after_a_system_message_and_otherwise_not_in_part():
    pair = parse_pair({"prompt": "q", "chosen": [SYSTEM, USER, YES], "rejected": [SYSTEM, USER, NO]})
    assert pair == {"prompt": [SYSTEM, USER], "chosen": [YES], "rejected": [NO]}
    for chosen, rejected, prompt in (
        ([USER, YES], [NO], [USER]),
        ([YES], [SYSTEM, USER, NO], [USER]),
        ([USER, YES], [USER, NO], [SYSTEM, USER]),
    ):
        with pytest.raises(ValueError, match='repeats some of "prompt"; let both repeat all of it, or none'):
            parse_pair({"prompt": prompt, "chosen": chosen, "rejected": rejected})


def test_the_prompt_of_two_conversations_is_what_they_begin_with_alike():
    again, more = user("and?"), assistant("more")
    for prompt, chosen, rejected in (
        ([USER, YES, again], [YES], [more]),
        ([USER], [YES], [YES, again, more]),
        ([USER], [YES], [YES]),
    ):
        pair = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        assert parse_pair({"chosen": prompt + chosen, "rejected": prompt + rejected}) == pair
    system = parse_pair({"system": "s", "prompt": "q", "chosen": "yes", "rejected": "no", "tools": '[{"name": "f"}]'})
    assert (system["prompt"], system["tools"]) == ([SYSTEM, USER], [{"name": "f"}])


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML_UNMARKED, PLAIN_TEMPLATE, LLAMA3_TEMPLATE])
@pytest.mark.parametrize("turns", [1, 3])
def test_prompt_and_completions_are_the_plain_encoding_and_only_completions_are_learned(template, turns):
    tokenizer = pickle.loads(pickle.dumps(chat(template)))
    prompt, chosen, rejected = [USER, YES, user("the cat")][-turns:], assistant("the cat and"), assistant("the hat")
    pair = tokenizer.pair({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
    for completion, message in ((pair.chosen, chosen), (pair.rejected, rejected)):
        text, spans = tokenizer.render([*prompt, message], first=len(prompt))
        (span,) = spans
        whole = TOKENIZER.encode(text[: span[1]], add_special_tokens=False).ids
        assert [*pair.prompt.tolist(), *completion.tokens.tolist()] == whole
        assert learned(completion) == text[slice(*span)]
        assert completion.loss_mask.all()  # no token of these prompts crosses into the completion
        whole_document = tokenizer({"messages": [*prompt, message]})
        np.testing.assert_array_equal(whole_document.tokens[: len(whole)], whole)


def test_a_merge_across_the_end_of_the_prompt_shortens_the_prompt():
    """Of the prompt "xa" only "x" is common: "ab" is one token, which holds a character to learn, and "ac" is two."""
    vocab = {"x": 0, "a": 1, "b": 2, "c": 3, "ab": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    record = parse_pair({"prompt": "xa", "chosen": "bb", "rejected": "cc"})
    pair = chat(template, tokenizer, None, None).pair(record)
    assert pair.prompt.tolist() == [0]
    assert (pair.chosen.tokens.tolist(), pair.chosen.loss_mask.tolist()) == ([4, 2], [True, True])
    assert (pair.rejected.tokens.tolist(), pair.rejected.loss_mask.tolist()) == ([1, 3, 3], [False, True, True])


def test_a_pair_without_a_common_prompt_token_is_refused():
    with pytest.raises(ValueError, match="no prompt token in common; give the record a prompt"):
        pair_of(document([1, 2], 0), document([1, 3], 0))
    with pytest.raises(ValueError, match="no prompt token in common"):
        pair_of(document([1, 2], 1), document([4, 3], 1))


def test_both_layouts_by_hand():
    pair = numbered(3, 2, 4)
    shared = lay_out_pair(pair, True)
    assert shared.bounds == (0, 2, 4, 8)
    assert shared.inputs.tolist() == [0, 1, 2, 300, 2, 600, 601, 602]
    assert shared.labels.tolist() == [-100, -100, 300, 301, 600, 601, 602, 603]
    assert shared.positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 5]
    separate = lay_out_pair(pair, False)
    assert separate.bounds == (0, 0, 4, 10)
    assert separate.inputs.tolist() == [0, 1, 2, 300, 0, 1, 2, 600, 601, 602]
    assert separate.labels.tolist() == [-100, -100, 300, 301, -100, -100, 600, 601, 602, 603]
    assert separate.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    for piece in (shared, separate):
        assert {piece.inputs.dtype, piece.labels.dtype, piece.positions.dtype} == {np.dtype(np.int32)}


sizes = st.integers(1, 30)


@given(sizes, sizes, sizes, st.booleans())
def test_both_layouts_hold_the_same_labels_after_the_same_contexts(prompt, chosen, rejected, shared_prompt):
    """By definition: what a labelled position has seen, and what it predicts."""

    def contexts(piece):
        begin, first, second, end = piece.bounds
        seen = []
        for start, stop in ((first, second), (second, end)):
            tokens = [*piece.inputs[begin:first], *piece.inputs[start:stop]]
            labels = [*piece.labels[begin:first], *piece.labels[start:stop]]
            positions = [*piece.positions[begin:first], *piece.positions[start:stop]]
            assert positions == list(range(len(tokens)))
            seen.append([(tokens[: i + 1], label) for i, label in enumerate(labels) if label != IGNORE_INDEX])
        return seen

    pair = numbered(prompt, chosen, rejected)
    one, two = lay_out_pair(pair, True), lay_out_pair(pair, False)
    assert len(one) == pair.num_positions(True) == prompt - 1 + chosen + rejected
    assert len(two) == pair.num_positions(False) == 2 * (prompt - 1) + chosen + rejected
    assert contexts(one) == contexts(two)
    assert [len(branch) for branch in contexts(one)] == [chosen, rejected]


@given(sizes, sizes, sizes, st.integers(1, 80), st.booleans())
def test_truncation_keeps_the_prompt_and_fills_the_pack(prompt, chosen, rejected, seq_len, shared_prompt):
    pair = numbered(prompt, chosen, rejected)
    room = seq_len - (1 if shared_prompt else 2) * (prompt - 1)
    fitted = fit_pair(pair, seq_len, shared_prompt)
    if room < 2:
        assert fitted is None
        return
    assert fitted.prompt.tolist() == pair.prompt.tolist()
    kept = [len(fitted.chosen.tokens), len(fitted.rejected.tokens)]
    assert fitted.num_positions(shared_prompt) == min(seq_len, pair.num_positions(shared_prompt))
    assert fitted.chosen.tokens.tolist() == pair.chosen.tokens[: kept[0]].tolist()
    assert fitted.rejected.tokens.tolist() == pair.rejected.tokens[: kept[1]].tolist()
    if kept != [chosen, rejected]:
        cut = max(kept)
        assert all(now in (before, cut, cut - 1) for now, before in zip(kept, (chosen, rejected), strict=True))


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_packs_hold_every_pair_that_fits_once(corpus, shared_prompt):
    packs = dataset(corpus, shared_prompt=shared_prompt)
    expected = {}
    for index, line in enumerate(corpus.read_text().splitlines()):
        fitted = fit_pair(tokenize(parse_pair(json.loads(line))), SEQ_LEN, shared_prompt)
        if fitted is not None:
            expected[index] = lay_out_pair(fitted, shared_prompt)
    found = []
    for inputs, labels in packs:
        assert set(inputs) == {"input", "positions", "pairs", "pair_ids"}
        pairs, pair_ids, rows = inputs["pairs"], inputs["pair_ids"], (inputs["input"], inputs["positions"], labels)
        assert [row.dtype for row in rows] == [torch.int64, torch.int32, torch.int64]
        assert (pairs.dtype, pair_ids.dtype) == (np.int32, np.int64)
        assert pairs[0, 0] == 0
        assert (pairs[1:, 0] == pairs[:-1, 3]).all()
        for (start, chosen, rejected, end), pair_id in zip(pairs.tolist(), pair_ids.tolist(), strict=True):
            piece = expected[pair_id]
            assert (chosen - start, rejected - start, end - start) == piece.bounds[1:]
            for row, expected_row in zip(rows, (piece.inputs, piece.positions, piece.labels), strict=True):
                assert row[start:end].tolist() == expected_row.tolist()
            found.append(pair_id)
        assert (labels[pairs[-1, 3] :] == IGNORE_INDEX).all()
    assert sorted(found) == sorted(expected)
    assert packs.num_records == 100
    assert max(expected) > 90


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_counts_of_pairs_add_up(corpus, tmp_path, shared_prompt):
    lines = corpus.read_text() + json.dumps({"prompt": "1 9 0 3", "chosen": "c", "rejected": "r"}) + "\n"
    path = tmp_path / "pairs.jsonl"
    path.write_text(lines)
    packs = dataset(path, shared_prompt=shared_prompt)
    produced = list(packs)
    counts = packs.counts
    assert (counts.documents, counts.unlabeled) == (101, 1)
    assert counts.long_prompts > 0
    assert counts.truncated > 0
    assert_nothing_is_lost(counts)
    assert counts.pieces == sum(len(inputs["pairs"]) for inputs, _ in produced)
    assert counts.tokens == sum(int(inputs["pairs"][-1, 3]) for inputs, _ in produced)


def test_a_pair_without_a_preference_is_left_out_and_counted(tmp_path):
    records = [
        {"prompt": "q", "chosen": "the cat", "rejected": "the cat"},
        {"prompt": "q", "chosen": "the cat" * 20, "rejected": "the cat" * 20 + "!"},  # equal once truncated
        {"prompt": "q", "chosen": "the cat", "rejected": "the hat"},
        {"prompt": "q" * 50, "chosen": "the cat", "rejected": "the hat"},
    ]
    path = write_jsonl(tmp_path / "pairs.jsonl", records)
    packs = PackedPairDataset(path, chat(CHATML_TEMPLATE).pair, 40, epochs=1)
    assert [inputs["pair_ids"].tolist() for inputs, _ in packs] == [[2]]
    assert (packs.counts.equal, packs.counts.long_prompts, packs.counts.documents) == (2, 1, 4)
    assert "left out: 2 with chosen equal to rejected, 1 with too long a prompt" in str(packs.counts)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(sizes, sizes, sizes), min_size=1, max_size=40),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    shared_prompt=st.booleans(),
    data=st.data(),
)
def test_pairs_are_sharded_and_resumed_like_documents(tmp_path_factory, lengths, before, after, shared_prompt, data):
    path = write(tmp_path_factory.mktemp("any") / "pairs.jsonl", [(i + 1, *row) for i, row in enumerate(lengths)])
    options = {"shared_prompt": shared_prompt}

    def ids(packs):
        return [inputs["pair_ids"].tolist() for inputs, _ in packs]

    stream = ids(dataset(path, **options)) if any(p < 33 for p, _, _ in lengths) else []
    steps = data.draw(st.integers(0, -(-len(stream) // before)))
    first = dataset(path, dp_world_size=before, **options)
    assert len(take(first, steps)) == steps
    state = json.loads(json.dumps(first.state_dict()))
    ranks = [dataset(path, dp_rank=rank, dp_world_size=after, **options) for rank in range(after)]
    rest = join(ids(resume(packs, state)) for packs in ranks)
    assert [item for item in rest if item] == stream[steps * before :]


def test_state_of_the_other_layout_or_of_documents_is_refused(corpus):
    state = dataset(corpus).state_dict()
    with pytest.raises(ValueError, match="shared_prompt = True, this run has False; resume with the same"):
        dataset(corpus, shared_prompt=False).load_state_dict(state)


def test_state_of_another_tokenizer_or_template_is_refused(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "q", "chosen": "the cat", "rejected": "the hat"}\n')
    state = PackedPairDataset(path, chat(CHATML_TEMPLATE).pair, 40).state_dict()
    same = pickle.loads(pickle.dumps(chat(CHATML_TEMPLATE)))
    PackedPairDataset(path, same.pair, 40).load_state_dict(state)
    for other in (chat(PLAIN_TEMPLATE), chat(CHATML_TEMPLATE, bos=None)):
        with pytest.raises(ValueError, match=r"tokenizer = '.*', this run has '.*'; resume with the same value"):
            PackedPairDataset(path, other.pair, 40).load_state_dict(state)


def test_collate_shifts_pairs_and_joins_their_ids(corpus):
    samples = list(dataset(corpus))[:2]
    inputs, labels = collate_packs(samples)
    assert labels.shape == (2, SEQ_LEN)
    (first, _), (second, _) = samples
    pairs, pair_ids = inputs["pairs"], inputs["pair_ids"]
    np.testing.assert_array_equal(pairs, np.concatenate([first["pairs"], second["pairs"] + SEQ_LEN]))
    np.testing.assert_array_equal(pair_ids, np.concatenate([first["pair_ids"], second["pair_ids"]]))
    assert (pairs.dtype, pair_ids.dtype) == (np.int32, np.int64)


def test_ranks_without_a_pack_get_padding(tmp_path):
    path = write(tmp_path / "pairs.jsonl", [(1, 3, 4, 5)])
    ((inputs, labels),) = dataset(path, dp_rank=1, dp_world_size=2)
    assert inputs["pairs"].shape == (0, 4)
    assert inputs["pair_ids"].shape == (0,)
    assert (labels == IGNORE_INDEX).all()
