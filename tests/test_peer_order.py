"""Exchanges through peer memory in whatever order GPUs get to their work: streams that run ahead of each other.

Nothing is done when it is issued. Each stream of each rank is a queue, and whose turn comes next is drawn: a wait that
is not over holds its queue up. What arrives is compared when the stream that uses it gets there, and memory is used
again as soon as what used it has been issued, as the caching allocator does.
"""

import ctypes
import itertools
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_peer import Driver, Everyone, content, exchanges_of, in_place_of_the_driver, pack

from torchtitan_magi.exchange import peer_memory as peer

SIZE = 3
EXCHANGES = exchanges_of(np.cumsum([0, 90, 7, 1, 40, 33]), SIZE)


class Queue(deque):
    """Of a stream."""

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


class Cluster(Everyone):
    """Ranks whose hosts issue the same exchanges, one after another."""

    def __init__(self, streams, draw):
        super().__init__(SIZE)
        self.streams, self.draw = streams, draw
        self.main = [(streams.new(), streams.new()) for _ in self.ranks]
        self.use_stream(0)
        self.free = {stream: [] for streams_of_rank in self.main for stream in streams_of_rank}
        self.numbers = itertools.count(1)

    def use_stream(self, which):
        for rank, streams in zip(self.ranks, self.main, strict=True):
            rank.device = streams[which]

    def grow(self, slot_bytes):
        self.streams.run(self.draw)
        super().grow(slot_bytes)

    def allocate(self, rank, rows, columns):
        """Memory given back last, if it is large enough: as long as the stream's order protects it."""
        free = self.free[self.ranks[rank].device]
        found = next((i for i in reversed(range(len(free))) if free[i].numel() >= rows * columns), None)
        block = torch.zeros(1 << 14) if found is None else free.pop(found)
        return block, block[: rows * columns].view(rows, columns)

    def by_kernels(self, columns, back, monkeypatch, later):
        """An exchange for which kernels pack, and a kernel that waits for it."""
        sent, expected = content(EXCHANGES, columns, back, next(self.numbers))
        for i, (rank, exchange) in enumerate(zip(self.ranks, EXCHANGES, strict=True)):
            blocks = []

            def memory(shape, dtype, i=i, blocks=blocks):
                block, view = self.allocate(i, *shape)
                blocks.append(block)
                return view

            monkeypatch.setattr(rank, "_received", memory)
            places, received, arrival = rank.places((columns,), torch.float32, exchange, back)
            self.streams.put(rank.device, partial(pack, places, sent[i]))
            if not later:
                arrival.begin()
            address, number = arrival.flag()
            self.streams.wait(rank.device, ctypes.c_uint32.from_address(address), number)
            self.streams.put(rank.device, partial(np.testing.assert_array_equal, received, expected[i]))
            if later:
                arrival.begin()
            self.free[rank.device] += blocks


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["fetched", "fetched later", "written"]),
        st.booleans(),  # back
        st.sampled_from([1, 4, 30]),  # columns: memory grows
        st.integers(1, 4),  # how many, one after another
        st.integers(0, 1),  # on which stream
    ),
    min_size=1,
    max_size=6,
)


@given(steps=STEPS, seed=st.integers(0, 1 << 30))
def test_whatever_stream_runs_ahead_rows_arrive_before_they_are_used(steps, seed):
    random = np.random.default_rng(seed)
    streams = Streams()
    patience = random.choice([0.0, 0.1, 1.0], 4 * SIZE)  # of each stream: how often it goes on when it may

    def draw(ready):
        names = [name for name, queue in streams.queues.items() if any(queue is each for each in ready)]
        willing = [name for name in names if random.random() < patience[name - 1]]
        return streams.queues[random.choice(willing or names)]

    with in_place_of_the_driver(streams, streams.new, lambda device: device) as monkeypatch:
        cluster = Cluster(streams, draw)
        for kind, back, columns, count, which in steps:
            cluster.use_stream(which)
            monkeypatch.setattr(peer, "WRITTEN_BYTES", 8 << 20 if kind == "written" else 0)
            for rank in cluster.ranks:
                rank.places_of.cache_clear()  # it keeps which way was taken
            for _ in range(count):
                cluster.by_kernels(columns, back, monkeypatch, kind == "fetched later")
        streams.run(draw)
