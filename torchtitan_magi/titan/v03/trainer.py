"""Our Trainer: SFT per token or per document, and DPO, without ever holding all logits."""

import contextlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.observability.structured_logger import init_structured_logger
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from torchtitan_magi.models.model_config import Experts, ModelConfig, read_model_config
from torchtitan_magi.titan.v03.attention import OVERRIDE, local_batch
from torchtitan_magi.titan.v03.components import (
    MagiCheckpointManager,
    MagiMetricsProcessor,
    MagiMixedAC,
    MagiTokenizer,
    MagiValidator,
    ObjectiveLoss,
)
from torchtitan_magi.titan.v03.config import job_of, trainer_options
from torchtitan_magi.titan.v03.lora import with_adapters
from torchtitan_magi.titan.v03.models import config_of, temperature_of
from torchtitan_magi.titan.v03.toml_sections import read_job_config
from torchtitan_magi.training.batches.pack_loader import TextLoader
from torchtitan_magi.training.batches.planned_loader import PlannedLoader
from torchtitan_magi.training.batches.planner import WorkCount
from torchtitan_magi.training.finite import StepGuard
from torchtitan_magi.training.memory_log import memory_of_run
from torchtitan_magi.training.objectives.logprob_model import LogprobModel
from torchtitan_magi.training.objectives.lora import PolicyWithoutAdapters
from torchtitan_magi.training.objectives.objective import LossRecord, Reference
from torchtitan_magi.training.objectives.pipeline import Pipeline
from torchtitan_magi.training.objectives.reference_model import ReferenceModel
from torchtitan_magi.training.process.groups import data_parallel_place, group_of
from torchtitan_magi.training.process.last_line import LAST_LINE
from torchtitan_magi.training.process.launcher import config_file
from torchtitan_magi.training.process.run_folder import save_config
from torchtitan_magi.training.run_parts import RunParts
from torchtitan_magi.training.settings import degrees
from torchtitan_magi.training.settings.checks import check_settings
from torchtitan_magi.training.settings.magi_section import import_modules
from torchtitan_magi.training.settings.model_folder import HF_FLAVOR
from torchtitan_magi.training.settings.optimizer import check_groups, check_states
from torchtitan_magi.training.settings.options import Magi
from torchtitan_magi.training.settings.resume import base_of_adapters
from torchtitan_magi.training.settings.sections import check_gpu_options, check_launcher, check_loaders
from torchtitan_magi.training.settings.values import check_values
from torchtitan_magi.training.trainer import ObjectiveTrainer


class MagiTrainer(RunParts, ObjectiveTrainer, Trainer):
    """torchtitan's Trainer with the loss of an ``Objective``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's options, the [magi] options, and our components."""

        magi: Magi = field(default_factory=Magi)
        tokenizer: MagiTokenizer.Config = field(default_factory=MagiTokenizer.Config)
        metrics: MagiMetricsProcessor.Config = field(default_factory=MagiMetricsProcessor.Config)
        validator: MagiValidator.Config = field(default_factory=MagiValidator.Config)
        checkpoint: MagiCheckpointManager.Config = field(default_factory=MagiCheckpointManager.Config)
        loss: ObjectiveLoss.Config = field(default_factory=ObjectiveLoss.Config)

    def __init__(self, config: Config) -> None:
        check_launcher()
        check_loaders(config, HuggingFaceTextDataLoader.Config)
        self.job_config = job_of(config)
        check_values(self.job_config)
        import_modules(config.magi.imports)
        self.model_facts = _facts(config)
        self.count = WorkCount()
        _make_room_for_positions(config)
        temperature = {"temperature": temperature_of(self.model_facts)}
        changed: dict[str, Any] = {
            "model_spec": with_adapters(config.model_spec, config.magi.lora),
            "tokenizer": _StandIn(config.tokenizer, lambda **_: self.tokenizer),  # built before the model, as the data
            "dataloader": _StandIn(config.dataloader, partial(self._build_loader, config.dataloader)),
            "override": replace(config.override, imports=[*config.override.imports, (OVERRIDE, temperature)]),
            "training": replace(config.training, disable_cuda_graphs=True),
            "lr_scheduler": replace(config.lr_scheduler),  # which we change
        }
        super().__init__(replace(config, **changed))
        if config.checkpoint.enable:
            self.checkpointer.sd_adapter.fqn_to_index_mapping = self.export.layout.shards
            self.checkpointer.export = self.export
            self.checkpointer.lora, (_, self.checkpointer.base) = config.magi.lora, base_of_adapters(self.job_config)
        self._start_metrics()
        self.checkpointer.guard = StepGuard(self)
        self.compiled = config.compile.enable and "loss" in config.compile.components
        model = None if self.parallel_dims.pp_enabled else LogprobModel(self.model_parts[0], self.compiled)
        if model is None:
            ends = self.pp_has_first_stage, self.pp_has_last_stage
            self.pipeline = Pipeline(self.pp_schedule, self.model_parts, *ends, self.loss_fn, self.compiled)
        if config.validator.enable:
            self._start_validator()
        self.start_objectives(model)

    def init_distributed(self) -> ParallelDims:
        """Also checks, as soon as ranks can agree, what a user can get wrong, and makes the runtime."""
        job, facts = self.job_config, self.model_facts
        degrees.check_parallelism(job.parallelism, int(os.environ["WORLD_SIZE"]))
        check_gpu_options(job, utils.device_type, ["profiling.enable_profiling"])
        dims = super().init_distributed()
        check_settings(job, DATASETS, True, self._check_version)
        self.read_model(lambda: facts)
        degrees.check_experts(job, facts.experts, ranks_of_experts(job, dims, facts.experts))
        degrees.check_adapters_of_experts(job.magi.lora, facts.experts, _expert_ranks(dims))
        runtime = self.build_runtime(dims, facts, self.device, facts.windows or (0,) * facts.num_attention_layers)
        self.runtime, self.process = runtime, partial(local_batch, runtime)
        runtime.block_attn.check(facts.head_dim, TORCH_DTYPE_MAP[job.training.mixed_precision_param], facts.value_dim)
        self._open_data(dims)
        self.memory = memory_of_run(job, dims, facts, self.loader, True, utils.device_type)
        if isinstance(checkpointing := self.config.activation_checkpoint, MagiMixedAC.Config):
            checkpointing.keeping = self.memory.setup.keepings
        return dims

    def _check_version(self, job: Any) -> None:
        check_groups(self.config.optimizer.param_groups)
        check_states(self.config.optimizer.implementation, job.training, utils.device_type)
        degrees.check_pipeline(job, self.model_facts)

    def _open_data(self, dims: ParallelDims) -> None:
        """Tokenizer and training data, see ``open_data``."""
        training, place = self.job_config.training, data_parallel_place(dims)
        self.use_tokenizer(self.config.tokenizer.stock.build(tokenizer_path=self.config.hf_assets_path))
        packs = training.global_batch_size
        if packs < 0:
            packs = training.local_batch_size * place[0]
        at_once = self.config.parallelism.pipeline_parallel_microbatch_size if dims.pp_enabled else None
        section = _changed(training, local_batch_size=at_once or training.local_batch_size, global_batch_size=packs)
        self.open_data(section, place, self.config)

    def _build_loader(self, stock: Any, *, dp_world_size: int, dp_rank: int, **options: Any) -> PlannedLoader:
        """The training data, see ``training_data``; torchtitan asks for it behind the model."""
        return self.training_data(partial(_stock_loader, stock, (dp_world_size, dp_rank), **options))

    def build_lr_schedulers(self, optimizers: Any, steps: int) -> Any:
        """torchtitan's schedulers of the learning rate, for a run of so many steps."""
        return self.config.lr_scheduler.build(optimizers=optimizers, training_steps=steps)

    def _start_metrics(self) -> None:
        attention, seq_len = self.model_facts.attention_flops, self.config.training.seq_len
        self.metrics_processor.num_flops_per_token -= attention * seq_len  # torchtitan counts a dense pack
        self.metrics_processor.count_work(attention, self, LossRecord(self.num_microbatches), self.memory)

    def _start_validator(self) -> None:
        job, place = self.job_config, data_parallel_place(self.parallel_dims)
        section: Any = job.validation
        self.validator.steps = section.steps
        if self.pipeline is not None:  # each pack is a microbatch
            self.validator.steps *= section.local_batch_size if section.steps != -1 else 1
            section = _changed(section, local_batch_size=1)
        sizes = {"seq_len": section.seq_len, "local_batch_size": section.local_batch_size}
        build = partial(_stock_loader, self.config.validator.dataloader, place, self.tokenizer, **sizes)
        self.validator.batches = self.validation_data(section, place, build)
        self.validator.pipeline = self.pipeline
        if self.pipeline is not None:
            self.validator.batches.at_once = self.pipeline.num_microbatches
        self.validator.process, self.validator.device = self.process, utils.device_type

    def close(self) -> None:
        """Ends the run, and says where the model is."""
        super().close()
        LAST_LINE.tell()

    def make_reference(self) -> Reference:
        """The model without its adapters, if it has some; else a frozen copy."""
        model = self.pipeline or self.model
        pp_group = group_of(self.parallel_dims, "pp")
        return PolicyWithoutAdapters(model, pp_group) if self.job_config.magi.lora.rank else ReferenceModel(self)

    def is_replicated_by_ddp(self) -> bool:
        """Always False: torchtitan 0.3 replicates by FSDP2."""
        return False

    def forward_context(self) -> AbstractContextManager[None]:
        """Nothing: mixed precision is FSDP2's here."""
        return contextlib.nullcontext()

    def build_frozen_copy(self) -> LogprobModel | Pipeline:
        """A model, or its parts in a pipeline, built as the Trainer builds its own, with weights of no meaning."""
        config, spec = self.config, self.config.model_spec
        with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
            model: Any = self.model_config.build()
        options: dict[str, Any] = {
            "parallel_dims": self.parallel_dims,
            "training": config.training,
            "parallelism": replace(config.parallelism, fsdp_reshard_after_forward="always"),
            "compile_config": config.compile,
            "ac_config": None,
            "dump_folder": config.dump_folder,
        }
        if self.pipeline is None:
            return LogprobModel(self.with_memory(spec.parallelize_fn(model, **options)), self.compiled)
        loss = config.loss.build()
        options |= {"device": self.device, "model_config": self.model_config, "parallelize_fn": spec.parallelize_fn}
        schedule, parts, first, last = spec.pipelining_fn(model, loss_fn=loss, **options)
        return Pipeline(schedule, [self.with_memory(part) for part in parts], first, last, loss, self.compiled)


def _stock_loader(stock: Any, place: tuple[int, int], tokenizer: Any, **options: Any) -> TextLoader:
    """torchtitan's own data loader, of its Config. place: the number of batches loaded at a time, and which is ours."""
    return TextLoader(stock.build(dp_world_size=place[0], dp_rank=place[1], tokenizer=tokenizer, **options))


class _StandIn:
    """Stands in for a component's Config: what torchtitan would build of it is built by us."""

    def __init__(self, stock: Any, build: Callable[..., Any]) -> None:
        self.stock, self.build, self.to_dict = stock, build, stock.to_dict


def _changed(section: Any, **values: Any) -> Any:
    return type(section)(**vars(section) | values)


def _facts(config: Any) -> ModelConfig:
    """The model of the run."""
    spec = config.model_spec
    return read_model_config(config.hf_assets_path) if spec.flavor == HF_FLAVOR else config_of(spec.model)


def ranks_of_experts(job: Any, dims: ParallelDims, experts: Experts | None) -> int | None:
    """How many ranks share the experts of a layer, for ``check_experts``.

    None where FSDP shards each expert's rows, and for gpt-oss, whose files have all experts of a layer in one tensor.
    """
    ranks = _expert_ranks(dims)
    return ranks if experts and job.model.name != "gpt_oss" and ranks <= experts.num_experts else None


def _expert_ranks(dims: ParallelDims) -> int:
    """How many ranks share the experts of a layer."""
    return dims.dp_shard * dims.cp * (dims.tp if dims.ep > 1 else 1)


def _make_room_for_positions(config: Any) -> None:
    """Gives the model rotary positions for packs longer than it was trained on."""
    for attention in (layer.attention for layer in config.model_spec.model.layers if layer.attention is not None):
        longest = max(attention.rope.max_seq_len, config.training.seq_len)
        attention.rope = replace(attention.rope, max_seq_len=longest)


def build(arguments: list[str]) -> MagiTrainer:
    """The Trainer of a command line, with the TOML file of ``--job.config_file``."""
    init_logger()
    job = read_job_config(config_file(arguments), arguments)
    if job.debug.enable_structured_logging:
        init_structured_logger("training", job.job.dump_folder)
    trainer: MagiTrainer = MagiTrainer.Config(**trainer_options(job)).build()
    save_config(job)
    return trainer


def main(arguments: list[str] | None = None) -> None:
    """Trains as the command line says, with the TOML file of ``--job.config_file``."""
    trainer = build(list(sys.argv[1:] if arguments is None else arguments))
    try:
        if trainer.config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(0, last_step=True)
        else:
            trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()
