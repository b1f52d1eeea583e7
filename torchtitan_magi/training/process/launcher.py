"""What a rank gets of the torchrun that started it: its end, and the command line."""

import ctypes
import os
import signal
import socket

from torchtitan_magi.wording import quoted_path

PR_SET_PDEATHSIG = 1  # prctl(2)
NO_FILE = "--job.config_file is missing; give the path of a TOML file"


def end_with_launcher() -> None:
    """Lets the kernel kill this process when the torchrun that started it ends, also if that is killed itself.

    Without it the ranks of a killed torchrun go on training and saving, beside those of a new one.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if _has_ended():  # before that
            os.kill(os.getpid(), signal.SIGKILL)


def _has_ended() -> bool:
    """Whether nobody listens any more where the torchrun of the first machine has its store, which ranks meet by.

    The parent does not tell: there may be a shell between, an orphan's new parent is not always process 1, and torchrun
    may be process 1 itself.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def config_file(arguments: list[str]) -> str:
    """The value of --job.config_file. Raises ValueError if it is not there."""
    path = config_file_if_any(arguments)
    if path is None:
        raise ValueError(NO_FILE)
    return path


def config_file_if_any(arguments: list[str]) -> str | None:
    """The value of --job.config_file; None without one. Raises ValueError if there are several."""
    paths = []
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.replace("_", "-") == "--job.config-file" and (equals or i + 1 < len(arguments)):
            paths.append(value if equals else arguments[i + 1])
    if len(paths) > 1:
        raise ValueError(f"--job.config_file is given as {' and as '.join(map(quoted_path, paths))}; give one file")
    return paths[0] if paths else None
