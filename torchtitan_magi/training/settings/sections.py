"""Checks of the sections [training], [validation], [activation_checkpoint] and [profiling]."""

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torchtitan_magi.training.process.all_ranks import is_first_rank, rank_and_size
from torchtitan_magi.training.settings.magi_section import (
    check_options_are_used,
    check_options_for_pairs,
    check_options_for_rollouts,
)
from torchtitan_magi.training.settings.options import (
    DPO,
    DPO_DATASET,
    OUR_DATASETS,
    ROLLOUTS_DATASET,
    SFT_DATASET,
    LoRA,
    Magi,
    Rollouts,
    check_schedule,
)
from torchtitan_magi.training.settings.values import value_of
from torchtitan_magi.wording import quoted, quoted_path

logger = logging.getLogger(__name__)

ENTRY = "torchrun -m torchtitan_magi.train"
COMPONENTS = ("model", "loss")  # that torchtitan compiles
MOST_TOKENS = 2**30  # in a step, ten times what anybody trains with
PARTS = ("model_spec", "dataloader", "training", "loss", "tokenizer", "metrics", "checkpoint", "validator")

# what is heard only with more than one rank of a kind, with its default
OF_DEGREES: dict[str, dict[str, Any]] = {
    "pipeline_parallel_degree": {
        "parallelism.module_fqns_per_model_part": None,
        "parallelism.pipeline_parallel_first_stage_less_layers": 1,
        "parallelism.pipeline_parallel_last_stage_less_layers": 1,
        "parallelism.pipeline_parallel_layers_per_stage": None,
        "parallelism.pipeline_parallel_schedule": "1F1B",
        "parallelism.pipeline_parallel_schedule_csv": "",
        "parallelism.pipeline_parallel_microbatch_size": 1,
        "parallelism.pipeline_parallel_expert_parallel_overlap": True,
    },
    "tensor_parallel_degree": {
        "parallelism.enable_sequence_parallel": True,
        "parallelism.enable_async_tensor_parallel": False,
        "compile.enable_async_tensor_parallel": False,
    },
    "context_parallel_degree": {"magi.overlap_stages": -1, "magi.fp32_reduce": False, "magi.cost_model": ""},
}
NEED_A_GPU = (
    "training.enable_cpu_offload",
    "training.gc_debug",
    "profiling.enable_profiling",
    "profiling.enable_memory_snapshot",
)


def check_launcher() -> None:
    """Raises ValueError, one line, in a process that no torchrun has started."""
    if "LOCAL_RANK" not in os.environ:
        raise ValueError(f"LOCAL_RANK is not set, as torchrun sets it; start it with torchrun, as in {ENTRY}")


def check_gpu_options(job_config: Any, device_type: str, without: Sequence[str] = ()) -> None:
    """Refuses on the CPU what torchtitan does on GPUs alone: it would end in an error that names no remedy.

    Args:
        device_type: that of torchtitan's tools, "cpu" once a run is to use the CPU.
        without: options that need none in this torchtitan.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    for option in NEED_A_GPU if device_type == "cpu" else ():
        if option not in without and attrgetter(option)(job_config):
            raise ValueError(f"{option} is true, but there is no GPU, which it needs; set it to false")


def check_configuration(config: Any, magi: Any) -> None:
    """Refuses what with_magi cannot make a run of, and parts of classes that ours would replace.

    Raises:
        ValueError: one line that names the argument and the remedy.
    """
    if isinstance(config, type) or any(getattr(config, name, None) is None for name in PARTS):
        raise ValueError(
            f"with_magi got {quoted(config)}; give a configuration of torchtitan's Trainer with a model, as a function "
            "such as llama3_debugmodel returns it"
        )
    if not isinstance(magi, Magi):
        raise ValueError(f"with_magi got {quoted(magi)} as its [magi] options; give Magi(...), or leave it out")
    for name, kind in (("dpo", DPO), ("rollouts", Rollouts), ("lora", LoRA)):
        if not isinstance(options := getattr(magi, name), kind):
            raise ValueError(f"magi.{name} is {quoted(options)}; give {kind.__name__}(...), or leave it out")
    loss = getattr(config.loss, "loss_fn", config.loss)
    check_replaced([config, config.loss, loss, config.tokenizer, config.metrics, config.checkpoint, config.validator])


def check_replaced(parts: Iterable[Any]) -> None:
    """Refuses configurations of classes that are not torchtitan's plain ones, where ours take their place: a user's
    own, those of torchtitan's experiments, a loss for other models.

    Raises:
        ValueError: one line that names the class and the remedy.
    """
    for kind in map(type, parts):
        is_plain = kind.__module__.startswith(("torchtitan.", "torchtitan_magi."))
        is_other = kind.__module__.startswith("torchtitan.experiments.") or kind.__qualname__ == "MSELoss.Config"
        if is_other or not is_plain:
            raise ValueError(
                f"with_magi puts a class of its own in the place of {kind.__module__}.{kind.__qualname__}, which would "
                "not be used; leave torchtitan's default there"
            )


def check_loaders(config: Any, plain: Any) -> None:
    """Refuses data loaders that are not torchtitan's for text, and those derived from it where our data sets take their
    place.

    Args:
        config: of our Trainer.
        plain: the configuration of torchtitan's loader for text.

    Raises:
        ValueError: one line that names the loader and the remedy.
    """
    for option, loader in (("dataloader", config.dataloader), ("validator.dataloader", config.validator.dataloader)):
        if not isinstance(loader, plain) or (type(loader) is not plain and loader.dataset in OUR_DATASETS):
            raise ValueError(
                f"{option} is {quoted(loader)}, which would not be used; give torchtitan's {plain.__qualname__}"
                '(dataset="sft", dataset_path="data/conversations.jsonl"), or another of its data sets'
            )


def check_sections(job_config: Any, titans: Iterable[str], has_objectives: bool) -> None:
    """Checks the sections by themselves and against each other.

    Args:
        titans: names of torchtitan's own datasets.
        has_objectives: whether our Trainer runs, not torchtitan's own.

    Raises:
        ValueError: one line that names the value and the remedy.
    """
    _check_section(job_config, "training", titans)
    if job_config.magi.epochs == -1:  # else the data say how many steps there are
        check_schedule(job_config.lr_scheduler.total_steps, job_config.training.steps)
    training, validation = job_config.training, job_config.validation
    check_options_are_used(
        job_config.magi, training.dataset, validation.dataset if validation.enable else training.dataset
    )
    _check_batch(job_config)
    if job_config.validation.enable:
        _check_section(job_config, "validation", titans)
        _check_validation(job_config)
    elif job_config.validation.dataset_path and is_first_rank():
        logger.warning("This run validates nothing: validation.enable is false, so dataset_path has no effect")
    if job_config.debug.moe_force_load_balance and is_first_rank():
        logger.warning(
            "This run learns nothing of routing: debug.moe_force_load_balance is true, so tokens go to experts in turn"
        )
    if is_first_rank():
        _warn_of_unheard(job_config)
    _check_profiling(job_config.profiling)
    _check_compile(job_config.compile, value_of(job_config, "parallelism.enable_async_tensor_parallel"))
    _check_checkpointing(job_config.activation_checkpoint, job_config.compile)
    _check_objective(job_config, has_objectives)


def _warn_of_unheard(job_config: Any) -> None:
    """Says which options have no effect: some never here, some because of others."""
    for option, default, is_heard, why in _heard(job_config):
        if not is_heard and (value := value_of(job_config, option)) not in (default, None):
            logger.warning(f"{option} is {quoted(value)}, which has no effect: {why}")


def _heard(job_config: Any) -> Iterator[tuple[str, Any, bool, str]]:
    """Options that may have no effect: each with its default, whether it has one in this run, and why not."""
    checkpoint, parallelism = job_config.checkpoint, job_config.parallelism
    planned = "rows travel as planned, and the plan balances"
    yield "debug.spmd_typechecking", False, False, 'it is for parallelism.spmd_backend "spmd_types"'
    yield "debug.deterministic_warn_only", False, job_config.debug.deterministic, "debug.deterministic is false"
    yield "parallelism.context_parallel_load_balancer", "headtail", False, planned
    yield "parallelism.context_parallel_ptrr_mask_key", None, False, planned
    yield "parallelism.context_parallel_rotate_method", "allgather", False, planned
    is_exported = checkpoint.last_save_model_only or not checkpoint.enable
    yield "checkpoint.export_dtype", "float32", is_exported, "checkpoint.last_save_model_only is false"
    yield "checkpoint.enable_ft_dataloader_checkpoints", True, False, "this Trainer does without torchft"
    yield "model.print_after_conversion", False, bool(value_of(job_config, "model.converters")), "nothing is converted"
    for option, default in (("folder", "comm_traces"), ("file_prefix", "rank_")):
        is_traced = job_config.comm.trace_buf_size > 0
        yield f"comm.save_traces_{option}", default, is_traced, "comm.trace_buf_size is 0"
    for degree, options in OF_DEGREES.items():
        for option, default in options.items():
            yield option, default, getattr(parallelism, degree) > 1, f"parallelism.{degree} is 1"
    for name in ("training", "validation"):
        is_ours = getattr(job_config, name).dataset in OUR_DATASETS
        yield f"{name}.dataloader.persistent_workers", False, not is_ours, "workers live for one pass over the data"


def _check_profiling(section: Any) -> None:
    least = section.profiler_warmup + section.profiler_active
    if section.enable_profiling and section.profile_freq < least:
        raise ValueError(  # torchtitan asserts it once the model is built
            f"profiling.profile_freq is {section.profile_freq}; use at least {least}, profiler_warmup plus "
            "profiler_active"
        )


def _check_compile(section: Any, is_async: bool | None) -> None:
    """torchtitan takes any word for a component, or none, and compiles nothing then. is_async: tensor parallelism."""
    if unknown := [name for name in section.components if name not in COMPONENTS]:
        raise ValueError(f"compile.components has {quoted(unknown[0])}; use one or both of 'model' and 'loss'")
    if section.enable and not section.components:
        raise ValueError(
            "compile.enable is true, but compile.components is empty, so that nothing is compiled; add 'model'"
        )
    if is_async and not (section.enable and "model" in section.components):
        raise ValueError(  # torchtitan 0.2.2 says so once the model is built
            "parallelism.enable_async_tensor_parallel is true, but the model is not compiled, which it needs; set "
            "compile.enable to true, with 'model' in compile.components, or this to false"
        )
    if section.enable:
        _check_compiler(section.backend)


def _check_compiler(backend: str) -> None:
    """Raises ValueError, one line, for a word that torch.compile does not know: it would say so in the first step."""
    import torch

    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(map(repr, torch.compiler.list_backends()))
        raise ValueError(f"compile.backend is {quoted(backend)}; use 'inductor', or another of {known}")


def _check_checkpointing(section: Any, compiled: Any) -> None:
    budgets = compiled.enable and "model" in compiled.components and compiled.backend == "inductor"
    if section.mode == "memory_budget" and not budgets:
        raise ValueError(
            'activation_checkpoint.mode is "memory_budget", which is for compiled models; set compile.enable to true, '
            'with "model" in compile.components and "inductor" as compile.backend, or mode to "auto"'
        )
    by_tensor = section.mode == "auto" or (section.mode == "selective" and section.selective_ac_option == "op")
    if section.debug and by_tensor:
        raise ValueError(  # so says torch.utils.checkpoint, in the first step
            f"activation_checkpoint.debug is true, but mode {quoted(section.mode)} chooses by tensor what layers keep; "
            'set mode to "full" or debug to false'
        )


def _check_tokens(option: str, packs: int, seq_len: int) -> None:
    """Raises ValueError, one line, for so many packs that tokens must be meant: their data alone take minutes."""
    if packs * seq_len > MOST_TOKENS:
        raise ValueError(
            f"{option} is {packs}, but it counts packs, each of {seq_len} tokens; use at most "
            f"{max(1, MOST_TOKENS // seq_len)}"
        )


def _check_batch(job_config: Any) -> None:
    """Checks that the data-parallel ranks can share the global batch; torchtitan does so once the model is built."""
    training, parallelism = job_config.training, job_config.parallelism
    _check_tokens("training.local_batch_size", training.local_batch_size, training.seq_len)
    _check_tokens("training.global_batch_size", training.global_batch_size, training.seq_len)
    copies = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    ranks = max(1, rank_and_size()[1] // (copies * parallelism.pipeline_parallel_degree))
    size, divisor = training.global_batch_size, training.local_batch_size * ranks
    if size > 0 and size % divisor:
        raise ValueError(
            f"training.global_batch_size is {size}; use a multiple of {divisor}, which is training.local_batch_size "
            f"times {ranks} data-parallel ranks, or -1 for that"
        )


def _check_section(job_config: Any, name: str, titans: Iterable[str]) -> None:
    """name: "training" or "validation"."""
    section = getattr(job_config, name)
    parallelism = job_config.parallelism
    divisor = 2 * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    if section.seq_len % divisor:
        raise ValueError(  # torchtitan has the same rule for training, as an assertion without words
            f"{name}.seq_len is {quoted(section.seq_len)}; use a multiple of {divisor}, twice "
            "context_parallel_degree times tensor_parallel_degree"
        )
    if section.dataset not in (*OUR_DATASETS, *titans):
        known = ", ".join(map(repr, (*OUR_DATASETS, *titans)))
        raise ValueError(f"{name}.dataset is {quoted(section.dataset)}; use one of {known}")
    given_by_step = name == "training" and section.dataset == ROLLOUTS_DATASET  # by open_trainer
    if section.dataset in OUR_DATASETS and not section.dataset_path and not given_by_step:
        raise ValueError(
            f"{name}.dataset_path is {quoted_path(section.dataset_path)}; give the JSONL file of dataset "
            f"{quoted(section.dataset)}, or all its sources in one string, separated by commas"
        )
    if name == "training" and job_config.magi.epochs != -1 and section.dataset not in OUR_DATASETS:
        raise ValueError(
            f"magi.epochs is {job_config.magi.epochs}, but training.dataset {quoted(section.dataset)} has none; leave "
            "it out, and give training.steps"
        )
    if job_config.magi.loss_per == "document" and section.dataset != SFT_DATASET:
        raise ValueError(
            f'magi.loss_per is "document" and {name}.dataset {quoted(section.dataset)}; it needs the documents of '
            f'dataset {SFT_DATASET!r}: use that, or "token"'
        )
    if job_config.magi.share_prefixes and section.dataset != SFT_DATASET:
        raise ValueError(
            f"magi.share_prefixes is true and {name}.dataset {quoted(section.dataset)}; it is for the documents of "
            f"dataset {SFT_DATASET!r}: use that, or false (pairs share prompts by "
            "magi.dpo.shared_prompt, rollouts always)"
        )


def _check_validation(job_config: Any) -> None:
    training, validation = job_config.training, job_config.validation
    for kind in (DPO_DATASET, ROLLOUTS_DATASET):
        if (validation.dataset == kind) != (training.dataset == kind):
            raise ValueError(
                f"validation.dataset is {quoted(validation.dataset)} and training.dataset {quoted(training.dataset)}; "
                f"validate on what is trained, {kind!r} or not"
            )
    _check_tokens("validation.local_batch_size", validation.local_batch_size, validation.seq_len)
    if validation.seq_len > training.seq_len:
        raise ValueError(  # torchtitan makes as many rotary positions as training needs
            f"validation.seq_len is {validation.seq_len}; use at most training.seq_len, {training.seq_len}"
        )


def _check_objective(job_config: Any, has_objectives: bool) -> None:
    magi, training, copies = job_config.magi, job_config.training, job_config.parallelism.data_parallel_replicate_degree
    if not has_objectives and copies == rank_and_size()[1] > 1:  # by DDP, which takes the mean of gradients
        raise ValueError(
            f"parallelism.data_parallel_replicate_degree is {copies}, but without FSDP torchtitan's own entry point "
            f"divides gradients by that; start it with {ENTRY}, or use data_parallel_shard_degree"
        )
    ours = {
        f"training.dataset is {training.dataset!r}": training.dataset in (DPO_DATASET, ROLLOUTS_DATASET),
        'magi.loss_per is "document"': magi.loss_per == "document",
        "magi.share_prefixes is true": magi.share_prefixes,
    }
    for what in (what for what, is_so in ours.items() if is_so and not has_objectives):
        raise ValueError(f"{what}, which torchtitan's own entry point does not know; start it with {ENTRY}")
    if training.dataset == DPO_DATASET:
        check_options_for_pairs(magi)
    if training.dataset == ROLLOUTS_DATASET:
        check_options_for_rollouts(magi)
