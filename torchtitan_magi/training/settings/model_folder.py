"""Which model a run has: that of ``hf_assets_path``'s config.json, or a named flavor compared with it."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_magi.models.config_file import ConfigFile
from torchtitan_magi.models.model_config import ModelConfig, differences, read_model_config
from torchtitan_magi.models.names import PICTURES
from torchtitan_magi.training.checkpoints.hf_weights import ExportLayout, check_weights, float32_names, shard_numbers
from torchtitan_magi.training.settings.options import has_reference
from torchtitan_magi.training.settings.resume import folder_of_checkpoints, initial_weights
from torchtitan_magi.wording import quoted, quoted_path, shown

logger = logging.getLogger(__name__)

HF_FLAVOR = "hf"


def read_hf_config(job_config: Any, check: Callable[[ModelConfig], object]) -> ModelConfig:
    """The model of flavor "hf".

    Args:
        check: raises ValueError for a model that the installed torchtitan does not have.

    Raises:
        ValueError: one line that names the file, the field and the remedy.
    """
    model = job_config.model
    config = read_model_config(model.hf_assets_path)
    path = Path(model.hf_assets_path) / "config.json"
    if config.model != model.name:
        raise ValueError(
            f'model.name is {quoted(model.name)}, but {shown(path)} is of a {config.model}; set it to "{config.model}"'
        )
    try:
        check(config)
    except ValueError as error:
        raise ValueError(f"{shown(path)}: {error}") from None
    if config.left_out:
        logger.warning(f"{shown(path)}: {config.left_out}")
    return config


def check_folders(job_config: Any, config: ModelConfig) -> ExportLayout:
    """Compares the run's model with the folders of Hugging Face files that it starts from or ends in.

    Raises:
        ValueError: weights are read from a folder, or exported in its format, that has another model; or the weights
            to be read are not complete. One line.
    """
    checkpoint, assets = job_config.checkpoint, job_config.model.hf_assets_path
    reads = checkpoint.enable and checkpoint.initial_load_in_hf
    exports = checkpoint.enable and checkpoint.last_save_in_hf
    source = initial_weights(job_config) if reads else None
    for folder in dict.fromkeys(filter(None, (assets, source))):
        problem = _problem(job_config.model, folder, config)
        if problem and (folder == source or (folder == assets and exports)):
            raise ValueError(problem)
        if problem:
            logger.warning(problem)
    resumes = folder_of_checkpoints(job_config).exists()
    if source and (not resumes or has_reference(job_config)):  # a reference always starts from there
        check_weights(source, config)
    _warn_of_positions(job_config.training.seq_len, config, exports and not job_config.magi.lora.rank)
    if exports and job_config.magi.lora.rank and job_config.magi.random_weights:
        logger.warning(
            "magi.random_weights is true, so adapters are trained on weights that nobody keeps, and their export is of "
            "no use; begin with the weights of a checkpoint"
        )
    rounds = checkpoint.enable and checkpoint.last_save_model_only and checkpoint.export_dtype != "float32"
    return ExportLayout(
        shard_numbers(assets, config) if exports else None,
        float32_names(source or assets, config) if rounds else (),
        (config.model, str(source or assets)) if exports and config.model in PICTURES else None,
    )


def _warn_of_positions(seq_len: int, config: ModelConfig, exports: bool) -> None:
    """Says that documents may be longer than those that the model was trained on."""
    if seq_len <= config.num_positions:
        return
    line = f"training.seq_len is {seq_len}, but the model was trained for {config.num_positions} positions: what lies "
    line += "beyond them in a document is new to it"
    if exports and config.rope.type == "yarn":
        line += "; an export names no more of them, as YaRN's factor sets their number"
    elif exports:
        line += "; the export's max_position_embeddings will be the longest length trained, if it is more"
    logger.warning(line)


def _problem(model: Any, folder: str, config: ModelConfig) -> str | None:
    """What a folder's config.json has against the run's model, in one line; None without a config.json."""
    path = Path(folder) / "config.json"
    if not path.exists():
        return None
    try:
        found = differences(read_model_config(folder), config)
    except ValueError as error:
        return f"model.flavor {quoted(model.flavor)} cannot be the model of this folder: {error}"
    if not found:
        return None
    remedy = f'set model.flavor = "{HF_FLAVOR}"'
    if folder != model.hf_assets_path:
        remedy += f" and model.hf_assets_path = {quoted_path(folder)}"
    return f"model.flavor {quoted(model.flavor)} is not the model of {shown(path)}: {'; '.join(found)}; {remedy}"


def check_vocabulary(tokenizer: Any, config: ModelConfig, job_config: Any) -> None:
    """Refuses a tokenizer with tokens that the model's embedding does not have, or without the model's special tokens.

    Raises:
        ValueError: one line with both numbers.
    """
    tokens = 1 + max(tokenizer.tokenizer.get_vocab().values())
    if tokens > config.vocab_size:
        raise ValueError(
            f"the tokenizer in {shown(job_config.model.hf_assets_path)} has {tokens} tokens, the model's vocab_size is "
            f"{config.vocab_size}; use the tokenizer that came with the weights"
        )
    folder = job_config.model.hf_assets_path
    named = _named_tokens(Path(folder) / "config.json")
    for name, number in named:
        if number >= tokens:
            raise ValueError(
                f"the config.json of {shown(folder)} has {name} {number}, but the tokenizer there has {tokens} tokens; "
                "use the tokenizer that came with the weights"
            )
    bos = dict(named).get("bos_token_id")
    if None not in (bos, tokenizer.bos_id) and bos != tokenizer.bos_id:
        logger.warning(
            f"{shown(folder)}: config.json has bos_token_id {bos}, but the tokenizer's BOS is {tokenizer.bos_id}: "
            "is it the tokenizer that came with the weights?"
        )


def _named_tokens(path: Path) -> list[tuple[str, int]]:
    """Fields of a config.json that number a special token, and the numbers."""
    try:
        fields = ConfigFile(path).values
    except ValueError:  # there is none; of a broken one others have told
        return []
    values = [(name, fields.get(name)) for name in ("bos_token_id", "eos_token_id")]
    numbers = [(name, number) for name, value in values for number in (value if isinstance(value, list) else [value])]
    return [(name, number) for name, number in numbers if type(number) is int and number >= 0]
