"""The ``[magi]`` section of a torchtitan TOML file, and what of the whole configuration is checked before a run.

torchtitan merges this ``JobConfig`` into its own when ``[job] custom_config_module`` names ``torchtitan_magi.titan``.
It needs real types here, so this file has no ``from __future__ import annotations``.
"""

import itertools
import math
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_magi.backends import BACKENDS
from torchtitan_magi.planning.plan import MAX_STAGES
from torchtitan_magi.planning.stages import CostModel

HOOK = "torchtitan_magi.titan"
ENTRY = "torchrun -m torchtitan_magi.train"
SFT_DATASET = "sft"
DPO_DATASET = "dpo"
OUR_DATASETS = (SFT_DATASET, DPO_DATASET)


@dataclass(frozen=True)
class DPO:
    """Direct preference optimisation (arXiv 2305.18290), for dataset "dpo"."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """Loss of a pair's margin. "ipo" (arXiv 2310.12036) and "hinge" (arXiv 2305.10425) instead of DPO's own."""

    beta: float = 0.1
    """How strongly the policy is held to the reference; the scale of the rewards (no unit)."""

    label_smoothing: float = 0.0
    """Share of pairs whose preference is taken to be the wrong way round, 0 to 0.5 (exclusive), for loss "sigmoid"."""

    reference: Literal["model", "file"] = "model"
    """Source of the reference log-probabilities. "model": a frozen copy of the initial model, sharded like the policy.
    "file": computed once before training and kept beside the data, which needs no second model in memory."""

    shared_prompt: bool = True
    """Compute a pair's prompt once, chosen and rejected both attending to it. False: two separate documents."""


@dataclass(frozen=True)
class Magi:
    """Varlen context parallelism, packed SFT data and preference training."""

    backend: Literal["auto", "ffa", "flex"] = "auto"
    """Attention kernel. "ffa": ours, for Hopper GPUs. "flex": torch's flex_attention, for any machine, slower. "auto":
    ffa on CUDA, flex on CPU; it never falls back from one to the other."""

    overlap_stages: int = -1
    """Into how many stages the K/V of other ranks is cut, to travel while attention runs (a count). 0: no overlap. -1:
    chosen for each microbatch, for the forward and for the backward, by what a cost model predicts."""

    cost_model: str = ""
    """Path of the cost model for that choice, from ``torchrun -m torchtitan_magi.calibrate`` on this kind of machine.
    "": what was measured on H200 GPUs, and between nodes an estimate for 400 Gb/s per GPU."""

    deterministic: bool = False
    """Repeat bit for bit, forward and backward, on a fixed layout. Slower."""

    fp32_reduce: bool = False
    """Send the gradients of K and V between ranks in float32 instead of the training dtype. Sums are always float32."""

    positions: Literal["auto", "document", "pack"] = "auto"
    """Rotary positions. "document": restart at 0 in every document. "pack": run over the whole pack. "auto": document
    for datasets "sft" and "dpo", pack for torchtitan's own."""

    long_documents: Literal["truncate", "split"] = "truncate"
    """What becomes of documents longer than training.seq_len tokens, for dataset "sft"."""

    epochs: int = -1
    """How many times training passes over the data before it ends (a count), at training.steps at the latest. -1: no
    end. For datasets "sft" and "dpo", as the next two."""

    shuffle: bool = True
    """A new seeded order in every epoch. False: the order of the files, as far as packing allows."""

    bad_records: Literal["error", "skip"] = "error"
    """What becomes of malformed records. "error": the run stops, before the first step where that can be told. "skip":
    they are left out, counted, and the first of them logged with file and line."""

    loss_per: Literal["token", "document"] = "token"
    """What the loss of dataset "sft" is a mean over. "token": all labels of a step. "document": its documents, each by
    the mean over its labels, so that short answers weigh as much as long ones."""

    dpo: DPO = field(default_factory=DPO)


@dataclass
class JobConfig:
    magi: Magi = field(default_factory=Magi)


def without_context_parallel(job_config: Any) -> Any:
    """The same configuration with a context-parallel degree of 1, for torchtitan's guards against varlen with CP."""
    return replace(job_config, parallelism=replace(job_config.parallelism, context_parallel_degree=1))


def check_job_config(job_config: Any, attn_types: dict[str, str], has_objectives: bool) -> None:
    """What a user can get wrong, before anything is built.

    Args:
        attn_types: attention type of each flavor of the model.
        has_objectives: whether our Trainer runs, not torchtitan's own.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    if not isinstance(getattr(job_config, "magi", None), Magi):
        raise ValueError(f'job.custom_config_module is {job_config.job.custom_config_module!r}; set it to "{HOOK}"')
    if job_config.experimental.custom_import != HOOK:
        raise ValueError(f'experimental.custom_import is {job_config.experimental.custom_import!r}; set it to "{HOOK}"')
    magi, parallelism, model = job_config.magi, job_config.parallelism, job_config.model
    for options, prefix in ((magi, "magi"), (magi.dpo, "magi.dpo")):
        for option in fields(options):
            choices = BACKENDS if option.name == "backend" else get_args(option.type)
            value = getattr(options, option.name)
            if choices and value not in choices:
                raise ValueError(f"{prefix}.{option.name} is {value!r}; use one of {', '.join(map(repr, choices))}")
            if option.type is bool and type(value) is not bool:
                raise ValueError(f"{prefix}.{option.name} is {value!r}; use true or false")
            if option.type is float and type(value) not in (int, float):
                raise ValueError(f"{prefix}.{option.name} is {value!r}; use a number")
    if type(magi.overlap_stages) is not int or not -1 <= magi.overlap_stages <= MAX_STAGES:
        raise ValueError(
            f"magi.overlap_stages is {magi.overlap_stages!r}; use 0 for no overlap, the number of stages (at most "
            f"{MAX_STAGES}), or -1 to have it chosen"
        )
    if magi.cost_model:
        CostModel.load(magi.cost_model)
    if parallelism.pipeline_parallel_degree > 1:
        raise ValueError(
            f"parallelism.pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}; varlen attention works "
            "without pipeline parallelism only: set it to 1 and use context, tensor or data parallelism"
        )
    if attn_types.get(model.flavor) != "varlen":
        varlen = [flavor for flavor, attn_type in attn_types.items() if attn_type == "varlen"]
        has = f"has {attn_types[model.flavor]} attention" if model.flavor in attn_types else "is unknown"
        raise ValueError(f"model.flavor {model.flavor!r} {has}; use one with varlen attention: {', '.join(varlen)}")
    if type(magi.epochs) is not int or (magi.epochs < 1 and magi.epochs != -1):
        raise ValueError(f"magi.epochs is {magi.epochs!r}; use a number of passes over the data, or -1 for no end")
    if job_config.training.steps < 1:
        raise ValueError(f"training.steps is {job_config.training.steps}; use at least 1")
    sections = {"training": job_config.training}
    if job_config.validation.enable:
        sections["validation"] = job_config.validation
    for name, section in sections.items():
        if section.local_batch_size < 1:
            raise ValueError(f"{name}.local_batch_size is {section.local_batch_size}; use at least 1 pack")
        _check_seq_len(name, section.seq_len, parallelism)
        if section.dataset not in (*OUR_DATASETS, *DATASETS):
            known = ", ".join(map(repr, (*OUR_DATASETS, *DATASETS)))
            raise ValueError(f"{name}.dataset is {section.dataset!r}; use one of {known}")
        if section.dataset in OUR_DATASETS and not section.dataset_path:
            path = section.dataset_path
            raise ValueError(f"{name}.dataset_path is {path!r}; give the JSONL file of dataset {section.dataset!r}")
        if section.dataset in OUR_DATASETS and section.dataloader.num_workers > 1:
            raise ValueError(
                f"{name}.dataloader.num_workers is {section.dataloader.num_workers}; use 0 or 1 for dataset "
                f"{section.dataset!r}, whose packs are made in one sequence"
            )
        if (section.dataset == DPO_DATASET) != (job_config.training.dataset == DPO_DATASET):
            raise ValueError(
                f"validation.dataset is {section.dataset!r} and training.dataset {job_config.training.dataset!r}; "
                f"validate on what is trained, preference pairs ({DPO_DATASET!r}) or not"
            )
        if magi.loss_per == "document" and section.dataset != SFT_DATASET:
            raise ValueError(
                f'magi.loss_per is "document" and {name}.dataset {section.dataset!r}; it needs the documents of '
                f'dataset {SFT_DATASET!r}: use that, or "token"'
            )
    longest = job_config.training.seq_len
    if job_config.validation.enable and job_config.validation.seq_len > longest:
        raise ValueError(  # torchtitan makes as many rotary positions as training needs
            f"validation.seq_len is {job_config.validation.seq_len}; use at most training.seq_len, {longest}"
        )
    if not has_objectives and (magi.loss_per == "document" or job_config.training.dataset == DPO_DATASET):
        what = f"training.dataset is {DPO_DATASET!r}" if magi.loss_per == "token" else 'magi.loss_per is "document"'
        raise ValueError(f"{what}, which torchtitan's own entry point does not know; start it with {ENTRY}")
    if job_config.training.dataset == DPO_DATASET:
        _check_dpo(magi)
    _check_continues(job_config)


def _check_seq_len(name: str, seq_len: Any, parallelism: Any) -> None:
    """torchtitan has the same rule for training, as an assertion without words."""
    divisor = 2 * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    if type(seq_len) is not int or seq_len < 1 or seq_len % divisor:
        raise ValueError(
            f"{name}.seq_len is {seq_len!r}; use a multiple of {divisor}, twice context_parallel_degree times "
            "tensor_parallel_degree"
        )


def _check_continues(job_config: Any) -> None:
    """A checkpoint from which the run would continue must hold what it needs, more than weights."""
    checkpoint = job_config.checkpoint
    if not checkpoint.enable or checkpoint.load_only or checkpoint.exclude_from_loading:
        return
    folder = Path(job_config.job.dump_folder) / checkpoint.folder
    finished = itertools.chain(folder.glob("step-*/.metadata"), folder.glob("step-*/model.safetensors.index.json"))
    names = {path.parent.name[5:] for path in finished}
    steps = sorted(map(int, filter(str.isdigit, names)), reverse=True)
    step = checkpoint.load_step if checkpoint.load_step != -1 else max(steps, default=0)
    if step not in steps:
        return
    if _can_continue(folder, step):
        _check_reference(job_config, folder, step)
        return
    earlier = next((other for other in steps if other < step and _can_continue(folder, other)), None)
    instead = "" if earlier is None else f"set checkpoint.load_step to {earlier}, or "
    raise ValueError(
        f"{folder}/step-{step} has no state of the data loader, as a run's last checkpoint holds weights only unless "
        f"checkpoint.last_save_model_only is false; {instead}start another run with its path as "
        "checkpoint.initial_load_path"
    )


def _check_reference(job_config: Any, folder: Path, step: int) -> None:
    needs_file = job_config.training.dataset == DPO_DATASET and job_config.magi.dpo.reference == "file"
    if step > 0 and needs_file and "train_state.reference_model" not in _names_in(folder, step):
        raise ValueError(
            f'magi.dpo.reference is "file", but {folder}/step-{step} is of a run with "model"; set it to that, or '
            "start another run"
        )


def _can_continue(folder: Path, step: int) -> bool:
    """Of step 0 torchtitan takes the weights only."""
    return step == 0 or any(name.startswith("dataloader") for name in _names_in(folder, step))


def _names_in(folder: Path, step: int) -> list[str]:
    """What a checkpoint holds; nothing is said of safetensors."""
    path = folder / f"step-{step}"
    if not (path / ".metadata").is_file():
        return []
    return list(FileSystemReader(path).read_metadata().state_dict_metadata)


def _check_dpo(magi: Magi) -> None:
    dpo = magi.dpo
    if not 0 < dpo.beta < math.inf:
        raise ValueError(f"magi.dpo.beta is {dpo.beta}; use a positive number, such as 0.1")
    if not 0 <= dpo.label_smoothing < 0.5:
        raise ValueError(f"magi.dpo.label_smoothing is {dpo.label_smoothing}; use 0 or more and less than 0.5")
    if dpo.label_smoothing and dpo.loss != "sigmoid":
        raise ValueError(
            f"magi.dpo.label_smoothing is {dpo.label_smoothing} with magi.dpo.loss {dpo.loss!r}; "
            'use it with loss "sigmoid", or set it to 0'
        )
    if magi.long_documents != "truncate":
        raise ValueError(
            f"magi.long_documents is {magi.long_documents!r}, but a preference pair cannot be split; "
            f'use "truncate" with dataset {DPO_DATASET!r}'
        )
    if magi.positions == "pack":
        raise ValueError(
            f'magi.positions is "pack", but both answers of a pair continue the positions of its prompt; '
            f'use "auto" with dataset {DPO_DATASET!r}'
        )
