"""What a run's TOML file says of its packs and attention layers, as options of the report."""

import tomllib
from pathlib import Path
from typing import Any

from torchtitan_magi.files import read_text
from torchtitan_magi.models.model_config import read_model_config
from torchtitan_magi.wording import one_line, quoted, quoted_path, shown


def options_of(path: str, *, with_heads: bool) -> dict[str, Any]:
    """Values of the report's options for the run of a TOML file; ``with_heads`` reads the model's config.json, too.

    Raises:
        ValueError: a file that cannot be read; an option that is missing or that training refuses.
    """
    run = _read(path)
    total = _value(run, path, "training", "seq_len", int)
    cp_size = _value(run, path, "parallelism", "context_parallel_degree", int)
    tp_size = _value(run, path, "parallelism", "tensor_parallel_degree", int, 1)
    if cp_size < 1 or tp_size < 1:
        raise ValueError(f"{shown(path)} has parallel degrees {cp_size} and {tp_size}; use at least 1")
    if total < 1 or total % (2 * cp_size * tp_size):
        multiple = f"a multiple of {2 * cp_size * tp_size}, twice context_parallel_degree times tensor_parallel_degree"
        raise ValueError(f"training.seq_len is {total}; use {multiple}")
    dataset = _value(run, path, "training", "dataset", str)
    if dataset not in ("sft", "dpo"):
        raise ValueError(f"training.dataset is {quoted(dataset)}; the report reads 'sft' and 'dpo'")
    folder = _value(run, path, "model", "hf_assets_path", str)
    return {
        "source": _value(run, path, "training", "dataset_path", str), "dataset": dataset, "tokenizer": folder,
        "total": str(total), "cp": [cp_size], "cost": _cost(run, path),
        **(_heads(folder, tp_size) if with_heads else {}),
    }  # fmt: skip


def _heads(folder: str, tp_size: int) -> dict[str, Any]:
    """Heads of a layer on one GPU, of the folder's config.json."""
    try:
        model = read_model_config(folder)
    except ValueError as error:
        raise ValueError(f"{error}, or give --heads and --head-dim") from None
    if model.windows:
        raise ValueError(
            f"{shown(folder)}/config.json is of a {model.model} with windows of {max(model.windows)} tokens, which "
            "the report "
            f"does not size; give --heads and --head-dim for its layers without, {model.windows.count(0)} of "
            f"{model.num_layers}"
        )
    heads, keys = model.num_heads_q, model.num_heads_kv
    if heads % tp_size or keys % tp_size:
        shape = f"{heads} query heads and {keys} K/V heads; use a degree that divides both"
        raise ValueError(f"parallelism.tensor_parallel_degree is {tp_size}, but the model has {shape}")
    dims = {"head_dim": model.head_dim, "value_dim": model.value_dim}
    return {"heads": f"{heads // tp_size}:{keys // tp_size}", **dims}


def _cost(run: dict[str, Any], path: str) -> Path | None:
    name = _value(run, path, "magi", "cost_model", str, "")
    return Path(name) if name else None


def _value(run: dict[str, Any], path: str, section: str, option: str, kind: type, default: Any = None) -> Any:
    table = run.get(section, {})
    value = table.get(option, default) if isinstance(table, dict) else None
    if type(value) is not kind:
        said = "no" if value is None else "a wrong"
        raise ValueError(f"{shown(path)} has {said} {section}.{option}; set it as training needs it")
    return value


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, "utf-8-sig"))  # a byte order mark is let in
    except (OSError, ValueError, RecursionError) as error:  # also UnicodeDecodeError, TOMLDecodeError
        raise ValueError(f"cannot read {quoted_path(path)} ({one_line(error)}); give a run's TOML file") from None
