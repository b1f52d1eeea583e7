"""Data loaders: packed records for ``dataset = "sft"`` and ``"dpo"``, torchtitan's own for everything else."""

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools.logging import logger

from torchtitan_magi.data import ChatTokenizer, PackedPairDataset, PackedSFTDataset, collate_packs
from torchtitan_magi.data.packed import PackedDataset, Sample, padding_like
from torchtitan_magi.titan.v02.job_config import DPO_DATASET, OUR_DATASETS


class PackLoader(BaseDataLoader):
    """Batches of a ``PackedDataset``, one microbatch of ``collate_packs`` at a time.

    The state is the dataset's after the last batch given out, so it is the same on every data-parallel rank, is saved
    once in a checkpoint and can be loaded at another data-parallel degree. ``iter()`` begins at a loaded state, else at
    the first pack. At the end the last batch is filled up with padding, and the last step with batches of padding, so
    that no pack is left over.

    Args:
        dataset: the rank's shard.
        batch_size: packs per batch.
        batches_per_step: microbatches of a training step on this rank.
        options: of torch's DataLoader; at most one worker, which lives for one pass.
    """

    def __init__(self, dataset: PackedDataset, batch_size: int, batches_per_step: int = 1, **options: Any) -> None:
        self.dataset, self.batch_size, self.batches_per_step = dataset, batch_size, batches_per_step
        self.options = options
        if not options.get("num_workers"):
            self.options = {k: v for k, v in options.items() if k not in ("persistent_workers", "prefetch_factor")}
        self._state = json.dumps(dataset.state_dict())
        self._exhausted = self._resuming = False

    def __iter__(self) -> Iterator[Sample]:
        packs = _PacksWithState(self.dataset, self._state if self._resuming else None)
        self._exhausted = self._resuming = False
        batches = self._whole_steps(packs)
        following = next(batches, None)
        while following is not None:
            (batch, self._state), following = following, next(batches, None)
            self._exhausted = following is None
            yield batch

    def _whole_steps(self, packs: "_PacksWithState") -> Iterator[tuple[Sample, str]]:
        collate = functools.partial(_collate_with_state, num_rows=self.batch_size)
        number = 0
        for batch, state in DataLoader(packs, batch_size=self.batch_size, collate_fn=collate, **self.options):
            number += 1
            yield batch, state
        for _ in range(-number % self.batches_per_step):
            yield padding_like(batch), state

    def state_dict(self) -> dict[str, Any]:
        """state: the dataset's, as JSON; exhausted: whether the last batch has been given out."""
        return {"state": self._state, "exhausted": self._exhausted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if the state is of other data or other options."""
        if not state_dict:
            return
        self.dataset.check_state(json.loads(state_dict["state"]))
        self._state, self._resuming = state_dict["state"], True


class _PacksWithState(IterableDataset):
    """Items of a dataset, each with the state after it; it is iterated where the loader's worker lives."""

    def __init__(self, dataset: PackedDataset, state: str | None) -> None:
        self.dataset, self.state = dataset, state

    def __iter__(self) -> Iterator[tuple[Sample, str]]:
        if self.state is not None:
            self.dataset.load_state_dict(json.loads(self.state))
        for sample in self.dataset:
            yield sample, json.dumps(self.dataset.state_dict())


def _collate_with_state(items: list[tuple[Sample, str]], num_rows: int) -> tuple[Sample, str]:
    samples, states = zip(*items, strict=True)
    return collate_packs(samples, num_rows), states[-1]


def save_at_the_end_of_data(save: Any) -> Any:
    """``CheckpointManager.save`` that also takes the step that used up our data for the last one."""

    @functools.wraps(save)
    def save_step(self: Any, curr_step: int, last_step: bool = False) -> None:
        loader = self.states["dataloader"]
        if isinstance(loader, BaseDataLoader) and not isinstance(loader, ParallelAwareDataloader):
            last_step |= loader.state_dict().get("exhausted", False)
        save(self, curr_step, last_step)

    return save_step


def build_dataset(
    section: Any, seq_len: int, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> PackedDataset:
    """Packs of ``section.dataset_path`` for one data-parallel rank: documents for "sft", preference pairs for "dpo".

    A collective of all ranks where there are several: each checks its share of the records.

    Args:
        section: job_config.training or job_config.validation.
        seq_len: tokens per pack.
        tokenizer: torchtitan's Hugging Face tokenizer.
        training: as the [magi] options say, or one pass over every record in the order of the files.

    Raises:
        ValueError: on all ranks, for a records file that is missing, empty, malformed or not the same on each of them.
    """
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    dataset, problem = None, None
    try:
        dataset = _dataset(section, seq_len, dp_world_size, dp_rank, tokenizer, job_config, training)
        if job_config.magi.bad_records == "error":
            dataset.records.check(*ranks)
    except ValueError as error:
        problem = str(error)
    found = [(problem, dataset and dataset.records.fingerprint)]
    if ranks[1] > 1:
        found *= ranks[1]
        dist.all_gather_object(found, found[0])
    for problem, _ in found:
        if problem is not None:
            raise ValueError(problem)
    for rank, (_, fingerprint) in enumerate(found):
        if fingerprint != found[0][1]:
            raise ValueError(
                f"{section.dataset_path!r} has {found[0][1]} on rank 0, {fingerprint} on rank {rank};"
                " give every rank the same data"
            )
    assert dataset is not None
    return dataset


def _dataset(
    section: Any, seq_len: int, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> PackedDataset:
    magi = job_config.magi
    chat = ChatTokenizer.from_assets(
        tokenizer.tokenizer, tokenizer.bos_id, tokenizer.eos_id, job_config.model.hf_assets_path
    )
    path, shard = section.dataset_path, (seq_len, dp_rank, dp_world_size)
    options = {
        "seed": job_config.debug.seed or 0,
        "shuffle": training and magi.shuffle,
        "epochs": magi.epochs if training else 1,
        "weighted": training,
        "bad_records": magi.bad_records,
        "check": False,
    }
    if section.dataset == DPO_DATASET:
        return PackedPairDataset(path, chat.pair, *shard, shared_prompt=magi.dpo.shared_prompt, **options)
    return PackedSFTDataset(path, chat, *shard, long_documents=magi.long_documents, **options)


def build_dataloader(
    section: Any, seq_len: int, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> PackLoader:
    """Batches of ``build_dataset``, whose arguments it takes."""
    dataset = build_dataset(section, seq_len, dp_world_size, dp_rank, tokenizer, job_config, training)
    packs_per_batch = section.local_batch_size * dp_world_size
    batches_per_step = max(1, section.global_batch_size // packs_per_batch) if training else 1
    logger.info(f"Packing {section.dataset_path} into {seq_len} tokens per pack: {dataset.records.fingerprint}")
    return PackLoader(dataset, section.local_batch_size, batches_per_step, **asdict(section.dataloader))


def build_validation_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> BaseDataLoader:
    """The validation set of the job, one pass of ``validation.steps`` batches (-1: all of it)."""
    section = job_config.validation
    if section.dataset in OUR_DATASETS:
        if section.seq_len < (longest := job_config.training.seq_len):
            logger.warning(
                f"Validation packs have {section.seq_len} tokens, those of training {longest}: documents whole there "
                "may be truncated here; set validation.seq_len to compare losses"
            )
        return build_dataloader(section, section.seq_len, dp_world_size, dp_rank, tokenizer, job_config, False)
    infinite = section.steps != -1
    return build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
