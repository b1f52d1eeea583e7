"""What makes a folder of exported weights a model that transformers loads: configuration, tokenizer, chat template."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan_magi.training.hf_weights import INDEX
from torchtitan_magi.wording import quoted_path

logger = logging.getLogger(__name__)

# What transformers reads of a model's folder beside the weights.
PATTERNS = (
    "config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.j*", "additional_chat_templates/*",
)  # fmt: skip
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
SHARDED = "sharded"  # torch's name


def read_files(folder: str) -> dict[str, bytes]:
    """What transformers reads of a model's folder beside the weights: contents by path in the folder.

    Raises:
        ValueError: one line: the folder or a file cannot be read, or config.json is no JSON object.
    """
    try:
        if not Path(folder).is_dir():
            raise NotADirectoryError("no such folder")
        paths = [path for pattern in PATTERNS for path in Path(folder).glob(pattern) if path.is_file()]
        files = {str(path.relative_to(folder)): path.read_bytes() for path in paths}
    except OSError as error:
        raise ValueError(
            f"model.hf_assets_path is {quoted_path(folder)}, whose files cannot be exported beside the weights "
            f"({error}); give a folder that can be read, or set checkpoint.last_save_in_hf to false"
        ) from None
    if CONFIG in files and not isinstance(_parsed(files[CONFIG]), dict):
        raise ValueError(f"{Path(folder, CONFIG)} is no JSON object; download it again")
    return files


def add_config(files: dict[str, bytes], config: dict[str, Any]) -> None:
    """Adds a config.json. The tokenizer stays what it is without one: transformers would choose its class by model.

    Args:
        files: of a folder that has a tokenizer alone.
        config: the fields of config.json.
    """
    files[CONFIG] = _json(config)
    if "tokenizer.json" in files:
        tokenizer_config = _parsed(files.get(TOKENIZER_CONFIG, b"{}"))
        files[TOKENIZER_CONFIG] = _json({"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_config})


def export(folder: Path, files: dict[str, bytes], dtype: torch.dtype, save_weights: Callable[[], None]) -> None:
    """Writes files and weights to a folder. A collective of all ranks.

    The index, by which torchtitan knows a finished checkpoint, comes last. Then the first copy of the weights goes,
    which has a file per rank and is merged to the second.

    Args:
        folder: of the checkpoint.
        files: contents by path in the folder.
        dtype: of the weights, which config.json will name.
        save_weights: torchtitan's writing, which leaves both copies; it returns when all ranks have finished.

    Raises:
        OSError: on all ranks: a file cannot be written.
    """

    def write_files() -> None:
        (folder / INDEX).unlink(missing_ok=True)
        if (folder / SHARDED).exists():  # of an export that was cut off; its files would be merged with the new ones
            shutil.rmtree(folder / SHARDED)
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(_with_dtype(content, dtype) if name == CONFIG else content)

    def remove_first_copy() -> None:
        try:
            shutil.rmtree(folder / SHARDED)
        except OSError as error:
            logger.warning(f"{folder} is complete, but {folder / SHARDED} could not be removed ({error}); delete it")

    _on_first_rank(write_files)
    save_weights()
    _on_first_rank(remove_first_copy)


def _on_first_rank(action: Callable[[], None]) -> None:
    """Calls action() on rank 0 while the others wait; what it raises of the operating system, all ranks raise."""
    problem: list[OSError | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            problem = [error]
    if dist.is_initialized():
        dist.broadcast_object_list(problem)
    if problem[0] is not None:
        raise problem[0]


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """config.json with the dtype of the weights, under the name that it uses."""
    fields = _parsed(config)
    names = {"dtype", "torch_dtype"} & fields.keys() or {"torch_dtype"}
    return _json(fields | dict.fromkeys(names, str(dtype).removeprefix("torch.")))


def _parsed(content: bytes) -> Any:
    """The value of a JSON file; None if it is none."""
    try:
        return json.loads(content)
    except ValueError:
        return None


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
