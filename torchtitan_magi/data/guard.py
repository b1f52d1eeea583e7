"""Work in processes of its own, whose death is an error with a remedy: rendering by chat templates, which are other
people's programs and get limits of CPU time and address space, and reading footers of Parquet files, since some damage
makes pyarrow abort.

In a process that `limit_process` was called in, `limited` raises ValueError for a call that takes too much. A signal
ends a call that runs Python code; jinja2's sandbox is Python. A single C function that does not come back, such as the
comparison of two lists that hold themselves many times over, never sees the signal: then the kernel ends the process
with SIGXCPU, and `describe_exit` says why.
"""

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torchtitan_magi import machine

SECONDS = 20  # CPU time of a call
MEMORY_BYTES = 2**30  # address space that a call may add to its process
ROOM_BYTES = 6 * 2**30  # address space that is enough for any record; the longest take 4 GiB
STACK_BYTES = 8 * 2**20  # that are usual
GRACE = 5  # seconds of CPU time from the signal to the end of the process
WAIT_SECONDS = 600  # for the answer of a process, however loaded the machine is

T = TypeVar("T")

_MEMORY = f"{MEMORY_BYTES / 2**30:.0f} GiB"
_REMEDY = "correct the template, or the record if others pass"

# The packages' own __init__ import torch, which such a process does without.
_CLEAN = """
import pickle, sys, types
sys.path[:], packages = pickle.load(sys.stdin.buffer)
for name, folders in packages:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = folders
function, arguments = pickle.load(sys.stdin.buffer)
function(*arguments)
"""

_statm: int | None = None  # of a limited process: the open file that tells its address space
_is_running = False  # whether a limited call is


class _TimeIsUp(BaseException):
    """A call's time is up. Not an Exception: a template's own handlers must not catch it."""


def limit_process() -> None:
    """From now on `limited` limits its calls. For worker processes only; call it in the main thread.

    The address space is the whole process's, so another thread that allocates during a call can fail.
    """
    global _statm
    _statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, _end_call)


def limited(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)`; in a limited process, ValueError if it takes more than SECONDS or MEMORY_BYTES.

    Raises MemoryError if the machine does not give it so much.
    """
    if _statm is None:
        return function(*args)
    try:
        return _with_limits(_statm, function, args)
    except MemoryError:
        pass  # the exception holds on to what the call had made
    if not machine.has_memory(MEMORY_BYTES):
        raise MemoryError(f"a chat template gets less than the {_MEMORY} of memory that it may take")
    raise ValueError(_too_much(f"{_MEMORY} of memory"))


def _with_limits(statm: int, function: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Calls the function; raises MemoryError for too much memory, ValueError for too much time."""
    global _is_running
    before = resource.getrlimit(resource.RLIMIT_AS), resource.getrlimit(resource.RLIMIT_CPU)
    try:
        try:
            address_space = int(os.pread(statm, 64, 0).split()[0]) * resource.getpagesize()
            _lower(resource.RLIMIT_AS, before[0], address_space + MEMORY_BYTES)
            _lower(resource.RLIMIT_CPU, before[1], int(time.process_time()) + SECONDS + GRACE)
            _is_running = True
            signal.setitimer(signal.ITIMER_PROF, SECONDS, 1.0)  # again, should a destructor swallow the first
            return function(*args)
        finally:
            _is_running = False
    except _TimeIsUp:
        raise ValueError(_too_much(f"{SECONDS} s of CPU time")) from None
    finally:
        _is_running = False  # the signal may have come before the line above
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before[0])
        resource.setrlimit(resource.RLIMIT_CPU, before[1])


def run_limited(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)` in a limited process of its own, see `apart`. Raises ValueError also if it dies."""
    what = "the process that renders the chat template"
    try:
        return apart(_limited_here, function, args)
    except Died as end:
        raise ValueError(f"{what} {describe_exit(end.exitcode)}") from None
    except (OSError, MemoryError) as error:
        raise ValueError(machine.lack(error, what) or f"{what}: {machine.cause(error)}; {_REMEDY}") from None


class Died(Exception):
    """A process died. exitcode: its exit code; -n: it was ended by signal n; None: it gave no answer."""

    def __init__(self, exitcode: int | None) -> None:
        self.exitcode = exitcode


def apart(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)` in a process of its own, forked from this one, and waits for its answer.

    The result, or the ValueError, OSError or MemoryError that it raises, comes back pickled. Raises Died if the process
    dies or gives no answer. For the main thread: what is forked from another one first destroys what the main thread
    has for itself, and a process group of PyTorch that only that holds (in DTensor's cache) waits for its threads, for
    ever.
    """
    reading, writing = Pipe(duplex=False)
    child = _fork()
    if child == 0:
        _send_result(writing, function, args)
    writing.close()
    with reading:
        value, error = receive(reading, lambda: _end_child(child))
    _end_child(child)
    if error is not None:
        raise error
    return value


def receive(pipe: Connection, end: Callable[[], int]) -> Any:
    """The next answer of a process. end: kills it unless it has ended by itself, and returns its exit code. Raises Died
    if it ends without, also in the middle of it, or if there is none after WAIT_SECONDS. It is killed where this is
    interrupted."""
    try:
        if pipe.poll(WAIT_SECONDS):
            return pipe.recv()
    except (EOFError, OSError):
        raise Died(end()) from None
    except BaseException:
        end()
        raise
    end()
    raise Died(None)


def start(function: Callable[..., Any], *args: Any, **options: Any) -> subprocess.Popen[bytes]:
    """A new process, no fork of this one, that calls `function(*args)`: what this one has in memory or in other threads
    cannot hold it up.

    Args:
        function: of a module below torchtitan_magi.data, which the process imports without torch.
        args: are pickled.
        options: of Popen.
    """
    process = subprocess.Popen([sys.executable, "-c", _CLEAN], stdin=subprocess.PIPE, **options)
    package = Path(__file__).parents[1]
    packages = [("torchtitan_magi", [str(package)]), ("torchtitan_magi.data", [str(package / "data")])]
    assert process.stdin is not None
    with suppress(BrokenPipeError), process.stdin as stdin:
        pickle.dump((sys.path, packages), stdin)
        pickle.dump((function, args), stdin)
    return process


def _fork() -> int:
    """As os.fork (multiprocessing has no children for daemons, such as loader workers); garbage of this process is not
    collected in the other."""
    collects, child = gc.isenabled(), -1
    gc.disable()
    try:
        child = os.fork()
    finally:
        if collects and child:
            gc.enable()
    return child


def _end_child(child: int) -> int:
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def describe_exit(exitcode: int | None) -> str:
    """How a limited process ended, by its exit code (-n: by signal n), with the remedy: "was ended: ..."."""
    if exitcode == -signal.SIGXCPU:
        return f"was ended: {_too_much(f'{SECONDS} s of CPU time')}"
    if exitcode is None:
        return f"{describe_end(exitcode)}; {_REMEDY}"
    if exitcode < 0:
        return f"{describe_end(exitcode)}; {machine.memory_remedy()}, or {_REMEDY}"
    return f"{describe_end(exitcode)}; see its output above"


def describe_fault(exitcode: int) -> str:
    """`describe_exit` for a process that had all that it may take: what it did not lack is no remedy."""
    return describe_exit(exitcode) if exitcode == -signal.SIGXCPU else f"{describe_end(exitcode)}; {_REMEDY}"


def lacked(exitcode: int) -> str:
    """The remedy, if a limited process may have been ended for what the machine did not give it; "" if not."""
    if exitcode == -signal.SIGXCPU and (seconds := resource.getrlimit(resource.RLIMIT_CPU)[0]) >= 0:
        return f"raise the limit of CPU time, ulimit -t, which is {seconds:,} s"
    if exitcode == -signal.SIGSEGV and 0 <= (size := resource.getrlimit(resource.RLIMIT_STACK)[0]) < STACK_BYTES:
        return f"raise the limit of stacks, ulimit -s, which is {size // 1024:,} KiB"
    return "" if has_room() else machine.memory_remedy()


def has_room() -> bool:
    """Whether this process could take what any record takes."""
    return machine.has_memory(ROOM_BYTES)


def describe_end(exitcode: int | None) -> str:
    """How a process ended, by its exit code (-n: by signal n; None: no answer): "was ended by SIGKILL"."""
    if exitcode is None:
        return f"gave no answer for {WAIT_SECONDS} s"
    if exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _limited_here(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    limit_process()
    return limited(function, *args)


def _send_result(writing: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """Ends the process, without what a normal end of it would do for the one that it was forked from."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its memory is the other's
    try:
        result: tuple[Any, ValueError | OSError | MemoryError | None]
        try:
            result = function(*args), None
        except ValueError as error:
            result = None, ValueError(str(error))
        except (OSError, MemoryError) as error:
            result = None, error
        writing.send(result)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _too_much(amount: str) -> str:
    return f"the chat template takes more than {amount}; {_REMEDY}"


def _lower(kind: int, before: tuple[int, int], limit: int) -> None:
    limits = [value for value in before if value != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min([limit, *limits]), before[1]))


def _end_call(*_: Any) -> None:
    if _is_running:
        raise _TimeIsUp
