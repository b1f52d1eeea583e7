"""The plans of windows, kept as files beside the tokens: of all ranks and runs one makes a plan, the others read it."""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchtitan_magi import machine
from torchtitan_magi.data.packs.window_plan import WindowPlan
from torchtitan_magi.data.tokens.array_file import Damaged
from torchtitan_magi.data.tokens.token_cache import POLL, Cancelled, clean, remove_damaged
from torchtitan_magi.data.tokens.token_writer import unusable
from torchtitan_magi.files import Waiting, open_lock, release_lock, take_lock
from torchtitan_magi.wording import shown

logger = logging.getLogger(__name__)

MakePlan = Callable[[threading.Event], WindowPlan]  # raises Cancelled if the event is set while it waits for tokens


class PlanCache:
    """Plans of windows in a folder that exists; several machines may share it.

    Where plans cannot be kept, each process makes its own, which is logged once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cleaned = self._told = False

    def open(self, name: str, make: MakePlan, cancelled: threading.Event) -> WindowPlan:
        """The plan of this name, which is made if it is not there: by one process, while the others wait for it.

        Raises Cancelled if the event is set meanwhile, and ValueError, with path and remedy, if it cannot be read.
        """
        path = self._path(name)
        waiting = Waiting(shown(path))
        while not cancelled.is_set():
            try:
                return WindowPlan.open(path)
            except FileNotFoundError:
                pass
            except Damaged:
                remove_damaged(path)
            except OSError as error:
                raise ValueError(unusable(self.folder, error)) from None
            try:
                with self._locked(name):
                    if not os.path.exists(path):
                        plan = make(cancelled)
                        self._keep(plan, path)
                        return plan
            except BlockingIOError as error:
                waiting.note(error)
                cancelled.wait(POLL)
            except OSError as error:
                self._tell(error)
                return make(cancelled)
        raise Cancelled

    def remake(self, name: str, make: MakePlan) -> WindowPlan:
        """The plan of this name, whose file is damaged, made again."""
        remove_damaged(self._path(name))
        return self.open(name, make, threading.Event())

    def _path(self, name: str) -> str:
        return f"{self.folder}/{name}.plan"

    def _keep(self, plan: WindowPlan, path: str) -> None:
        if not self._cleaned:
            self._cleaned = True
            clean(self.folder)
        try:
            plan.write(path)
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            reason = machine.cause(error)
            logger.warning(
                "plans cannot be kept in %s (%s): every process packs for itself", shown(self.folder), reason
            )

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Raises BlockingIOError while another process has the lock."""
        path = self.folder / f"{name}.lock"
        with open(open_lock(path), "r+b") as lock:
            take_lock(lock.fileno())
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # whoever opened it before finds the plan
                release_lock(lock.fileno())
