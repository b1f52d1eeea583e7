"""From a TOML file to torchtitan 0.3's configuration of a Trainer, and from there to what our neutral parts read."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.override import OverrideConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.tools.profiler import Profiler

from torchtitan_magi.titan.v03.components import (
    MagiCheckpointManager,
    MagiMetricsProcessor,
    MagiMixedAC,
    MagiSelectiveAC,
    MagiValidator,
)
from torchtitan_magi.titan.v03.families.configs import copied
from torchtitan_magi.titan.v03.models import check_model, flavors, model_of, model_spec, stock_flavor
from torchtitan_magi.titan.v03.toml_sections import Workers
from torchtitan_magi.training.settings.magi_section import import_modules
from torchtitan_magi.training.settings.model_folder import HF_FLAVOR, read_hf_config
from torchtitan_magi.wording import one_line, quoted

CHECKPOINTING = {  # the first that a configuration is one of counts
    "auto": MagiMixedAC.Config,
    "selective": MagiSelectiveAC.Config,
    "full": FullAC.Config,
    "memory_budget": MemoryBudgetAC.Config,
}


def trainer_options(job: Any) -> dict[str, Any]:
    """The fields of a ``MagiTrainer.Config``.

    Args:
        job: a ``JobConfig``.

    Raises:
        ValueError: one line that names the option and the remedy.
    """
    import_modules(job.magi.imports)
    path = job.checkpoint.initial_load_path
    job.checkpoint.initial_load_path = str(Path(path).absolute()) if path else None
    job.debug.save_config_file = job.job.save_config_file or job.debug.save_config_file
    job.compile.enable_async_tensor_parallel |= job.parallelism.enable_async_tensor_parallel
    try:
        return {
            "magi": job.magi,
            "model_spec": _model_spec(job),
            "hf_assets_path": job.model.hf_assets_path,
            "dump_folder": job.job.dump_folder,
            "profiler": copied(Profiler.Config, job.profiling),
            "metrics": copied(MagiMetricsProcessor.Config, job.metrics),
            "dataloader": _loader(job.training, True),
            "optimizer": _optimizer(job.optimizer),
            "lr_scheduler": copied(LRSchedulersContainer.Config, job.lr_scheduler),
            "training": copied(TrainingConfig, job.training, disable_cuda_graphs=True),
            "parallelism": copied(ParallelismConfig, job.parallelism),
            "checkpoint": copied(MagiCheckpointManager.Config, job.checkpoint),
            "activation_checkpoint": _checkpointing(job.activation_checkpoint),
            "compile": copied(CompileConfig, job.compile),
            "comm": copied(CommConfig, job.comm),
            "validator": _validator(job.validation),
            "debug": copied(DebugConfig, job.debug),
            "override": OverrideConfig(),
        }
    except AssertionError as error:
        raise ValueError(f"{one_line(error)}; correct the TOML file or the command line") from None


def values_of(config: Any) -> dict[str, Any]:
    """The options of a configuration of torchtitan's by name."""
    return {option.name: getattr(config, option.name) for option in fields(config)}


def _model_spec(job: Any) -> Any:
    name, flavor = job.model.name, job.model.flavor
    check_model(name)
    if job.model.converters:
        raise ValueError(f"model.converters is {quoted(job.model.converters)}, which 0.3 has no more; leave it out")
    config = None
    if flavor == HF_FLAVOR:
        config = read_hf_config(job, model_of)
    elif stock_flavor(name, flavor) is None:
        known = ", ".join([HF_FLAVOR, *flavors(name)])
        raise ValueError(f"model.flavor {quoted(flavor)} is unknown; use one of {known}")
    return model_spec(name, flavor, config)


def _loader(section: Any, infinite: bool) -> HuggingFaceTextDataLoader.Config:
    data = {"dataset": section.dataset, "dataset_path": section.dataset_path} | vars(section.dataloader)
    return HuggingFaceTextDataLoader.Config(infinite=infinite or section.steps != -1, **data)


def _validator(section: Any) -> MagiValidator.Config:
    sizes = {"pack_length": section.seq_len, "packs_per_batch": section.local_batch_size}
    return copied(MagiValidator.Config, section, dataloader=_loader(section, False), **sizes)


def _optimizer(section: Any) -> OptimizersContainer.Config:
    betas = (section.beta1, section.beta2)
    options = {"lr": section.lr, "betas": betas, "eps": section.eps, "weight_decay": section.weight_decay}
    groups = [ParamGroupConfig(pattern=".*", optimizer_name=section.name, optimizer_kwargs=options)]
    return OptimizersContainer.Config(param_groups=groups, implementation=section.implementation)


def _checkpointing(section: Any) -> Any:
    if section.mode == "none":
        return None
    shapes = {"force_recompute_mm_shapes_by_fqns": section.per_op_sac_force_recompute_mm_shapes_by_fqns}
    return copied(CHECKPOINTING[section.mode], section, **(shapes if section.mode in ("auto", "selective") else {}))


def _checkpointing_section(config: Any) -> Any:
    mode = next((mode for mode, kind in CHECKPOINTING.items() if isinstance(config, kind)), "none")
    budget, debug = getattr(config, "memory_budget", None), getattr(config, "debug", False)
    return SimpleNamespace(mode=mode, selective_ac_option="op", memory_budget=budget, debug=debug)


def job_of(config: Any) -> Any:
    """The sections of a ``MagiTrainer.Config`` by the names of a TOML file."""
    training, validator = config.training, config.validator
    validation = SimpleNamespace(
        **values_of(validator) | _data(validator.dataloader),
        seq_len=validator.pack_length or training.seq_len,
        local_batch_size=validator.packs_per_batch or training.local_batch_size,
    )
    spec = config.model_spec
    renamed = {
        "job": SimpleNamespace(dump_folder=config.dump_folder),
        "model": SimpleNamespace(name=spec.name, flavor=spec.flavor, hf_assets_path=config.hf_assets_path),
        "training": SimpleNamespace(**values_of(training), **_data(config.dataloader)),
        "validation": validation,
        "profiling": config.profiler,
        "activation_checkpoint": _checkpointing_section(config.activation_checkpoint),
    }
    return SimpleNamespace(**values_of(config) | renamed)


def _data(loader: Any) -> dict[str, Any]:
    """What a section says of its data."""
    values: dict[str, Any] = {field.name: getattr(loader, field.name) for field in fields(Workers)}
    return {"dataset": loader.dataset, "dataset_path": loader.dataset_path, "dataloader": Workers(**values)}
