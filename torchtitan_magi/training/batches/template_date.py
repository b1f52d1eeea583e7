"""The date that chat templates print: the same on all ranks and in all starts of a run."""

from datetime import date
from pathlib import Path

from torchtitan_magi.files import read_text, write_whole
from torchtitan_magi.machine import cause
from torchtitan_magi.training.process.all_ranks import is_first_rank, on_first_rank
from torchtitan_magi.wording import one_line, shown


def template_date(option: str, folder: str) -> date:
    """What the templates of a run take for today: the option, or the date of the run's first start. A collective.

    Args:
        option: ISO date, "" for none.
        folder: the run's own; `keep_template_date` leaves the date of the first start there, for rank 0 to find.

    Raises:
        ValueError: on all ranks, if the folder's date cannot be read.
    """
    return on_first_rank(lambda: date.fromisoformat(option) if option else _kept(_path(folder)) or date.today())


def keep_template_date(folder: str, day: date) -> None:
    """Leaves the date for later starts of the run, if there is none. Does something on rank 0 only.

    Raises:
        ValueError: if the folder cannot be written.
    """
    if not is_first_rank():
        return
    path = _path(folder)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_whole(path, f"{day}\n".encode())
    except OSError as error:
        raise ValueError(
            f"cannot write {shown(path)}: {cause(error)}; set job.dump_folder to a folder that can be written, or "
            "give magi.template_date"
        ) from None


def _path(folder: str) -> Path:
    return Path(folder) / "template_date"


def _kept(path: Path) -> date | None:
    try:
        text = read_text(path).strip()
        return date.fromisoformat(text)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{shown(path)} holds no date ({one_line(error)}); remove it, or give magi.template_date"
        ) from None
