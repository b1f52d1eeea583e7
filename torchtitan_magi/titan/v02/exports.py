"""The last checkpoint in Hugging Face's format: a folder that transformers loads as it is."""

from typing import Any

import torch
from torch import Tensor
from torchtitan.components.checkpoint import MODEL, TRAIN_STATE, CheckpointManager

from torchtitan_magi.data.chat import default_template, load_chat_template
from torchtitan_magi.titan.v02.job_config import OUR_DATASETS
from torchtitan_magi.training.exports import read_files


def prepare_export(checkpointer: CheckpointManager) -> None:
    """Reads what the export will hold beside the weights, so that a run cannot end without it.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    trainer: Any = checkpointer.states[TRAIN_STATE]
    folder, tokenizer = trainer.job_config.model.hf_assets_path, trainer.tokenizer
    files = read_files(folder)
    if trainer.job_config.training.dataset in OUR_DATASETS and load_chat_template(folder) is None:
        files["chat_template.jinja"] = default_template(tokenizer.tokenizer).encode()  # the one that it trains with
    checkpointer.exported_files = files
    _place_tensors(checkpointer.sd_adapter, checkpointer.states[MODEL].state_dict())


def _place_tensors(adapter: Any, weights: dict[str, Tensor]) -> None:
    """Gives each tensor of the model a file. torchtitan takes the files of the index in hf_assets_path, which may name
    tensors that the model has not, or lack some, such as a head tied to the embeddings."""
    files = adapter.fqn_to_index_mapping
    if files:
        shapes = {name: torch.empty(weight.shape, device="meta") for name, weight in weights.items()}
        adapter.fqn_to_index_mapping = {name: files.get(name, max(files.values())) for name in adapter.to_hf(shapes)}
