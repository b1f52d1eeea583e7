"""What a run's TOML file says of its packs, its model and its layout."""

import functools
import os
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from torchtitan_magi.files import read_text
from torchtitan_magi.models.model_config import ModelConfig, read_model_config
from torchtitan_magi.models.published import published_sizes
from torchtitan_magi.models.shapes import heads_of_rank
from torchtitan_magi.sizing.run_setup import Setup, setup_of
from torchtitan_magi.training.settings.options import DEFAULT_STEPS, DPO, OUR_DATASETS, LoRA, Magi, Rollouts
from torchtitan_magi.wording import one_line, quoted, quoted_path, shown, unknown

# options of each section by either torchtitan, and the sections of a file
NAMES = {
    "": "job model optimizer lr_scheduler training parallelism checkpoint activation_checkpoint compile validation "
    "metrics profiling comm debug experimental quantize fault_tolerance memory_estimation magi",
    "job": "config_file dump_folder description print_config save_config_file custom_config_module",
    "model": "name flavor hf_assets_path tokenizer_path converters print_after_conversion",
    "optimizer": "name lr beta1 beta2 eps weight_decay implementation early_step_in_backward",
    "lr_scheduler": "warmup_steps total_steps decay_ratio decay_type min_lr_factor",
    "training": "dataset dataset_path local_batch_size global_batch_size seq_len max_norm steps enable_cpu_offload "
    "dtype mixed_precision_param mixed_precision_reduce gc_freq gc_debug dataloader disable_cuda_graphs",
    "parallelism": "data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree "
    "pipeline_parallel_degree context_parallel_degree expert_parallel_degree expert_tensor_parallel_degree "
    "fsdp_reshard_after_forward enable_fsdp_symm_mem enable_sequence_parallel enable_async_tensor_parallel "
    "disable_loss_parallel module_fqns_per_model_part pipeline_parallel_first_stage_less_layers "
    "pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_schedule "
    "pipeline_parallel_schedule_csv pipeline_parallel_microbatch_size pipeline_parallel_expert_parallel_overlap "
    "context_parallel_load_balancer context_parallel_rotate_method context_parallel_ptrr_mask_key "
    "expert_parallel_comm_backend spmd_backend",
    "checkpoint": "enable enable_ft_dataloader_checkpoints folder interval initial_load_path initial_load_model_only "
    "initial_load_in_hf initial_load_in_hf_quantized last_save_model_only last_save_in_hf export_dtype async_mode "
    "keep_latest_k load_step exclude_from_loading enable_first_step_checkpoint create_seed_checkpoint load_only",
    "activation_checkpoint": "mode selective_ac_option per_op_sac_force_recompute_mm_shapes_by_fqns early_stop "
    "memory_budget visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    "compile": "enable components backend enable_async_tensor_parallel",
    "validation": "enable dataset dataset_path local_batch_size seq_len freq steps dataloader",
    "metrics": "log_freq enable_tensorboard disable_color_printing save_tb_folder save_for_all_ranks enable_wandb",
    "profiling": "enable_profiling save_traces_folder profile_freq profiler_active profiler_warmup profiler_repeat "
    "profiler_skip_first profiler_skip_first_wait enable_memory_snapshot save_memory_snapshot_folder "
    "memory_snapshot_freq memory_snapshot_max_entries",
    "comm": "init_timeout_seconds train_timeout_seconds trace_buf_size save_traces_folder save_traces_file_prefix mode",
    "debug": "seed deterministic deterministic_warn_only moe_force_load_balance spmd_typechecking detect_anomaly "
    "batch_invariant print_config save_config_file enable_structured_logging",
    "experimental": "custom_import custom_args_module",
    **dict.fromkeys(
        ("training.dataloader", "validation.dataloader"), "num_workers persistent_workers pin_memory prefetch_factor"
    ),
}
OURS = {"magi": Magi, "magi.dpo": DPO, "magi.rollouts": Rollouts, "magi.lora": LoRA}
OPTIONS = {section: names.split() for section, names in NAMES.items()} | {
    section: [option.name for option in fields(kind)] for section, kind in OURS.items()
}


class RunFile:
    """The options of a TOML file.

    Raises:
        ValueError: the file cannot be read, or has a section or an option that neither torchtitan has.
    """

    def __init__(self, path: str) -> None:
        self.name = shown(path)
        try:
            self.sections = tomllib.loads(read_text(path, "utf-8-sig"))  # a byte order mark is let in
        except (OSError, ValueError, RecursionError) as error:  # also UnicodeDecodeError, TOMLDecodeError
            raise ValueError(f"cannot read {quoted_path(path)} ({one_line(error)}); give a run's TOML file") from None
        _check_names(self.sections)

    def set(self, name: str, value: Any) -> None:
        """Sets "section.option" in place of what the file has."""
        section, option = name.split(".")
        self.sections[section] = self.sections.get(section, {}) | {option: value}

    def read(self, name: str, default: Any) -> Any:
        """The value of "section.option", see ``run_setup.Read``.

        Raises:
            ValueError: it is missing, of another type, none of the values, or, where there are none, below 1 and the
                default is not.
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
        if kind is int and not choices and (default is int or default > 0) and value < 1:
            raise ValueError(f"{name} is {value}; use at least 1")
        return value


def _check_names(table: dict[str, Any], section: str = "") -> None:
    """Raises ValueError for a name that the section does not have, nor those in it."""
    for name, value in table.items():
        option = f"{section}.{name}" if section else name
        if name not in OPTIONS[section]:
            raise ValueError(unknown(option, "torchtitan with torchtitan_magi", OPTIONS[section]))
        if option in OPTIONS and isinstance(value, dict):
            _check_names(value, option)


NO_DATA = "histogram"  # whose documents stand for those of a data set that is not there yet


def options_of(run: RunFile, *, with_heads: bool) -> dict[str, Any]:
    """Values of the command's options for a run; ``with_heads`` reads the model's config.json, too.

    Raises:
        ValueError: an option that is missing or that training refuses.
    """
    tp_size = run.read("parallelism.tensor_parallel_degree", 1)
    dataset = run.read("training.dataset", str)
    if dataset not in OUR_DATASETS:
        raise ValueError(f"training.dataset is {quoted(dataset)}; sizing reads 'sft', 'dpo' and 'rollouts'")
    shares = run.read("magi.share_prefixes", False)
    if shares and dataset != "sft":
        raise ValueError(
            f"magi.share_prefixes is true and training.dataset {quoted(dataset)}; it is for 'sft': use that, or false"
        )
    folder, cost = run.read("model.hf_assets_path", str), run.read("magi.cost_model", "")
    return {
        "source": path_of(run), "dataset": dataset, "tokenizer": folder,
        "share_prefixes": shares, "seed": run.read("debug.seed", 0),
        "total": str(run.read("training.seq_len", int)),
        "cp": [run.read("parallelism.context_parallel_degree", 1)], "cost": Path(cost) if cost else None,
        **(_heads(run, tp_size) if with_heads else {}),
    }  # fmt: skip


def check_length(run: RunFile, total: int, cp_size: int) -> None:
    """Raises ValueError for packs that training refuses with this number of context-parallel GPUs."""
    if total % (parts := 2 * cp_size * run.read("parallelism.tensor_parallel_degree", 1)):
        multiple = f"a multiple of {parts}, twice context_parallel_degree times tensor_parallel_degree"
        raise ValueError(f"training.seq_len is {total}; use {multiple}")


def reading_of(run: RunFile, dataset: str) -> dict[str, Any]:
    """How a run reads records of a kind and packs them, as options of the class that does."""
    options = {
        "bad_records": run.read("magi.bad_records", ("error", "skip")),
        "shuffle": run.read("magi.shuffle", True),
    }
    if folder := run.read("magi.token_cache", ""):
        options["token_cache"] = folder
    if dataset == "sft":
        options["long_documents"] = run.read("magi.long_documents", ("truncate", "split"))
    if dataset == "dpo":
        options["shared_prompt"] = run.read("magi.dpo.shared_prompt", True)
    return options


def path_of(run: RunFile) -> str:
    """training.dataset_path, which is "" for rollouts that a program gives step by step."""
    given_by_step = run.read("training.dataset", str) == "rollouts"
    path: str = run.read("training.dataset_path", "" if given_by_step else str)
    return path


def model_of(run: RunFile) -> ModelConfig:
    """The run's model: of its config.json, or the published one that the folder is named after.

    Raises:
        ValueError: the file is broken, or is not there and the folder's name is not known.
    """
    folder = run.read("model.hf_assets_path", str)
    published = published_sizes(folder)
    if published is not None and not os.path.exists(Path(folder) / "config.json"):
        return published
    flavor = run.read("model.flavor", "hf")
    if flavor != "hf" and not os.path.exists(Path(folder) / "config.json"):
        raise ValueError(
            f"model.flavor is {quoted(flavor)}, a model of torchtitan's; sizing reads the config.json of a checkpoint, "
            f"and {shown(folder)} has none; put one there"
        )
    return read_model_config(folder)


def notes_on(run: RunFile, tokenizer: str) -> Iterator[str]:
    """Says what is not there yet, what it was sized by instead, and what is not counted."""
    folder, flavor = run.read("model.hf_assets_path", str), run.read("model.flavor", "debugmodel")
    if not os.path.exists(Path(folder) / "config.json"):
        yield f"{shown(folder)} has no config.json yet; the model is the published {Path(folder).name}"
    if flavor != "hf":
        yield (
            f"model.flavor is {quoted(flavor)}, which training takes from torchtitan; the model here is that of "
            f'{shown(folder)}, which "hf" trains'
        )
    if missing := missing_data(run, tokenizer):
        yield (
            f"{shown(missing)} is not there yet; documents are those of the histogram, and their lengths decide what "
            "attention takes"
        )
        if run.read("magi.share_prefixes", False):
            yield "magi.share_prefixes is true; what records share the data will say, and it is not counted"
    if run.read("training.enable_cpu_offload", False):
        yield "training.enable_cpu_offload is true; what copies and the optimizer on the CPU take is not counted"


def missing_data(run: RunFile, folder: str) -> str | None:
    """What is not there of a run's data and a tokenizer's folder; None where they can be read."""
    path = path_of(run)
    if not path:
        return "what open_trainer will be given"
    is_one = "://" not in path and not any(mark in path for mark in ",*=[")
    tokenizer = os.path.join(folder, "tokenizer.json")
    return next((each for each in (path, tokenizer) if not os.path.exists(each) and (each != path or is_one)), None)


def setup_of_file(run: RunFile, num_gpus: int = 0) -> Setup:
    """The facts of a run that decide about its memory and time.

    Args:
        num_gpus: of the run, for a data_parallel_shard_degree of -1; 0: as few as its degrees multiply to.

    Raises:
        ValueError: an option that is missing or wrong; GPUs that the degrees do not divide.
    """
    model, shard = model_of(run), run.read("parallelism.data_parallel_shard_degree", -1)
    others = setup_of(run.read, model, 1).world_size
    if shard > 0 and num_gpus not in (0, others * shard):
        raise ValueError(f"--gpus is {num_gpus}, but the degrees of {run.name} multiply to {others * shard}; give that")
    if num_gpus % others:
        raise ValueError(f"--gpus is {num_gpus}, but the degrees of {run.name} multiply to {others}; give a multiple")
    return setup_of(run.read, model, shard if shard > 0 else max(1, num_gpus // others))


def steps_of(run: RunFile, packs_per_step: float, per_epoch: float | None) -> int | None:
    """Steps of the run; None where magi.epochs sets them and the data are not there."""
    steps, epochs = run.read("training.steps", DEFAULT_STEPS), run.read("magi.epochs", -1)
    if epochs == -1:
        return steps
    if per_epoch is None:
        return None if steps == DEFAULT_STEPS else steps
    counted = -int(-epochs * per_epoch // packs_per_step)
    return counted if steps == DEFAULT_STEPS else min(steps, counted)


def _heads(run: RunFile, tp_size: int) -> dict[str, Any]:
    """Heads of a layer on one GPU."""
    try:
        model = model_of(run)
    except ValueError as error:
        raise ValueError(f"{error}, or give --heads and --head-dim") from None
    heads = heads_of_rank(model, tp_size)
    return {"heads": "{}:{}".format(*heads.counts), "head_dim": heads.head_dim, "value_dim": heads.value_dim}
