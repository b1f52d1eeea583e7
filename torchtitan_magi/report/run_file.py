"""What a run's TOML file says of its packs and attention layers, as options of the report."""

import json
import tomllib
from pathlib import Path
from typing import Any

from torchtitan_magi.wording import quoted, quoted_path


def options_of(path: str, *, with_heads: bool) -> dict[str, Any]:
    """Values of the report's options for the run of a TOML file; ``with_heads`` reads the model's config.json, too.

    Raises:
        ValueError: a file that cannot be read; an option that is missing or that training refuses.
    """
    run = _read(Path(path), tomllib.loads, "give a run's TOML file")
    total = _value(run, path, "training", "seq_len", int)
    cp_size = _value(run, path, "parallelism", "context_parallel_degree", int)
    tp_size = _value(run, path, "parallelism", "tensor_parallel_degree", int, 1)
    if cp_size < 1 or tp_size < 1:
        raise ValueError(f"{path} has parallel degrees {cp_size} and {tp_size}; use at least 1")
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
        **(_heads(Path(folder) / "config.json", tp_size) if with_heads else {}),
    }  # fmt: skip


def _heads(path: Path, tp_size: int) -> dict[str, Any]:
    """Heads of a layer on one GPU, of a model's config.json."""
    config = _read(path, json.loads, "put the model there, or give --heads")
    heads = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(keys, int) or heads < 1 or keys < 1:
        raise ValueError(f"{path} has {heads} query heads and {keys} K/V heads; give --heads")
    if heads % tp_size or keys % tp_size:
        shape = f"{heads} query heads and {keys} K/V heads; use a degree that divides both"
        raise ValueError(f"parallelism.tensor_parallel_degree is {tp_size}, but the model has {shape}")
    dim = config.get("head_dim") or config.get("hidden_size", 128 * heads) // heads
    return {"heads": f"{heads // tp_size}:{keys // tp_size}", "head_dim": dim}


def _cost(run: dict[str, Any], path: str) -> Path | None:
    name = _value(run, path, "magi", "cost_model", str, "")
    return Path(name) if name else None


def _value(run: dict[str, Any], path: str, section: str, option: str, kind: type, default: Any = None) -> Any:
    table = run.get(section, {})
    value = table.get(option, default) if isinstance(table, dict) else None
    if type(value) is not kind:
        said = "no" if value is None else "a wrong"
        raise ValueError(f"{path} has {said} {section}.{option}; set it as training needs it")
    return value


def _read(path: Path, parse: Any, remedy: str) -> dict[str, Any]:
    try:
        content = parse(path.read_text())
    except (OSError, ValueError) as error:  # also UnicodeDecodeError, TOMLDecodeError, JSONDecodeError
        raise ValueError(f"cannot read {quoted_path(path)} ({error}); {remedy}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{quoted_path(path)} holds no table; {remedy}")
    return content
