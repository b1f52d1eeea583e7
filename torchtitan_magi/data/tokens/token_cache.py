"""Tokens of a data set, made once: a folder of files, one per block of records, which all ranks and later runs read.
The plans of packs lie beside them.

A file is named by a hash of all that its tokens depend on: the block's content, the tokenizer with its chat template,
the kind of record. A reader that misses a file starts a writer, see `token_writer`, and waits. A lock lets one writer
at a time run for an order of blocks; when it dies, a reader that waits starts the next.
"""

import hashlib
import logging
import os
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from torchtitan_magi import machine
from torchtitan_magi.data import guard
from torchtitan_magi.data.records.corpus import Corpus
from torchtitan_magi.data.tokens.array_file import Damaged
from torchtitan_magi.data.tokens.token_block import VERSION, TokenBlock
from torchtitan_magi.data.tokens.token_writer import Job, unusable, write
from torchtitan_magi.files import Waiting, cache_folder, open_lock, sign_lock, take_lock
from torchtitan_magi.wording import amount, quoted_path, shown

logger = logging.getLogger(__name__)

POLL = 0.02  # seconds between looks for a file
_MAX_WRITERS = 4  # that end without the file that is waited for
_MAX_OPEN = 128  # files of tokens that nobody uses at the moment
_UNFINISHED_SECONDS = 3600.0  # age of a temporary file whose writer is dead
_UNUSED_SECONDS = 30 * 86400.0  # since a plan was last read, until it is removed


def default_folder() -> Path:
    """$TORCHTITAN_MAGI_CACHE/tokens, or torchtitan_magi/tokens in the user's cache folder."""
    return cache_folder("tokens")


class Cancelled(Exception):
    """Nobody wants the result any more."""


class TokenizedHere:
    """Tokens made in this process when they are asked for, and forgotten when nobody uses them.

    tokenize: records -> tokens or ValueErrors, in batches; a ValueError among the records is passed on. The methods are
    those of `TokenCache`.
    """

    def __init__(self, corpus: Corpus, tokenize: Callable[[list[Any]], list[Any]]) -> None:
        self.corpus, self.tokenize = corpus, tokenize
        self._in_use: weakref.WeakValueDictionary[int, TokenBlock] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.corpus, self.tokenize)

    def order(self, blocks: list[int]) -> None: ...

    def are_there(self, blocks: list[int]) -> bool:
        return False

    def open(self, block: int, cancelled: threading.Event) -> TokenBlock:
        tokens = self._in_use.get(block)
        if tokens is None:
            tokens = self._in_use[block] = TokenBlock.of(self.tokenize(self.corpus.read(block)))
        return tokens

    def malformed(self, block: int) -> dict[int, str] | None:
        return None

    def remake(self, block: int) -> TokenBlock:
        raise AssertionError("nothing changes what is in memory")


class TokenCache:
    """Tokens in a folder.

    Args:
        folder: made when it is first written to. Several machines may share it.
        tokenizer: has `fingerprint` and a method of the kind's name, as `ChatTokenizer`; picklable.
        kind: "documents", "pairs" or "rollouts".
        order_name: text of what the order of the blocks depends on, for the lock.

    Raises ValueError, with path and remedy, when tokens are missing and cannot be written.
    """

    def __init__(self, folder: Path, corpus: Corpus, tokenizer: Any, kind: str, order_name: str) -> None:
        self.folder, self.corpus, self.tokenizer = folder, corpus, tokenizer
        self.kind, self.order_name = kind, order_name
        self._depends_on = f"{VERSION} {kind} {tokenizer.fingerprint}"
        self._order: list[int] = []
        self._there: set[int] = set()  # blocks whose tokens have been seen
        self._exitcode = 0  # of the last writer that ended
        self._writers: dict[str, _Writer] = {}
        self._makers: dict[str, str] = {}  # who writes, here or in another process
        self._in_use: weakref.WeakValueDictionary[int, TokenBlock] = weakref.WeakValueDictionary()
        self._opened_last: deque[TokenBlock] = deque(maxlen=_MAX_OPEN)  # small data stays open across its epochs

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder, self.corpus, self.tokenizer, self.kind, self.order_name)

    def __str__(self) -> str:
        sizes = []
        with suppress(OSError), os.scandir(self.folder) as found:
            sizes = [file.stat().st_size for file in found]
        return f"token cache {shown(self.folder)}: {sum(sizes) / 2**30:.2f} GiB in {len(sizes):,} files"

    def path(self, block: int) -> str:
        """The file of a block's tokens; as text: there are many blocks, and a Path costs more."""
        key = hashlib.sha256(f"{self.corpus.digest(block)} {self._depends_on}".encode()).hexdigest()[:40]
        return f"{self.folder}/{key}.tokens"

    def order(self, blocks: list[int]) -> None:
        """Says in which order blocks will be opened: what is missing of them is written in this order, from now on."""
        self._order = blocks
        if not self.are_there(blocks):
            self._write(blocks, self.order_name)

    def are_there(self, blocks: list[int]) -> bool:
        """Whether the tokens of all these blocks need not be made."""
        unknown = set(blocks) - self._there
        found = all(os.path.exists(self.path(block)) for block in unknown)
        if found:
            self._there |= unknown
        return found

    def open(self, block: int, cancelled: threading.Event) -> TokenBlock:
        """Waits for the tokens of a block. Raises Cancelled if the event is set meanwhile."""
        tokens = self._in_use.get(block)
        if tokens is None:
            tokens = self._in_use[block] = self._wait(block, cancelled)
            self._opened_last.append(tokens)
        return tokens

    def malformed(self, block: int) -> dict[int, str] | None:
        """What is wrong with records of a block, by index in it; None if its tokens are not there yet."""
        try:
            return TokenBlock.open(self.path(block)).malformed
        except (OSError, Damaged):
            return None

    def remake(self, block: int) -> TokenBlock:
        """The tokens of a block whose file is damaged, made again."""
        remove_damaged(self.path(block))
        self._in_use.pop(block, None)
        return self.open(block, threading.Event())

    def _wait(self, block: int, cancelled: threading.Event) -> TokenBlock:
        path, waiting, num_writers = self.path(block), Waiting(f"the tokens of {self.corpus.name}"), 0
        order, name = self._order, self.order_name
        while not cancelled.is_set():
            try:
                return TokenBlock.open(path)
            except FileNotFoundError:
                pass
            except Damaged:
                remove_damaged(path)
                order, name = [], os.path.basename(path)  # a writer that runs may have been here already
            except OSError as error:
                raise ValueError(unusable(self.folder, error)) from None
            self.corpus.check_unchanged(block)
            num_writers += self._write([block, *order], name)
            if num_writers > _MAX_WRITERS:
                raise ValueError(self._endless())
            waiting.note(self._makers.get(name, "another process"))
            cancelled.wait(POLL)
        raise Cancelled

    def _endless(self) -> str:
        """What goes wrong where one writer after the other ends without the tokens."""
        if self._exitcode < 0:
            end = guard.describe_end(self._exitcode)
            return f"the process that tokenizes {self.corpus.name} {end} again and again; {machine.memory_remedy()}"
        return f"tokens disappear from {quoted_path(self.folder)}; let no other program remove files there"

    def _write(self, blocks: list[int], name: str) -> bool:
        """Starts a writer unless one runs, here or in another process. Raises ValueError if the last one failed."""
        writer = self._writers.get(name)
        if writer is not None:
            if writer.is_running():
                return False
            self._exitcode = writer.process.returncode
            self._writers.pop(name, None)  # another thread may be here too
        name_of_lock = hashlib.sha256(f"{self._depends_on} {name}".encode()).hexdigest()[:40]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(open_lock(self.folder / f"{name_of_lock}.lock"), "r+b") as lock:
                take_lock(lock.fileno())
                clean(self.folder)
                items = [(block, self.path(block)) for block in blocks]
                missing = [(block, path) for block, path in items if not os.path.exists(path)]
                if missing:
                    job = Job(self.corpus, missing, self.tokenizer, self.kind, os.getpid())
                    self._writers[name] = writer = _Writer(job, lock)
                    self._makers[name] = f"process {writer.process.pid}"
                return bool(missing)
        except BlockingIOError as error:
            self._makers[name] = str(error)
            return False
        except OSError as error:
            raise ValueError(unusable(self.folder, error)) from None


def remove_damaged(path: str) -> None:
    """Removes a file of tokens or of a plan that is to be made again. Raises ValueError, with the remedy."""
    logger.warning("%s is damaged and is made again", shown(path))
    try:
        Path(path).unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(unusable(os.path.dirname(path), error)) from None


def clean(folder: Path) -> None:
    """Removes what dead writers have left in a folder of tokens, and plans that nobody has read for long."""
    leftovers = dict.fromkeys(("unfinished", "tmp"), _UNFINISHED_SECONDS)  # tmp: of earlier versions
    for kind, seconds in (leftovers | {"plan": _UNUSED_SECONDS}).items():
        for path in folder.glob(f"*.{kind}"):
            with suppress(OSError):
                found = path.stat()
                if time.time() - max(found.st_atime, found.st_mtime) > seconds:
                    path.unlink()


Tokens = TokenCache | TokenizedHere  # where packs take tokens from


def _remedy_of_start() -> str:
    """What to do where a process does not come so far as to say what it lacks."""
    if guard.has_room():
        return "see its output above"
    return f"{machine.memory_remedy()}, or see its output above"


class _Writer:
    """A process that runs `token_writer.write`; it holds the lock as long as it lives."""

    def __init__(self, job: Job, lock: BinaryIO) -> None:
        options = {"stdout": subprocess.PIPE, "pass_fds": [lock.fileno()], "start_new_session": True}
        self.process = guard.start(write, job, **options)
        with suppress(OSError):  # a full disk
            sign_lock(lock.fileno(), self.process.pid)
        logger.info("tokenizing %s of records; processes: %d", amount(len(job.items), "block"), job.num_workers)

    def is_running(self) -> bool:
        """Raises ValueError with the process's own message if it failed; one that was killed just runs no more."""
        code = self.process.poll()
        if code is not None and code > 0:
            assert self.process.stdout is not None
            message = self.process.stdout.read().decode().strip()
            raise ValueError(message or f"the process that tokenizes ended with {code}; {_remedy_of_start()}")
        if code is not None and code < 0:
            logger.warning("the process that tokenizes was ended by signal %d; another takes over", -code)
        return code is None
