"""Our Trainer: SFT per token or per document, and DPO, without ever holding all logits."""

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torchtitan.train
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from torchtitan_magi.titan.v02.attention import local_batches
from torchtitan_magi.titan.v02.components import MagiMetricsProcessor
from torchtitan_magi.titan.v02.models import config_of
from torchtitan_magi.titan.v02.spec import MagiSpec
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.process.last_line import LAST_LINE
from torchtitan_magi.training.process.run_folder import save_config
from torchtitan_magi.training.settings.sections import check_launcher
from torchtitan_magi.training.trainer import ObjectiveTrainer
from torchtitan_magi.wording import quoted


class MagiTrainer(ObjectiveTrainer, Trainer):
    """torchtitan's Trainer with the loss of an ``Objective``."""

    def __init__(self, job_config: Any) -> None:
        check_launcher()
        # Our log-probabilities split the vocabulary over the TP ranks by themselves.
        parallelism = replace(job_config.parallelism, disable_loss_parallel=True)
        own = {name: replace(getattr(job_config, name)) for name in ("training", "lr_scheduler")}  # which we change
        with MagiSpec.with_objectives():
            super().__init__(replace(job_config, parallelism=parallelism, **own))
        if not isinstance(self.metrics_processor, MagiMetricsProcessor):
            raise ValueError(
                f"model.name is {quoted(job_config.model.name)}, whose train spec is not ours; train it with "
                "torchtitan's entry point, torchrun -m torchtitan.train, or add a flavor to llama3 or qwen3 instead"
            )
        save_config(job_config)
        self.model_facts = config_of(self.model_args)
        self.process = local_batches(self.post_dataloading_process)
        compile_config = self.job_config.compile
        compiled = compile_config.enable and "loss" in compile_config.components
        self.start_objectives(LogprobModel(self.model_parts[0], compiled))

    def forward_context(self) -> AbstractContextManager[None]:
        """Mixed precision where FSDP2 has none."""
        return self.maybe_enable_amp

    def build_frozen_copy(self) -> LogprobModel:
        """A model built as the Trainer builds its own. It gets no gradients as it runs without autograd: DDP refuses
        parameters that do not require any."""
        job_config, spec = self.job_config, self.train_spec
        job_config = replace(
            job_config,
            activation_checkpoint=replace(job_config.activation_checkpoint, mode="none"),
            parallelism=replace(job_config.parallelism, fsdp_reshard_after_forward="always"),
        )
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
            model: Any = spec.model_cls(self.model_args)
        build_model_converters(job_config, self.parallel_dims).convert(model)
        model = spec.parallelize_fn(model, self.parallel_dims, job_config)
        return LogprobModel(self.with_memory(model), self.model.compiled)


def build(arguments: list[str]) -> MagiTrainer:
    """The Trainer of a command line, with the TOML file of ``--job.config_file``."""
    init_logger()
    return MagiTrainer(ConfigManager().parse_args(arguments))


def main() -> None:
    """Trains as the command line says."""
    torchtitan.train.main(MagiTrainer)
    LAST_LINE.tell()
