"""The reference of preference training as numbers beside the data, computed once with the initial weights."""

import hashlib
import io
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan_magi.files import write_whole
from torchtitan_magi.machine import cause
from torchtitan_magi.training.batches.pack_loader import PackLoader
from torchtitan_magi.training.objectives.dpo import PairBatch
from torchtitan_magi.training.objectives.fingerprint import fingerprint_of_model
from torchtitan_magi.training.objectives.lora import adapters_off
from torchtitan_magi.training.objectives.objective import Reference
from torchtitan_magi.training.objectives.reference_model import Policy
from torchtitan_magi.training.process.all_ranks import on_first_rank
from torchtitan_magi.training.process.groups import group_of, reduced
from torchtitan_magi.wording import one_line, shown

logger = logging.getLogger(__name__)

LATER = {"digest", "configuration"}  # entries of a reference file that those of earlier versions lack
ENTRIES = {"logprobs", "model", "data"} | LATER


@dataclass(frozen=True)
class ReferenceData:
    """The pairs that a reference file is about."""

    path: Path  # the reference file
    fingerprint: str  # of records, tokenizer and layout
    num_records: int
    compute: Callable[[], Tensor]  # as in the file, by the initial model; a collective of all ranks


class ReferenceFile(Reference):
    """Log-probabilities of all pairs of a data set, in a file beside it or where the user wants it.

    The array is float64 [num_records, 2 * width]: of a record its pairs one after the other, chosen and rejected, and
    zeros up to the largest number of pairs that a record has, the width.

    The first run writes the file, with fingerprints of model and data; a run that has the same ones uses it.

    Args:
        fingerprint_model: the fingerprint of the model's weights as they are now; a collective of all ranks.
        configuration: the fingerprint of what else the model computes with.
        open_data: called when the weights are loaded; a collective of all ranks.
        device: where the numbers are looked up.
    """

    def __init__(
        self,
        fingerprint_model: Callable[[], str],
        configuration: str,
        open_data: Callable[[], ReferenceData],
        device: torch.device,
    ) -> None:
        self.fingerprint_model, self.configuration = fingerprint_model, configuration
        self.open_data, self.device = open_data, device
        self.model_fingerprint = ""
        self.logprobs_of_records = torch.empty(0, 2)

    def prepare(self, step: int) -> None:
        """Reads the file, or makes it in a new run.

        Raises:
            ValueError: the file is damaged, of another model or of other data; it cannot be read or written; a resumed
                run has none.
        """
        if step == 0:
            self.model_fingerprint = self.fingerprint_model()
        data = self.open_data()
        fingerprints = {"model": self.model_fingerprint, "configuration": self.configuration, "data": data.fingerprint}
        remedy = (
            f"a run resumed at step {step} cannot make it; put it back, or start a new run"
            if step > 0
            else "delete the file to have it made anew, or set magi.dpo.reference_path to another one"
        )

        def read() -> npt.NDArray[np.float64] | None:
            return read_logprobs(data.path, fingerprints, data.num_records, remedy)

        logprobs = on_first_rank(read)
        if logprobs is None:
            if step > 0:
                raise ValueError(f"reference file {shown(data.path)} does not exist, and {remedy}")
            on_first_rank(lambda: check_writable(data.path, data.num_records))
            logger.info(f"Computing the reference's log-probabilities for {shown(data.path)}")
            computed = data.compute().cpu().numpy()

            def write() -> npt.NDArray[np.float64]:
                made_meanwhile = read()  # by another run on the same pairs
                if made_meanwhile is None:
                    write_logprobs(data.path, fingerprints, computed)
                return computed if made_meanwhile is None else made_meanwhile

            logprobs = on_first_rank(write)
        self.logprobs_of_records = torch.from_numpy(logprobs).to(self.device)

    def logprobs(self, batches: list[PairBatch]) -> list[Tensor]:
        of_pairs = self.logprobs_of_records.unflatten(1, (-1, 2))
        return [of_pairs[batch.pair_ids, batch.pair_numbers] for batch in batches]

    def state_dict(self) -> dict[str, Any]:
        return {"reference_model": self.model_fingerprint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.model_fingerprint = state_dict["reference_model"]


def reference_file(policy: Policy, section: Any) -> ReferenceFile:
    """The log-probabilities of a section's pairs in ``magi.dpo.reference_path``, by default ``<file>.reference.npz``
    beside its first file of records; those of validation with ``.validation`` in the name.

    Args:
        section: job_config.training or job_config.validation.
    """
    job_config = policy.job_config

    def open_data() -> ReferenceData:
        loader = policy.open_packs(section)
        records = loader.dataset.records
        kind = ".validation" if section is job_config.validation else ""
        if given := job_config.magi.dpo.reference_path:
            path = Path(given).with_stem(Path(given).stem + kind)
        else:
            path = Path(f"{records.files[0].beside}{kind}.reference.npz")
        layout = f"{section.seq_len} tokens per pack, shared_prompt {job_config.magi.dpo.shared_prompt}"
        data = f"{records.fingerprint}, tokenizer {loader.dataset.identity()['tokenizer']}, {layout}"
        return ReferenceData(path, data, loader.dataset.num_records, lambda: compute(loader))

    def compute(loader: PackLoader) -> Tensor:
        group = group_of(policy.parallel_dims, "batch")
        with adapters_off(policy.model_parts):
            ids, numbers, found = policy.logprobs_of(loader)
        width = int(reduced(1 + torch.cat([numbers, numbers.new_zeros(1)]).max(), group, dist.ReduceOp.MAX))
        logprobs = found.new_zeros(loader.dataset.num_records, width, 2)
        logprobs[ids, numbers] = found
        return reduced(logprobs, group).flatten(1)

    weights = partial(fingerprint_of_model, policy.model_parts, job_config.training.mixed_precision_param)
    return ReferenceFile(weights, policy.model_facts.fingerprint, open_data, policy.device)


def read_logprobs(
    path: Path, fingerprints: dict[str, str], num_records: int, remedy: str
) -> npt.NDArray[np.float64] | None:
    """The numbers of a reference file, see ``ReferenceFile``; None if there is no file.

    Raises:
        ValueError: it cannot be read, is damaged, or has other fingerprints. Ends with the remedy.
    """

    def refused(why: str) -> ValueError:
        return ValueError(f"reference file {shown(path)} {why}; {remedy}")

    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise refused("is no file but a folder, pipe or device")
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise refused(f"cannot be read ({cause(error)})") from None
    try:
        entries = _entries(content)
    except Exception as error:  # NumPy's reader and zipfile raise of all kinds when bytes are wrong
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise refused(f"is damaged ({reason})") from None
    for name, now in fingerprints.items():
        if (made := entries.get(name, now)) != now:
            raise refused(f"was made with the {name} [{one_line(made)}], this run has [{now}]")
    logprobs = entries["logprobs"]
    if logprobs.ndim != 2 or len(logprobs) != num_records or logprobs.shape[1] % 2 or not logprobs.shape[1]:
        raise refused(f"is damaged (log-probabilities {logprobs.shape} for {num_records} records)")
    if not np.isfinite(logprobs).all():
        raise refused("is damaged (log-probabilities that are not finite)")
    return logprobs


def _entries(content: bytes) -> dict[str, Any]:
    """The entries of a reference file, checked by themselves: an array and strings."""
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        entries = {name: file[name] for name in file.files}
    if not ENTRIES - LATER <= entries.keys() <= ENTRIES:
        raise ValueError(f"its entries are {', '.join(sorted(entries))}")
    if entries["logprobs"].dtype != np.float64:
        raise ValueError(f"log-probabilities are {entries['logprobs'].dtype}")
    texts = {name: value for name, value in entries.items() if name != "logprobs"}
    for name, value in texts.items():
        if value.shape != () or value.dtype.kind != "U":
            raise ValueError(f"entry {name} is no text")
        texts[name] = str(value)
    if texts.get("digest", (expected := _digest(entries["logprobs"], texts))) != expected:
        raise ValueError("its digest is not that of its content")
    return entries | texts


def _digest(logprobs: npt.NDArray[np.float64], texts: dict[str, str]) -> str:
    later = [texts[name] for name in ("configuration",) if name in texts]
    digest = hashlib.sha256(repr((logprobs.shape, texts["model"], texts["data"], *later)).encode())
    digest.update(np.ascontiguousarray(logprobs).tobytes())
    return digest.hexdigest()


def check_writable(path: Path, num_records: int) -> None:
    """Raises ValueError where a reference file of so many records, with a pair each, cannot be written. Makes its
    folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:
            os.posix_fallocate(file.fileno(), 0, 16 * num_records + 4096)
    except OSError as error:
        raise _unwritable(path, error) from None


def write_logprobs(path: Path, fingerprints: dict[str, str], logprobs: npt.NDArray[np.float64]) -> None:
    """Writes a reference file, whole or not at all.

    Raises:
        ValueError: it cannot be written, or the numbers are no log-probabilities; names the remedy.
    """
    wrong = np.flatnonzero(~np.isfinite(logprobs).all(1))
    if wrong.size:
        raise ValueError(
            f"reference file {shown(path)} is not made: the initial model has no finite log-probability for "
            f"{wrong.size} of {len(logprobs)} records, the first of them record {wrong[0]}; check its weights and that "
            "record"
        )
    content = io.BytesIO()
    np.savez(content, logprobs=logprobs, digest=_digest(logprobs, fingerprints), **fingerprints)  # type: ignore[arg-type]
    try:
        write_whole(path, content.getvalue())
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(
        f"reference file {shown(path)} cannot be written ({cause(error)}); set magi.dpo.reference_path to a file "
        'that can be, or magi.dpo.reference to "model"'
    )
