"""Exchanges through peer memory, without GPUs: the driver's calls are done at once on memory of the host."""

import ctypes
import struct
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.peers import Driver, Everyone, arriving, in_place_of_the_driver, pack

from torchtitan_magi import make_plan, varlen_causal
from torchtitan_magi.cuda import driver
from torchtitan_magi.exchange import group_cast
from torchtitan_magi.exchange import peer_memory as peer
from torchtitan_magi.exchange.in_flight import Arrival, Piece, Places
from torchtitan_magi.exchange.peer_memory import FLAG_BYTES, MAX_SLOT_BYTES, SLOTS, WRITTEN_BYTES
from torchtitan_magi.exchange.pieces import Flow

CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["old driver", "new driver"])
def fake_driver(request):
    fake = Driver(request.param)
    with in_place_of_the_driver(fake, lambda: 0, lambda device: 0):
        yield fake


def exchanges_of(cu, size):
    """The only exchange of each rank, for causal documents."""
    plan = make_plan(varlen_causal(cu), int(cu[-1]), size, overlap_stages=0)
    return [share.forward[0].exchanges[0] for share in plan.ranks]


def content(exchanges, columns, back, number):
    """Rows that each rank sends, other ones for each number, and what each rank gets of them."""
    sent = [
        torch.arange(float(columns * sum(exchange.splits(back)[1]))).view(-1, columns) + 1e5 * rank + 7 * number
        for rank, exchange in enumerate(exchanges)
    ]
    return sent, arriving(exchanges, sent, back)


def exchange_by_kernels(fake_driver, everyone, exchanges, back, columns, number):
    """What kernels pack for each rank arrives there. Returns the places of each piece of rank 0."""
    found = [
        rank.pieces((columns,), torch.float32, exchange, back)
        for rank, exchange in zip(everyone.ranks, exchanges, strict=True)
    ]
    sent, expected = content(exchanges, columns, back, number)
    for pieces in zip(*(pieces for _, pieces in found), strict=True):  # as many on all ranks
        exchange_piece(fake_driver, pieces, sent)
    for (received, _), rows in zip(found, expected, strict=True):
        assert torch.equal(received, rows)
    return [piece.places for piece in found[0][1]]


def exchange_piece(fake_driver, pieces, sent):
    """A piece that all ranks pack arrives at each."""
    (is_written,) = {piece.slot is None for piece in pieces}
    flags = [piece.arrival.flag() for piece in pieces]
    missing = {flag.number - ctypes.c_int32.from_address(flag.address).value for flag in flags}
    assert missing == {len(pieces) if is_written else 1}
    for piece, rows in zip(pieces, sent, strict=True):
        assert piece.places.begin in (0, *piece.places.ends)
        assert is_written or not len(piece.slot) or piece.places.addresses == [piece.slot.data_ptr()]
        pack(piece.places, torch.cat(piece.cut(rows)))
    fake_driver.waits.clear()
    for piece in pieces:
        piece.arrival.begin()
    assert all(word.value == value for word, value in fake_driver.waits)
    assert len(fake_driver.waits) == (0 if is_written else len(pieces))
    for piece, flag in zip(pieces, flags, strict=True):
        assert ctypes.c_int32.from_address(flag.address).value == flag.number
        piece.arrival.wait()


@pytest.fixture(params=["fetched", "written", "pieces"])
def way(request, monkeypatch):
    monkeypatch.setattr(peer, "WRITTEN_BYTES", WRITTEN_BYTES if request.param == "written" else 0)
    monkeypatch.setattr(peer, "MAX_SLOT_BYTES", 1 << 10 if request.param == "pieces" else MAX_SLOT_BYTES)
    return request.param


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_gets_what_kernels_pack_for_it(fake_driver, size):
    everyone, exchanges = Everyone(size), exchanges_of(np.cumsum([0, 900, 7, 1, 64, 500, 33, 495]), size)
    for turn in range(2 * SLOTS):
        for back in (False, True):
            everyone.grow(1 << 16) if turn == 4 else None
            exchange_by_kernels(fake_driver, everyone, exchanges, back, 3, turn)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("earlier", range(SLOTS + 1))
def test_memory_that_grows_at_any_time_is_used_slot_by_slot(fake_driver, earlier):
    everyone, exchanges = Everyone(2), exchanges_of([0, 512], 2)
    for number in range(earlier):
        exchange_by_kernels(fake_driver, everyone, exchanges, False, 4, number)
    starts = []
    for number in range(2 * SLOTS):
        pieces = exchange_by_kernels(fake_driver, everyone, exchanges, False, 64, number)  # the first one grows
        starts += [places.addresses[0] for places in pieces]
    assert starts[:-SLOTS] == starts[SLOTS:]
    assert len(set(starts)) == SLOTS


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("back", [False, True])
def test_a_first_exchange_may_be_without_rows(fake_driver, back):
    exchanges = exchanges_of([0, 33, 64], 2)
    assert len(exchanges[0].hops) == 1
    exchange_by_kernels(fake_driver, Everyone(2), exchanges, back, 4, 0)


@pytest.mark.usefixtures("fake_driver")
def test_what_is_written_and_what_is_fetched(monkeypatch):
    everyone = Everyone(2)

    def way(stages, row, back):
        stage = make_plan(varlen_causal([0, 512]), 512, 2, overlap_stages=stages).ranks[0].forward[-1]
        found = everyone.ranks[0].pieces((row,), torch.uint8, stage.exchanges[0], back)
        if found is None:
            return "all_to_all"
        own, memory = everyone.ranks[0].memory.data_ptr(), found[1][0].places.addresses[0]
        way = "fetched" if own <= memory < own + len(everyone.ranks[0].memory) else "written"
        return way if len(found[1]) == 1 else f"{way} in {len(found[1])} pieces"

    received = 256  # rows, the most of any rank
    assert way(0, WRITTEN_BYTES // received, back=False) == "written"
    assert way(0, WRITTEN_BYTES // received + 1, back=False) == "fetched"  # attention runs meanwhile
    assert way(0, WRITTEN_BYTES // received + 1, back=True) == "written"  # nothing does
    assert way(2, 1, back=False) == "all_to_all"  # one of several stages
    assert way(2, 1, back=True) == "all_to_all"
    monkeypatch.setattr(peer, "MAX_SLOT_BYTES", 100 * received)
    assert [way(0, 100, back) for back in (False, True)] == ["written"] * 2
    assert way(0, 101, back=False) == way(0, 200, back=False) == "fetched in 2 pieces"
    assert way(0, 201, back=True) == "fetched in 3 pieces"


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_pieces_are_as_few_as_fit_and_together_bring_everything(size, back):
    exchanges = exchanges_of(np.cumsum([0, 900, 7, 1, 64, 500, 33, 495]), size)
    most = Flow.of(exchanges[0], back).most_sent
    for rows in (size, size + 1, 50, most - 1, most, 10 * most):
        (pieces,) = {Flow.of(exchange, back).num_pieces(rows) for exchange in exchanges}
        assert (pieces == 1) == (rows >= most)
        assert (pieces - 1) * (rows - size) < most  # no more, but for the rounding of each rank's share
        for exchange in exchanges:
            got, sent = map(sum, exchange.splits(back))
            parts = [Flow.of(exchange, back).parts(i, pieces) for i in range(pieces)]
            assert all(sum(part.stop - part.start for part in each) <= rows for each in parts)
            assert sorted(i for each in parts for part in each for i in range(part.start, part.stop)) == [*range(sent)]
            fetches = [fetch for i in range(pieces) for fetch in Flow.of(exchange, back).fetches(i, pieces)]
            assert sorted(i for _, _, n, place in fetches for i in range(place, place + n)) == [*range(got)]


def test_memory_is_bounded_and_logged(fake_driver, caplog):
    mib = 1 << 20
    sizes = {0: 4, mib: 4, mib + 1: 8, 500 * mib: 2048, 1024 * mib: 4096, 1025 * mib: 4096, 1 << 50: 4096}
    assert {largest: peer.memory_bytes(largest) - FLAG_BYTES for largest in sizes} == {
        largest: total * mib for largest, total in sizes.items()
    }
    everyone = Everyone(2)
    assert everyone.ranks[0].num_bytes == 0
    caplog.set_level("INFO")
    for slot in (mib, 4 * mib):
        everyone.grow(slot)
        assert everyone.ranks[0].num_bytes == FLAG_BYTES + 4 * slot
        assert f"Rows by peer memory: {4 * slot >> 20} MiB of each GPU" in caplog.messages[-1]


@pytest.mark.parametrize(("later", "launches_block"), [(False, False), (True, False), (True, True)])
def test_an_exchange_begins_when_its_rows_are_packed_or_when_the_caller_says_so(monkeypatch, later, launches_block):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", str(int(launches_block)))
    group_cast._launches_block.cache_clear()
    stage = make_plan(varlen_causal([0, 512]), 512, 2, overlap_stages=0).ranks[0].forward[0]
    events, k = [], torch.zeros(256, 1, 8)
    arrival = Arrival(lambda: events.append("wait"), begin=lambda: events.append("begin"))
    transport = SimpleNamespace(pieces=lambda *_, back: (k, [Piece(None, Places([], [], 0, []), None, arrival)]))
    rows = SimpleNamespace(writes_to_places=True, gather=lambda *_: events.append("pack"))
    _, arriving = group_cast.group_cast(group_cast.StageRows(stage, [[k]], rows, transport), k, k, later)
    assert events == (["pack"] if later and not launches_block else ["pack", "begin"])
    arriving.begin()  # as who takes late keys does
    arriving.wait()
    assert events == ["pack", "begin", "wait"]
    group_cast._launches_block.cache_clear()


def test_stream_operations_have_the_layout_of_the_driver():
    operation = driver.StreamOperation(driver.StreamOperation.WRITE, 0x1234, 7)
    assert ctypes.sizeof(operation) == 48
    assert struct.unpack_from("<IxxxxQQI", bytes(operation)) == (2, 0x1234, 7, 0)
