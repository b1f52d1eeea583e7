"""All ranks of a group as threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from torchtitan_magi.exchange.in_flight import Arrival
from torchtitan_magi.exchange.pieces import Flow


class _Rank:
    def __init__(self, group, rank):
        self.group, self.rank, self.size = group, rank, group.size

    def pieces(self, shape, dtype, exchange, back):
        return None

    def all_to_all(self, output, input, exchange, back):
        received, sent = exchange.splits(back)
        assert sum(sent) == len(input)
        assert sum(received) == len(output)
        if exchange.hops is not None:  # as through peer memory: everyone takes what is his
            flow, ready = Flow.of(exchange, back), self.group.exchange(self.rank, [input] * self.size)
            assert max(map(len, ready)) == flow.most_sent
            for source, first, rows, place in flow.fetches():
                output[place : place + rows] = ready[source][first : first + rows]
            assert sum(fetch.rows for fetch in flow.fetches()) == len(output)
        else:
            arrived = self.group.exchange(self.rank, input.split(list(sent)))
            for target, part in zip(output.split(list(received)), arrived, strict=True):
                target.copy_(part)
        return Arrival(lambda: None)

    def all_gather(self, output, input):
        parts = self.group.exchange(self.rank, [input] * self.size)
        for target, sent in zip(output.chunk(self.size) if len(output) else [], parts, strict=False):
            target.copy_(sent)


class Loopback:
    def __init__(self, size):
        self.size = size
        self.slots = [None] * size
        self.barrier = threading.Barrier(size, timeout=1500)
        self.turn = threading.Lock()  # one thread computes at a time: threads that fight for the interpreter are slow

    def exchange(self, rank, parts):
        """Gives parts[i] to rank i; returns what every rank gave to this one."""
        self.slots[rank] = [part.clone() for part in parts]
        self._wait()
        received = [slot[rank] for slot in self.slots]
        self._wait()
        return received

    def _wait(self):
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()

    def run(self, function):
        """function(transport) on every rank; the results by rank."""

        def guarded(rank):
            try:
                # A backward on a GPU would run in the one thread that autograd has for it, where ranks cannot wait for
                # each other.
                with self.turn, torch.autograd.set_multithreading_enabled(False):
                    return function(_Rank(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(guarded, rank) for rank in range(self.size)]
            errors = [future.exception() for future in futures]
            real = [error for error in errors if error and not isinstance(error, threading.BrokenBarrierError)]
            for error in real or [error for error in errors if error]:
                raise error
            return [future.result() for future in futures]
