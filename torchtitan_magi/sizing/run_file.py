"""What a run's TOML file says of its packs, its layout and its memory."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan_magi.files import read_text
from torchtitan_magi.models.model_config import read_model_config
from torchtitan_magi.models.shapes import heads_of_rank
from torchtitan_magi.sizing.run_setup import Setup, setup_of, unpredicted
from torchtitan_magi.wording import one_line, quoted, quoted_path, shown

DTYPES = ("float32", "bfloat16")
SHARD_THE_REST = ("data_parallel_shard_degree", -1)  # over all ranks that other degrees leave
# Section -> option -> torchtitan 0.2.2's default, or all values with the default first; a type: the file must say it.
OPTIONS: dict[str, Any] = {
    "model": {"hf_assets_path": str},
    "training": {
        "dataset": str, "dataset_path": str, "seq_len": int, "local_batch_size": 8, "global_batch_size": -1,
        "enable_cpu_offload": False, "dtype": DTYPES, "mixed_precision_param": DTYPES[::-1],
        "mixed_precision_reduce": DTYPES[:1],
    },
    "parallelism": {
        "context_parallel_degree": int, "tensor_parallel_degree": 1, "pipeline_parallel_degree": 1,
        "data_parallel_replicate_degree": 1, "data_parallel_shard_degree": -1, "expert_parallel_degree": 1,
        "expert_tensor_parallel_degree": 1,
    },
    "activation_checkpoint": {
        "mode": ("selective", "full", "memory_budget", "none"), "selective_ac_option": "2", "memory_budget": 0.5,
    },
    "compile": {"enable": False, "components": ["model", "loss"]},
    "optimizer": {"implementation": ("fused", "foreach", "for-loop")},
    "magi": {
        "cost_model": "", "overlap_stages": -1, "dpo": {"reference": ("model", "file")}, "lora": {"rank": 0},
    },
}  # fmt: skip


def read_run(path: str) -> Any:
    """The options of a TOML file that its size depends on, as ``run.training.seq_len``.

    Raises:
        ValueError: a file that cannot be read; an option that is missing or has a wrong value.
    """
    try:
        sections = tomllib.loads(read_text(path, "utf-8-sig"))  # a byte order mark is let in
    except (OSError, ValueError, RecursionError) as error:  # also UnicodeDecodeError, TOMLDecodeError
        raise ValueError(f"cannot read {quoted_path(path)} ({one_line(error)}); give a run's TOML file") from None
    return _options(sections, OPTIONS, path)


def _options(table: Any, known: dict[str, Any], path: str, prefix: str = "") -> SimpleNamespace:
    """The known options of a section, and of the sections in it."""
    if not isinstance(table, dict):
        raise ValueError(f"{shown(path)} has a wrong {prefix.rstrip('.')}; set its options as training needs them")
    values: dict[str, Any] = {}
    for name, default in known.items():
        if isinstance(default, dict):
            values[name] = _options(table.get(name, {}), default, path, f"{prefix}{name}.")
            continue
        choices = default if isinstance(default, tuple) else ()
        value = table.get(name, choices[0] if choices else default)
        kind = default if isinstance(default, type) else type(choices[0] if choices else default)
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if not is_kind or (choices and value not in choices):
            said = "no" if value is kind else "a wrong"
            raise ValueError(f"{shown(path)} has {said} {prefix}{name}; set it as training needs it")
        values[name] = value
    return SimpleNamespace(**values)


def options_of(run: Any, path: str, *, with_heads: bool) -> dict[str, Any]:
    """Values of the report's options for a run; ``with_heads`` reads the model's config.json, too.

    Args:
        run: from ``read_run``.
        path: the file's.

    Raises:
        ValueError: an option that training refuses.
    """
    training, folder, cost = run.training, run.model.hf_assets_path, run.magi.cost_model
    cp_size, tp_size = run.parallelism.context_parallel_degree, run.parallelism.tensor_parallel_degree
    total = training.seq_len
    if cp_size < 1 or tp_size < 1:
        raise ValueError(f"{shown(path)} has parallel degrees {cp_size} and {tp_size}; use at least 1")
    if total < 1 or total % (2 * cp_size * tp_size):
        multiple = f"a multiple of {2 * cp_size * tp_size}, twice context_parallel_degree times tensor_parallel_degree"
        raise ValueError(f"training.seq_len is {total}; use {multiple}")
    if training.dataset not in ("sft", "dpo"):
        raise ValueError(f"training.dataset is {quoted(training.dataset)}; the report reads 'sft' and 'dpo'")
    return {
        "source": training.dataset_path, "dataset": training.dataset, "tokenizer": folder,
        "total": str(total), "cp": [cp_size], "cost": Path(cost) if cost else None,
        **(_heads(folder, tp_size) if with_heads else {}),
    }  # fmt: skip


def setup_of_file(run: Any, path: str) -> Setup:
    """The facts of a run that decide about its memory, with one rank for a data_parallel_shard_degree of -1.

    Args:
        run: from ``read_run``.
        path: the file's.

    Raises:
        ValueError: a model or layout whose memory is not predicted; a number below 1.
    """
    model, parallelism = read_model_config(run.model.hf_assets_path), run.parallelism
    if what := unpredicted(run, model):
        raise ValueError(f"memory is not predicted for {what}; leave out --memory")
    numbers = {name: value for name, value in vars(parallelism).items() if (name, value) != SHARD_THE_REST}
    numbers["local_batch_size"] = run.training.local_batch_size
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{shown(path)} has {name} {value}; use at least 1")
    return setup_of(run, model, max(1, parallelism.data_parallel_shard_degree))


def _heads(folder: str, tp_size: int) -> dict[str, Any]:
    """Heads of a layer on one GPU, of the folder's config.json."""
    try:
        model = read_model_config(folder)
    except ValueError as error:
        raise ValueError(f"{error}, or give --heads and --head-dim") from None
    if model.windows:
        raise ValueError(
            f"{shown(folder)}/config.json is of a {model.model} with windows of {max(model.windows)} tokens, which "
            f"the report does not size; give --heads and --head-dim for its layers without, {model.windows.count(0)} "
            f"of {model.num_layers}"
        )
    heads = heads_of_rank(model, tp_size)
    return {"heads": "{}:{}".format(*heads.counts), "head_dim": heads.head_dim, "value_dim": heads.value_dim}
