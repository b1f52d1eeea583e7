"""Preference pairs: forms of records, tokens, both layouts, what is left out, and the packed stream of them."""

import itertools
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

from torchtitan_magi.data import IGNORE_INDEX, PackedPairDataset, TokenizedDocument, TokenizedPairs, collate_packs
from torchtitan_magi.data.datasets.pairs import lay_out_pairs, pieces_of_pairs
from torchtitan_magi.data.records.formats import parse_pair
from torchtitan_magi.data.tokens.chat import CHATML_TEMPLATE, PLAIN_TEMPLATE
from torchtitan_magi.data.tokens.documents import pairs_of
from torchtitan_magi.data.tokens.token_block import TokenBlock

SEQ_LEN = 64
USER, YES, NO = user("q"), assistant("yes"), assistant("no")
SYSTEM = {"role": "system", "content": "s"}
PAIR = {"prompt": [USER], "answers": [[YES], [NO]], "pairs": [(0, 1)]}


def document(tokens, first):
    tokens = np.array(tokens, dtype=np.int32)
    return TokenizedDocument(tokens, np.arange(len(tokens)) >= first)


def numbered(prompt, *answers, name=0, pairs=((0, 1),)):
    """P is name * 10,000 + 0, 1, ..; answers count on from + 300, + 600, .."""
    base = name * 10_000
    return TokenizedPairs(
        np.arange(base, base + prompt, dtype=np.int32),
        tuple(document(np.arange(size) + base + 300 * number, 0) for number, size in enumerate(answers, start=1)),
        tuple(pairs),
    )


def tokenize(record):
    """The prompt's content is "name prompt answer ..", tokens of each; an answer's its number."""
    name, prompt, *lengths = map(int, record["prompt"][0]["content"].split())
    answers = [lengths[int(answer[0]["content"])] for answer in record["answers"]]
    return numbered(prompt, *answers, name=name, pairs=record["pairs"])


def fit(pairs, seq_len, shared_prompt):
    """The pieces of a record."""
    found = pieces_of_pairs(TokenBlock.of([pairs]), np.zeros(1, np.int64), seq_len, shared_prompt)
    return [found.tokens(piece) for piece in range(len(found.pieces))]


def write(path, pairs):
    """Pairs of (name, prompt, chosen, rejected)."""
    return write_jsonl(path, ({"prompt": " ".join(map(str, p)), "chosen": "0", "rejected": "1"} for p in pairs))


def write_answers(path, records):
    """Records of (prompt, answers, pairs), named from 1 on, see `tokenize`."""
    lines = (
        {
            "prompt": " ".join(map(str, (name, prompt, *answers))),
            "completions": [str(number) for number in range(len(answers))],
            "pairs": pairs,
        }
        for name, (prompt, answers, pairs) in enumerate(records, start=1)
    )
    return write_jsonl(path, lines)


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
    assert pair == PAIR | {"prompt": [SYSTEM, USER]}
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
        pair = PAIR | {"prompt": prompt, "answers": [chosen, rejected]}
        assert parse_pair({"chosen": prompt + chosen, "rejected": prompt + rejected}) == pair
    system = parse_pair({"system": "s", "prompt": "q", "chosen": "yes", "rejected": "no", "tools": '[{"name": "f"}]'})
    assert (system["prompt"], system["tools"]) == ([SYSTEM, USER], [{"name": "f"}])


@pytest.mark.parametrize("template", [CHATML_TEMPLATE, CHATML_UNMARKED, PLAIN_TEMPLATE, LLAMA3_TEMPLATE])
@pytest.mark.parametrize("turns", [1, 3])
def test_prompt_and_completions_are_the_plain_encoding_and_only_completions_are_learned(template, turns):
    tokenizer = pickle.loads(pickle.dumps(chat(template)))
    prompt, chosen, rejected = [USER, YES, user("the cat")][-turns:], assistant("the cat and"), assistant("the hat")
    pair = tokenizer.pair({"prompt": prompt, "answers": [[chosen], [rejected]], "pairs": [(0, 1)]})
    assert pair.pairs == ((0, 1),)
    for completion, message in zip(pair.answers, (chosen, rejected), strict=True):
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
    chosen, rejected = pair.answers
    assert (chosen.tokens.tolist(), chosen.loss_mask.tolist()) == ([4, 2], [True, True])
    assert (rejected.tokens.tolist(), rejected.loss_mask.tolist()) == ([1, 3, 3], [False, True, True])


def test_a_pair_without_a_common_prompt_token_is_refused():
    with pytest.raises(ValueError, match="no prompt token in common; give the record a prompt"):
        pairs_of([document([1, 2], 0), document([1, 3], 0)], [(0, 1)])
    with pytest.raises(ValueError, match="no prompt token in common"):
        pairs_of([document([1, 2], 1), document([4, 3], 1)], [(0, 1)])


def test_both_layouts_by_hand():
    pair = numbered(3, 2, 4)
    shared = lay_out_pairs(pair, True)
    assert (shared.branches.tolist(), shared.pairs.tolist()) == ([[0, 4, 0], [4, 8, 2]], [[0, 1]])
    assert shared.inputs.tolist() == [0, 1, 2, 300, 2, 600, 601, 602]
    assert shared.labels.tolist() == [-100, -100, 300, 301, 600, 601, 602, 603]
    assert shared.positions.tolist() == [0, 1, 2, 3, 2, 3, 4, 5]
    separate = lay_out_pairs(pair, False)
    assert (separate.branches.tolist(), separate.pairs.tolist()) == ([[0, 4, 0], [4, 10, 0]], [[0, 1]])
    assert separate.inputs.tolist() == [0, 1, 2, 300, 0, 1, 2, 600, 601, 602]
    assert separate.labels.tolist() == [-100, -100, 300, 301, -100, -100, 600, 601, 602, 603]
    assert separate.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    for piece in (shared, separate):
        assert {piece.inputs.dtype, piece.labels.dtype, piece.positions.dtype} == {np.dtype(np.int32)}


sizes = st.integers(1, 30)


@st.composite
def records(draw, most=6):
    """The prompt's size, those of the answers, and pairs of these."""
    answers = draw(st.lists(sizes, min_size=2, max_size=most))
    numbers = st.permutations(range(len(answers))).map(lambda order: tuple(order[:2]))
    return draw(sizes), answers, draw(st.lists(numbers, min_size=1, max_size=8, unique=True))


def contexts(inputs, positions, labels, branches):
    """By definition, of each branch: what a labelled position has seen, and what it predicts."""
    found, tokens, marks = [], [], []
    for start, end, shared in np.asarray(branches).tolist():
        tokens = [*tokens[:shared], *np.asarray(inputs)[start:end].tolist()]
        marks = [*marks[:shared], *np.asarray(labels)[start:end].tolist()]
        assert np.asarray(positions)[start:end].tolist() == list(range(shared, len(tokens)))
        found.append([(tokens[: i + 1], label) for i, label in enumerate(marks) if label != IGNORE_INDEX])
    return found


def contexts_of(pairs, shared_prompt):
    laid = lay_out_pairs(pairs, shared_prompt)
    return contexts(laid.inputs, laid.positions, laid.labels, laid.branches)


@given(records())
def test_both_layouts_hold_the_same_labels_after_the_same_contexts(record):
    prompt, answers, pairs = record
    whole = numbered(prompt, *answers, pairs=pairs)
    one, two = lay_out_pairs(whole, True), lay_out_pairs(whole, False)
    assert len(one) == prompt - 1 + sum(answers)
    assert len(two) == len(answers) * (prompt - 1) + sum(answers)
    assert contexts_of(whole, True) == contexts_of(whole, False)
    assert [len(branch) for branch in contexts_of(whole, True)] == answers
    assert one.pairs.tolist() == two.pairs.tolist() == [list(pair) for pair in pairs]


@given(sizes, sizes, sizes, st.integers(1, 80), st.booleans())
def test_truncation_keeps_the_prompt_and_fills_the_pack(prompt, chosen, rejected, seq_len, shared_prompt):
    pair = numbered(prompt, chosen, rejected)
    room = seq_len - (1 if shared_prompt else 2) * (prompt - 1)
    fitted = fit(pair, seq_len, shared_prompt)
    if room < 2:
        assert fitted == []
        return
    (fitted,) = fitted
    assert fitted.prompt.tolist() == pair.prompt.tolist()
    kept = [len(answer.tokens) for answer in fitted.answers]
    assert len(lay_out_pairs(fitted, shared_prompt)) == min(seq_len, len(lay_out_pairs(pair, shared_prompt)))
    for answer, whole in zip(fitted.answers, pair.answers, strict=True):
        assert answer.tokens.tolist() == whole.tokens[: len(answer.tokens)].tolist()
    if kept != [chosen, rejected]:
        cut = max(kept)
        assert all(now in (before, cut, cut - 1) for now, before in zip(kept, (chosen, rejected), strict=True))


@given(records(), st.integers(1, 120), st.booleans())
def test_pieces_have_each_good_pair_once_as_it_is_by_itself(record, seq_len, shared_prompt):
    prompt, answers, pairs = record

    def compared(pieces):
        of_pieces = [(contexts_of(piece, shared_prompt), piece.pairs) for piece in pieces]
        return [[branches[number] for number in pair] for branches, of_piece in of_pieces for pair in of_piece]

    alone = [fit(numbered(prompt, *answers, pairs=[pair]), seq_len, shared_prompt) for pair in pairs]
    pieces = fit(numbered(prompt, *answers, pairs=pairs), seq_len, shared_prompt)
    assert compared(pieces) == compared(itertools.chain(*alone))
    for piece in pieces:
        assert len(lay_out_pairs(piece, shared_prompt)) <= seq_len
        assert len(piece.answers) == len({number for pair in piece.pairs for number in pair})
    for before, after in itertools.pairwise(pieces):  # the first pair of a piece did not fit the one before
        used = {int(answer.tokens[0]): len(answer.tokens) for answer in before.answers}
        both = [after.answers[number] for number in after.pairs[0]]
        used |= {int(answer.tokens[0]): len(answer.tokens) for answer in both}
        assert (1 if shared_prompt else len(used)) * (prompt - 1) + sum(used.values()) > seq_len or any(
            len(lay_out_pairs(piece, shared_prompt)) == seq_len for piece in (before, after)
        )


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_packs_hold_every_pair_that_fits_once(corpus, shared_prompt):
    packs = dataset(corpus, shared_prompt=shared_prompt)
    expected = {}
    for index, line in enumerate(corpus.read_text().splitlines()):
        for fitted in fit(tokenize(parse_pair(json.loads(line))), SEQ_LEN, shared_prompt):
            expected[index] = lay_out_pairs(fitted, shared_prompt)
    found = []
    for inputs, labels in packs:
        assert set(inputs) == {"input", "positions", "documents", "pairs", "pair_ids", "pair_numbers"}
        documents, rows = inputs["documents"], (inputs["input"], inputs["positions"], labels)
        assert [row.dtype for row in rows] == [torch.int64, torch.int32, torch.int64]
        names = ("documents", "pairs", "pair_ids", "pair_numbers")
        assert [inputs[name].dtype for name in names] == [np.int32, np.int32, np.int64, np.int64]
        assert not inputs["pair_numbers"].any()
        assert documents[0, 0] == 0
        assert (documents[1:, 0] == documents[:-1, 1]).all()
        for branches, pair_id in zip(documents[inputs["pairs"]].tolist(), inputs["pair_ids"].tolist(), strict=True):
            piece = expected[pair_id]
            start, end = branches[0][0], branches[1][1]
            assert (np.array(branches) - [start, start, 0]).tolist() == piece.branches.tolist()
            for row, expected_row in zip(rows, (piece.inputs, piece.positions, piece.labels), strict=True):
                assert row[start:end].tolist() == expected_row.tolist()
            found.append(pair_id)
        assert (labels[documents[-1, 1] :] == IGNORE_INDEX).all()
    assert sorted(found) == sorted(expected)
    assert packs.num_records == 100
    assert max(expected) > 90


@pytest.mark.parametrize("shared_prompt", [True, False])
def test_counts_of_pairs_add_up(corpus, tmp_path, shared_prompt):
    lines = corpus.read_text() + json.dumps({"prompt": "1 9 0 3", "chosen": "0", "rejected": "1"}) + "\n"
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
    assert counts.tokens == sum(int(inputs["documents"][-1, 1]) for inputs, _ in produced)


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


def test_pairs_without_a_preference_are_left_out_of_those_of_their_record(tmp_path):
    pairs = [[0, 1], [2, 3], [0, 2], [1, 2], [0, 4], [3, 2]]
    answers = ["the cat", "the cat", "the hat", [assistant("a", weight=0)], "the cat and a hat " * 30]
    path = write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "q", "completions": answers, "pairs": pairs}])
    packs = PackedPairDataset(path, chat(CHATML_TEMPLATE).pair, 64, epochs=1)
    items = [inputs for inputs, _ in packs]
    assert sorted(inputs["pair_numbers"].tolist() for inputs in items) == [[2, 3], [4]]
    assert {len(inputs["documents"]) for inputs in items} == {3, 2}
    counts = packs.counts
    assert (counts.documents, counts.pieces, counts.extra_pieces) == (1, 2, 4)
    assert (counts.equal, counts.unlabeled, counts.truncated, counts.long_prompts) == (1, 2, 1, 0)
    assert_nothing_is_lost(counts)


@settings(max_examples=60, deadline=None)
@given(whole=st.lists(records(), min_size=1, max_size=20), shared_prompt=st.booleans())
def test_packs_of_answers_have_the_pairs_of_flat_records(tmp_path_factory, whole, shared_prompt):
    """Each pair once, with the labels after the contexts that it has as a record of its own."""
    folder = tmp_path_factory.mktemp("any")

    def compared(path):
        packs = dataset(path, shared_prompt=shared_prompt)
        found = {}
        for inputs, labels in packs if any(prompt < 33 for prompt, _, _ in whole) else ():
            branches = contexts(inputs["input"], inputs["positions"], labels, inputs["documents"])
            places = zip(inputs["pair_ids"].tolist(), inputs["pair_numbers"].tolist(), strict=True)
            for place, pair in zip(places, inputs["pairs"].tolist(), strict=True):
                assert place not in found
                found[place] = [branches[number] for number in pair]
        assert_nothing_is_lost(packs.counts)
        return found, packs.counts

    pairs = [(number, index) for number, (_, _, of_one) in enumerate(whole) for index in range(len(of_one))]
    lines = []
    for number, index in pairs:
        prompt, answers, of_one = whole[number]
        lines.append((1 + number, prompt, *(answers[answer] for answer in of_one[index])))
    together, counts = compared(write_answers(folder / "whole.jsonl", whole))
    alone, flat = compared(write(folder / "flat.jsonl", lines))
    assert counts.documents == (len(whole) if flat.packs else 0)
    assert counts.pieces <= flat.pieces
    assert counts.tokens <= flat.tokens
    assert together.keys() == {pairs[record] for record, _ in alone}

    def sizes_of(branches):  # the name of an answer depends on its number in the record
        return [[(len(seen), seen[0], label % 300) for seen, label in branch] for branch in branches]

    for (record, _), branches in alone.items():
        assert sizes_of(together[pairs[record]]) == sizes_of(branches)


@settings(max_examples=60, deadline=None)
@given(
    whole=st.lists(records(), min_size=1, max_size=30),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    shared_prompt=st.booleans(),
    data=st.data(),
)
def test_pairs_are_sharded_and_resumed_like_documents(tmp_path_factory, whole, before, after, shared_prompt, data):
    path = write_answers(tmp_path_factory.mktemp("any") / "pairs.jsonl", whole)
    options = {"shared_prompt": shared_prompt}

    def ids(packs):
        rows = ((inputs["pair_ids"], inputs["pair_numbers"], inputs["documents"]) for inputs, _ in packs)
        return [[array.tolist() for array in row] for row in rows]

    stream = ids(dataset(path, **options)) if any(prompt < 33 for prompt, _, _ in whole) else []
    steps = data.draw(st.integers(0, -(-len(stream) // before)))
    first = dataset(path, dp_world_size=before, **options)
    assert len(take(first, steps)) == steps
    state = json.loads(json.dumps(first.state_dict()))
    ranks = [dataset(path, dp_rank=rank, dp_world_size=after, **options) for rank in range(after)]
    rest = join(ids(resume(packs, state)) for packs in ranks)
    assert [item for item in rest if item[0]] == stream[steps * before :]


def test_pieces_of_one_record_are_carried_into_the_next_window(tmp_path):
    """Those of a dissolved pack; of which some is in a later window than others of its record."""
    pairs = [(0, other) for other in range(1, 6)]
    path = write_answers(tmp_path / "pairs.jsonl", [(9, [20, 25, 13, 30, 8, 17], pairs)] * 12)
    cursors, places = [], []
    packs = dataset(path, window_blocks=1)
    for inputs, _ in packs:
        cursors += packs.state_dict()["cursor"]["carried"]
        places += zip(inputs["pair_ids"].tolist(), inputs["pair_numbers"].tolist(), strict=True)
    assert any(start > 0 for _, start in cursors)
    assert sorted(places) == [(record, number) for record in range(12) for number in range(5)]
    counts = packs.counts
    assert (counts.documents, counts.truncated, counts.unlabeled, counts.equal) == (12, 0, 0, 0)
    assert counts.extra_pieces == counts.pieces - 12 > 0


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
    documents, pairs = inputs["documents"], inputs["pairs"]
    shifted = second["documents"] + np.int32([SEQ_LEN, SEQ_LEN, 0])
    np.testing.assert_array_equal(documents, np.concatenate([first["documents"], shifted]))
    np.testing.assert_array_equal(pairs, np.concatenate([first["pairs"], second["pairs"] + len(first["documents"])]))
    for name in ("pair_ids", "pair_numbers"):
        np.testing.assert_array_equal(inputs[name], np.concatenate([first[name], second[name]]))
        assert inputs[name].dtype == np.int64
    assert (documents.dtype, pairs.dtype) == (np.int32, np.int32)


def test_ranks_without_a_pack_get_padding(tmp_path):
    path = write(tmp_path / "pairs.jsonl", [(1, 3, 4, 5)])
    ((inputs, labels),) = dataset(path, dp_rank=1, dp_world_size=2)
    assert (inputs["documents"].shape, inputs["pairs"].shape) == ((0, 3), (0, 2))
    assert inputs["pair_ids"].shape == (0,)
    assert (labels == IGNORE_INDEX).all()
