"""The process that tokenizes blocks of records, with a worker on every core. Started by `token_cache`.

It ends with the process that started it, and its workers end with it. Chat templates are other people's programs: they
run in the workers, under the limits of `guard`. A record that ends its worker is malformed, like one that is refused:
what is said of it is kept for ever, so the machine must have given the worker all that any record takes.

No torch here: a worker is to start fast and stay small.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from torchtitan_magi import machine
from torchtitan_magi.data import guard
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.tokens.token_block import TokenBlock
from torchtitan_magi.wording import quoted_path

Item = tuple[int, str]  # number of a block in the corpus, path of its tokens

_BATCH = 512  # records that are tokenized together; bounds the memory of a worker
_SECONDS_PER_LINE = 30.0
_OF_THE_RECORD = {signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS}  # others come from outside
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """What a writer is to do. items: in the order in which they are written; parent: process to end with."""

    corpus: Corpus
    items: list[Item]
    tokenizer: Any
    kind: str
    parent: int

    @property
    def num_workers(self) -> int:
        """One process per core, or per item if these are fewer."""
        return min(len(os.sched_getaffinity(0)), len(self.items))

    def num_records(self, item: Item) -> int:
        """Number of records of a block."""
        first, last = self.corpus.block_firsts[item[0] : item[0] + 2].tolist()
        return last - first


@dataclass(frozen=True)
class Task:
    """A block to write.

    refused: index -> why, of records that ended a worker; None: none did so far, and batches can be made.
    """

    item: Item
    refused: dict[int, str] | None = None


@dataclass(frozen=True)
class Written:
    """What a worker says of a block."""

    num_records: int
    num_tokens: int
    num_malformed: int
    first_malformed: str


@dataclass(frozen=True)
class Failed:
    """What a worker could not do, and the remedy, in one line."""

    message: str


def write(job: Job) -> None:
    """Writes the blocks of a job; a failure is one line on standard output, and exit code 1."""
    os.nice(10)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        failure = write_blocks(job)
    except (OSError, MemoryError) as error:  # of a process or pipe that cannot be made
        what = f"{job.corpus.name} cannot be tokenized"
        failure = Failed(machine.lack(error, what) or f"{what}: {machine.cause(error)}")
    if failure:
        with suppress(BrokenPipeError):  # the reader may have found the same and ended
            os.write(sys.stdout.fileno(), failure.message.encode())
        sys.exit(1)


def write_blocks(job: Job) -> Failed | None:
    """Writes the blocks of a job; ends early, without an error, if the process that it belongs to has ended."""
    tasks = deque(Task(item) for item in job.items)
    progress = _Progress(sum(job.num_records(item) for item in job.items))
    workers = [_Worker(job) for _ in range(job.num_workers)]
    try:
        while os.getppid() == job.parent:
            for worker in workers:
                while worker.task is None and tasks:
                    worker.give(tasks.popleft(), progress)
            busy = [worker for worker in workers if worker.task is not None]
            if not busy:
                return None
            ready = wait([worker.pipe for worker in busy], timeout=1.0)
            for worker in [worker for worker in busy if worker.pipe in ready]:
                result = worker.result()
                if isinstance(result, Failed):
                    return result
                if isinstance(result, Task):  # again, without the record that ended the worker
                    tasks.appendleft(result)
                if isinstance(result, Written):
                    progress.add(result)
        return None
    finally:
        progress.close()
        for worker in workers:
            worker.process.kill()


class _Worker:
    """A worker process as the writer sees it. task: what it works on; at: the record, where these go one by one."""

    task: Task | None = None
    at: int | None = None

    def __init__(self, job: Job) -> None:
        self.job = job
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")  # of a process with one thread
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.job, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task, progress: "_Progress") -> None:
        """Gives it a block to write, unless that is there: another job may have written it."""
        if os.path.exists(task.item[1]):
            progress.add(Written(self.job.num_records(task.item), 0, 0, ""))
            return
        self.task, self.at = task, None
        self.pipe.send(task)

    def result(self) -> Written | Failed | Task | None:
        """What the worker says; None: it goes on. Starts another process if it has ended."""
        assert self.task is not None
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionError):
            return self._ended()
        if isinstance(message, int):
            self.at = message
            return None
        self.task = None
        return message

    def _ended(self) -> Failed | Task:
        assert self.task is not None
        self.process.join()
        exitcode, task, at = self.process.exitcode, self.task, self.at
        self.task = None
        corpus = self.job.corpus
        if exitcode is None or -exitcode not in _OF_THE_RECORD:
            return Failed(f"a process that tokenizes {corpus.name} {guard.describe_exit(exitcode)}")
        end, remedy = guard.describe_end(exitcode), guard.lacked(exitcode)
        if remedy:  # with more of it the record may be tokenized
            return Failed(f"a process that tokenizes {corpus.name} {end}; {remedy}")
        self._start()
        if task.refused is None:
            return Task(task.item, {})  # one record at a time, to find the one
        if at is None:  # before the first record
            file = quoted_path(corpus.path(task.item[0]))
            return Failed(f"cannot read records file {file}: the process that reads it {end}; write the file again")
        return Task(task.item, task.refused | {at: f"the process that tokenizes it {guard.describe_fault(exitcode)}"})


def _work(pipe: Connection, job: Job, parent: int) -> None:
    """A worker: writes a block for each task."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    guard.limit_process()
    while True:
        task: Task = pipe.recv()
        pipe.send(_write(task, job, pipe))


def _write(task: Task, job: Job, pipe: Connection) -> Written | Failed:
    try:
        return _write_block(task, job, pipe)
    except MemoryError as error:  # never of the record, see `guard.limited`
        return Failed(machine.lack(error, f"a process that tokenizes {job.corpus.name} lacks memory"))


def _write_block(task: Task, job: Job, pipe: Connection) -> Written | Failed:
    number, path = task.item
    try:
        records = job.corpus.read(number)
    except ValueError as error:  # of the file
        return Failed(str(error))
    tokenize = getattr(job.tokenizer, job.kind)
    if task.refused is None:
        made = [one for first in range(0, len(records), _BATCH) for one in tokenize(records[first : first + _BATCH])]
    else:
        made = list(_one_by_one(records, tokenize, task.refused, pipe))
    block = TokenBlock.of(made)
    try:
        block.write(path)
    except OSError as error:
        return Failed(unusable(os.path.dirname(path), error))
    first = min(block.malformed, default=None)
    problem = ""
    if first is not None:
        problem = f"{job.corpus.where(int(job.corpus.block_firsts[number]) + first)}: {block.malformed[first]}"
    return Written(len(block), len(block.tokens), len(block.malformed), problem)


def _one_by_one(records: list[Any], tokenize: Any, refused: dict[int, str], pipe: Connection) -> Iterator[Any]:
    for index, record in enumerate(records):
        pipe.send(index)
        yield ValueError(refused[index]) if index in refused else tokenize([record])[0]


def unusable(folder: str | os.PathLike[str], error: OSError) -> str:
    """Why tokens cannot be kept in a folder, and the remedy, in one line."""
    what = f"tokens cannot be kept in {quoted_path(folder)}"
    other = f"{what}: {machine.cause(error)}; make room there, or set magi.token_cache to another folder"
    return machine.lack(error, what) or other


class _Progress:
    """A bar on a terminal, else a line now and then."""

    def __init__(self, num_records: int) -> None:
        self.num_records, self.done, self.tokens, self.malformed = num_records, 0, 0, 0
        self.since = self.told = time.monotonic()
        self.bar: Any = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=num_records, desc="tokenizing", unit=" records", leave=False)

    def add(self, written: Written) -> None:
        self.done += written.num_records
        self.tokens += written.num_tokens
        if written.num_malformed and not self.malformed:
            print(f"malformed record, which training will come to: {written.first_malformed}", file=sys.stderr)
        self.malformed += written.num_malformed
        seconds = time.monotonic() - self.since
        speed = self.tokens / max(seconds, 1e-9)
        if self.bar is not None:
            self.bar.set_postfix_str(f"{speed / 1e6:.2f} M tokens/s")
            self.bar.update(written.num_records)
        elif time.monotonic() - self.told > _SECONDS_PER_LINE:
            self.told = time.monotonic()
            left = seconds * (self.num_records - self.done) / max(1, self.done)
            print(
                f"tokenizing: {self.done:,} of {self.num_records:,} records, {speed / 1e6:.2f} M tokens/s,"
                f" {left / 60:.0f} min left",
                file=sys.stderr,
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
