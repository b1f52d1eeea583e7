"""Models of torchtitan 0.3 on a machine without an accelerator; see ``training.process.cpu``."""

from typing import Any

from torchtitan.tools import utils

from torchtitan_magi.training.process.cpu import draw_whole_model, reduce_by_plain_sums


def prepare_model(model: Any, parallel_dims: Any) -> None:
    """Fits a parallelized model, or the part of one in a pipeline, to gloo and to what a CPU draws at random."""
    reduce_by_plain_sums(model)
    if parallel_dims.pp_enabled:
        stage = parallel_dims.get_mesh("pp").get_local_rank()
        draw_whole_model(model, model.config.build, stage, utils.set_default_dtype)
