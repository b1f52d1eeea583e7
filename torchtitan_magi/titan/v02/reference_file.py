"""The reference of preference training as numbers beside the data, computed once with the initial weights."""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.tools.logging import logger

from torchtitan_magi.titan.v02.ahead import PlannedLoader
from torchtitan_magi.titan.v02.data import build_dataloader
from torchtitan_magi.titan.v02.dpo import PairBatch, PairReader, Reference
from torchtitan_magi.titan.v02.runtime import check_tokens
from torchtitan_magi.titan.v02.validate import to_device

T = TypeVar("T")
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class ReferenceFile(Reference):
    """Log-probabilities of all pairs of a data set in ``<file>.reference.npz`` beside its first file; of a validation
    section's in ``<file>.validation.reference.npz``.

    The first run writes it, with fingerprints of model and data; a run that has the same ones uses it.

    Args:
        trainer: a ``MagiTrainer``.
        section: job_config.training or job_config.validation.
    """

    def __init__(self, trainer: Any, section: Any) -> None:
        self.trainer, self.section = trainer, section
        self.model_fingerprint = ""
        self.logprobs_of_records = torch.empty(0, 2)

    def prepare(self, step: int) -> None:
        """Reads the file, or makes it in a new run.

        Raises:
            ValueError: the file is of another model or of other data; it cannot be written; a resumed run has none.
        """
        trainer, batch_mesh = self.trainer, self.trainer.parallel_dims.get_optional_mesh("batch")
        if step == 0:
            precision = trainer.job_config.training.mixed_precision_param
            self.model_fingerprint = fingerprint_of_model(trainer.model_parts[0], precision)
        size, rank = (1, 0) if batch_mesh is None else (batch_mesh.size(), batch_mesh.get_local_rank())
        loader = build_dataloader(
            self.section, self.section.seq_len, size, rank, trainer.tokenizer, trainer.job_config, False
        )
        records = loader.dataset.records
        kind = ".validation" if self.section is trainer.job_config.validation else ""
        path = Path(f"{records.sources[0].files[0].path}{kind}.reference.npz")
        layout = f"{self.section.seq_len} tokens per pack, shared_prompt {trainer.job_config.magi.dpo.shared_prompt}"
        data = f"{records.fingerprint}, tokenizer {loader.dataset.identity()['tokenizer']}, {layout}"
        fingerprints = {"model": self.model_fingerprint, "data": data}
        logprobs = _on_rank_0(lambda: read_logprobs(path, fingerprints))
        if logprobs is None:
            if step > 0:
                raise ValueError(
                    f"reference file {path} does not exist, and a run resumed at step {step} cannot make it; "
                    "put it back, or start a new run"
                )
            _on_rank_0(lambda: check_writable(path))
            logger.info(f"Computing the reference's log-probabilities for {path}")
            logprobs = self._compute(loader, batch_mesh)
            _on_rank_0(lambda: write_logprobs(path, fingerprints, logprobs))
        self.logprobs_of_records = torch.from_numpy(logprobs).to(trainer.device)

    def logprobs(self, batch: PairBatch) -> Tensor:
        return self.logprobs_of_records[batch.pair_ids]

    def state_dict(self) -> dict[str, Any]:
        return {"reference_model": self.model_fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model_fingerprint = state_dict["reference_model"]

    def _compute(self, loader: Any, batch_mesh: DeviceMesh | None) -> npt.NDArray[np.float64]:
        """float64 [records, 2] in one pass over the data; 0 for records that are in no pack."""
        trainer, reader = self.trainer, PairReader(self.trainer.parallel_dims)
        logprobs = torch.zeros(loader.dataset.num_records, 2, dtype=torch.float64, device=trainer.device)
        runtime = trainer.model_parts[0].magi

        def plan(inputs: dict[str, Any], labels: Tensor) -> dict[str, Any]:
            check_tokens(inputs["input"], trainer.model_args.vocab_size)
            return runtime.plan_ahead(inputs, labels, eos_id=None)

        with torch.no_grad(), trainer.maybe_enable_amp:
            for inputs, labels in PlannedLoader(loader, plan, waited=lambda seconds: None):
                reader.weigh(inputs, labels)
                batch = reader.read(to_device(inputs), labels.to(trainer.device), trainer.post_dataloading_process)
                logprobs[batch.pair_ids] = batch.logprobs(trainer.model)
        if batch_mesh is not None:
            dist.all_reduce(logprobs, group=batch_mesh.get_group())
        trainer.metrics_processor.count.take()  # this was no training
        trainer.metrics_processor.time_last_log = time.perf_counter()
        return logprobs.cpu().numpy()


def read_logprobs(path: Path, fingerprints: dict[str, str]) -> npt.NDArray[np.float64] | None:
    """The numbers of a reference file, None if there is none.

    Raises:
        ValueError: it has other fingerprints.
    """
    if not path.exists():
        return None
    with np.load(path) as file:
        for name, now in fingerprints.items():
            if file[name] != now:
                raise ValueError(
                    f"reference file {path} was made with the {name} [{file[name]}], this run has [{now}]; "
                    "delete the file to have it made anew, or go back to what it was made with"
                )
        return file["logprobs"]


def check_writable(path: Path) -> None:
    """Raises ValueError where a reference file cannot be written."""
    try:
        _unfinished(path).open("ab").close()
    except OSError as error:
        raise ValueError(
            f'reference file {path} cannot be written ({error}); let it be, or set magi.dpo.reference to "model"'
        ) from None


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.unfinished.npz")


def write_logprobs(path: Path, fingerprints: dict[str, str], logprobs: npt.NDArray[np.float64]) -> None:
    """Writes a reference file, whole or not at all."""
    unfinished = _unfinished(path)
    np.savez(unfinished, logprobs=logprobs, **fingerprints)  # type: ignore[arg-type]
    unfinished.replace(path)


def fingerprint_of_model(model: nn.Module, precision: str) -> str:
    """Of all parameters and the precision of the layers, the same under every layout: parameters enter by the sum of
    their bit patterns as integers, which is exact in any order. A collective of all ranks."""
    digest = hashlib.sha256(precision.encode())
    for name, value in sorted(get_model_state_dict(model).items()):
        local = value.to_local() if isinstance(value, DTensor) else value
        total = local.view(BITS[local.element_size()]).sum(dtype=torch.int64)
        if isinstance(value, DTensor):
            for axis, placement in enumerate(value.placements):
                if not placement.is_replicate():
                    dist.all_reduce(total, group=value.device_mesh.get_group(axis))
        digest.update(f"{name} {tuple(value.shape)} {local.dtype} {total.item()}\n".encode())
    return digest.hexdigest()[:16]


def _on_rank_0(function: Callable[[], T]) -> T:
    """What function() returns there, on all ranks; so that all take the same path on a file system of any kind.

    Raises:
        ValueError: function raised one, or an OSError.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except (ValueError, OSError) as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    return outcome[0]
