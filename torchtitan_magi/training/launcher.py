"""What a rank gets of the torchrun that started it: its end, and the command line."""

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


def config_file(arguments: list[str]) -> str:
    """The value of --job.config_file. Raises ValueError if it is not there."""
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == "--job.config-file" and (equals or i + 1 < len(arguments)):
            return value if equals else arguments[i + 1]
    raise ValueError("--job.config_file is missing; give the path of a TOML file")
