"""Data loaders: packed records for ``dataset = "sft"`` and ``"dpo"``, torchtitan's own for everything else."""

from dataclasses import asdict
from typing import Any

from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader
from torchtitan.tools.logging import logger

from torchtitan_magi.data import ChatTokenizer, PackedPairDataset, PackedSFTDataset
from torchtitan_magi.data.packed import PackedDataset
from torchtitan_magi.data.token_cache import default_folder
from torchtitan_magi.titan.v02.job_config import DPO_DATASET, OUR_DATASETS
from torchtitan_magi.training.pack_loader import PackLoader, agreed_dataset
from torchtitan_magi.training.template_date import keep_template_date, template_date


def build_dataloader(
    section: Any, dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any, training: bool
) -> PackLoader:
    """Packs of ``section.dataset_path`` for one data-parallel rank: documents for "sft", preference pairs for "dpo".

    A collective of all ranks where there are several.

    Args:
        section: job_config.training or job_config.validation.
        tokenizer: torchtitan's Hugging Face tokenizer.
        training: as the [magi] options say, or one pass over every record in the order of the files.

    Raises:
        ValueError: on all ranks, for a records file that is missing, empty, malformed or not the same on each of them.
    """
    magi, path = job_config.magi, section.dataset_path
    day = template_date(magi.template_date, job_config.job.dump_folder)

    def make() -> PackedDataset:
        chat = ChatTokenizer.from_assets(
            tokenizer.tokenizer, tokenizer.bos_id, tokenizer.eos_id, job_config.model.hf_assets_path, day
        )
        if chat.prints_date:
            keep_template_date(job_config.job.dump_folder, day)
            logger.info(f"The chat template prints the date: {day}; another by magi.template_date")
        shard = (section.seq_len, dp_rank, dp_world_size)
        options = {
            "seed": job_config.debug.seed or 0,
            "shuffle": training and magi.shuffle,
            "epochs": magi.epochs if training else 1,
            "weighted": training,
            "bad_records": magi.bad_records,
            "check": False,
            "token_cache": magi.token_cache or default_folder(),
        }
        if section.dataset == DPO_DATASET:
            return PackedPairDataset(path, chat.pair, *shard, shared_prompt=magi.dpo.shared_prompt, **options)
        return PackedSFTDataset(path, chat, *shard, long_documents=magi.long_documents, **options)

    dataset = agreed_dataset(path, make, magi.bad_records == "error")
    packs_per_batch = section.local_batch_size * dp_world_size
    batches_per_step = max(1, section.global_batch_size // packs_per_batch) if training else 1
    logger.info(
        f"Packing {path} into {section.seq_len} tokens per pack: {dataset.records.fingerprint}; {dataset.tokens}"
    )
    return PackLoader(dataset, section.local_batch_size, batches_per_step, **asdict(section.dataloader))


def build_validation_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
    """The validation set of the job, one pass of ``validation.steps`` batches (-1: all of it)."""
    section = job_config.validation
    if section.dataset in OUR_DATASETS:
        if section.seq_len < (longest := job_config.training.seq_len):
            logger.warning(
                f"Validation packs have {section.seq_len} tokens, those of training {longest}: documents whole there "
                "may be truncated here; set validation.seq_len to compare losses"
            )
        return build_dataloader(section, dp_world_size, dp_rank, tokenizer, job_config, False)
    infinite = section.steps != -1
    return build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
