"""The last line of a run: where its model lies, and how to go on from there, also where a signal ends it."""

import contextlib
import ctypes
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from torchtitan_magi.training.process.all_ranks import is_first_rank
from torchtitan_magi.wording import shown

SOON = 2.0  # seconds

logger = logging.getLogger(__name__)


class LastLine:
    """The last line of one run; it is logged once, on rank 0."""

    def __init__(self) -> None:
        self.text = ""

    def note(
        self, checkpointer: Any, step: int, adapters_of: str = "", auto_class: str = "AutoModelForCausalLM"
    ) -> None:
        """Takes note of a last checkpoint.

        Args:
            checkpointer: torchtitan's CheckpointManager, which has saved it.
            adapters_of: the folder of the model whose adapters are exported; "": the whole model is.
            auto_class: transformers' that loads it.
        """
        if not is_first_rank():
            return
        folder = checkpointer._create_checkpoint_id(step)
        quoted = _literal(folder)
        load = f"{auto_class}.from_pretrained({{}})"
        if checkpointer.last_save_in_hf and adapters_of:
            base = load.format(_literal(adapters_of))
            self.text = f"The adapters are in {shown(folder)}: PeftModel.from_pretrained({base}, {quoted})"
        elif checkpointer.last_save_in_hf:
            self.text = f"The model is in {shown(folder)}: {load.format(quoted)}"
        elif checkpointer.last_save_model_only:
            self.text = (
                f"The weights are in {shown(folder)}, in torch's format; another run starts from them with "
                f"--checkpoint.initial_load_path {shown(folder)} --checkpoint.no-initial_load_in_hf, and exports them "
                "with --training.steps 1 --optimizer.lr 0 --checkpoint.last_save_in_hf as well"
            )
        else:
            self.text = (
                f"The last checkpoint is {shown(folder)}; the run goes on from it with more --training.steps, and "
                "exports with --checkpoint.last_save_in_hf --checkpoint.last_save_model_only as well"
            )

    def tell(self) -> None:
        """Logs it, if there is one."""
        if self.text:
            logger.info(self.text)
        self.text = ""


@contextlib.contextmanager
def told_on_signal(text: Callable[[], str]) -> Iterator[None]:
    """Lets rank 0 log a text when a signal that torchrun passes on ends it. All ranks end by the signal itself, without
    traceback. SIGHUP and SIGQUIT stay with whom they have: ``nohup`` ignores the former."""

    def end(number: int, _: object = None) -> None:
        with contextlib.suppress(RuntimeError):  # the signal came while another line was being written
            logger.info(text())
        ctypes.CDLL(None).signal(number, None)  # SIG_DFL, as signal.signal sets it, but in any thread
        os.kill(os.getpid(), number)

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    free = [number for number in (signal.SIGHUP, signal.SIGQUIT) if signal.getsignal(number) == signal.SIG_DFL]
    own: dict[int, Any] = {signal.SIGINT: signal.SIG_DFL}
    if is_first_rank():
        own = dict.fromkeys((signal.SIGINT, signal.SIGTERM, *free), end)
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    _told.update(own)
    try:
        with _also_where_main_thread_waits(end) if is_first_rank() else contextlib.nullcontext():
            yield
    finally:
        _told.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


_told: set[int] = set()  # signals that are handled while a run goes on


def _tell_nothing() -> None:
    """In a forked process: its end is not the run's, and nobody shall hear of it in the pipe of the run's process."""
    if _told:
        signal.set_wakeup_fd(-1)
    for number in _told:
        signal.signal(number, signal.SIG_DFL)


os.register_at_fork(after_in_child=_tell_nothing)


@contextlib.contextmanager
def _also_where_main_thread_waits(end: Callable[[int], None]) -> Iterator[None]:
    """Calls end(number) of a signal also where the main thread waits for a GPU, which waits for another rank.
    Python's handlers run in the main thread alone, so torchrun would kill the process, 30 s later."""
    heard, number = os.pipe()
    os.set_blocking(number, False)

    def listen() -> None:
        while signals := os.read(heard, 1):
            if signals[0] in _told:
                time.sleep(SOON)  # meanwhile the main thread ends the process, if it can
                end(signals[0])
        os.close(heard)

    threading.Thread(target=listen, name="signals", daemon=True).start()
    before = signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)  # of a program that leads this run, such as asyncio's
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(number)


def stopped(step: int, saved: int) -> str:
    """What a run that was stopped says. saved: the step of its last checkpoint; -1: there is none."""
    if saved == -1:
        return f"Stopped after step {step:,}; no checkpoint was saved: the same command begins anew"
    return f"Stopped after step {step:,}; the same command goes on from step-{saved}"


def _literal(path: str) -> str:
    """A path as Python has it between double quotes, all of it printable."""
    return json.dumps(path, ensure_ascii=not path.isprintable())


LAST_LINE = LastLine()
