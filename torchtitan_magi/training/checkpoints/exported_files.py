"""What the last checkpoint in Hugging Face's format holds beside the weights."""

from typing import Any

from torchtitan_magi.data.tokens.chat import default_template, load_chat_template
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.training.checkpoints.export import CONFIG, add_config, json_file, parsed, read_files
from torchtitan_magi.training.process.all_ranks import agreed
from torchtitan_magi.training.settings.options import OUR_DATASETS


def exported_files(job_config: Any, config: ModelConfig, tokenizer: Any) -> dict[str, bytes]:
    """Contents by path in the folder, read before the first step so that a run cannot end without them.

    A collective of all ranks. What hf_assets_path lacks is what the run has: the model's configuration, and the chat
    template of its conversations.

    Raises:
        ValueError: on all ranks, one line that names the value and the remedy.
    """
    folder, checkpoint = job_config.model.hf_assets_path, job_config.checkpoint
    if not (checkpoint.enable and checkpoint.last_save_in_hf):
        return {}
    if not checkpoint.last_save_model_only:  # torchtitan would fail after the last step
        raise ValueError(
            "checkpoint.last_save_in_hf is true, but checkpoint.last_save_model_only is false; set that to true, too: "
            "an export has weights only"
        )

    def read() -> dict[str, bytes]:
        files = read_files(folder)
        if CONFIG not in files:
            ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
            add_config(files, config.to_hf() | ids)
        else:
            files[CONFIG] = _of_whole_model(files[CONFIG])
        if job_config.training.dataset in OUR_DATASETS and load_chat_template(folder) is None:
            files["chat_template.jinja"] = default_template(tokenizer.tokenizer).encode()
        return files

    return agreed(folder, read, sorted)


def _of_whole_model(content: bytes) -> bytes:
    """config.json of the model with its output layer, also where that of the source is of the model without it."""
    fields = parsed(content)
    names = fields.get("architectures") or []
    if not names or names[0].endswith("ForCausalLM"):
        return content
    return json_file(fields | {"architectures": [f"{names[0].removesuffix('Model')}ForCausalLM"]})
