"""What a run's TOML file says of its packs, its layout and its memory."""

import functools
import tomllib
from pathlib import Path
from typing import Any

from torchtitan_magi.files import read_text
from torchtitan_magi.models.model_config import read_model_config
from torchtitan_magi.models.shapes import heads_of_rank
from torchtitan_magi.sizing.run_setup import Setup, setup_of, unpredicted
from torchtitan_magi.wording import one_line, quoted, quoted_path, shown


class RunFile:
    """The options of a TOML file.

    Raises:
        ValueError: the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.name = shown(path)
        try:
            self.sections = tomllib.loads(read_text(path, "utf-8-sig"))  # a byte order mark is let in
        except (OSError, ValueError, RecursionError) as error:  # also UnicodeDecodeError, TOMLDecodeError
            raise ValueError(f"cannot read {quoted_path(path)} ({one_line(error)}); give a run's TOML file") from None

    def read(self, name: str, default: Any) -> Any:
        """The value of "section.option", see ``run_setup.Read``.

        Raises:
            ValueError: it is missing, of another type, none of the values, or below 1 where the default is not.
        """
        choices = default if isinstance(default, tuple) else ()
        default = choices[0] if choices else default
        kind = default if isinstance(default, type) else type(default)
        *sections, option = name.split(".")
        try:
            table = functools.reduce(lambda table, section: table.get(section, {}), sections, self.sections)
            value: Any = table.get(option, default)
        except AttributeError:  # a section that is no table
            value = None
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if not is_kind or (choices and value not in choices):
            said = "no" if value is kind else "a wrong"
            raise ValueError(f"{self.name} has {said} {name}; set it as training needs it")
        if type(default) is int and default > 0 and value < 1:
            raise ValueError(f"{name} is {value}; use at least 1")
        return value


def options_of(run: RunFile, *, with_heads: bool) -> dict[str, Any]:
    """Values of the report's options for a run; ``with_heads`` reads the model's config.json, too.

    Raises:
        ValueError: an option that is missing or that training refuses.
    """
    total = run.read("training.seq_len", int)
    cp_size = run.read("parallelism.context_parallel_degree", int)
    tp_size = run.read("parallelism.tensor_parallel_degree", 1)
    if cp_size < 1:
        raise ValueError(f"{run.name} has parallel degrees {cp_size} and {tp_size}; use at least 1")
    if total < 1 or total % (2 * cp_size * tp_size):
        multiple = f"a multiple of {2 * cp_size * tp_size}, twice context_parallel_degree times tensor_parallel_degree"
        raise ValueError(f"training.seq_len is {total}; use {multiple}")
    dataset = run.read("training.dataset", str)
    if dataset not in ("sft", "dpo"):
        raise ValueError(f"training.dataset is {quoted(dataset)}; the report reads 'sft' and 'dpo'")
    folder, cost = run.read("model.hf_assets_path", str), run.read("magi.cost_model", "")
    return {
        "source": run.read("training.dataset_path", str), "dataset": dataset, "tokenizer": folder,
        "total": str(total), "cp": [cp_size], "cost": Path(cost) if cost else None,
        **(_heads(folder, tp_size) if with_heads else {}),
    }  # fmt: skip


def setup_of_file(run: RunFile) -> Setup:
    """The facts of a run that decide about its memory, with one rank for a data_parallel_shard_degree of -1.

    Raises:
        ValueError: an option that is missing or wrong; a model or a layout whose memory is not predicted.
    """
    model = read_model_config(run.read("model.hf_assets_path", str))
    if what := unpredicted(run.read, model):
        raise ValueError(f"memory is not predicted for {what}; leave out --memory")
    return setup_of(run.read, model, max(1, run.read("parallelism.data_parallel_shard_degree", -1)))


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
