"""The tokenizer; and the validation set: packed records for ``dataset = "sft"`` and ``"dpo"``, torchtitan's own for
everything else."""

from typing import Any

from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets.text_datasets import build_text_validation_dataloader

from torchtitan_magi.training.batches.pack_loader import build_dataloader
from torchtitan_magi.training.batches.tokenizer import AssetsTokenizer
from torchtitan_magi.training.settings.options import OUR_DATASETS


class MagiTokenizer(AssetsTokenizer, HuggingFaceTokenizer):
    """torchtitan's, of the same tokens as the inspector's and the report's."""


def build_validation_dataloader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> Any:
    """The validation set of the job, one pass of ``validation.steps`` batches (-1: all of it)."""
    section = job_config.validation
    if section.dataset in OUR_DATASETS:
        return build_dataloader(section, dp_world_size, dp_rank, tokenizer, job_config, False)
    infinite = section.steps != -1
    return build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
