"""The values of a TOML file, of the command line and of a program, checked one by one before anything is built."""

import contextlib
import functools
import io
import math
import os
import re
import tomllib
import types
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import groupby
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan_magi.files import read_text
from torchtitan_magi.machine import cause, lack
from torchtitan_magi.training.process.run_folder import check_local, check_writable
from torchtitan_magi.training.settings.options import DPO, LoRA, Magi
from torchtitan_magi.wording import one_line, quoted, quoted_path, unknown

# whole numbers: the option, the least value, and one below it that has a meaning of its own; some can be left out
LEAST: tuple[tuple[str, int, int | None], ...] = (
    ("training.local_batch_size", 1, None),
    ("training.global_batch_size", 1, -1),
    ("training.seq_len", 1, None),
    ("training.steps", 1, None),
    ("training.gc_freq", 1, None),
    ("validation.local_batch_size", 1, None),
    ("validation.seq_len", 1, None),
    ("validation.freq", 1, None),
    ("lr_scheduler.warmup_steps", 0, None),
    ("checkpoint.interval", 1, None),
    ("checkpoint.load_step", 0, -1),
    ("checkpoint.keep_latest_k", 2, 0),
    ("metrics.log_freq", 1, None),
    ("profiling.profile_freq", 1, None),
    ("profiling.profiler_active", 1, None),
    ("profiling.profiler_warmup", 0, None),
    ("profiling.profiler_repeat", 0, None),
    ("profiling.profiler_skip_first", 0, None),
    ("profiling.profiler_skip_first_wait", 0, None),
    ("profiling.memory_snapshot_freq", 1, None),
    ("profiling.memory_snapshot_max_entries", 1, None),
    ("training.dataloader.num_workers", 0, None),
    ("training.dataloader.prefetch_factor", 1, None),
    ("validation.dataloader.num_workers", 0, None),
    ("validation.dataloader.prefetch_factor", 1, None),
    ("comm.init_timeout_seconds", 1, None),
    ("comm.train_timeout_seconds", 1, None),
    ("comm.trace_buf_size", 0, None),
    ("parallelism.data_parallel_replicate_degree", 1, None),
    ("parallelism.data_parallel_shard_degree", 1, -1),
    ("parallelism.context_parallel_degree", 1, None),
    ("parallelism.tensor_parallel_degree", 1, None),
    ("parallelism.pipeline_parallel_degree", 1, None),
    ("parallelism.pipeline_parallel_layers_per_stage", 1, None),
    ("parallelism.pipeline_parallel_microbatch_size", 1, None),
    ("parallelism.expert_parallel_degree", 1, None),
    ("parallelism.expert_tensor_parallel_degree", 1, None),
)
# beyond them gloo counts nanoseconds below 0, torch's recorder of collectives ends the process, rotary positions take
# more memory than a GPU has, and a data loader's processes and what they make ahead take all of a host's
MOST = {
    "comm.init_timeout_seconds": 10**9,
    "comm.train_timeout_seconds": 10**9,
    "comm.trace_buf_size": 2**31 - 1,
    "training.seq_len": 2**27,
    **{f"{name}.dataloader.num_workers": 1024 for name in ("training", "validation")},
    **{f"{name}.dataloader.prefetch_factor": 1024 for name in ("training", "validation")},
}
# what a data loader without workers would not hear, and its default
OF_WORKERS = [
    (f"{name}.dataloader.{option}", default)
    for name in ("training", "validation")
    for option, default in (("prefetch_factor", None), ("persistent_workers", False))
]
UNLIMITED = "training.max_norm"  # inf: no gradient is too long
NOT_NEGATIVE = (lambda x: x >= 0), "a number of at least 0"
BELOW_1 = (lambda x: 0 <= x < 1), "a number of at least 0 and below 1"
SHARE = (lambda x: 0 <= x <= 1), "a number from 0 to 1"
# other numbers; with those outside a run would learn nothing, or the opposite, or end in NaN
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    UNLIMITED: ((lambda x: x > 0), "a number above 0; inf leaves gradients as they are"),
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.beta1": BELOW_1,
    "optimizer.beta2": BELOW_1,
    "optimizer.eps": ((lambda x: x > 0), "a number above 0, such as 1e-8"),
    "optimizer.weight_decay": NOT_NEGATIVE,
    "lr_scheduler.decay_ratio": SHARE,
    "lr_scheduler.min_lr_factor": SHARE,
    "activation_checkpoint.memory_budget": SHARE,
    "magi.lora.alpha": ((lambda x: x > 0), "a number above 0, such as twice the rank"),
}
# words that torch or torchtitan would refuse in the first step, or once the model is built
CHOICES = {"optimizer.name": ("AdamW", "Adam"), "activation_checkpoint.determinism_check": ("default", "none")}
RECOMPUTING = ("full", "selective", "auto")  # modes by torch.utils.checkpoint
# options of [activation_checkpoint] that other modes would leave unheard: their default, and what they are for
OF_MODES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "memory_budget": (0.5, ("memory_budget",)),
    "visualize_memory_budget_pareto": (False, ("memory_budget",)),
    "per_op_sac_force_recompute_mm_shapes_by_fqns": (["moe.router.gate"], ("selective", "auto")),
    "preserve_rng_state": (True, RECOMPUTING),
    "determinism_check": ("default", RECOMPUTING),
    "early_stop": (False, RECOMPUTING),
    "debug": (False, RECOMPUTING),
}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


def read_toml(path: str) -> dict[str, Any]:
    """The values of a TOML file, which may begin with a byte order mark.

    Raises:
        ValueError: it is not there, or is none; one line with the remedy.
    """
    try:
        return tomllib.loads(read_text(path, "utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        what = f"job.config_file is {quoted_path(path)}"
        other = f"{what}, which cannot be read ({one_line(error)}); give a TOML file"
        raise ValueError(lack(error, what) or other) from None


def check_toml(config: type, values: dict[str, Any], prefix: str = "") -> None:
    """Checks names and types in a TOML file. The options of [magi] have checks of their own.

    Args:
        config: the dataclass of a section, or of the whole file.
        values: what the file has there.
        prefix: of names in error texts.

    Raises:
        ValueError: one line that names the option and the remedy.
    """
    known = {field.name: field.type for field in fields(config)}
    for name, value in values.items():
        option = f"{prefix}{name}"
        if name not in known:
            raise ValueError(_unknown(option, list(known)))
        kind: Any = known[name]
        if is_dataclass(kind):
            if not isinstance(value, dict):
                raise ValueError(
                    f"{option} is {quoted(value)}, but it is a section; write [{option}] and its options below"
                )
            check_toml(kind, value, f"{option}.")  # type: ignore[arg-type]
        elif type(value) is int and value.bit_length() > 63:
            raise ValueError(f"{option} is {quoted(value)}; use a number of at most 64 bits")
        elif isinstance(value, str) and "\0" in value:  # of which the command line has none
            raise ValueError(f"{option} is {quoted(value)}; leave the NUL out, which no name of a file can have")
        elif not issubclass(config, (Magi, DPO, LoRA)) and not is_of(value, kind):
            raise ValueError(f"{option} is {quoted(value)}; use {words_for(kind)}")


def _unknown(option: str, known: list[str]) -> str:
    if option == "magi":
        return '[magi] is unknown; add custom_config_module = "torchtitan_magi.titan" to [job]'
    return unknown(option, f"torchtitan {version('torchtitan')} with torchtitan_magi", known)


def is_of(value: Any, kind: Any) -> bool:
    """Whether a value of a TOML file has the type of a dataclass's field."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(is_of(value, argument) for argument in arguments)
    if origin is list:
        return isinstance(value, list) and all(is_of(item, arguments[0]) for item in value)
    if kind is float:
        return type(value) in (int, float)
    return type(value) is kind if kind in WORDS or kind is types.NoneType else True


def words_for(kind: Any) -> str:
    """The words for a value of this type, for a user: "a whole number or a string"."""
    origin, arguments = get_origin(kind), [argument for argument in get_args(kind) if argument is not type(None)]
    if origin is Literal:
        return f"one of {', '.join(map(repr, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(words_for, arguments)))
    if origin is list:
        return f"a list, each of it {words_for(arguments[0])}"
    return WORDS.get(kind, str(kind))


def check_values(job_config: Any) -> None:
    """Checks numbers, and that the run can write where it will.

    Raises:
        ValueError: one line that names the option and the remedy.
    """
    for option, least, special in LEAST:
        value = value_of(job_config, option)
        if value is not None and (type(value) is not int or (value < least and value != special)):
            other = "" if special is None else f", or {special}"
            raise ValueError(f"{option} is {quoted(value)}; use a whole number of at least {least}{other}")
    for option, most in MOST.items():
        if (value := value_of(job_config, option)) is not None and value > most:
            raise ValueError(f"{option} is {quoted(value)}; use a whole number of at most {most}")
    for option, default in OF_WORKERS:
        section, _, _ = option.rpartition(".")
        if (value := value_of(job_config, option)) != default and not value_of(job_config, f"{section}.num_workers"):
            raise ValueError(f"{option} is {quoted(value)}, but num_workers is 0; give a number, or leave it out")
    for option, choices in CHOICES.items():
        if (value := value_of(job_config, option)) not in (*choices, None):
            raise ValueError(f"{option} is {quoted(value)}; use one of {', '.join(map(repr, choices))}")
    checkpoint = job_config.checkpoint
    if checkpoint.enable and checkpoint.last_save_in_hf and not checkpoint.last_save_model_only:
        raise ValueError(
            "checkpoint.last_save_in_hf is true, but checkpoint.last_save_model_only is false; set that to true, too: "
            "an export has weights only"
        )
    if checkpoint.enable and checkpoint.initial_load_in_hf and not checkpoint.initial_load_model_only:
        raise ValueError(
            "checkpoint.initial_load_in_hf is true, but checkpoint.initial_load_model_only is false; leave that out: "
            "safetensors hold weights only"
        )
    if (communicates := job_config.comm.mode) != "default":  # else each rank would train by itself
        raise ValueError(
            f"comm.mode is {quoted(communicates)}, but here ranks exchange rows, by NCCL or gloo; leave it out"
        )
    seed = job_config.debug.seed
    if seed is not None and not 0 <= seed < 2**64:
        raise ValueError(f"debug.seed is {quoted(seed)}; use a whole number of 0 to 2**64 - 1, or leave it out")
    for option, number in _numbers(job_config, ""):
        check_number(option, number)
    mode = job_config.activation_checkpoint.mode
    for name, (default, modes) in OF_MODES.items():
        value = value_of(job_config, f"activation_checkpoint.{name}")
        if mode not in modes and value not in (default, None):
            raise ValueError(
                f"activation_checkpoint.{name} is {quoted(value)}, but mode is {quoted(mode)}; leave it out, or set "
                f"mode to {quoted(modes[0])}"
            )
    if job_config.metrics.enable_wandb and find_spec("wandb") is None:  # torchtitan goes on without it
        raise ValueError(
            "metrics.enable_wandb is true, but the package wandb is not installed; install it, or set it to false"
        )
    for option in ("job.dump_folder", "checkpoint.folder", "checkpoint.initial_load_path"):
        check_local(value_of(job_config, option) or "", option)
    check_writable(job_config.job.dump_folder)
    _check_places(job_config)


def _check_places(job_config: Any) -> None:
    """Checks that the run can write what torchtitan puts into its folder, which may be late in it."""
    folder = job_config.job.dump_folder
    for option, switch in (
        ("comm.save_traces_folder", "comm.trace_buf_size"),
        ("metrics.save_tb_folder", "metrics.enable_tensorboard"),
        ("profiling.save_traces_folder", "profiling.enable_profiling"),
        ("profiling.save_memory_snapshot_folder", "profiling.enable_memory_snapshot"),
    ):
        if value_of(job_config, switch):
            check_writable(os.path.join(folder, value_of(job_config, option)), option)
    for option in ("job.save_config_file", "debug.save_config_file"):
        if (name := value_of(job_config, option)) is not None:
            path = os.path.join(folder, name)
            check_writable(os.path.dirname(path), option)
            try:
                open(path, "ab").close()
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{option} is {quoted_path(path)}, which cannot be written ({cause(error)}); name a file of your "
                    "own"
                ) from None


def value_of(job_config: Any, option: str) -> Any:
    """The option's value; None where it is left out, or is none of this torchtitan."""
    return functools.reduce(lambda section, name: getattr(section, name, None), option.split("."), job_config)


def check_number(option: str, value: float) -> None:
    """Raises ValueError, one line, for a number that nobody trains with."""
    if math.isnan(value) or (math.isinf(value) and option != UNLIMITED):
        raise ValueError(f"{option} is {value}; use a finite number")
    if option in RANGES and not RANGES[option][0](value):
        raise ValueError(f"{option} is {value}; use {RANGES[option][1]}")


def _numbers(section: Any, prefix: str) -> Iterator[tuple[str, float]]:
    """The options that are no whole numbers, or need not be; [magi.dpo] has checks of its own."""
    names = [field.name for field in fields(section)] if is_dataclass(section) else vars(section)
    for name in names:
        if name == "model_spec":
            continue
        value, option = getattr(section, name), f"{prefix}{name}"
        if isinstance(value, float) or (type(value) is int and option in RANGES):
            yield option, value
        elif (is_dataclass(value) or isinstance(value, types.SimpleNamespace)) and not isinstance(value, DPO):
            yield from _numbers(value, f"{option}.")


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Makes one line of the box that tyro prints for wrong arguments before it exits, and of torchtitan's assertions.

    Raises:
        ValueError: names the argument.
    """
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except AssertionError as error:
        raise ValueError(f"{one_line(error)}; correct the TOML file or the command line") from None
    except SystemExit as end:
        if not end.code:  # --help
            raise
        remedy = "put --help behind the file to see all options"  # tyro names a program that nobody called
        text = re.sub(r"For full helptext, \w+ .* --help", remedy, _in_box(printed.getvalue()))
        raise ValueError(one_line(text, 1000)) from None


def _in_box(printed: str) -> str:
    """The text in a printed box: its parts one after the other, without the title, which the first repeats."""
    lines = (re.sub(r"\x1b\[[0-9;]*m", "", line).strip() for line in printed.splitlines())
    inside = [line.strip("│ ") for line in lines if not line.startswith(("╭", "╰"))]
    parts = groupby(inside, lambda line: bool(line) and not line.strip("─"))
    return "; ".join(" ".join(filter(None, part)) for is_rule, part in parts if not is_rule)
