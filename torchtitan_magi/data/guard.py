"""Limits for chat templates, which are other people's programs: CPU time and address space of each call.

In a process that `limit_process` was called in, `limited` raises ValueError for a call that takes too much. A signal
ends a call that runs Python code; jinja2's sandbox is Python. A single C function that does not come back, such as the
comparison of two lists that hold themselves many times over, never sees the signal: then the kernel ends the process
with SIGXCPU, and `describe_exit` says why.
"""

import multiprocessing
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

SECONDS = 20  # CPU time of a call
MEMORY_BYTES = 2**30  # address space that a call may add to its process
GRACE = 5  # seconds of CPU time from the signal to the end of the process

T = TypeVar("T")

_REMEDY = "correct the template, or the record if others pass"

_is_limited = False


class _TimeIsUp(BaseException):
    """Not an Exception: a template's own handlers must not catch it."""


def limit_process() -> None:
    """From now on `limited` limits its calls. For worker processes only; call it in the main thread.

    The address space is the whole process's, so another thread that allocates during a call can fail.
    """
    global _is_limited
    _is_limited = True
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


def limited(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)`; in a limited process, ValueError if it takes more than SECONDS or MEMORY_BYTES."""
    if not _is_limited:
        return function(*args)
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)}
    try:
        try:
            _lower(resource.RLIMIT_AS, _address_space() + MEMORY_BYTES)
            _lower(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS + GRACE)
            signal.signal(signal.SIGPROF, _raise_time_is_up)
            signal.setitimer(signal.ITIMER_PROF, SECONDS, 1.0)  # again, should a destructor swallow the first
            return function(*args)
        finally:
            _stop_timer()
    except _TimeIsUp:
        _stop_timer()  # the signal may have come just before the line above
        raise ValueError(_too_much(f"{SECONDS} s of CPU time")) from None
    except MemoryError:
        raise ValueError(_too_much(f"{MEMORY_BYTES / 2**30:.0f} GiB of memory")) from None
    finally:
        for kind, limits in before.items():
            resource.setrlimit(kind, limits)


def run_limited(function: Callable[..., T], *args: Any) -> T:
    """Calls `function(*args)` in a limited process of its own, which does not outlive the call.

    The process is forked. Its result, or the ValueError that it raises, comes back pickled. Raises ValueError also if
    the process dies.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(sender, function, args))
    process.start()
    sender.close()
    result: Any = None
    with suppress(EOFError):
        result = receiver.recv()
    process.join()
    if result is None:
        raise ValueError(f"the process that renders the chat template {describe_exit(process.exitcode)}")
    value, error = result
    if error is not None:
        raise error
    return value


def describe_exit(exitcode: int | None) -> str:
    """How a limited process ended, by `multiprocessing.Process.exitcode`, with the remedy: "was ended: ..."."""
    if exitcode == -signal.SIGXCPU:
        return f"was ended: {_too_much(f'{SECONDS} s of CPU time')}"
    if exitcode is not None and exitcode < 0:
        return f"was ended by {signal.Signals(-exitcode).name}; free memory, or {_REMEDY}"
    return f"ended with exit code {exitcode}; see its output above"


def _send_result(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    limit_process()
    try:
        sender.send((limited(function, *args), None))
    except ValueError as error:
        sender.send((None, ValueError(str(error))))


def _too_much(amount: str) -> str:
    return f"the chat template takes more than {amount}; {_REMEDY}"


def _lower(kind: int, limit: int) -> None:
    soft, hard = resource.getrlimit(kind)
    others = [value for value in (soft, hard) if value != resource.RLIM_INFINITY]
    resource.setrlimit(kind, (min(limit, *others), hard) if others else (limit, hard))


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _raise_time_is_up(*_: Any) -> None:
    raise _TimeIsUp


def _stop_timer() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, signal.SIG_IGN)
