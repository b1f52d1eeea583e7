"""Data loaders: packed records for ``dataset = "sft"`` and ``"dpo"``, torchtitan's own for everything else."""

from dataclasses import asdict
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools.logging import logger

from torchtitan_magi.data import ChatTokenizer, PackedPairDataset, PackedSFTDataset, collate_packs
from torchtitan_magi.data.packed import PackedDataset
from torchtitan_magi.titan.job_config import DPO_DATASET, OUR_DATASETS


def build_dataset(
    section: Any, seq_len: int, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> PackedDataset:
    """Packs of ``section.dataset_path`` for one data-parallel rank: documents for "sft", preference pairs for "dpo".

    Args:
        section: job_config.training or job_config.validation.
        seq_len: tokens per pack.
        tokenizer: torchtitan's Hugging Face tokenizer.
        training: shuffled and without end, or one pass in a fixed order.

    Raises:
        ValueError: a records file that is missing, empty or malformed.
    """
    chat = ChatTokenizer.from_assets(
        tokenizer.tokenizer, tokenizer.bos_id, tokenizer.eos_id, job_config.model.hf_assets_path
    )
    place = (seq_len, dp_rank, dp_world_size)
    options = {"seed": job_config.debug.seed or 0, "shuffle": training, "epochs": -1 if training else 1}
    if section.dataset == DPO_DATASET:
        shared_prompt = job_config.magi.dpo.shared_prompt
        return PackedPairDataset(section.dataset_path, chat.pair, *place, shared_prompt=shared_prompt, **options)
    long_documents = job_config.magi.long_documents
    return PackedSFTDataset(section.dataset_path, chat, *place, long_documents=long_documents, **options)


def build_dataloader(
    section: Any, seq_len: int, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> ParallelAwareDataloader:
    """Batches of ``build_dataset``, whose arguments it takes."""
    dataset = build_dataset(section, seq_len, dp_world_size, dp_rank, tokenizer, job_config, training)
    logger.info(f"Packing {section.dataset_path} into {seq_len} tokens per pack")
    options = {**asdict(section.dataloader), "batch_size": section.local_batch_size, "collate_fn": collate_packs}
    return ParallelAwareDataloader(dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **options)


def build_validation_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> BaseDataLoader:
    """The validation set of the job, one pass of ``validation.steps`` batches (-1: all of it)."""
    section = job_config.validation
    if section.dataset in OUR_DATASETS:
        return build_dataloader(section, section.seq_len, dp_world_size, dp_rank, tokenizer, job_config, False)
    infinite = section.steps != -1
    return build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
