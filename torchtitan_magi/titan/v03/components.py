"""Components of torchtitan 0.3's Trainer that are ours, each by its ``Config``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.dcp import AsyncMode
from torchtitan.components.loss import BaseLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from torchtitan_magi.attention.op import attention_op
from torchtitan_magi.linear.op import conv_op, rule_op
from torchtitan_magi.sizing.keeping.kinds import ALL, ATTENTION, INPUTS, Keeping
from torchtitan_magi.training.activations.layers import KeepsAll, told_apart
from torchtitan_magi.training.batches.microbatch import Process
from torchtitan_magi.training.batches.tokenizer import AssetsTokenizer
from torchtitan_magi.training.checkpoints.digests import loading, saving
from torchtitan_magi.training.checkpoints.export import Export
from torchtitan_magi.training.continued import load_checkpoint, purge_stale
from torchtitan_magi.training.finite import StepGuard, check_state
from torchtitan_magi.training.metrics import PlanMetrics
from torchtitan_magi.training.objectives.lora import save_adapters
from torchtitan_magi.training.objectives.objective import Objective
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.objectives.validation import limited, validate
from torchtitan_magi.training.process.last_line import LAST_LINE
from torchtitan_magi.training.settings.options import LoRA
from torchtitan_magi.training.trainer import loading_train_state

ATTENTION_OPS = {attention_op, rule_op, conv_op}


class MagiTokenizer(AssetsTokenizer, HuggingFaceTokenizer):
    """torchtitan's, of the same tokens as the inspector's and the report's. It leaves the chat template to us: it knows
    no ``generation`` blocks."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTokenizer.Config):
        pass

    def set_chat_template(self, template: str) -> None:
        """Does nothing: conversations are rendered by ``torchtitan_magi.data``."""


class MagiSelectiveAC(SelectiveAC):
    """torchtitan's, which does not redo attention, nor layers that recur."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set[Any]:
        """The operations whose results are kept for the backward: torchtitan's, and attention of both kinds."""
        return super().get_save_ops() | ATTENTION_OPS


class MagiMixedAC(MagiSelectiveAC):
    """What each layer keeps by itself, for mode "auto"."""

    @dataclass(kw_only=True, slots=True)
    class Config(MagiSelectiveAC.Config):
        keeping: tuple[Keeping, ...] = ()
        """What each layer of the model keeps; decided before it is built."""

    config: Config
    _kept = ALL  # of the layer that is wrapped

    def get_save_ops(self) -> set[Any]:
        """A layer that keeps what attention puts out keeps that alone, and the choice of experts, not to change it."""
        return {*ATTENTION_OPS, torch.ops.aten.topk.default} if self._kept == ATTENTION else super().get_save_ops()

    def _wrap_block(self, module: nn.Module, *, base_fqn: str | None = None) -> nn.Module:
        self._kept = self.config.keeping[int(str(base_fqn).rpartition(".")[2])].kept
        if self._kept == ALL:
            return KeepsAll(module)
        if self._kept == INPUTS:
            return FullAC(self.config)._wrap_block(module, base_fqn=base_fqn)
        return told_apart(super()._wrap_block(module, base_fqn=base_fqn), self._kept)


class ObjectiveLoss(BaseLoss):
    """The loss of a pipeline's last stage: our Trainer sets ``of_hidden``, which knows the microbatch by its target."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    of_hidden: Callable[[Tensor, Any], Tensor]

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        """Takes and ignores compile_config: compiled or not, the loss is that of the objective."""

    def __call__(self, pred: Tensor, labels: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.of_hidden(pred, labels), {}


class MagiMetricsProcessor(PlanMetrics, MetricsProcessor):
    """torchtitan's, with the numbers of ``PlanMetrics`` once ``count_work`` has been called."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass


class MagiValidator(BaseValidator):
    """Validation loss that is the same number under every layout. Our Trainer sets what is declared here."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pack_length: int | None = None
        """Tokens per pack; default: as in training."""

        packs_per_batch: int | None = None
        """Packs per data-parallel rank; default: as in training."""

    objective: Objective
    batches: Any
    steps: int
    pipeline: Pipeline | None
    process: Process
    device: str

    def __init__(self, config: Config, *, metrics_processor: Any, validation_context: Any, **others: Any) -> None:
        super().__init__(config)
        self.metrics_processor, self.context = metrics_processor, validation_context

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Logs the loss of the validation set."""
        batches, processor, how = limited(self.batches, self.steps), self.metrics_processor, self.context
        validate(model_parts, self.objective, batches, self.process, how, processor, self.device, step, self.pipeline)


class MagiCheckpointManager(CheckpointManager):
    """torchtitan's, with digests beside the files, whole models as exports, and errors of one line."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    export: Export  # our Trainer sets it, and the adapters
    lora: LoRA
    base: str  # the folder of the model that adapters are for
    guard: StepGuard  # set by our Trainer
    _purge_stale_checkpoints = purge_stale

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Also counts the step that used up the data as the last one, and ends the run by one that was not finite."""
        loader = self.guard.trainer.dataloader
        last_step |= loader.state_dict().get("exhausted", False)
        self.guard.end_step(self.enable and self._should_save(curr_step, last_step), last_step)
        return super().save(curr_step, last_step)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Saves; an asynchronous save that failed is reported by the next."""
        with saving(self.folder):
            is_saved = super()._save(curr_step, last_step)
        if is_saved and last_step:
            LAST_LINE.note(self, curr_step, self.base if self.lora.rank else "", self.export.auto_class)
        return is_saved

    def _load(self, step: int = -1) -> bool:
        return load_checkpoint(self, step, super()._load, self.states["train_state"].build_lr_schedulers)

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads into the states. Raises ValueError, one line, for what does not fit or is not whole."""
        with loading(checkpoint_id), loading_train_state(state_dict, checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Saves states or, with to_hf, exports the model or its adapters. They must be finite, see ``check_state``."""
        check_state(state_dict, self.guard.trainer.step)
        if to_hf and self.lora.rank:
            dtype, parts = self.export_dtype, self.states["model"].model
            save_adapters(Path(checkpoint_id), parts, self.sd_adapter, self.lora, self.base, dtype)
            return None

        def save(weights: dict[str, Any], folder: Path) -> Any:
            how = async_mode, enable_garbage_collection, to_hf
            return super(MagiCheckpointManager, self).dcp_save(weights, str(folder), *how)

        return self.export.save(self, state_dict, Path(checkpoint_id), to_hf, save)
