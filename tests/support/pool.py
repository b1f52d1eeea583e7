"""A persistent pool of ranks, on CPU with gloo or on GPUs with NCCL. A job is a function that every rank calls."""

import multiprocessing
import os
import tempfile
import traceback

import torch
import torch.distributed as dist

PRELOAD = ["torch", "torchtitan_magi"]
if not torch.cuda.is_available():  # what might ask for a GPU must not be forked
    PRELOAD += ["pytest", "hypothesis", "torch.distributed.tensor", "torchtitan_magi.backends.flex"]


def _serve(rank, size, device, store, jobs, results):
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "nccl", init_method=f"file://{store}", rank=rank, world_size=size
    )
    while (job := jobs.get()) is not None:
        function, arguments = job
        try:
            results.put((rank, function(*arguments), None))
        except BaseException:
            results.put((rank, None, traceback.format_exc()))
    dist.destroy_process_group()


class RankPool:
    """Ranks that serve jobs until one of them fails: new ones serve the next job."""

    def __init__(self, size, device="cpu"):
        self.size, self.device, self.processes = size, device, []
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory()
        self._start()

    def _start(self):
        self.results, self.queues = self.context.Queue(), [self.context.Queue() for _ in range(self.size)]
        store = os.path.join(tempfile.mkdtemp(dir=self.folder.name), "store")
        for rank, queue in enumerate(self.queues):
            arguments = rank, self.size, self.device, store, queue, self.results
            self.processes.append(self.context.Process(target=_serve, args=arguments, daemon=True))
            self.processes[-1].start()

    def run(self, function, *arguments):
        """function(*arguments) on every rank; the results by rank."""
        if not self.processes:
            self._start()
        for queue in self.queues:
            queue.put((function, arguments))
        answers = {}
        for _ in range(self.size):
            rank, answers[rank], error = self.results.get(timeout=1500)
            if error is not None:  # others may wait for this rank for ever
                self._end()
                raise AssertionError(f"rank {rank}:\n{error}")
        return [answers[rank] for rank in range(self.size)]

    def _end(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for queue in self.queues:
            queue.put(None)
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()
