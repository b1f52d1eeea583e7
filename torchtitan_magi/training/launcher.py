"""A rank and the torchrun that started it: they end together."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_launcher() -> None:
    """Lets the kernel kill this process when the torchrun that started it ends, also if that is killed itself.

    Without it the ranks of a killed torchrun go on training and saving, beside those of a new one.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
