"""The reason of a rank that can no longer say it: PyTorch's watchdog ends a process whose collectives stand still."""

import contextlib
import json
import os
import threading
import time
from pathlib import Path

from torchtitan_magi.files import write_whole


class LastWords:
    """Writes to torchrun's error file that no step ends, while none does. torchrun shows it if the process dies then.

    On GPUs the process gets no exception when another rank hangs: the watchdog of NCCL aborts it, and torchrun would
    know of no more than a signal. The words are taken back when a step ends; an exception that is written there takes
    their place. Without torchrun nothing is written.

    Args:
        first_timeout, timeout: seconds that collectives may take in the first step, and after it. The words stand after
            half of it, so before the watchdog ends the process.
    """

    def __init__(self, first_timeout: float, timeout: float) -> None:
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        self.has_torchrun, self.path = file is not None, Path(file or "")
        self.timeout = timeout
        self._wait(first_timeout, "before the first step ended", "init_timeout_seconds")
        self.written = 0  # st_mtime_ns of our words; 0: there are none
        self.lock = threading.Lock()
        self.is_over = threading.Event()

    def __enter__(self) -> "LastWords":
        if self.has_torchrun:
            threading.Thread(target=self._watch, name="last words", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.is_over.set()
            self._take_back()

    def note_step(self, step: int) -> None:
        """A step ended."""
        with self.lock:
            self._wait(self.timeout, f"after step {step} ended", "train_timeout_seconds")
            self._take_back()

    def _wait(self, timeout: float, ended: str, option: str) -> None:
        """Begins to wait for the end of a step."""
        self.patience, self.ended, self.option, self.since = timeout / 2, ended, option, time.monotonic()

    def _watch(self) -> None:
        while not self.is_over.wait(min(1.0, self.patience / 4)):
            with self.lock:
                waited = time.monotonic() - self.since
                if waited > self.patience and not self.is_over.is_set() and self._is_ours():
                    self._write(waited)

    def _is_ours(self) -> bool:
        """Nobody else has written a reason."""
        try:
            return self.path.stat().st_mtime_ns == self.written
        except FileNotFoundError:
            return True

    def _write(self, waited: float) -> None:
        """The time beside the words is later than now, as torchrun takes the reason of the earliest time."""
        text = (
            f"this rank was killed {waited:.0f} s {self.ended}, without another: a rank hangs or is gone, see what it "
            f"printed last; if a step takes so long, raise comm.{self.option}"
        )
        words = {"message": text, "timestamp": int(time.time()) + 2}
        with contextlib.suppress(OSError):  # words that do not stand there are no reason to end a run
            write_whole(self.path, json.dumps(words).encode())
            self.written = self.path.stat().st_mtime_ns

    def _take_back(self) -> None:
        if self.written and self._is_ours():
            self.path.unlink(missing_ok=True)
        self.written = 0
