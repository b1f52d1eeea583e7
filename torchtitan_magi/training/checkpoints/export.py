"""What makes a folder of exported weights a model that transformers loads: configuration, tokenizer, chat template."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torchtitan_magi.data.tokens.chat import default_template, load_chat_template
from torchtitan_magi.models.model_config import ModelConfig
from torchtitan_magi.training.checkpoints.hf_weights import INDEX, ExportLayout
from torchtitan_magi.training.checkpoints.pictures import copy_pictures
from torchtitan_magi.training.checkpoints.trained_length import keep_trained_length, trained_length
from torchtitan_magi.training.process.all_ranks import agreed, on_first_rank
from torchtitan_magi.training.settings.options import OUR_DATASETS
from torchtitan_magi.wording import one_line, quoted_path, shown

logger = logging.getLogger(__name__)

# What transformers reads of a model's folder beside the weights.
PATTERNS = (
    "config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.j*", "additional_chat_templates/*",
    "tiktoken.model", "*.py",  # the tokenizers of Kimi, and the code that auto_map names
    "*processor_config.json",  # of what sees pictures: servers ask for it whatever they are asked
)  # fmt: skip
CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
SHARDED = "sharded"  # torch's name
UNFINISHED = "unfinished"  # where all of an export is written first
ORIGINAL = "original_max_position_embeddings"
NUMBER = re.compile(r"(?<=[.])\d+(?=[.])")  # of a layer or an expert in a tensor's name


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
    if not names or names[0].endswith(("ForCausalLM", "ForConditionalGeneration")):
        return content
    return json_file(fields | {"architectures": [f"{names[0].removesuffix('Model')}ForCausalLM"]})


def read_files(folder: str) -> dict[str, bytes]:
    """What transformers reads of a model's folder beside the weights: contents by path in the folder.

    Links are followed inside the folder, and to the ``blobs`` of a Hugging Face cache, whose snapshots consist of such
    links. What lies elsewhere is not part of the model, and may be of nobody's business.

    Raises:
        ValueError: one line: the folder or a file cannot be read, a link leads elsewhere, or config.json is no JSON
            object.
    """
    try:
        if not Path(folder).is_dir():
            raise NotADirectoryError("no such folder")
        paths = [path for pattern in PATTERNS for path in Path(folder).glob(pattern) if not path.is_dir()]
        for path in paths:
            _check_is_of_model(path, Path(folder).resolve())
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    except OSError as error:
        raise ValueError(
            f"model.hf_assets_path is {quoted_path(folder)}, whose files cannot be exported beside the weights "
            f"({one_line(error)}); give a folder that can be read, or set checkpoint.last_save_in_hf to false"
        ) from None
    if CONFIG in files and not isinstance(parsed(files[CONFIG]), dict):
        raise ValueError(f"{shown(Path(folder, CONFIG))} is no JSON object; download it again")
    return files


def _check_is_of_model(path: Path, folder: Path) -> None:
    """Raises ValueError for what is no file, or is taken from elsewhere by a link."""
    if not path.is_file():
        raise ValueError(f"{shown(path)} is no file that can be exported beside the weights; remove it")
    found = path.resolve()
    cache = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(found.is_relative_to(place) for place in (folder, *cache)):
        raise ValueError(
            f"{shown(path)} is a link to {shown(found)}, outside of the model's folder, and would be exported beside "
            "the weights; put a copy in its place, or remove it"
        )


def add_config(files: dict[str, bytes], config: dict[str, Any]) -> None:
    """Adds a config.json. The tokenizer stays what it is without one: transformers would choose its class by model.

    Args:
        files: of a folder that has a tokenizer alone.
        config: the fields of config.json.
    """
    files[CONFIG] = json_file(config)
    if "tokenizer.json" in files:
        tokenizer_config = parsed(files.get(TOKENIZER_CONFIG, b"{}"))
        files[TOKENIZER_CONFIG] = json_file({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config})


@dataclass
class Export:
    """How a run's weights are saved at its end.

    files: contents by path in the folder of an export, beside the weights; layout: of the weights.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    layout: ExportLayout = field(default_factory=ExportLayout)

    def save(
        self, checkpointer: Any, weights: dict[str, Any], folder: Path, to_hf: bool, save: Callable[[Any, Path], Any]
    ) -> Any:
        """Saves a checkpoint, or exports. A collective of all ranks.

        Args:
            checkpointer: torchtitan's CheckpointManager.
            weights: and other states if it is no export, as it wants to save them; of the last ones torchtitan has
                rounded all.
            folder: of the checkpoint.
            to_hf: whether to export.
            save: torchtitan's saving of such weights to a folder.

        Returns:
            What save() returned; None for an export.
        """
        length, dtype = trained_length(checkpointer), next(iter(weights.values())).dtype if to_hf else None
        names = self.parameters(checkpointer.sd_adapter) & weights.keys()
        if names:
            trained = checkpointer.states["model"].state_dict()
            weights = weights | {
                name: trained[name].float() for name in names if to_hf or trained[name].dtype != weights[name].dtype
            }
        result = save(weights, folder) if dtype is None else None
        if dtype is not None:
            export(folder, self.files, dtype, lambda place: self._write(place, lambda: save(weights, place)), length)
        keep_trained_length(checkpointer, length)
        return result

    def _write(self, folder: Path, save: Callable[[], Any]) -> None:
        save()
        if self.layout.pictures is not None:
            model, source = self.layout.pictures
            on_first_rank(lambda: copy_pictures(source, folder, model))

    @property
    def auto_class(self) -> str:
        """transformers' class that loads the model."""
        names = (parsed(self.files.get(CONFIG, b"")) or {}).get("architectures") or [""]
        of_pictures = names[0].endswith("ForConditionalGeneration")
        return "AutoModelForImageTextToText" if of_pictures else "AutoModelForCausalLM"

    def parameters(self, adapter: Any) -> set[str]:
        """torchtitan's names of what is saved in float32. adapter: its StateDictAdapter."""
        found, joined = set(), getattr(adapter, "joined", {})
        for name in self.layout.float32:
            number, theirs = NUMBER.search(name), NUMBER.sub("{}", name)
            parts = [own for own, whole in joined.items() if whole == theirs] or [adapter.from_hf_map[theirs]]
            found |= {own.format(number and number[0]) for own in parts}
        return found


def export(
    folder: Path, files: dict[str, bytes], dtype: torch.dtype, save_weights: Callable[[Path], object], length: int = 0
) -> None:
    """Writes files and weights to a folder. A collective of all ranks.

    All is written to a folder inside, of which no loader knows: a file of weights that is being merged has its name
    before its content. Then all is moved to its place, config.json and last the index, by which torchtitan knows a
    finished checkpoint. What stays behind is removed: the first copy of the weights, which has a file per rank and was
    merged to the second.

    Args:
        folder: of the checkpoint.
        files: contents by path in the folder.
        dtype: of most weights, which config.json will name.
        save_weights: torchtitan's writing to a folder, which leaves both copies; it returns when all ranks have
            finished.
        length: positions up to which the model was trained, which config.json will name if it names fewer.

    Raises:
        OSError: on all ranks: a file cannot be written.
    """

    unfinished = folder / UNFINISHED

    def write_files() -> None:
        for path in (folder / INDEX, folder / CONFIG, *folder.glob("*.safetensors")):  # of an earlier export
            path.unlink(missing_ok=True)
        if unfinished.exists():  # of an export that was cut off; its files would be merged with the new ones
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
        for name, content in files.items():
            path = unfinished / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_finished(content, dtype, length) if name == CONFIG else content)

    def finish() -> None:
        _move_files(unfinished, folder)
        try:
            shutil.rmtree(unfinished)
        except OSError as error:
            logger.warning(
                f"{shown(folder)} is complete, but {shown(unfinished)} could not be removed ({one_line(error)}); "
                "delete it"
            )

    on_first_rank(write_files)
    save_weights(unfinished)
    on_first_rank(finish)


def _move_files(source: Path, target: Path) -> None:
    """Moves all but the first copy of the weights; the configuration and the index last."""
    found = [path.relative_to(source) for path in source.rglob("*") if path.is_file()]
    names = [name for name in found if name.parts[0] != SHARDED]
    for name in sorted(names, key=lambda name: (name == Path(INDEX), name == Path(CONFIG))):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)


def _finished(config: bytes, dtype: torch.dtype, length: int) -> bytes:
    """config.json with the dtype of the weights, under the name that it uses, and as many positions as were trained."""
    fields = parsed(config)
    names = {"dtype", "torch_dtype"} & fields.keys() or {"torch_dtype"}
    dtypes = dict.fromkeys(names, str(dtype).removeprefix("torch."))
    text = fields.get("text_config")
    if isinstance(text, dict):
        return json_file(fields | dtypes | {"text_config": text | dtypes | _positions(text, length)})
    return json_file(fields | dtypes | _positions(fields, length))


def _positions(fields: dict[str, Any], length: int) -> dict[str, Any]:
    """What of config.json changes with the number of positions, if it grows.

    Not where positions are "yarn": their number is a product of two other fields, which the model computes with. Where
    they are "llama3", the model computes with the old number unless another field says it.
    """
    number = fields.get("max_position_embeddings", length)
    key = next((key for key in ("rope_scaling", "rope_parameters") if fields.get(key)), "")
    rope = fields.get(key, {})
    kind = rope.get("rope_type") or rope.get("type")
    if length <= number or kind == "yarn":
        return {}
    changed: dict[str, Any] = {"max_position_embeddings": length}
    if kind == "llama3" and not fields.get(ORIGINAL):  # where transformers finds it, too
        changed[key] = {ORIGINAL: number} | rope
    return changed


def parsed(content: bytes) -> Any:
    """The value of a JSON file; None if it is none."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def json_file(value: dict[str, Any]) -> bytes:
    """The content of a JSON file."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
