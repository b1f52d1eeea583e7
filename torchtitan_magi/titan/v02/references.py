"""The reference of preference training for torchtitan's Trainer: a frozen copy of the initial model, or a file."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.checkpoint import MODEL, ModelWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from torchtitan_magi.titan.v02.data import build_dataloader
from torchtitan_magi.titan.v02.metadata import local_batches
from torchtitan_magi.titan.v02.moe import expert_counts_kept
from torchtitan_magi.training.dpo import PairBatch, PairReader, Reference
from torchtitan_magi.training.logprob_model import LogprobModel
from torchtitan_magi.training.planned_loader import PlannedLoader
from torchtitan_magi.training.reference_file import ReferenceData, ReferenceFile, fill_in_logprobs, fingerprint_of_model
from torchtitan_magi.wording import quoted_path


def reference_file(trainer: Any, section: Any, reader: PairReader) -> ReferenceFile:
    """The log-probabilities of a section's pairs in ``magi.dpo.reference_path``, by default ``<file>.reference.npz``
    beside its first file of records; those of validation with ``.validation`` in the name.

    Args:
        trainer: a ``MagiTrainer``.
        section: job_config.training or job_config.validation.
    """
    job_config, batch_mesh = trainer.job_config, trainer.parallel_dims.get_optional_mesh("batch")
    size, rank = (1, 0) if batch_mesh is None else (batch_mesh.size(), batch_mesh.get_local_rank())

    def open_data() -> ReferenceData:
        loader = build_dataloader(section, size, rank, trainer.tokenizer, job_config, False)
        records = loader.dataset.records
        kind = ".validation" if section is job_config.validation else ""
        if given := job_config.magi.dpo.reference_path:
            path = Path(given).with_stem(Path(given).stem + kind)
        else:
            path = Path(f"{records.files[0].beside}{kind}.reference.npz")
        layout = f"{section.seq_len} tokens per pack, shared_prompt {job_config.magi.dpo.shared_prompt}"
        data = f"{records.fingerprint}, tokenizer {loader.dataset.identity()['tokenizer']}, {layout}"
        return ReferenceData(path, data, loader.dataset.num_records, partial(compute, loader))

    def compute(loader: Any) -> Tensor:
        logprobs = torch.zeros(loader.dataset.num_records, 2, dtype=torch.float64, device=trainer.device)
        batches = PlannedLoader(loader, trainer.dataloader.plan, trainer.dataloader.waited)
        with trainer.maybe_enable_amp, torch.no_grad(), expert_counts_kept(trainer.model_parts[0]):
            fill_in_logprobs(logprobs, batches, trainer.model, reader, local_batches(trainer.post_dataloading_process))
        if batch_mesh is not None:
            dist.all_reduce(logprobs, group=batch_mesh.get_group())
        trainer.metrics_processor.count.take()  # this was no training
        trainer.metrics_processor.time_last_log = time.perf_counter()
        return logprobs

    precision = job_config.training.mixed_precision_param
    return ReferenceFile(partial(fingerprint_of_model, trainer.model_parts[0], precision), open_data, trainer.device)


class ReferenceModel(Reference):
    """A second model, sharded like the policy. With the same weights it gives the same bits, except under
    torch.compile, which may fuse differently where no gradient is needed."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.model: LogprobModel | None = None

    def prepare(self, step: int) -> None:
        """Copies the policy's weights in a new run; in a resumed one loads the initial weights again.

        Raises:
            ValueError: the run is resumed, and nothing says where the initial weights are.
        """
        if self.model is not None:  # training and validation share it
            return
        trainer, checkpoint = self.trainer, self.trainer.job_config.checkpoint
        path = checkpoint.initial_load_path
        if not path and checkpoint.initial_load_in_hf:
            path = trainer.job_config.model.hf_assets_path
        if step > 0 and not path:
            raise ValueError(
                f"checkpoint.initial_load_path is {quoted_path(checkpoint.initial_load_path)}, but the run resumes "
                f"at step {step} and the reference is the model before step 1; set it to those weights"
            )
        if checkpoint.enable and not path:
            logger.warning(
                "This run cannot be resumed: the reference is the model as it is now, and no "
                "checkpoint.initial_load_path says where to find it again"
            )
        model = build_frozen_copy(trainer)
        if step == 0:
            for mine, policys in zip(_tensors(model), _tensors(trainer.model_parts[0]), strict=True):
                mine.detach().copy_(policys.detach())
        else:
            _load(model, path, trainer)
        self.model = LogprobModel(model, self.trainer.model.compiled)

    def logprobs(self, batch: PairBatch) -> Tensor:
        assert self.model is not None
        return batch.logprobs(self.model)


def build_frozen_copy(trainer: Trainer) -> nn.Module:
    """A model built as the Trainer builds its own, with weights of no meaning, without activation checkpointing.

    It never gets gradients because it runs without autograd; DDP refuses parameters that do not require any.
    """
    job_config, spec = trainer.job_config, trainer.train_spec
    job_config = replace(
        job_config,
        activation_checkpoint=replace(job_config.activation_checkpoint, mode="none"),
        parallelism=replace(job_config.parallelism, fsdp_reshard_after_forward="always"),
    )
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        model: Any = spec.model_cls(trainer.model_args)
    build_model_converters(job_config, trainer.parallel_dims).convert(model)
    model = spec.parallelize_fn(model, trainer.parallel_dims, job_config)
    offload = job_config.training.enable_cpu_offload
    model.to_empty(device="cpu" if offload else utils.device_type)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(utils.device_type) if offload else None)  # and the buffers
    return model.eval()


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers: a model with experts may have learnt a bias of their choice, which is a buffer."""
    return itertools.chain(model.parameters(), model.buffers())


def _load(model: nn.Module, path: str, trainer: Trainer) -> None:
    """Loads a checkpoint in torchtitan's or Hugging Face's format by torchtitan's CheckpointManager.

    Its ``dcp_load`` loads the model among its states, so the model stands there for the time of the call.
    """
    checkpoint, checkpointer = trainer.job_config.checkpoint, trainer.checkpointer
    quantized = checkpoint.initial_load_in_hf_quantized
    policy, states = checkpointer.states[MODEL], ModelWrapper(model)
    checkpointer.states[MODEL] = states
    checkpointer.dcp_load(states.state_dict(), path, checkpoint.initial_load_in_hf, quantized)
    checkpointer.states[MODEL] = policy
