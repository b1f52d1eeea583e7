"""The reference of preference training: a frozen copy of the initial model, or a file."""

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan_magi.training.batches.pack_loader import build_dataloader
from torchtitan_magi.training.batches.planned_loader import PlannedLoader
from torchtitan_magi.training.experts import expert_counts_kept
from torchtitan_magi.training.metrics import group_of
from torchtitan_magi.training.objectives.dpo import PairBatch, PairReader, logprobs_by
from torchtitan_magi.training.objectives.fingerprint import KnownWeights, fingerprint_of_model
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.objectives.reference_file import ReferenceData, ReferenceFile, fill_in_logprobs
from torchtitan_magi.wording import quoted_path

logger = logging.getLogger(__name__)


def reference_file(trainer: Any, section: Any, reader: PairReader) -> ReferenceFile:
    """The log-probabilities of a section's pairs in ``magi.dpo.reference_path``, by default ``<file>.reference.npz``
    beside its first file of records; those of validation with ``.validation`` in the name.

    Args:
        trainer: an ``ObjectiveTrainer``.
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
        kept = expert_counts_kept(trainer.model_parts)
        with trainer.train_context(), trainer.forward_context(), torch.no_grad(), kept:
            fill_in_logprobs(logprobs, batches, trainer.model, reader, trainer.process)
        if batch_mesh is not None:
            dist.all_reduce(logprobs, group=batch_mesh.get_group())
        trainer.metrics_processor.count.take()  # this was no training
        trainer.metrics_processor.time_last_log = time.perf_counter()
        return logprobs

    precision = job_config.training.mixed_precision_param
    return ReferenceFile(partial(fingerprint_of_model, trainer.model_parts, precision), open_data, trainer.device)


class ReferenceModel(KnownWeights):
    """A second model, sharded like the policy. With the same weights it gives the same bits, except under
    torch.compile, which may fuse differently where no gradient is needed."""

    def __init__(self, trainer: Any) -> None:
        """trainer: an ``ObjectiveTrainer``."""
        self.trainer = trainer
        self.model: LogprobModel | Pipeline | None = None

    def prepare(self, step: int) -> None:
        """Copies the policy's weights in a new run; in a resumed one loads the initial weights again.

        Raises:
            ValueError: the run is resumed, and nothing says where the initial weights are, or other weights are there.
        """
        if self.model is not None:  # training and validation share it
            return
        trainer, checkpoint = self.trainer, self.trainer.job_config.checkpoint
        path, option = checkpoint.initial_load_path, "checkpoint.initial_load_path"
        if not path and checkpoint.initial_load_in_hf:
            path, option = trainer.job_config.model.hf_assets_path, "model.hf_assets_path"
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
        self.model = trainer.build_frozen_copy()
        parts = self.model.parts
        if step == 0:
            for mine, policys in zip(_tensors(parts), _tensors(trainer.model_parts), strict=True):
                mine.detach().copy_(policys.detach())
        else:
            trainer.load_weights(parts, path)
        if checkpoint.enable:
            found = fingerprint_of_model(parts, group=group_of(trainer.parallel_dims, "pp"))
            remedy = f"set {option} to the weights that the run began with, or start another run"
            self.check_weights(quoted_path(path), found, step, remedy)

    def logprobs(self, batches: list[PairBatch]) -> list[Tensor]:
        assert self.model is not None
        return logprobs_by(self.model, batches)


def _tensors(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers: a model with experts may have learnt a bias of their choice, which is a buffer."""
    return itertools.chain.from_iterable(itertools.chain(part.parameters(), part.buffers()) for part in parts)
