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
    def __init__(self, size, device="cpu"):
        self.size = size
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.results = context.Queue()
        self.queues = [context.Queue() for _ in range(size)]
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.processes = [
            context.Process(
                target=_serve, args=(rank, size, device, store, self.queues[rank], self.results), daemon=True
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def run(self, function, *arguments):
        """function(*arguments) on every rank; the results by rank."""
        for queue in self.queues:
            queue.put((function, arguments))
        answers = {}
        for _ in range(self.size):
            rank, result, error = self.results.get(timeout=1500)
            assert error is None, f"rank {rank}:\n{error}"
            answers[rank] = result
        return [answers[rank] for rank in range(self.size)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for queue in self.queues:
            queue.put(None)
        for process in self.processes:
            process.join(10)
        self.folder.cleanup()
