"""All ranks of a group as threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor


class _Rank:
    def __init__(self, group, rank):
        self.group, self.rank, self.size = group, rank, group.size

    def all_to_all(self, output, input, output_splits, input_splits, channel="cast"):
        assert sum(input_splits) == len(input)
        assert sum(output_splits) == len(output)
        for target, sent in zip(
            output.split(list(output_splits)),
            self.group.exchange(self.rank, input.split(list(input_splits))),
            strict=True,
        ):
            target.copy_(sent)
        return lambda: None

    def all_gather(self, output, input):
        parts = self.group.exchange(self.rank, [input] * self.size)
        for target, sent in zip(output.chunk(self.size) if len(output) else [], parts, strict=False):
            target.copy_(sent)


class Loopback:
    def __init__(self, size):
        self.size = size
        self.slots = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)
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
                with self.turn:
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
