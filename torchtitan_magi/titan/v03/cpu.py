"""Models of torchtitan 0.3 on a machine without an accelerator; see ``training.process.cpu``."""

from typing import Any

from torchtitan.tools import utils

from torchtitan_magi.training.process.cpu import draw_whole_model


def draw_stage(part: Any, parallel_dims: Any) -> None:
    """Has the part of a model in a pipeline draw on a CPU at random what it has of the whole model."""
    stage = parallel_dims.get_mesh("pp").get_local_rank()
    draw_whole_model(part, part.config.build, stage, utils.set_default_dtype)
