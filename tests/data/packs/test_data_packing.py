"""Cutting documents to pieces and packing pieces."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import one_line

from torchtitan_magi.data import IGNORE_INDEX, PackedSFTDataset, PackingCounts, TokenizedDocument, pack_best_fit
from torchtitan_magi.data.packs import best_fit
from torchtitan_magi.data.packs.pack_options import PackOptions
from torchtitan_magi.data.tokens.token_block import TokenBlock


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 80))
def test_every_document_is_packed_once_and_no_pack_overflows(lengths, capacity):
    packs = pack_best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= capacity for pack in packs)


@pytest.mark.parametrize("lengths", [[5, 61], [0, 5], [-1], [1.5, 2.0]])
def test_lengths_that_do_not_fit_a_pack_are_refused(lengths):
    with one_line("lengths are from .* to .*; give integers from 1 to 60, the capacity of a pack"):
        pack_best_fit(np.array(lengths), 60)


@given(st.lists(st.integers(1, 50), max_size=100))
def test_packing_is_best_fit_decreasing(lengths):
    """Against the definition, in quadratic time: same fill of every pack."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(60 - length)
    packs = pack_best_fit(np.array(lengths, dtype=np.int64), 60)
    assert sorted(60 - sum(lengths[i] for i in pack) for pack in packs) == sorted(rooms)


@pytest.mark.parametrize(("low", "high", "capacity"), [(1, 2049, 2048), (20_000, 45_000, 65_536), (1, 300, 1 << 20)])
def test_packing_100_000_documents_searches_once_for_each(low, high, capacity):
    lengths = np.random.default_rng(0).integers(low, high, 100_000)
    with mock.patch.object(best_fit, "bisect_left", wraps=best_fit.bisect_left) as search:
        packs = pack_best_fit(lengths, capacity)
    assert search.call_count == 100_000
    assert lengths.sum() / (len(packs) * capacity) > 0.95


def test_lognormal_lengths_at_8k_are_packed_to_98_percent_of_the_best():
    """As in bench_data.py, but fewer."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(2_900), 0.5, 5_000), 1_024, 8_192).astype(int)
    best = -(-lengths.sum() // 8_192)
    assert best / len(pack_best_fit(lengths, 8_192)) >= 0.98


@st.composite
def documents(draw):
    size = draw(st.integers(0, 60))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return TokenizedDocument(np.arange(100, 100 + size, dtype=np.int32), np.array(mask, dtype=bool))


def cut(made, seq_len, long_documents):
    """The pieces of documents as (index, start, inputs, labels), and the counts."""
    packs = PackedSFTDataset.__new__(PackedSFTDataset)
    packs.options, packs.seq_len, packs.long_documents = PackOptions(seq_len), seq_len, long_documents
    block = TokenBlock.of(made)
    pieces, counts = packs.make_pieces(block, np.arange(len(made)))
    found = []
    for index, start, length in zip(pieces.index.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True):
        first = int(block.bounds[index]) + start
        after = block.document(first + 1, first + 1 + length)
        labels = np.where(after.loss_mask, after.tokens, IGNORE_INDEX).tolist()
        found.append((index, start, block.tokens[first : first + length].tolist(), labels))
    return found, counts


def by_definition(made, seq_len, longest):
    """Every piece, with a label or without."""
    for index, document in enumerate(made):
        tokens, mask = document.tokens.tolist(), document.loss_mask.tolist()
        labels = [token if m else IGNORE_INDEX for token, m in zip(tokens[1:], mask[1:], strict=True)]
        for start in range(0, min(longest, len(labels)), seq_len):
            yield index, start, tokens[:-1][start : start + seq_len], labels[start : start + seq_len]


@given(st.lists(documents(), min_size=1, max_size=5), st.integers(1, 70), st.sampled_from(["split", "truncate"]))
def test_pieces_hold_every_position_and_label_once_and_what_is_left_out_is_counted(made, seq_len, long_documents):
    found, counts = cut(made, seq_len, long_documents)
    expected = list(by_definition(made, seq_len, seq_len if long_documents == "truncate" else 10**6))
    labelled = [piece for piece in expected if set(piece[3]) != {IGNORE_INDEX}]
    assert found == labelled
    empty = sum(len(document.tokens) < 2 for document in made)
    assert counts.unlabeled == len(expected) - len(labelled) + empty
    kept = sum(len(piece[2]) for piece in labelled)
    assert counts.tokens_read == kept + counts.truncated_tokens + counts.tokens_left_out
    assert counts.documents + counts.extra_pieces == len(labelled) + counts.unlabeled


def test_counts_add_up_and_print_on_one_line():
    counts = PackingCounts(documents=3, packs=1, tokens=90, slots=100) + PackingCounts(documents=1, truncated=1)
    assert counts == PackingCounts(documents=4, truncated=1, packs=1, tokens=90, slots=100)
    assert counts.fill == 0.9
    assert str(counts).startswith("4 documents, 1 packs 90.0% full; 1 truncated")
    assert "\n" not in str(counts)
    assert PackingCounts().fill == 0
