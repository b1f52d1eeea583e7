"""All checks of a run's settings, before anything is built: one list, in an order that names the first cause.

What a file or a command line says is checked value by value as it is read (`values`), and that the degrees multiply to
the number of processes before meshes are built of them (`degrees`). Everything else is here, called as soon as the
ranks can agree.
"""

import zlib
from collections.abc import Callable, Iterable
from typing import Any

from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.training.checkpoints.hf_weights import ExportLayout
from torchtitan_magi.training.process.all_ranks import agreed
from torchtitan_magi.training.settings.first_weights import check_first_weights
from torchtitan_magi.training.settings.magi_section import check_options, check_width
from torchtitan_magi.training.settings.model_folder import check_folders
from torchtitan_magi.training.settings.resume import check_checkpoints
from torchtitan_magi.training.settings.sections import check_sections


def check_settings(
    job_config: Any, titans: Iterable[str], has_objectives: bool, of_version: Callable[[Any], None]
) -> None:
    """Checks what a user can get wrong and what needs no model. A collective of all ranks.

    Args:
        titans: names of torchtitan's own datasets.
        has_objectives: whether our Trainer runs, not torchtitan's own.
        of_version: checks what the installed torchtitan does not have.

    Raises:
        ValueError: on all ranks, one line that names the value and the remedy.
    """
    check_options(job_config.magi)
    of_version(job_config)
    check_sections(job_config, titans, has_objectives)
    check_checkpoints(job_config)
    check_first_weights(job_config)


def check_model(job_config: Any, read: Callable[[], ModelConfig]) -> tuple[ModelConfig, ExportLayout]:
    """The run's model, and how it will be exported, once it is known to go with the settings and the folders of
    weights. A collective of all ranks.

    Args:
        read: the model; may raise ValueError.

    Raises:
        ValueError: on all ranks, one line that names the value and the remedy.
    """

    def checked() -> tuple[ModelConfig, ExportLayout]:
        config = read()
        check_width(job_config.magi.lora, config.dim)
        return config, check_folders(job_config, config)

    folder = job_config.model.hf_assets_path
    return agreed(folder, checked, lambda found: (found[0], zlib.crc32(repr(found[1]).encode())))
