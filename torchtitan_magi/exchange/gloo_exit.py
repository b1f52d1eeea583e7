"""A clean end for processes with gloo groups.

A worker thread of gloo reports the end of a collective first and lets go of its tensors then, for which it needs the
Python interpreter. If that is shutting down by then, the process ends with SIGABRT ("terminate called without an active
exception") after all its work. The threads end with their group, but a mesh in a variable or a cycle of references
keeps the group beyond ``destroy_process_group``.
"""

import atexit
import functools
import gc
import time
from collections.abc import Iterator
from pathlib import Path

_PAUSE, _LONGEST = 0.01, 5.0  # seconds


@functools.cache
def let_gloo_finish_at_exit() -> None:
    """From now on, the interpreter waits for gloo's threads before it shuts down."""
    atexit.register(_let_gloo_finish)


def _let_gloo_finish() -> None:
    """Ends the groups that only cycles hold, and waits until no thread of the others has anything to do.

    A thread that waits for the interpreter gets it in a pause; so one that sleeps before and after it is idle, or waits
    for another rank.
    """
    gc.collect()
    deadline, asleep = time.monotonic() + _LONGEST, 0
    while asleep < 2 and time.monotonic() < deadline:
        states = list(_states_of_gloo())
        if not states:
            return
        asleep = asleep + 1 if set(states) == {"S"} else 0
        time.sleep(_PAUSE)


def _states_of_gloo() -> Iterator[str]:
    """The state of each of gloo's worker threads, as Linux names them: R runs or could, S sleeps."""
    for path in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue  # it has just ended
        if name == "pt_gloo_runloop":
            yield rest.split()[0]
