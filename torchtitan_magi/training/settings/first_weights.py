"""Where the weights of a run come from, and whether it leaves any behind: said, or refused, before its first step."""

import logging
from pathlib import Path
from typing import Any

from torchtitan_magi.models.names import ADAPTER
from torchtitan_magi.training.checkpoints.hf_weights import INDEX
from torchtitan_magi.training.process.all_ranks import agreed, is_first_rank, rank_and_size
from torchtitan_magi.training.settings.optimizer import learning_rates
from torchtitan_magi.training.settings.resume import (
    check_load_step,
    finished_steps,
    folder_of_checkpoints,
    initial_weights,
    step_to_load,
)
from torchtitan_magi.wording import quoted_path, shown

logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", INDEX, "pytorch_model*.bin")
RANDOM, RESUMED = "random", ", where this run goes on"  # a source's beginning, and an end
LR_OF_PRETRAINING = 8e-4  # torchtitan's default of optimizer.lr


def check_first_weights(job_config: Any) -> None:
    """Checks that a run loads the weights that it has, and says on rank 0 where they come from. A collective of all
    ranks, after ``check_checkpoints``.

    Raises:
        ValueError: on all ranks, one line with the remedy: the run would train random weights, which nobody asked for.
    """
    folder = job_config.model.hf_assets_path
    source = agreed(folder, lambda: _source(job_config), lambda source: f"weights {source}")
    if not is_first_rank():
        return
    logger.info(f"Weights: {source}")
    is_trained = not source.startswith(RANDOM) and not source.endswith(RESUMED)
    if is_trained and LR_OF_PRETRAINING in learning_rates(job_config.optimizer):
        logger.warning(
            f"optimizer.lr is {LR_OF_PRETRAINING}, torchtitan's default, which is for pre-training; over trained "
            "weights usual are 1e-5 for SFT, 2e-4 for LoRA and 5e-7 for DPO"
        )
    checkpoint = job_config.checkpoint
    if not checkpoint.enable or checkpoint.load_only:
        option = "load_only is true" if checkpoint.enable else "enable is false"
        logger.warning(f"This run saves nothing, not even at its end: checkpoint.{option}{_unused(checkpoint)}")


def _source(job_config: Any) -> str:
    """Where the weights come from. Raises ValueError, see ``check_first_weights``."""
    checkpoint, is_wanted = job_config.checkpoint, job_config.magi.random_weights
    _check_is_heard(checkpoint, is_wanted)
    if checkpoint.create_seed_checkpoint:
        return f"{RANDOM}, for a seed checkpoint"
    if checkpoint.enable and (found := _loaded(job_config)):
        return found
    if not is_wanted:
        _check_nothing_is_left(job_config)
    return f"{RANDOM}, as magi.random_weights says" if is_wanted else f"{RANDOM}, as nothing is loaded"


def _check_is_heard(checkpoint: Any, is_random: bool) -> None:
    """Raises ValueError for an option of [checkpoint] that asks in vain for weights, or for a seed to be saved."""
    if checkpoint.create_seed_checkpoint and checkpoint.load_only:
        raise ValueError(
            "checkpoint.create_seed_checkpoint is true, but with checkpoint.load_only nothing is saved; set that to "
            "false"
        )
    if checkpoint.create_seed_checkpoint and (processes := rank_and_size()[1]) > 1:  # else each makes the whole model
        raise ValueError(
            f"checkpoint.create_seed_checkpoint is true, but torchrun started {processes} processes; start one, with "
            "parallel degrees of 1"
        )
    initial = ""
    if checkpoint.initial_load_path:
        initial = f"initial_load_path is {quoted_path(checkpoint.initial_load_path)}"
    elif checkpoint.initial_load_in_hf:
        initial = "initial_load_in_hf is true"
    if checkpoint.initial_load_in_hf_quantized and not checkpoint.initial_load_in_hf:
        raise ValueError(
            "checkpoint.initial_load_in_hf_quantized is true, but checkpoint.initial_load_in_hf is false; set that to "
            "true, too, or leave both out"
        )
    if checkpoint.enable:
        if initial and is_random:
            raise ValueError(f"magi.random_weights is true, but checkpoint.{initial}; leave one of them out")
        return
    asked = "" if is_random else initial
    if checkpoint.load_step != -1:
        asked = f"load_step is {checkpoint.load_step}"
    if checkpoint.create_seed_checkpoint:
        asked = "create_seed_checkpoint is true"
    if asked:
        raise ValueError(
            f"checkpoint.{asked}, but checkpoint.enable is false, without which nothing is loaded or saved; set it to "
            "true"
        )


def _loaded(job_config: Any) -> str:
    """What torchtitan will load; "" if nothing.

    Raises:
        ValueError: a step is asked for, and there is none.
    """
    checkpoint, folder = job_config.checkpoint, folder_of_checkpoints(job_config)
    steps = finished_steps(folder)
    check_load_step(checkpoint, folder, steps)
    if steps:
        return f"those of {shown(folder)}/step-{step_to_load(checkpoint, steps)}{RESUMED}"
    path = initial_weights(job_config)
    return path and f"those of {shown(path)}{', in safetensors' if checkpoint.initial_load_in_hf else ''}"


def _check_nothing_is_left(job_config: Any) -> None:
    """Raises ValueError for a model's weights that nothing loads."""
    folder = job_config.model.hf_assets_path
    found = sorted(path.name for pattern in WEIGHTS for path in Path(folder).glob(pattern) if path.name != ADAPTER)
    if found:
        enable = "" if job_config.checkpoint.enable else "enable = true and "
        raise ValueError(
            f"model.hf_assets_path is {quoted_path(folder)}, which holds weights ({found[0]}), but nothing loads them; "
            f"add {enable}initial_load_in_hf = true to [checkpoint], or random_weights = true to [magi] to train "
            "random ones"
        )


def _unused(checkpoint: Any) -> str:
    """Options of [checkpoint] that would save."""
    names = [name for name in ("last_save_in_hf", "enable_first_step_checkpoint") if getattr(checkpoint, name)]
    return f", so that {' and '.join(names)} {'has' if len(names) == 1 else 'have'} no effect" if names else ""
