"""The TOML file: the sections and options of torchtitan 0.2.2 and [magi], as far as torchtitan 0.3 has them.

Sections are made of 0.3's own dataclasses, so what 0.3 adds to them can be set as well.
"""

from copy import copy
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from functools import partial
from typing import Any, Literal, get_type_hints

import tyro
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.manager import custom_registry
from torchtitan.tools.profiler import Profiler

from torchtitan_magi.training.settings.degrees import SPMD_BACKEND
from torchtitan_magi.training.settings.options import Magi
from torchtitan_magi.training.settings.values import check_toml, check_values, read_toml, usage_errors
from torchtitan_magi.wording import quoted

# Options of 0.2.2 that 0.3 lacks -> their default there, and what to do about another value.
WITHOUT_COUNTERPART: dict[str, tuple[Any, str]] = {
    "parallelism.disable_loss_parallel": (False, "leave it out: the loss never holds all logits"),
    "parallelism.expert_tensor_parallel_degree": (1, "leave it out: 0.3 takes ranks for experts from all axes"),
    "parallelism.expert_parallel_comm_backend": ("standard", "leave it out"),
    "parallelism.context_parallel_rotate_method": ("allgather", "leave it out: rows travel as planned"),
    "parallelism.pipeline_parallel_expert_parallel_overlap": (True, "leave it out"),
    "optimizer.early_step_in_backward": (False, "leave it out"),
    "activation_checkpoint.selective_ac_option": ("op", 'use "op", or activation_checkpoint.mode "full" or "none"'),
    "activation_checkpoint.early_stop": (False, "leave it out"),
    "model.print_after_conversion": (False, "use debug.print_config"),
    "checkpoint.enable_ft_dataloader_checkpoints": (True, "leave it out"),
    "experimental.custom_args_module": ("", "leave it out"),
    "job.print_config": (False, "use debug.print_config"),
}
HOOK = "torchtitan_magi.titan"  # by which 0.2.2 finds us
HOOKS: Any = dict.fromkeys(("job.custom_config_module", "experimental.custom_import"), ("", f'set it to "{HOOK}"'))
ABSENT_SECTIONS = {"quantize": ", or use torchtitan 0.2.2", "fault_tolerance": "", "memory_estimation": ""}


def _section(section: str, base: type | None = None, /, **own: Any) -> tuple[str, Any]:
    """Name and dataclass of a section: the plain options of one of 0.3's, more or other ones by (type, default), and
    those that can only have their default."""
    options: dict[str, Any] = {}
    hints = get_type_hints(base) if base is not None else {}
    for option in fields(base) if base is not None else ():
        if option.name != "trace_post_processor":  # a function
            is_made: Any = option.default_factory is not MISSING
            made = field(default_factory=option.default_factory) if is_made else field(default=option.default)
            options[option.name] = hints[option.name], made
    for name, (kind, default) in (own | _absent(section)).items():
        is_value = not is_dataclass(default) and not isinstance(default, list)
        options[name] = kind, field(default=default) if is_value else field(default_factory=partial(copy, default))
    return section, make_dataclass("Section", [(name, kind, made) for name, (kind, made) in options.items()])


@dataclass
class Workers:
    """A data loader's workers."""

    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    prefetch_factor: int | None = None


def _data(dataset: str) -> dict[str, Any]:
    return {"dataset": (str, dataset), "dataset_path": (str | None, None), "dataloader": (Workers, Workers())}


def _absent(section: str) -> dict[str, Any]:
    """Options that 0.2.2 has alone."""
    named = (name.split(".") for name in WITHOUT_COUNTERPART)
    defaults = {option: WITHOUT_COUNTERPART[f"{of}.{option}"][0] for of, option in named if of == section}
    return {option: (type(default), default) for option, default in defaults.items()}


_SECTIONS = [
    _section(
        "job",
        config_file=(str | None, None),
        dump_folder=(str, "./outputs"),
        description=(str, ""),
        save_config_file=(str | None, None),
        custom_config_module=(str, ""),
    ),
    _section(
        "model",
        name=(str, "llama3"),
        flavor=(str, "debugmodel"),
        hf_assets_path=(str, "./tests/assets/tokenizer"),
        converters=(list[str], []),
    ),
    _section(
        "optimizer",
        name=(Literal["Adam", "AdamW"], "AdamW"),
        lr=(float, 8e-4),
        beta1=(float, 0.9),
        beta2=(float, 0.95),
        eps=(float, 1e-8),
        weight_decay=(float, 0.1),
        implementation=(Literal["for-loop", "foreach", "fused", "fused_opt_states_bf16"], "fused"),
    ),
    _section("lr_scheduler", LRSchedulersContainer.Config),
    _section("training", TrainingConfig, **_data("c4_test")),
    _section(
        "parallelism",
        ParallelismConfig,
        spmd_backend=(Literal["partial_dtensor", "full_dtensor", "spmd_types"], SPMD_BACKEND),
        enable_async_tensor_parallel=(bool, False),
    ),
    _section("checkpoint", CheckpointManager.Config),
    _section(
        "activation_checkpoint",
        mode=(Literal["auto", "selective", "full", "memory_budget", "none"], "selective"),
        memory_budget=(float, 0.5),
        visualize_memory_budget_pareto=(bool, False),
        per_op_sac_force_recompute_mm_shapes_by_fqns=(list[str], ["moe.router.gate"]),
        preserve_rng_state=(bool, True),
        determinism_check=(str, "default"),
        debug=(bool, False),
    ),
    _section("compile", CompileConfig),
    _section(
        "validation",
        enable=(bool, False),
        local_batch_size=(int, 8),
        seq_len=(int, 2048),
        freq=(int, 10),
        steps=(int, -1),
        **_data("c4_validation"),
    ),
    _section("metrics", MetricsProcessor.Config),
    _section("profiling", Profiler.Config),
    _section("comm", CommConfig),
    _section("debug", DebugConfig, enable_structured_logging=(bool, False)),  # a file of events a rank, if wanted
    _section("experimental", custom_import=(str, "")),
    ("magi", Magi),
]
JobConfig = make_dataclass(
    "JobConfig", [(name, section, field(default_factory=section)) for name, section in _SECTIONS]
)


def read_job_config(path: str, overrides: list[str]) -> Any:
    """A TOML file with the overrides ``--section.option value`` of a command line, a ``JobConfig``.

    Raises:
        ValueError: one line that names the option and the remedy.
    """
    values = read_toml(path)
    for name, other in ABSENT_SECTIONS.items():
        if values.pop(name, None):
            raise ValueError(f"[{name}] has no counterpart in torchtitan 0.3; leave it out{other}")
    check_toml(JobConfig, values)
    with usage_errors():
        default = _filled(JobConfig, values)
        job = tyro.cli(JobConfig, args=overrides, default=default, registry=custom_registry)
    for option, (default, remedy) in (WITHOUT_COUNTERPART | HOOKS).items():
        section, name = option.split(".")
        if (value := getattr(getattr(job, section), name)) not in (default, HOOK):
            raise ValueError(f"{option} is {quoted(value)}, which has no counterpart in torchtitan 0.3; {remedy}")
    check_values(job)
    return job


def _filled(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass with these values, and the defaults of all others."""
    inner = {option.name: option.type for option in fields(kind) if is_dataclass(option.type)}
    return kind(**{name: _filled(inner[name], value) if name in inner else value for name, value in values.items()})
