"""torchtitan 0.3's own way to configure a run: a function that returns a configuration."""

from dataclasses import replace
from typing import Any

from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

from torchtitan_magi.titan.v03.components import (
    MagiCheckpointManager,
    MagiMetricsProcessor,
    MagiSelectiveAC,
    MagiTokenizer,
    MagiValidator,
    ObjectiveLoss,
)
from torchtitan_magi.titan.v03.config import values_of
from torchtitan_magi.titan.v03.families.configs import copied
from torchtitan_magi.titan.v03.models import with_varlen
from torchtitan_magi.titan.v03.trainer import MagiTrainer
from torchtitan_magi.training.settings.options import Magi
from torchtitan_magi.training.settings.sections import check_configuration, check_replaced


def with_magi(config: Any, magi: Magi | None = None) -> MagiTrainer.Config:
    """A configuration of torchtitan's Trainer for ours, of a model that is served, with attention "flex".

    Args:
        magi: the [magi] options.

    Raises:
        ValueError: one is of another class, or a part that ours would replace is of a class of your own; one line.
    """
    magi = getattr(config, "magi", Magi()) if magi is None else magi
    check_configuration(config, magi)
    checkpointing, parallelism = config.activation_checkpoint, config.parallelism
    if isinstance(checkpointing, SelectiveAC.Config):
        check_replaced([checkpointing])
        checkpointing = copied(MagiSelectiveAC.Config, checkpointing)
    if parallelism.spmd_backend == ParallelismConfig().spmd_backend:  # needs a newer torch
        parallelism = replace(parallelism, spmd_backend="partial_dtensor")
    return MagiTrainer.Config(
        **values_of(config)
        | {
            "magi": magi,
            "model_spec": with_varlen(config.model_spec),
            "tokenizer": MagiTokenizer.Config(),
            "metrics": copied(MagiMetricsProcessor.Config, config.metrics),
            "checkpoint": copied(MagiCheckpointManager.Config, config.checkpoint),
            "validator": copied(MagiValidator.Config, config.validator),
            "loss": ObjectiveLoss.Config(),
            "training": replace(config.training, disable_cuda_graphs=True),
            "activation_checkpoint": checkpointing,
            "parallelism": parallelism,
        }
    )


def llama3_debug() -> MagiTrainer.Config:
    """For ``--module torchtitan_magi.titan --config llama3_debug``: torchtitan's debug model, with our attention."""
    return with_magi(llama3_debugmodel())


def qwen3_debug() -> MagiTrainer.Config:
    """torchtitan's debug model of qwen3, likewise."""
    return with_magi(qwen3_debugmodel())
