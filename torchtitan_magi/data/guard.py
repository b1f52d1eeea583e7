"""Work in processes of its own, whose death is an error with a remedy: rendering by chat templates, which are other
people's programs and get limits of CPU time and address space, and reading footers of Parquet files (`apart`), since
some damage makes pyarrow abort.

In a process that `limit_process` was called in, `limited` raises ValueError for a call that takes too much. A signal
ends a call that runs Python code; jinja2's sandbox is Python. A single C function that does not come back, such as the
comparison of two lists that hold themselves many times over, never sees the signal: then the kernel ends the process
with SIGXCPU, and `describe_exit` says why.
"""

import gc
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, TypeVar

from torchtitan_magi import machine

SECONDS = 20  # CPU time of a call
MEMORY_BYTES = 2**30  # address space that a call may add to its process
ROOM_BYTES = 6 * 2**30  # address space that is enough for any record; the longest take 4 GiB
STACK_BYTES = 8 * 2**20  # that are usual
GRACE = 5  # seconds of CPU time from the signal to the end of the process
WAIT_SECONDS = 60, 540  # for the answer of one process, and of two, however loaded the machine is

T = TypeVar("T")

_MEMORY = f"{MEMORY_BYTES / 2**30:.0f} GiB"
_REMEDY = "correct the template, or the record if others pass"

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
    """A process died. exitcode: its exit code; -n: it was ended by signal n."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


def apart(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)` in a process of its own, forked from this one, and waits for its answer.

    The result, or the ValueError, OSError or MemoryError that it raises, comes back pickled. Raises Died if the process
    dies, also for want of an answer. Another thread may hold a lock at the fork, which then nobody in the new process
    ever lets go; so where no answer comes for long, a second process is asked too.
    """
    children: dict[Connection, int] = {}
    try:
        for seconds in WAIT_SECONDS:
            pipe, child = _forked(function, args)
            children[pipe] = child
            if answered := wait([*children], seconds):
                value, error = _answer(answered[0], children)  # type: ignore[arg-type]
                if error is not None:
                    raise error
                return value
        raise Died(-signal.SIGKILL)
    finally:
        for pipe, child in children.items():
            pipe.close()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _forked(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Connection, int]:
    """Where the answer of a new process comes out, and its number."""
    reading, writing = Pipe(duplex=False)
    child = os.fork()  # multiprocessing has no children for daemons, such as loader workers
    if child == 0:
        _send_result(writing, function, args)
    writing.close()
    return reading, child


def _answer(pipe: Connection, children: dict[Connection, int]) -> Any:
    """What a process sent. Raises Died if it ended without, and takes it out of the children."""
    try:
        return pipe.recv()
    except (EOFError, OSError):  # in the middle of its answer, or before
        pipe.close()
        raise Died(os.waitstatus_to_exitcode(os.waitpid(children.pop(pipe), 0)[1])) from None


def describe_exit(exitcode: int | None) -> str:
    """How a limited process ended, by its exit code (-n: by signal n), with the remedy: "was ended: ..."."""
    if exitcode == -signal.SIGXCPU:
        return f"was ended: {_too_much(f'{SECONDS} s of CPU time')}"
    if exitcode is not None and exitcode < 0:
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
    """How a process ended, by its exit code (-n: by signal n): "was ended by SIGKILL"."""
    if exitcode is not None and exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode}"


def _limited_here(function: Callable[..., T], args: tuple[Any, ...]) -> T:
    limit_process()
    return limited(function, *args)


def _send_result(writing: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> NoReturn:
    """Ends the process, without what a normal end of it would do for the one that it was forked from."""
    gc.disable()  # objects of the other process stay as they are
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
