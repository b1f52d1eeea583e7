"""Exchanges through peer memory in whatever order GPUs get to their work: streams that run ahead of each other.

Nothing is done when it is issued. Each stream of each rank is a queue, and whose turn comes next is drawn: a wait that
is not over holds its queue up. What arrives is compared when the stream that uses it gets there, and memory is used
again as soon as what used it has been issued, as the caching allocator does.
"""

import ctypes
import functools
import itertools
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.peers import Driver, Everyone, arriving, count, in_place_of_the_driver, pack

from torchtitan_magi import make_plan, varlen_causal
from torchtitan_magi.exchange import peer_memory as peer
from torchtitan_magi.exchange.group_cast import StageRows, group_cast, group_reduce
from torchtitan_magi.exchange.in_flight import Arrival, RowShape

PIECE_BYTES = 2048  # eight rows of the longest


class Queue(deque):
    """What a stream has to do."""

    issued = done = 0


def always():
    return True


class Streams(Driver):
    """The driver: for each stream a queue of what is to be done and whether it may be."""

    def __init__(self):
        super().__init__()
        self.queues = {}
        self.names = itertools.count(1)

    def new(self):
        name = next(self.names)
        self.queues[name] = Queue()
        return name

    def put(self, stream, work, ready=always):
        self.queues[stream].append((ready, work))
        self.queues[stream].issued += 1

    def stream(self, name):
        return SimpleNamespace(name=name, wait_stream=lambda other: self.wait_stream(name, self.queues[other.name]))

    def wait_stream(self, stream, other):
        self.put(stream, always, lambda so_far=other.issued: other.done >= so_far)

    def wait(self, stream, word, value):
        self.put(stream, always, lambda: word.value >= value)

    def run(self, draw):
        """Until all queues are empty."""
        while any(self.queues.values()):
            ready = [queue for queue in self.queues.values() if queue and queue[0][0]()]
            assert ready, "every stream waits"
            queue = draw(ready)
            queue.popleft()[1]()
            queue.done += 1


class Mover:
    """Kernels of a rank, on its current stream."""

    writes_to_places = True

    def __init__(self, streams, rank):
        self.streams, self.rank = streams, rank

    def queue(self, *work):
        self.streams.put(self.rank.device, partial(*work))

    def gather(self, k, v, index, places, sums):
        self.queue(pack, places, torch.cat([k, v], 1).flatten(1)[index[0]])

    def round_to(self, grad, piece):
        self.queue(piece.slot.copy_, torch.cat(piece.cut(grad)))
        self.queue(count, piece.places)

    def use(self, received, arrival, expected):
        """A kernel that waits for what has been received."""
        address, number = arrival.flag()
        self.streams.wait(self.rank.device, ctypes.c_uint32.from_address(address), number)
        self.queue(np.testing.assert_array_equal, received, expected)


@functools.cache
def stages_of(size):
    """The only stage of each rank, for causal documents."""
    cu = np.cumsum([0, 90, 7, 1, 40, 54])
    return [share.forward[0] for share in make_plan(varlen_causal(cu), 192, size, overlap_stages=0).ranks]


class Cluster(Everyone):
    """Ranks whose hosts issue the same exchanges, one after another."""

    def __init__(self, size, streams, draw, monkeypatch):
        super().__init__(size)
        self.streams, self.draw = streams, draw
        self.main = [(streams.new(), streams.new()) for _ in self.ranks]
        self.use_stream(0)
        self.free = {stream: [] for streams_of_rank in self.main for stream in streams_of_rank}
        self.blocks = []
        self.numbers = itertools.count(1)
        self.exchanges = [stage.exchanges[0] for stage in stages_of(size)]
        self.rows = []
        for rank, stage in zip(self.ranks, stages_of(size), strict=True):
            monkeypatch.setattr(rank, "_received", partial(self.allocate, rank))
            index = [torch.tensor(stage.exchanges[0].send_rows)]
            self.rows.append(StageRows(stage, [index], Mover(streams, rank), rank))

    def use_stream(self, which):
        for rank, streams in zip(self.ranks, self.main, strict=True):
            rank.device = streams[which]

    def grow(self, slot_bytes):
        self.streams.run(self.draw)
        super().grow(slot_bytes)

    def allocate(self, rank, shape, dtype):
        """Memory given back last, if it is large enough: as long as the stream's order protects it."""
        free, needed = self.free[rank.device], int(np.prod(shape))
        found = next((i for i in reversed(range(len(free))) if free[i].numel() >= needed), None)
        block = torch.zeros(1 << 14) if found is None else free.pop(found)
        self.blocks.append((rank.device, block))
        return block[:needed].view(shape)

    def give_back(self):
        for stream, block in self.blocks:
            self.free[stream].append(block)
        self.blocks.clear()

    def tensors(self, counts, columns):
        """[rows, 2 * columns] for each rank, other ones each time."""
        start = 7 * next(self.numbers)
        shapes = [(rows, 2 * columns) for rows in counts]
        return [torch.arange(float(np.prod(shape))).view(shape) + 1e5 * i + start for i, shape in enumerate(shapes)]

    def cast(self, columns, later):
        own = self.tensors([192 // self.size] * self.size, columns)
        sent = [kv[rows.index[0][0]] for kv, rows in zip(own, self.rows, strict=True)]
        expected = arriving(self.exchanges, sent, back=False)
        for rows, kv, rows_expected in zip(self.rows, own, expected, strict=True):
            received, arrival = group_cast(rows, *RowShape(1, columns, columns).split(kv), later)
            rows.mover.use(received, arrival, rows_expected)
            arrival.begin()
            self.give_back()

    def reduce(self, columns):
        grads = self.tensors([rows.stage.num_rows for rows in self.rows], columns)
        sent = [grad[rows.stage.arriving[0][0] :] for rows, grad in zip(self.rows, grads, strict=True)]
        expected = arriving(self.exchanges, sent, back=True)
        for rows, grad, rows_sent, rows_expected in zip(self.rows, grads, sent, expected, strict=True):
            returned = group_reduce(rows, grad, torch.float32)
            if returned.unsent is not None:
                rows.mover.queue(pack, returned.unsent.places, rows_sent)
            rows.mover.use(returned.rows, returned.arrival, rows_expected)
            self.give_back()


def simulate(size, steps, seed):
    """Steps of kind, back, columns, how many exchanges, on which stream; in an order that the seed decides."""
    random = np.random.default_rng(seed)
    streams = Streams()
    patience = random.choice([0.0, 0.1, 1.0], 4 * size)  # of each stream: how often it goes on when it may

    def draw(ready):
        names = [name for name, queue in streams.queues.items() if any(queue is each for each in ready)]
        willing = [name for name in names if random.random() < patience[name - 1]]
        return streams.queues[random.choice(willing or names)]

    with in_place_of_the_driver(streams, streams.new, lambda device: device) as monkeypatch:
        cluster = Cluster(size, streams, draw, monkeypatch)
        for kind, back, columns, times, which in steps:
            cluster.use_stream(which)
            monkeypatch.setattr(peer, "WRITTEN_BYTES", 8 << 20 if kind == "written" else 0)
            monkeypatch.setattr(peer, "MAX_SLOT_BYTES", PIECE_BYTES if "pieces" in kind else 1 << 30)
            for rank in cluster.ranks:
                rank.prepared.cache_clear()  # it keeps which way was taken
            for _ in range(times):
                cluster.reduce(columns) if back else cluster.cast(columns, "later" in kind)
        streams.run(draw)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fetched", "fetched later", "written", "pieces", "pieces later"]),
        st.booleans(),  # back
        st.sampled_from([1, 4, 30]),  # columns: memory grows
        st.integers(1, 4),  # how many, one after another
        st.integers(0, 1),  # on which stream
    ),
    min_size=1,
    max_size=6,
)


@given(size=st.sampled_from([2, 3, 4, 8]), steps=STEPS, seed=st.integers(0, 1 << 30))
def test_whatever_stream_runs_ahead_rows_arrive_before_they_are_used(size, steps, seed):
    simulate(size, steps, seed)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("mistake", ["one slot", "no wait between pieces"])
def test_some_order_shows_a_mistake(monkeypatch, mistake, back):
    if mistake == "one slot":
        monkeypatch.setattr(peer, "SLOTS", 1)
    else:
        monkeypatch.setattr(Arrival, "settle", lambda self, awaited: self.begin())
    with pytest.raises(AssertionError):
        list(map(partial(simulate, 3, [("pieces", back, 30, 2, 0)]), range(50)))
