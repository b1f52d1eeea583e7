"""Data loaders: packed SFT records for ``dataset = "sft"``, torchtitan's own for everything else."""

from dataclasses import asdict
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools.logging import logger

from torchtitan_magi.data import ChatTokenizer, PackedSFTDataset, collate_packs
from torchtitan_magi.titan.job_config import SFT_DATASET


def build_sft_dataloader(
    section: Any, seq_len: int, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> ParallelAwareDataloader:
    """Packs of ``section.dataset_path`` for one data-parallel rank.

    Args:
        section: job_config.training or job_config.validation.
        seq_len: tokens per pack.
        tokenizer: torchtitan's Hugging Face tokenizer.
        training: shuffled and without end, or one pass in a fixed order.

    Raises:
        ValueError: a records file that is missing, empty or malformed.
    """
    tokenize = ChatTokenizer.from_assets(
        tokenizer.tokenizer, tokenizer.bos_id, tokenizer.eos_id, job_config.model.hf_assets_path
    )
    dataset = PackedSFTDataset(
        section.dataset_path,
        tokenize,
        seq_len,
        dp_rank,
        dp_world_size,
        seed=job_config.debug.seed or 0,
        long_documents=job_config.magi.long_documents,
        shuffle=training,
        infinite=training,
    )
    logger.info(f"Packing {section.dataset_path} into {seq_len} tokens per pack")
    options = {**asdict(section.dataloader), "batch_size": section.local_batch_size, "collate_fn": collate_packs}
    return ParallelAwareDataloader(dataset, dp_rank=dp_rank, dp_world_size=dp_world_size, **options)


def build_validation_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> BaseDataLoader:
    """The validation set of the job, one pass of ``validation.steps`` batches (-1: all of it)."""
    section = job_config.validation
    if section.dataset == SFT_DATASET:
        return build_sft_dataloader(section, section.seq_len, dp_world_size, dp_rank, tokenizer, job_config, False)
    infinite = section.steps != -1
    return build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
