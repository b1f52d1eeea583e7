"""How a rank tells why it failed: in a file to torchrun, and in its own output."""

import dis
import os
from functools import partial
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record


class WholeErrorFile(ErrorHandler):
    """Writes the file whole or not at all, for ``record``. When a rank fails, torchrun kills the others, perhaps while
    they write, and reads what there is."""

    def record_exception(self, e: BaseException) -> None:
        """Writes the exception, of which torchrun shows the message. Raises OSError where it cannot be written."""
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file is None:
            return super().record_exception(e)
        os.environ["TORCHELASTIC_ERROR_FILE"] = part = f"{file}.part"
        try:
            super().record_exception(e)
            os.replace(part, file)
        except OSError:
            Path(file).touch()  # an empty one tells torchrun that there was something to say
            raise
        finally:
            os.environ["TORCHELASTIC_ERROR_FILE"] = file


ERROR_FILE = WholeErrorFile()
# A decorator of functions whose exceptions torchrun is told of, as they end the run.
recorded = partial(record, error_handler=ERROR_FILE)


def is_message(error: ValueError) -> bool:
    """Whether this package raised it by a statement: one line for the user, to which a traceback adds nothing.

    What Python or another package raised may be a fault, and its traceback is needed.
    """
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or not place.tb_frame.f_globals.get("__name__", "").startswith("torchtitan_magi."):
        return False
    return place.tb_frame.f_code.co_code[place.tb_lasti] == dis.opmap["RAISE_VARARGS"]
