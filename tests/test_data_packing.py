"""Cutting documents to pieces and packing pieces."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_magi.data import IGNORE_INDEX, PackingCounts, TokenizedDocument, pack_best_fit, packing
from torchtitan_magi.data.documents import cut_document


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 80))
def test_every_document_is_packed_once_and_no_pack_overflows(lengths, capacity):
    packs = pack_best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(i for pack in packs for i in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in pack) <= capacity for pack in packs)


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
    with mock.patch.object(packing, "bisect_left", wraps=packing.bisect_left) as search:
        packs = pack_best_fit(lengths, capacity)
    assert search.call_count == 100_000
    assert lengths.sum() / (len(packs) * capacity) > 0.95


@st.composite
def documents(draw):
    size = draw(st.integers(0, 60))
    mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    return TokenizedDocument(np.arange(100, 100 + size, dtype=np.int32), np.array(mask, dtype=bool))


@given(documents(), st.integers(1, 70))
def test_split_pieces_hold_every_position_and_label_once(document, seq_len):
    pieces, removed = cut_document(3, document, seq_len, "split")
    assert removed == 0
    assert all(0 < len(piece) <= seq_len and piece.record == 3 for piece in pieces)
    assert [piece.start for piece in pieces] == list(range(0, max(0, len(document.tokens) - 1), seq_len))
    inputs = [int(token) for piece in pieces for token in piece.inputs]
    labels = [int(token) for piece in pieces for token in piece.labels]
    tokens, mask = document.tokens.tolist(), document.loss_mask.tolist()
    assert inputs == tokens[:-1]
    assert labels == [token if m else IGNORE_INDEX for token, m in zip(tokens[1:], mask[1:], strict=True)]


@given(documents(), st.integers(1, 70))
def test_truncation_keeps_the_first_piece_and_counts_the_rest(document, seq_len):
    kept, removed = cut_document(0, document, seq_len, "truncate")
    pieces, _ = cut_document(0, document, seq_len, "split")
    assert len(kept) == min(1, len(pieces))
    for piece, expected in zip(kept, pieces, strict=False):
        np.testing.assert_array_equal(piece.inputs, expected.inputs)
        np.testing.assert_array_equal(piece.labels, expected.labels)
    assert removed == sum(len(piece) for piece in pieces[1:])


def test_counts_add_up_and_print_on_one_line():
    counts = PackingCounts(documents=3, packs=1, tokens=90, slots=100) + PackingCounts(documents=1, truncated=1)
    assert counts == PackingCounts(documents=4, truncated=1, packs=1, tokens=90, slots=100)
    assert counts.fill == 0.9
    assert str(counts).startswith("4 documents, 1 packs 90.0% full; 1 truncated")
    assert "\n" not in str(counts)
    assert PackingCounts().fill == 0
